"""Plan caches for transformers: ``past_key_values`` over packed pages, and the attention that reads them.

plan_cache.py               ``PlanCache``, dynamic, or with ``max_tokens`` static
attached.py                 ``attached``: gives queries to caches, and steps to the kernels
plan_layer.py               what both ask of a layer
paged_layer.py, static_layer.py    full attention, of a dynamic cache and of a static one
sliding_window.py           sliding windows, of either
build.py                    which layer stores what
prefix_file.py              a prompt's packed cache on disk: ``PlanCache.save`` and ``load``
"""
