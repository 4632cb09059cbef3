"""Pages: how 128 tokens of one KV head become a record of bytes, and back."""
