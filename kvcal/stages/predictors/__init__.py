"""Linear predictors: keys and values of a layer from earlier layers (AQUA-KV, Alg. 1)."""
