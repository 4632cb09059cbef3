"""The adapter: every contact with a transformers model (loading, geometry, taps, projection weights)."""
