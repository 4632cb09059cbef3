"""Plans inside serving engines, which own the memory of the cache in blocks and hand out tables of them.

support.py            what of a plan an engine takes, with reasons for what it does not
shard.py              the heads of one rank of tensor parallelism; equal bytes on all ranks
block.py              a layer's opaque block of 128 tokens, and its ring: what lies where
scratch.py            places of a step's sequences, and scratch that layers share
drafts.py             tokens and drafts of a batch, in rows of equal length
step.py               storing tokens in an engine's memory, and attention to them
window.py             the same of layers with a sliding window, which lie in the ring
prefill.py            attention of a chunk to its past, in tiles
versions.py           versions of the engines in which plans are served
capacity.py           what of a plan fits into an engine's memory
vllm/, sglang/        the plug-ins

Nothing outside a folder of an engine imports that engine. kvcal never depends on one.
"""
