"""Bases of keys and values, rotated pages, and error feedback."""
