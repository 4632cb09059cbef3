"""PM-KVQ: pages that shrink, and λ of keys."""
