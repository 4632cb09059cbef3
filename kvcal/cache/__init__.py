"""Plan caches for transformers: ``past_key_values`` over packed pages, and the attention that reads them.

plan_cache.py               ``PlanCache``, dynamic, or with ``max_tokens`` static
attached.py                 ``attached``: gives queries to caches, and steps of static caches to the kernels
paged_layer.py, sliding_window.py  layers of full attention and of sliding windows
dense_layer.py              a layer as dense tensors, for measuring plans
build.py                    which layer stores what
prefix_file.py              a prompt's packed cache on disk: ``PlanCache.save`` and ``load``
"""
