"""AQUA-KV: predictions from earlier layers, and HIGGS's lattices."""
