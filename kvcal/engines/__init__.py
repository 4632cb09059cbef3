"""Plans inside serving engines, which own the memory of the cache in blocks and hand out tables of them.

support.py            what an engine takes, with reasons for what it does not: plans, models, versions
shard.py              a layer's opaque block of 128 tokens and its ring, on each rank of tensor parallelism
scratch.py            places of a step's sequences and tokens, and scratch that layers share
step.py               storing tokens in an engine's memory, and attention to them
prefill.py            attention of a chunk to its past, in tiles
capacity.py           what of a plan fits into an engine's memory
vllm/, sglang/        the plug-ins

Nothing outside a folder of an engine imports that engine. kvcal never depends on one.
"""
