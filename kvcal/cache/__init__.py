"""Plan caches for transformers: ``past_key_values`` over packed pages, and the attention that reads them."""
