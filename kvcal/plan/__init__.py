"""The KV quantization plan: formats of layers, the transforms' tensors, and the exact bytes of a cache."""
