"""The memory that an engine lends one layer: opaque blocks of 128 tokens, and one ring a request.

    block   for every head range, the records of its heads' keys, then of their values: a page of each
    ring    keys [N, 128, D], then values [N, 128, D] of the newest tokens in the cache's dtype, token t at t mod 128;
            where any layer of the plan chooses channels by queries, the sums of |q| since the last page, fp32 [N, D],
            and the tokens at which they begin, int32 [N]: vLLM packs rings best that are equal in all layers

A page is packed in the step that fills it, directly into its block; from then on the block alone holds these tokens.
The engine knows both by their sizes. Blocks are shared between requests, rings are not.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES, CacheDtype
from kvcal.kernels.operands import QueryStatistic
from kvcal.kernels.variants import HeadRange, head_ranges, page_layout
from kvcal.pages.record_layout import PAGE_TOKENS
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES, Side


@dataclass(frozen=True)
class BlockLayout:
    """See the module's docstring. ``layer``: a paged layer that ``kvcal.engines.support`` takes, as this rank has it;
    ``has_statistic``: its ring has room for sums of queries."""

    layer: LayerPlan
    cache_dtype: CacheDtype
    has_statistic: bool = False

    @functools.cached_property
    def ranges(self) -> tuple[HeadRange, ...]:
        """Neighbouring KV heads of the same formats, which one call of an operator serves."""
        return head_ranges(self.layer)

    @functools.cached_property
    def block_bytes(self) -> int:
        """Bytes of 128 tokens of the layer: a multiple of 16."""
        return sum(self._records(pair, side) for pair in self.ranges for side in SIDES)

    @functools.cached_property
    def ring_bytes(self) -> int:
        """Bytes of a request's ring."""
        of_queries = self._query_sum_bytes + self._query_since_bytes if self.has_statistic else 0
        return sum(self._ring_bytes(side) for side in SIDES) + of_queries

    @functools.cached_property
    def needs_queries(self) -> bool:
        """Whether channels are chosen by queries in any head."""
        return any(fmt.needs_queries for fmt in self.layer.k)

    def offset(self, pair: HeadRange, side: Side) -> int:
        """The byte of a block at which the records of a head range's keys, or values, begin."""
        before = self.ranges[: self.ranges.index(pair)]
        within = self._records(pair, "k") if side == "v" else 0
        return within + sum(self._records(other, each) for other in before for each in SIDES)

    def record_bytes(self, pair: HeadRange, side: Side) -> int:
        """Bytes of a page of one KV head."""
        fmt = pair.format(side)
        return page_layout(side, fmt, self.layer.head_dim(side), self.cache_dtype, fmt.num_bits).record_bytes

    def pages(self, blocks: Tensor, pair: HeadRange, side: Side) -> Tensor:
        """The records of a head range in blocks, uint8 [blocks, block_bytes or more] of any stride between blocks: a
        view uint8 [blocks, n, record_bytes]."""
        first, record = self.offset(pair, side), self.record_bytes(pair, side)
        return blocks[:, first : first + pair.num_heads * record].unflatten(1, (pair.num_heads, record))

    def ring(self, rings: Tensor, side: Side) -> Tensor:
        """The keys, or values, in rings, uint8 [rings, ring_bytes or more]: a view [rings, N, 128, D] in the cache's
        dtype."""
        first = self._ring_bytes("k") if side == "v" else 0
        held = rings[:, first : first + self._ring_bytes(side)].view(CACHE_DTYPES[self.cache_dtype])
        return held.unflatten(1, (self.layer.attention.num_kv_heads, PAGE_TOKENS, self.layer.head_dim(side)))

    def statistic(self, rings: Tensor) -> QueryStatistic:
        """The query statistic in rings that have one, views [rings, N, D] and [rings, N]."""
        first = sum(self._ring_bytes(side) for side in SIDES)
        heads, since = self.layer.attention.num_kv_heads, first + self._query_sum_bytes
        sums = rings[:, first:since].view(torch.float32).unflatten(1, (heads, -1))
        return QueryStatistic(sums, rings[:, since : since + 4 * heads].view(torch.int32))

    @property
    def _query_sum_bytes(self) -> int:
        return 4 * self.layer.attention.num_kv_heads * self.layer.head_dim("k")

    @property
    def _query_since_bytes(self) -> int:
        """Bytes of the token counts at which sums began; rounded up, as a multiple of 16 follows."""
        return -(-4 * self.layer.attention.num_kv_heads // 16) * 16

    def _records(self, pair: HeadRange, side: Side) -> int:
        return pair.num_heads * self.record_bytes(pair, side)

    def _ring_bytes(self, side: Side) -> int:
        values = PAGE_TOKENS * self.layer.attention.num_kv_heads * self.layer.head_dim(side)
        return values * CACHE_DTYPES[self.cache_dtype].itemsize
