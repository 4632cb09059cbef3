"""MixKVQ: tiers by scores of queries."""
