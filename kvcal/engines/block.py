"""The memory that an engine lends one layer: opaque blocks of 128 tokens, and one ring a request.

    block   for every head range, the records of its heads' keys, then of their values: a page of each
    ring    for every head range, of its keys, then of its values, in the cache's dtype: the first tokens
            [n, sinks, D], and the newest ones [n, 128 + window, D], token t at t modulo their number; behind all
            ranges, where channels are chosen by queries, the sums of |q| since the last page, fp32 [N, D], and the
            tokens at which they begin, int32 [N]. Where drafts are verified, ``lookahead`` at a time, there are as many
            of the newest tokens more: rejected ones then push nothing out that is needed

A page is packed in the step that fills it, directly into its block. From then on the block alone holds these tokens,
but for sinks and the window, which the ring goes on to hold at 16 bits, and attention prefers. The engine knows block
and ring by their sizes. Blocks are shared between requests, rings are not.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES, CacheDtype
from kvcal.kernels.operands import QueryStatistic
from kvcal.kernels.variants import HeadRange, head_ranges, page_layout
from kvcal.pages.record_layout import aligned_size
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES, Side


@dataclass(frozen=True)
class BlockLayout:
    """See the module's docstring. ``layer``: a paged layer that ``kvcal.engines.support`` takes, as this rank has
    it."""

    layer: LayerPlan
    cache_dtype: CacheDtype
    lookahead: int = 0

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
        """Bytes of a request's ring: a multiple of 16."""
        of_queries = self._query_sum_bytes + self._query_since_bytes if self.needs_queries else 0
        return aligned_size(self._unquantized_bytes + of_queries)

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

    def unquantized(self, rings: Tensor, pair: HeadRange, side: Side) -> tuple[Tensor, Tensor]:
        """The sinks and the newest tokens of a head range in rings, uint8 [rings, ring_bytes or more]: views [rings, n,
        sinks, D] and [rings, n, ring_tokens, D] in the cache's dtype."""
        before = self.ranges[: self.ranges.index(pair)]
        first = sum(sum(self._tokens(other, each)) for other in before for each in SIDES)
        first += sum(self._tokens(pair, "k")) if side == "v" else 0
        shape, views = (pair.num_heads, -1, self.layer.head_dim(side)), []
        for nbytes in self._tokens(pair, side):
            views.append(rings[:, first : first + nbytes].view(CACHE_DTYPES[self.cache_dtype]))
            first += nbytes
        sinks, newest = (
            view.unflatten(1, shape) if view.shape[1] else view.new_empty(len(rings), pair.num_heads, 0, shape[2])
            for view in views
        )
        return sinks, newest

    def statistic(self, rings: Tensor) -> QueryStatistic:
        """The query statistic in rings that have one, views [rings, N, D] and [rings, N]."""
        first = self._unquantized_bytes
        heads, since = self.layer.attention.num_kv_heads, first + self._query_sum_bytes
        sums = rings[:, first:since].view(torch.float32).unflatten(1, (heads, -1))
        return QueryStatistic(sums, rings[:, since : since + 4 * heads].view(torch.int32))

    @property
    def _query_sum_bytes(self) -> int:
        return 4 * self.layer.attention.num_kv_heads * self.layer.head_dim("k")

    @property
    def _query_since_bytes(self) -> int:
        """Bytes of the token counts at which sums began; rounded up, as a multiple of 16 follows."""
        return aligned_size(4 * self.layer.attention.num_kv_heads)

    def _records(self, pair: HeadRange, side: Side) -> int:
        return pair.num_heads * self.record_bytes(pair, side)

    @property
    def _unquantized_bytes(self) -> int:
        return sum(sum(self._tokens(pair, side)) for pair in self.ranges for side in SIDES)

    def _tokens(self, pair: HeadRange, side: Side) -> tuple[int, int]:
        """Bytes of the sinks, and of the newest tokens, of a head range."""
        fmt, token = pair.format(side), self.layer.head_dim(side) * CACHE_DTYPES[self.cache_dtype].itemsize
        newest = fmt.ring_tokens + self.lookahead
        return pair.num_heads * fmt.num_sink_tokens * token, pair.num_heads * newest * token
