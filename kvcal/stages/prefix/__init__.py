"""Prefix files: a prompt's cache on disk, as the plan stores it (AQUA-KV's codec mode)."""
