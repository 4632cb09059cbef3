"""Tokens and requests of a plan that fit into an engine's memory, by the engine's own rule, before it is
started.

vLLM's pool has blocks of one size (``VllmPool``). A request takes a block for every 128 tokens that it has
begun, and blocks for its rings, its sinks and its sliding windows. Where a model has states besides (linear
attention, convolutions), a block has several pages, and a request takes blocks of states, too. SGLang's pool
has pages of 128 tokens, whose bytes it rounds up token by token (``SglangPool``); next to it lies a ring for
every request that may run, from the start, and shared sinks. Layers with a sliding window have a pool of their
own there.

Bytes are those of one rank; all ranks have the same.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcal.engines.shard import BlockLayout, HeadShard, rank_geometry
from kvcal.engines.support import loses_sinks
from kvcal.errors import InfeasibleBudget, UnsupportedModel, UsageError
from kvcal.geometry import CACHE_DTYPES, AttentionGeometry, CacheDtype
from kvcal.pages.layout_protocol import PAGE_TOKENS, aligned_size
from kvcal.pages.ways import Engine
from kvcal.plan.plan import Plan

# Beginnings of prompts whose sinks SGLang keeps for its cached pages, by rings.
BEGINNINGS = 4
# Tokens of a block of a layer with a sliding window, of which vLLM's attention takes some.
WINDOW_BLOCKS = 16, 32, 64, 128
# Of SGLang: tokens after which it frees those behind a window, and of a prompt that it computes at once.
FREED_TOKENS, CHUNK_TOKENS = 128, 8192
# Pages of a block beside states, and groups of states, at most: groups cost vLLM time on the host.
MAX_PAGES, MAX_STATE_GROUPS = 40, 12


@dataclass(frozen=True)
class Capacity:
    """``block_bytes`` of ``block_tokens`` tokens of all layers, padding included, of which pages are
    ``page_bytes``; ``num_blocks`` in the pool, with the one that engines keep for nobody; a request of the
    context takes ``blocks_per_request``, of which ``ring_blocks`` for rings and sinks, ``window_blocks`` for
    sliding windows and ``state_blocks`` for states. ``raw_tokens``: tokens at 16 bits in the same memory,
    without sliding windows and states. In SGLang ``window_tokens`` lie in its pool of sliding windows, for
    each token in pages ``window_ratio``; ``block_bytes`` are then those of both pools."""

    memory: int
    block_tokens: int
    block_bytes: int
    page_bytes: int
    num_blocks: int
    blocks_per_request: int
    ring_blocks: int
    window_blocks: int
    state_blocks: int
    context: int
    raw_tokens: int
    window_tokens: int = 0
    window_ratio: float = 0.0

    @property
    def concurrency(self) -> float:
        """Requests of the context that fit at once, as vLLM prints it, but for sliding windows: vLLM counts
        those of all tokens that a step may compute, too."""
        return self.num_blocks / self.blocks_per_request

    @property
    def num_tokens(self) -> int:
        """Tokens of such requests, as vLLM prints it."""
        return int(self.concurrency * self.context)


def capacity(
    engine: Engine,
    plan: Plan,
    memory: int,
    num_ranks: int,
    context: int,
    lookahead: int = 0,
    max_requests: int = 0,
    state_bytes: int = 0,
    draft_bytes: int = 0,
    window_ratio: float | None = None,
    stages: tuple[range, ...] = (),
) -> Capacity:
    """``memory``: bytes of the cache on one of ``num_ranks``. ``lookahead``: drafts that are verified with a
    token; ``max_requests``: as many rings, and one for padding, are in SGLang's memory from the start.
    ``state_bytes``: of a layer's state on a rank in vLLM, of a model that has some; ``draft_bytes``: of a token
    in the layers of a model that drafts, on a rank. ``window_ratio``: SGLang's --swa-full-tokens-ratio; default:
    what its requests of the context need. ``stages``: the layers of each stage of a pipeline in vLLM, which all
    have so much memory; bytes are those of the one with the largest blocks."""
    shard = HeadShard(plan, 0, num_ranks, 1 + lookahead, stages)
    pages = _page_bytes(shard.blocks)
    fixed, tokens, needed, beside, windows = 0, PAGE_TOKENS, 0, (0, 0, 0), (0, 0.0)
    if engine == "vllm":
        pools = (vllm_pool(one, state_bytes, draft_bytes=draft_bytes) for one in shard.of_stages)
        pool = max(pools, key=lambda pool: pool.block_bytes)
        shard, pages = pool.shard, _page_bytes(pool.shard.blocks)
        block_bytes, tokens = pool.block_bytes, pool.block_tokens
        beside = pool.ring_blocks, pool.window_blocks(context), pool.state_blocks
        needed, pages = pool.blocks(context), pages * pool.pages_per_block
        num_blocks, least, smallest = memory // block_bytes, needed, needed * block_bytes
    else:
        own = SglangPool.of(shard, max_requests, draft_bytes=draft_bytes)
        fixed, needed = own.fixed, -(-context // PAGE_TOKENS)
        ratio = window_ratio or own.ratio(own.fitting(memory, max_requests, context), context)
        num_blocks, block_bytes, windows = own.blocks(memory, ratio), own.block_bytes(ratio), own.windows(memory, ratio)
        least = max(needed, own.least_blocks(ratio))
        smallest = own.memory(least, ratio)
    if num_blocks < least:
        beyond, fewer = (f" besides {fixed} bytes of rings", ", or fewer requests") if fixed else ("", "")
        raise InfeasibleBudget(
            f"{memory} bytes are {num_blocks} blocks of {block_bytes} bytes{beyond}, and a request of {context} "
            f"tokens takes {least}",
            smallest_bytes=smallest,
            hint=f"give the cache {smallest} bytes on each rank, or a shorter context{fewer}",
        )
    values = sum(block.layer.attention.values_per_token for block in shard.blocks.values())
    raw_tokens = memory // (values * CACHE_DTYPES[plan.cache_dtype].itemsize)
    return Capacity(memory, tokens, block_bytes, pages, num_blocks, needed, *beside, context, raw_tokens, *windows)


def engine_bytes(engine: Engine, plan: Plan, num_ranks: int, lookahead: int = 0, state_bytes: int = 0) -> int:
    """Bytes of the cache on all ranks, of which each can hold all sequences of the plan's workload at once:
    with rings, padding, and vLLM's block that is nobody's. ``lookahead``, ``state_bytes``, and errors, as of
    :func:`capacity`."""
    batch, context = plan.workload.batch, plan.workload.context
    shard = HeadShard(plan, 0, num_ranks, 1 + lookahead)
    if engine == "sglang":
        return num_ranks * SglangPool.of(shard, batch).memory_of(batch, context)
    pool = vllm_pool(shard, state_bytes)
    return num_ranks * (1 + batch * pool.blocks(context)) * pool.block_bytes


@dataclass(frozen=True)
class SglangPool:
    """SGLang's memory of a rank with a plan: ``token_bytes`` of a token in pages, rounded up; ``window_bytes`` of
    one in the layers with a sliding ``window``, 0 without any; and ``fixed`` bytes of rings and sinks.

    Layers with a window have a pool of their own. Its tokens are those of the pages times a ratio, which is the
    user's (--swa-full-tokens-ratio); both pools have whole pages."""

    token_bytes: int
    window: int
    window_bytes: int
    fixed: int
    draft_bytes: int = 0

    @classmethod
    def of(cls, shard: HeadShard, max_requests: int, shares_sinks: bool = True, draft_bytes: int = 0) -> SglangPool:
        """Of a plan, beside so many bytes of a token in the layers of a model that drafts. SGLang has one ring more
        than requests, for padding. UnsupportedModel where windows have several sizes."""
        if len(shard.windows) > 1:
            sizes = " and ".join(map(str, sorted(shard.windows)))
            raise UnsupportedModel(f"the model has sliding windows of {sizes} tokens, and SGLang a pool for one size")
        window, (count, nbytes) = next(iter(shard.windows.items()), (0, (0, 0)))
        token_bytes = -(-_page_bytes(shard.blocks) // PAGE_TOKENS)
        ring = sum(map(shard.ring_bytes, shard.blocks))
        sinks = sum(block.sink_bytes for block in shard.blocks.values())
        fixed = (max_requests + 1) * (ring + BEGINNINGS * sinks * shares_sinks)
        return cls(token_bytes, window, count * nbytes, fixed, draft_bytes)

    def ratio(self, requests: int, context: int) -> float:
        """Tokens in windows, by those in pages, that so many requests of the context need at once, by SGLang's own
        count: of each the window, what it frees late, and the page that it fills; of prompts two chunks; whole pages.
        And as many windows more, for prefixes in the radix tree. 0 without windows; at most 1."""
        if not self.window:
            return 0.0
        running = self.window - 1 + FREED_TOKENS + 2 * PAGE_TOKENS
        cached = -(-self.window // PAGE_TOKENS) * PAGE_TOKENS + PAGE_TOKENS
        tokens = requests * (running + cached) + 2 * min(CHUNK_TOKENS, context) + 2 * PAGE_TOKENS
        in_pages = requests * -(-context // PAGE_TOKENS) * PAGE_TOKENS
        return min(1.0, math.ceil(10**6 * tokens / in_pages) / 10**6)

    def blocks(self, memory: int, ratio: float) -> int:
        """Pages in so many bytes."""
        return int(max(0, memory - self.fixed) // self._cell(ratio)) // PAGE_TOKENS

    def windows(self, memory: int, ratio: float) -> tuple[int, float]:
        """Tokens in windows besides these pages, and the ratio."""
        return int(self.blocks(memory, ratio) * PAGE_TOKENS * ratio) // PAGE_TOKENS * PAGE_TOKENS, ratio

    def block_bytes(self, ratio: float) -> int:
        """Bytes of a page and of its share of windows."""
        return math.ceil(PAGE_TOKENS * self._cell(ratio))

    def least_blocks(self, ratio: float) -> int:
        """Pages without which SGLang does not start: it wants room for more than a window and a page."""
        least = -(-(self.window + PAGE_TOKENS) // PAGE_TOKENS) * PAGE_TOKENS
        return math.ceil(least / ratio / PAGE_TOKENS) if self.window else 1

    def memory(self, blocks: int, ratio: float) -> int:
        """The fewest bytes with so many pages; a byte more where SGLang divides by a fraction."""
        return self.fixed + math.ceil(blocks * PAGE_TOKENS * self._cell(ratio)) + bool(self.window)

    def memory_of(self, requests: int, context: int) -> int:
        """The fewest bytes for so many requests of the context."""
        ratio = self.ratio(requests, context)
        return self.memory(max(requests * -(-context // PAGE_TOKENS), self.least_blocks(ratio)), ratio)

    def fitting(self, memory: int, max_requests: int, context: int) -> int:
        """Requests of the context for which so many bytes are enough, from 1 to ``max_requests``."""
        numbers = range(1, max(1, max_requests) + 1)
        return max(1, bisect.bisect_right(numbers, memory, key=lambda requests: self.memory_of(requests, context)))

    def _cell(self, ratio: float) -> int | float:
        return self.token_bytes + self.draft_bytes + (ratio * self.window_bytes if self.window else 0)


def _page_bytes(blocks: Mapping[int, BlockLayout]) -> int:
    """Of 128 tokens in all of these layers."""
    return sum(block.block_bytes for block in blocks.values())


class Placed(NamedTuple):
    """Things of layers in blocks, side by side: ``at``, by layer, the number of a block and a byte of it;
    ``num_blocks``, and the bytes of the fullest."""

    at: dict[int, tuple[int, int]]
    num_blocks: int
    block_bytes: int

    @classmethod
    def of(cls, sizes: Mapping[int, int], room: int) -> Placed:
        """Things of so many bytes, of layers in their order, in blocks with ``room`` for each of them."""
        at: dict[int, tuple[int, int]] = {}
        block = used = fullest = 0
        for index, size in sizes.items():
            if used + size > room:
                block, used = block + 1, 0
            at[index] = block, used
            used += size
            fullest = max(fullest, used)
        return cls(at, block + 1, fullest)

    @classmethod
    def alike(cls, stages: Sequence[Mapping[int, int]], room: int) -> list[Placed]:
        """Of the layers of every stage of a pipeline, in as many blocks of as many bytes."""
        found = [cls.of(sizes, room) for sizes in stages]
        num_blocks, fullest = (max(sizes) for sizes in zip(*((one[1], one[2]) for one in found), strict=True))
        return [one._replace(num_blocks=num_blocks, block_bytes=fullest) for one in found]


class PageNumbers(NamedTuple):
    """Of pages in vLLM's memory: number n begins at byte n times ``unit``. Page p of block b has the number b times
    ``of_block`` plus p times ``of_page``."""

    unit: int
    of_block: int
    of_page: int


class Window(NamedTuple):
    """Layers of one sliding window: ``tokens`` of a block; ``num_groups`` of layers, whose blocks are other
    ones; the blocks that a request of any length holds in each group, at most."""

    tokens: int
    num_groups: int
    blocks: int


class VllmPool:
    """vLLM's pool of blocks with a plan: how the layers of a rank lie in it, by vLLM's own planner.

        pages    of all layers: a block for every 128 tokens, or beside states for every ``pages_per_block`` times
                 as many. Each layer has the same share of it, and a plan's layers lie side by side in the shares
                 of all, page after page. (Of unequal pages vLLM takes some for a pattern of layers.)
        rings    of all layers: as many blocks a request as they take
        sinks    of all layers, where a request after a cached prefix has them: mostly one block
        windows  of layers with a sliding window, which vLLM keeps at 16 bits: blocks of fewer tokens, in groups of
                 as many layers as one has room for
        states   of layers that keep one, vLLM's own: in groups of as many layers as a block has room for, each with
                 a block, another one where prefixes are cached, and one a draft
        drafts   of a model's layers, vLLM's own at 16 bits: behind the pages of a block

    Stages of a pipeline have as many blocks, with the same numbers, each in memory of its own: shares of equal
    bytes, and rings and sinks in as many blocks. A stage with more layers has larger blocks.

    All blocks have the bytes of the largest. A state is much larger than a page of 128 tokens: blocks of several
    pages waste less of those that hold states, and a request's last block more."""

    def __init__(
        self,
        shard: HeadShard,
        has_prefixes: bool = True,
        state_bytes: int = 0,
        pages_per_block: int = 1,
        states_per_block: int = 1,
        draft_bytes: int = 0,
    ) -> None:
        """``has_prefixes``: whether they are cached, and sinks are shared, unless requests would lack
        some. ``state_bytes``: of a layer's state; a block has room for ``states_per_block``. ``draft_bytes``: of
        a token in the layers of a model that drafts."""
        self.shard, stages = shard, [one.blocks for one in shard.of_stages]
        self.pages_per_block, self.block_tokens = pages_per_block, pages_per_block * PAGE_TOKENS
        pages = {index: block.block_bytes for index, block in shard.blocks.items()}
        self.pages = Placed.of(pages, sum(pages.values()))
        # vLLM pads a state by whole bytes of each token of a block.
        self.state_bytes = -(-state_bytes // self.block_tokens) * self.block_tokens
        largest_ring = max(block.ring_bytes for blocks in stages for block in blocks.values())
        beside = self.state_bytes * states_per_block
        if pages_per_block > 1:  # pages lie at equal distances
            beside = max(beside, largest_ring, *self._smallest_windows)
        self.share_bytes = max(
            aligned_size(-(-max(_page_bytes(blocks) * pages_per_block, beside) // (pages_per_block * len(blocks))))
            for blocks in stages
        )
        fewest = min(map(len, stages))
        self.room = max(self.share_bytes * pages_per_block * fewest, largest_ring)
        is_cached = has_prefixes and not loses_sinks(shard.plan)
        self.rings, self.sinks = (
            Placed.alike([{index: nbytes(block) for index, block in blocks.items()} for blocks in stages], self.room)[
                shard.stage
            ]
            for nbytes in (lambda block: block.ring_bytes, lambda block: block.sink_bytes if is_cached else 0)
        )
        self.draft_bytes = draft_bytes * self.block_tokens
        self._states_of_a_group = (is_cached + shard.step_tokens) if shard.num_states else 0

    @property
    def _smallest_windows(self) -> list[int]:
        return [min(WINDOW_BLOCKS) * token_bytes for _, token_bytes in self.shard.windows.values()]

    def window(self, tokens: int, sizes: Sequence[int] = WINDOW_BLOCKS) -> Window:
        """Of the layers with a sliding window of so many tokens. Blocks, of one of these ``sizes`` in tokens,
        are the fewest, or a sixteenth more where that makes fewer groups, which cost vLLM time on the
        host."""
        count, token_bytes = self.shard.windows[tokens]
        found = []
        for size in [size for size in sizes if size * token_bytes <= self.room] or [min(sizes)]:
            groups = -(-count // max(1, self.room // (size * token_bytes)))
            found.append(Window(size, groups, -(-(tokens - 2 + self.shard.step_tokens) // size) + 1))
        fewest = min(one.num_groups * one.blocks for one in found)
        fitting = (one for one in found if 16 * one.num_groups * one.blocks <= 17 * fewest)
        return min(fitting, key=lambda one: (one.num_groups, one.num_groups * one.blocks))

    @property
    def block_bytes(self) -> int:
        """Of each block of the pool."""
        windows = (self.window(tokens).tokens * nbytes for tokens, (_, nbytes) in self.shard.windows.items())
        pages = self.share_bytes * len(self.shard.blocks) * self.pages_per_block
        return max(self.rings.block_bytes, self.sinks.block_bytes, pages + self.draft_bytes, *windows)

    def page_numbers(self, stride: int) -> PageNumbers:
        """The numbers of pages in blocks that are ``stride`` bytes apart. Kernels multiply a number by one distance.
        Keys of drafts may follow a block's pages: then it divides that of blocks and that of pages."""
        if self.pages_per_block == 1:
            return PageNumbers(stride, 1, 0)
        distance = self.share_bytes * len(self.shard.blocks)
        unit = math.gcd(stride, distance)
        return PageNumbers(unit, stride // unit, distance // unit)

    @property
    def ring_blocks(self) -> int:
        """Of a request of any length, for rings and sinks."""
        return self.rings.num_blocks + (self.sinks.num_blocks if self.sinks.block_bytes else 0)

    def window_blocks(self, context: int) -> int:
        """Of a request with so many tokens, for sliding windows, once its prompt is computed."""
        windows = map(self.window, self.shard.windows)
        return sum(one.num_groups * min(one.blocks, -(-context // one.tokens)) for one in windows)

    @property
    def state_groups(self) -> int:
        """Groups of layers with a state, whose blocks are other ones. A block that has keys of drafts next to its
        pages has room for more."""
        if not self.state_bytes:
            return 0
        room = max(self.room, self.share_bytes * len(self.shard.blocks) * self.pages_per_block + self.draft_bytes)
        return -(-self.shard.num_states // (room // self.state_bytes))

    @property
    def state_blocks(self) -> int:
        """Of a request of any length, for states."""
        return self.state_groups * self._states_of_a_group

    def blocks(self, context: int) -> int:
        """Of a request with so many tokens, once its prompt is computed."""
        pages = -(-context // self.block_tokens)
        return pages + self.ring_blocks + self.window_blocks(context) + self.state_blocks


def vllm_pool(
    shard: HeadShard,
    state_bytes: int = 0,
    has_prefixes: bool = True,
    pages_per_block: int | None = None,
    draft_bytes: int = 0,
) -> VllmPool:
    """The pool in which a sequence of the plan's workload takes the fewest bytes, of those with up to 40 pages
    a block and 12 groups of states; with so many pages a block where ``pages_per_block`` says so. Keys of drafts
    do not choose: the plug-in does not know their bytes when it makes a pool. UsageError where a model has states
    and their bytes are not known."""
    if not shard.num_states:
        return VllmPool(shard, has_prefixes, draft_bytes=draft_bytes)
    if not state_bytes:
        raise UsageError(
            f"{shard.num_states} layers of the plan's model keep a state, whose bytes in the engine are not stated",
            hint="kvcal serve-args counts them from the model's config.json",
        )
    numbers = range(1, MAX_PAGES + 1) if pages_per_block is None else [pages_per_block]
    states = range(-(-shard.num_states // MAX_STATE_GROUPS), shard.num_states + 1)
    context = shard.plan.workload.context

    def taken(sizes: tuple[int, int]) -> tuple[int, int]:
        pool = VllmPool(shard, has_prefixes, state_bytes, *sizes)
        return pool.blocks(context) * pool.block_bytes, pool.pages_per_block

    best = min(itertools.product(numbers, states), key=taken)
    return VllmPool(shard, has_prefixes, state_bytes, *best, draft_bytes)


def draft_token_bytes(layers: Sequence[AttentionGeometry], cache_dtype: CacheDtype, num_ranks: int) -> int:
    """Of a model that drafts, on each rank: a token's bytes in the layers with full attention."""
    shared = (rank_geometry(layer, 0, num_ranks) for layer in layers if layer.window is None)
    return sum(layer.values_per_token for layer in shared) * CACHE_DTYPES[cache_dtype].itemsize
