"""Evaluation: KL, perplexity and accuracy of plans, through the packed cache."""
