"""Quantizers: how a block of keys or values becomes codes, and how codes become bytes."""
