"""Tuning: score thresholds of mixed-precision keys, searched on tasks (MixKVQ, App. D)."""
