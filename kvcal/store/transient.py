"""Bytes that a dynamic cache takes for a moment while it stores new tokens, beyond what it holds before or after.

Pages of one part (the keys or the values of one layer, or of a run of its heads in one format) lie in one tensor, which
is allocated anew when pages are added or change their bits. So the old and the new pages of one part exist at a time;
of all other parts, either those before the update or those after it. New pages are encoded, and old ones converted, a
few at a time, which bounds the scratch.

Left out: what attention reads (the dense keys and values of a layer) and what predictors read (two layers' decoded
pages): the one is the model's working memory in any cache, the other is described in kvcal.store.prediction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvcal.geometry import CacheDtype
from kvcal.pages.codec import ENCODE_PAGES
from kvcal.pages.layout import PAGE_TOKENS
from kvcal.pages.shrink import RECORDS_AT_ONCE
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES, Format, Side, num_pages

# Scratch for each value that is encoded or converted at once. Measured: 14 to 19 bytes, 29 on a lattice.
SCRATCH_BYTES = 32
# Indices of rows and pages, for each sequence.
INDEX_BYTES = 64
# Where the new tokens lie in a ring: two int64 each, on the way.
PLACE_BYTES = 16


def transient_bytes(
    layers: Sequence[LayerPlan],
    cache_dtype: CacheDtype,
    before: Sequence[int],
    after: Sequence[int],
    columns: tuple[int, int],
) -> int:
    """Upper bound of the bytes that an update takes for storing beyond max(nbytes(before), nbytes(after)) of the plan.
    ``before``, ``after``: tokens of every sequence; ``columns``: fed before and after, padding included.

        sum of max(before, after) over parts - max(sum before, sum after) + largest (both - max + scratch) of a part
        + 64 bytes a sequence + 16 bytes a token of the longest ring
    """
    parts = [
        _Part(cache_dtype, layer, side, fmt, heads.stop - heads.start)
        for layer in layers
        if layer.is_paged
        for side in SIDES
        for fmt, heads in layer.runs(side)
    ]
    counts = Counter(before), Counter(after)
    old = [part.page_bytes(counts[0], columns[0]) for part in parts]
    new = [part.page_bytes(counts[1], columns[1]) for part in parts]
    mixed = sum(map(max, zip(old, new, strict=True))) - max(sum(old), sum(new))
    indices = INDEX_BYTES * len(after) + PLACE_BYTES * max((part.format.ring_tokens for part in parts), default=0)
    return mixed + indices + max((part.own_bytes(*counts, columns) for part in parts), default=0)


def largest_transient(layers: Sequence[LayerPlan], cache_dtype: CacheDtype, batch: int, max_tokens: int) -> int:
    """The most that ``transient_bytes`` is for ``batch`` equal sequences on their way to ``max_tokens``: fed at once,
    filling their last page, or where pages shrink."""
    formats = {fmt for layer in layers for fmt in (*layer.k, *layer.v)}
    shrinking = {count for fmt in formats for count in fmt.shrink_at if count <= max_tokens}
    steps = {(0, max_tokens), (max(0, max_tokens - PAGE_TOKENS), max_tokens)}
    steps |= {(max(0, count - 1), count) for count in shrinking}
    return max(transient_bytes(layers, cache_dtype, (n,) * batch, (m,) * batch, (n, m)) for n, m in steps)


@dataclass(frozen=True)
class _Part:
    """The keys, or values, of ``num_heads`` KV heads of a layer in one format: a PagedTensor."""

    cache_dtype: CacheDtype
    layer: LayerPlan
    side: Side
    format: Format
    num_heads: int

    def num_pages(self, lengths: Counter[int]) -> int:
        return sum(count * num_pages(length) for length, count in lengths.items())

    def page_bytes(self, lengths: Counter[int], columns: int) -> int:
        return self.num_pages(lengths) * self._bytes_of_page(columns)

    def own_bytes(self, before: Counter[int], after: Counter[int], columns: tuple[int, int]) -> int:
        """Beyond the larger one of its pages before and after."""
        old, new = self.num_pages(before), self.num_pages(after)
        wide, narrow = (self._bytes_of_page(count) for count in columns)
        converted = old * (wide + narrow) if wide != narrow else 0
        added = (old + new) * narrow if new > old else 0
        at_once = max(
            RECORDS_AT_ONCE if converted or self.format.lattice_dim is not None else 0,
            min(new - old, max(ENCODE_PAGES, after.total())) * self.num_heads,
        )
        scratch = SCRATCH_BYTES * at_once * PAGE_TOKENS * self.layer.head_dim(self.side)
        held = max(old * wide, new * narrow)
        return max(0, converted - held, added - held) + scratch

    def _bytes_of_page(self, columns: int) -> int:
        head_dim, dtype = self.layer.head_dim(self.side), self.cache_dtype
        layout = self.format.layout(self.side, self.num_heads, head_dim, dtype, self.format.bits_at(columns))
        return layout.record_bytes * (1 if self.format.lattice_dim is not None else self.num_heads)
