"""Storage of a plan's cache, dynamic or static: one paged store under both, and the scratch of a decode step.

layer_store.py              a full-attention layer: its parts, and its steps by the kernels
paged_tensor.py, pool.py    a part: sinks, ring and pages of some KV heads; where its pages lie, also those that shrink
state.py, padding.py        what layers share: plan, tensors, lengths, table of slots; which columns hold tokens
dequantize.py, prediction.py  pages that are reconstructed first; predictions from other layers
workspace.py                scratch of a step, and its bytes
"""
