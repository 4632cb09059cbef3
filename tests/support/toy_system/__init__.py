"""A system for tests: pages that hold the mirror image of keys or values."""
