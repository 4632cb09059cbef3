"""Allocation: the bits of every layer's keys and values, within a byte budget."""
