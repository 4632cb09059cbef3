"""What of a plan fits into an engine's memory, by the engine's own rule, before it is started.

vLLM's pool has blocks of one size, that of all layers' pages side by side. A request takes a block for every 128 tokens
that it has begun, and blocks for its rings: as many rings lie in one as there is room for (vLLM's
``_get_packed_kv_cache_groups``).

Bytes are those of one rank; all ranks have the same. Left out: what weights, activations and graphs take, which
engines measure when they start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvcal.engines.shard import HeadShard
from kvcal.errors import InfeasibleBudget, UnsupportedModel
from kvcal.geometry import CACHE_DTYPES
from kvcal.pages.record_layout import PAGE_TOKENS
from kvcal.plan.plan import Plan


@dataclass(frozen=True)
class Capacity:
    """``block_bytes`` of 128 tokens of all layers, padding included; ``num_blocks`` in the pool, with the one that
    engines keep for nobody; a request of the context takes ``blocks_per_request``, of which ``ring_blocks`` whatever
    its length. ``raw_tokens``: tokens at 16 bits in the same memory."""

    memory: int
    block_bytes: int
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


def vllm_capacity(plan: Plan, memory: int, num_ranks: int, context: int) -> Capacity:
    """``memory``: bytes of the cache on one of ``num_ranks``.

    Raises:
        UnsupportedModel: heads that the ranks cannot share equally, or layers whose rings differ.
        InfeasibleBudget: not one request of the context fits.
    """
    shard = HeadShard(plan, 0, num_ranks)
    indices = list(shard.blocks)
    rings = {shard.ring_bytes(index) for index in indices}
    if len(rings) != 1:
        raise UnsupportedModel("layers of different heads or head sizes: how vLLM packs their rings is not predicted")
    block_bytes, ring_blocks = vllm_blocks([shard.block_bytes(index) for index in indices], rings.pop())
    layers = [shard.blocks[index].layer.attention for index in indices]
    raw = sum(layer.values_per_token for layer in layers) * CACHE_DTYPES[plan.cache_dtype].itemsize
    needed = -(-context // PAGE_TOKENS) + ring_blocks
    found = Capacity(memory, block_bytes, memory // block_bytes, needed, ring_blocks, context, memory // raw)
    if found.num_blocks < needed:
        raise InfeasibleBudget(
            f"{memory} bytes are {found.num_blocks} blocks of {block_bytes} bytes, and a request of {context} tokens "
            f"takes {needed}",
            smallest_bytes=needed * block_bytes,
            hint=f"give the cache {needed * block_bytes} bytes on each rank, or a shorter context",
        )
    return found


def vllm_blocks(pages: Sequence[int], ring: int) -> tuple[int, int]:
    """vLLM's packing: bytes of a block of the pool, and the blocks that the rings of a request take. ``pages``: bytes
    of every layer's block of 128 tokens; ``ring``: bytes of a layer's ring."""
    count = len(pages)
    groups = -(-count // max(max(sum(pages), ring) // ring, 1))
    sizes = Counter(pages)
    if len(sizes) > 1 and len(set(sizes.values())) == 1:  # pages that vLLM takes for a repeating pattern of layers
        groups = max(groups, -(-count // _repeats(sizes[pages[0]], count)))
    return max(sum(pages), -(-count // groups) * ring), groups


def _repeats(pattern: int, count: int) -> int:
    """The number, from ``pattern`` to ``count``, to whose multiples both are padded least; the largest of several."""
    return min(range(count, pattern - 1, -1), key=lambda number: -pattern % number + -count % number)
