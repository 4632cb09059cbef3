"""Tokens and requests of a plan that fit into an engine's memory, by the engine's own rule, before it is started.

vLLM's pool has blocks of one size, that of all layers' pages side by side. A request takes a block for every 128 tokens
that it has begun, and blocks for its rings, which are all that a layer with a sliding window has: as many rings lie in
one as there is room for (vLLM's ``_get_packed_kv_cache_groups``), and a ring that is larger makes all blocks as large.
SGLang's pool has pages of 128 tokens, whose bytes it rounds up token by token; next to it lies a ring for every request
that may run, from the start, and shared sinks.

Bytes are those of one rank; all ranks have the same. Left out: what weights, activations and graphs take, which
engines measure when they start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvcal.engines.shard import BlockLayout, HeadShard
from kvcal.engines.support import unquantized_copies
from kvcal.errors import InfeasibleBudget
from kvcal.geometry import CACHE_DTYPES
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.plan import Plan
from kvcal.recipe import Engine

# Beginnings of prompts whose sinks SGLang keeps for its cached pages, by rings.
BEGINNINGS = 4


@dataclass(frozen=True)
class Capacity:
    """``block_bytes`` of 128 tokens of all layers, padding included, of which pages are ``page_bytes``; ``num_blocks``
    in the pool, with the one that engines keep for nobody; a request of the context takes ``blocks_per_request``, of
    which ``ring_blocks`` whatever its length. ``raw_tokens``: tokens at 16 bits in the same memory, without sliding
    windows."""

    memory: int
    block_bytes: int
    page_bytes: int
    num_blocks: int
    blocks_per_request: int
    ring_blocks: int
    context: int
    raw_tokens: int

    @property
    def concurrency(self) -> float:
        """Requests of the context that fit at once, as vLLM prints it."""
        return self.num_blocks / self.blocks_per_request

    @property
    def num_tokens(self) -> int:
        """Tokens of such requests, as vLLM prints it."""
        return int(self.concurrency * self.context)


def capacity(
    engine: Engine, plan: Plan, memory: int, num_ranks: int, context: int, lookahead: int = 0, max_requests: int = 0
) -> Capacity:
    """``memory``: bytes of the cache on one of ``num_ranks``. ``lookahead``: drafts that vLLM verifies with a token;
    ``max_requests``: as many rings, and one for padding, are in SGLang's memory from the start."""
    shard, needed = HeadShard(plan, 0, num_ranks, lookahead), -(-context // PAGE_TOKENS)
    pages = [shard.block_bytes(index) for index in shard.blocks]
    fixed = ring_blocks = 0
    if engine == "vllm":
        block_bytes, ring_blocks = vllm_blocks(pages, shard.largest_ring_bytes, shared_sinks(shard))
        needed += ring_blocks
    else:
        block_bytes = -(-sum(pages) // PAGE_TOKENS) * PAGE_TOKENS
        fixed = sglang_rings(shard, max_requests, not unquantized_copies(plan))
    num_blocks = max(0, memory - fixed) // block_bytes
    if num_blocks < needed:
        smallest = needed * block_bytes + fixed
        beyond, fewer = (f" besides {fixed} bytes of rings", ", or fewer requests") if fixed else ("", "")
        raise InfeasibleBudget(
            f"{memory} bytes are {num_blocks} blocks of {block_bytes} bytes{beyond}, and a request of {context} "
            f"tokens takes {needed}",
            smallest_bytes=smallest,
            hint=f"give the cache {smallest} bytes on each rank, or a shorter context{fewer}",
        )
    layers = [block.layer.attention for block in shard.blocks.values() if block.layer.is_paged]
    raw = sum(layer.values_per_token for layer in layers) * CACHE_DTYPES[plan.cache_dtype].itemsize
    return Capacity(memory, block_bytes, sum(pages), num_blocks, needed, ring_blocks, context, memory // raw)


def engine_bytes(engine: Engine, plan: Plan, num_ranks: int, lookahead: int = 0) -> int:
    """Bytes of the cache on all ranks, of which each can hold all sequences of the plan's workload at once: with rings,
    padding, and vLLM's block that is nobody's. ``lookahead``, and errors, as of :func:`capacity`."""
    batch, blocks = plan.workload.batch, -(-plan.workload.context // PAGE_TOKENS)
    shard = HeadShard(plan, 0, num_ranks, lookahead)
    pages = [shard.block_bytes(index) for index in shard.blocks]
    if engine == "sglang":
        fixed = sglang_rings(shard, batch, not unquantized_copies(plan))
        return num_ranks * (batch * blocks * PAGE_TOKENS * -(-sum(pages) // PAGE_TOKENS) + fixed)
    block_bytes, ring_blocks = vllm_blocks(pages, shard.largest_ring_bytes, shared_sinks(shard))
    return num_ranks * (1 + batch * (blocks + ring_blocks)) * block_bytes


def sglang_rings(shard: HeadShard, max_requests: int, shares_sinks: bool) -> int:
    """Bytes of SGLang's rings, of which it has one more than requests, for padding, and of shared sinks."""
    sinks = sum(block.sink_bytes for block in shard.blocks.values() if isinstance(block, BlockLayout))
    rings = sum(map(shard.ring_bytes, shard.blocks))
    return (max_requests + 1) * (rings + BEGINNINGS * sinks * shares_sinks)


def shared_sinks(shard: HeadShard) -> int:
    """Bytes of a layer's sinks next to a first page in vLLM; 0 where it serves the plan without caching prefixes."""
    is_shared = not unquantized_copies(shard.plan, shard.lookahead)
    return shard.largest_sink_bytes if is_shared else 0


def vllm_blocks(pages: Sequence[int], ring: int, sinks: int = 0) -> tuple[int, int]:
    """vLLM's packing: bytes of a block of the pool, and the blocks that the rings and sinks of a request take.
    ``pages``: bytes of every layer's block of 128 tokens, 0 of a sliding window; ``ring``, ``sinks``: bytes of a
    layer's ring, and of its shared sinks, which are fewer."""
    count, sizes = len(pages), Counter(size for size in pages if size)
    copies = [size for size in (ring, sinks) if size]
    groups = [-(-count // max(max(sum(pages), ring) // size, 1)) for size in copies]
    if len(sizes) > 1 and len(set(sizes.values())) == 1:  # pages that vLLM takes for a repeating pattern of layers
        # The number to whose multiples all are padded least; the largest of several.
        pattern = next(iter(sizes.values()))
        numbers = range(count, pattern - 1, -1)
        padded = min(numbers, key=lambda number: -pattern % number + len(copies) * (-count % number))
        groups = [max(found, -(-count // padded)) for found in groups]
    widest = max(-(-count // found) * size for found, size in zip(groups, copies, strict=True))
    return max(sum(pages), widest), sum(groups)
