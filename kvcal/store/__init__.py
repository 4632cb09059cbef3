"""Storage of a plan's cache, dynamic or static: one paged store under both, and the scratch of a decode step.

layer_store.py              a full-attention layer: its parts, and its steps by the kernels
paged_tensor.py, pool.py    a part: sinks, ring and pages of some KV heads; where its pages lie
sliding_window.py           a sliding-window layer of a static cache
state.py, padding.py        what layers share: plan, tensors, lengths, table of slots; which columns hold tokens
step.py                     one step of one head range
shrinking.py                the memory of pages that shrink in a static cache
dequantize.py, prediction.py  pages that are reconstructed first; predictions from other layers
dequantize_workspace.py     scratch of stored forms
step_workspace.py           bytes of all scratch of a step
transient.py                bytes that a dynamic cache takes for a moment while it stores
"""
