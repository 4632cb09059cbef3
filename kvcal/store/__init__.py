"""Storage of a plan's cache, dynamic or static: one paged store under both, and the scratch of a decode step.

layer_store.py                a full-attention layer: its parts, and its steps by the kernels
pages_and_ring.py             a part: sinks, ring and pages of some KV heads
window.py                     a sliding-window layer of a static cache
pool.py, shrinking.py         where pages lie, in slots; pages that shrink on a schedule, in one memory
state.py, padding.py          what layers share: plan, tensors, lengths, table of slots; which columns hold tokens
dequantize.py, prediction.py  pages that are reconstructed first; predictions from other layers
workspace.py                  scratch of a step, and its bytes

Elsewhere: how codes shrink (``kvcal.pages.shrink``), and the kernels that shrink them (``kvcal.kernels.shrink``).
"""
