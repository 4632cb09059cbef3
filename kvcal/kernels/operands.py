"""What the operators of a static cache are given, in groups: runs of the arguments that torch.library wants flat.

One call serves one head range of one layer: B rows, n KV heads, head size D. What a variant does not have is an empty
tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class StoredSide(NamedTuple):
    """The keys, or the values. A sliding window has no pages, a ring for its buffer, and one sink, which
    kvcal.kernels.window stores. Where pages shrink, ``pages`` is the memory of all regions, of one dimension."""

    sinks: Tensor  # [B, n, sinks, D], cache dtype
    buffer: Tensor  # [B, n, buffer_tokens, D], cache dtype
    pages: Tensor  # [B, pages, n, record] uint8: a page's record for every head

    def row(self, row: int) -> StoredSide:
        """Of one row of the batch, which stays a dimension."""
        return StoredSide(*(tensor[row : row + 1] for tensor in self))


class QueryStatistic(NamedTuple):
    """What query scores are made from. A prompt that ends between two pages begins the sum anew, so ``since`` is not a
    function of the length."""

    sum: Tensor  # [B, n, D] fp32: |q| since the last page, over the heads of a group
    since: Tensor  # [B, n] int32: tokens that the row held when the sum was begun


class PageCounts(NamedTuple):
    """What says how many pages every row has, and how many tokens behind them."""

    lengths: Tensor  # [B] int32: tokens that the row held before the step
    k_page_at: Tensor  # int32 [1 or more]: where the window follows a rule, tokens with which page i is due, ascending
    v_page_at: Tensor


class PageTransform(NamedTuple):
    """What pages of keys hold: (K - offset) / rescale."""

    rescale: Tensor  # [n, D] fp32
    offset: Tensor  # [n, D] fp32

    @property
    def of_values(self) -> PageTransform:
        """None of it: pages of values hold V."""
        return PageTransform(self.rescale[:0], self.offset[:0])


class Operands(NamedTuple):
    """What a step is given of a head range, whatever its token."""

    k: StoredSide
    v: StoredSide
    queries: QueryStatistic
    counts: PageCounts
    transform: PageTransform


def grouped(flat: Sequence[Any], *groups: type[Any]) -> list[Any]:
    """Flat arguments as these groups, one after the other, and what is left of them."""
    found, start = [], 0
    for group in groups:
        stop = start + len(group._fields)
        found.append(group(*flat[start:stop]))
        start = stop
    return [*found, *flat[start:]]
