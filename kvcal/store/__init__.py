"""Storage of a plan's cache: packed pages, recent tokens, and the scratch of a decode step."""
