"""Kitty: channels of keys with more bits."""
