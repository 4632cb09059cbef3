"""Streaming statistics of a model's keys, values and gradients. They are data: update, merge, result."""
