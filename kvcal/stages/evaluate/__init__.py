"""Perplexity, KL and tasks of plans, through the packed cache."""
