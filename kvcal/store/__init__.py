"""Storage of a plan's cache, dynamic or static: one paged store under both, and the scratch of a decode step.

layer_store.py        a full-attention layer: its parts, and its steps by the kernels
sinks_ring_pages.py   a part: sinks, ring and pages of some KV heads, of caches, windows and engines
paged_tensor.py       a part of a cache, with its codec and pool
pool.py               where pages lie, in slots
step.py               a layer's step by the kernels: new tokens stored, queries answered
growing_steps.py      what a step of a dynamic cache is given, which grows
state.py, padding.py  what layers share: plan, tensors, lengths, table of slots; which columns hold tokens
workspace.py          scratch of a step, and its bytes
"""
