"""Memory that a decode step of a plan takes besides its cache: its bytes, which whole-device budgets and the
bench count.

    kept       what predictions read: pages before RoPE in fp32, from the time they are reconstructed until their last
               reader has used them. A layer that is predicted from the one before makes two exist at a time;
               a layer that many are predicted from stays until the last of them
    unpacked   keys and values of one layer as attention reads them, one side's pages on their way there; of latent
               attention, the latents and the heads that they are expanded to
    reading    scratch of the pages that are decoded at once
    packing    what storing takes for a moment (``transient_bytes``)

All of it is a dynamic cache's; steps of a static one unpack nothing. Of reading and storing, which follow
each other, the larger counts. Sizes depend on the plan, the batch and ``max_tokens`` alone. Nothing here is
part of the plan's bytes, and nothing outlives a forward pass.

The pages of one part (the keys or the values of one layer) lie in one tensor, which is allocated anew when
pages are added or change their bits. So the old and the new pages of one part exist at a time; of all other
parts, either those before the update or those after it. New pages are encoded, and old ones converted, a few
at a time, which bounds the scratch. Tokens enter a basis a few at a time, too, in fp64.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvcal.geometry import CacheDtype
from kvcal.pages.codec import ENCODE_PAGES, VALUES_AT_ONCE
from kvcal.pages.layout_protocol import PAGE_TOKENS, RECORDS_AT_ONCE, Layout
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES, Format, Side, num_pages
from kvcal.stored_tensor import ITEM_BYTES

# Scratch for each value that is encoded or converted at once, or enters a basis. Measured: 14 to 19 bytes, 29
# in a row of all heads, 26 into a basis.
SCRATCH_BYTES = 32
# Of rotated pages, or with error feedback: 47 measured. With both, which searches scales: 135. (Kernels take
# less.)
ROTATED_BYTES = 56
SEARCH_BYTES = 152
# Of an entry of a basis while tokens enter it.
DOUBLE_BYTES = 8
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
    """Upper bound of the bytes that an update takes for storing beyond max(nbytes(before), nbytes(after)) of
    the plan. ``before``, ``after``: tokens of every sequence; ``columns``: fed before and after, padding
    included.

        sum of max(before, after) over parts - max(sum before, sum after) + largest (both - max + scratch) of
        a part + 64 bytes a sequence + 16 bytes a token of the longest ring
    """
    parts = [
        _Part(cache_dtype, layer, side, layer.format(side), layer.attention.num_kv_heads)
        for layer in layers
        if layer.is_paged
        for side in SIDES
    ]
    counts = Counter(before), Counter(after)
    old = [part.page_bytes(counts[0], columns[0]) for part in parts]
    new = [part.page_bytes(counts[1], columns[1]) for part in parts]
    mixed = sum(map(max, zip(old, new, strict=True))) - max(sum(old), sum(new))
    indices = INDEX_BYTES * len(after) + PLACE_BYTES * max((part.format.ring_tokens() for part in parts), default=0)
    return mixed + indices + max((part.own_bytes(*counts, columns) for part in parts), default=0)


def largest_transient(layers: Sequence[LayerPlan], cache_dtype: CacheDtype, batch: int, max_tokens: int) -> int:
    """The most that ``transient_bytes`` is for ``batch`` equal sequences on their way to ``max_tokens``: fed
    at once, filling their last page, or where pages get other bits."""
    formats = {fmt for layer in layers for fmt in layer.formats}
    changes = {count for fmt in formats for count in fmt.changes_at if count <= max_tokens}
    steps = {(0, max_tokens), (max(0, max_tokens - PAGE_TOKENS), max_tokens)}
    steps |= {(max(0, count - 1), count) for count in changes}
    return max(transient_bytes(layers, cache_dtype, (n,) * batch, (m,) * batch, (n, m)) for n, m in steps)


@dataclass(frozen=True)
class _Part:
    """The keys, or values, of a layer: a PagedTensor."""

    cache_dtype: CacheDtype
    layer: LayerPlan
    side: Side
    format: Format
    num_heads: int

    def num_pages(self, lengths: Counter[int]) -> int:
        return sum(count * self.format.num_pages(length) for length, count in lengths.items())

    def page_bytes(self, lengths: Counter[int], columns: int) -> int:
        return self.num_pages(lengths) * self._bytes_of_page(columns)

    def own_bytes(self, before: Counter[int], after: Counter[int], columns: tuple[int, int]) -> int:
        """Beyond the larger one of its pages before and after."""
        old, new = self.num_pages(before), self.num_pages(after)
        wide, narrow = (self._bytes_of_page(count) for count in columns)
        converted = old * (wide + narrow) if wide != narrow else 0
        added = (old + new) * narrow if new > old else 0
        at_once = max(
            RECORDS_AT_ONCE if converted or self._layout(0).records_per_page(2) == 1 else 0,
            min(new - old, max(ENCODE_PAGES, after.total())) * self.num_heads,
        )
        scratch = self._scratch_bytes * at_once * PAGE_TOKENS * self.layer.head_dim(self.side)
        if self.layer.basis(self.side):
            scratch = max(scratch, self._entering(after.total(), columns[1] - columns[0]))
            scratch += self.num_heads * self.layer.head_dim(self.side) ** 2 * DOUBLE_BYTES
        held = max(old * wide, new * narrow)
        return max(0, converted - held, added - held) + scratch

    @property
    def _scratch_bytes(self) -> int:
        """Of a value that is encoded."""
        is_rotated = self.format.kind == "rotated"
        has_feedback = self.layer.feedback(self.side)
        if is_rotated and has_feedback:
            return SEARCH_BYTES
        return ROTATED_BYTES if is_rotated or has_feedback else SCRATCH_BYTES

    def _entering(self, batch: int, tokens: int) -> int:
        """Scratch of so many new tokens of every sequence that enter a basis; those of the ring then lie in
        it."""
        values, itemsize = self.num_heads * self.layer.head_dim(self.side), ITEM_BYTES[self.cache_dtype]
        at_once = min(batch * tokens, max(ENCODE_PAGES, batch) * PAGE_TOKENS)
        return values * (SCRATCH_BYTES * at_once + itemsize * batch * min(tokens, self.format.ring_tokens()))

    def _bytes_of_page(self, columns: int) -> int:
        layout = self._layout(columns)
        return layout.record_bytes * layout.records_per_page(self.num_heads)

    def _layout(self, columns: int) -> Layout:
        head_dim, num_bits = self.layer.head_dim(self.side), self.format.bits_at(columns)
        return self.format.layout(self.side, self.num_heads, head_dim, self.cache_dtype, num_bits)


FLOAT_BYTES = 4
Slot = tuple[int, int, int, int, int]  # [B, pages, 128, N, D]


@dataclass(frozen=True)
class StepWorkspace:
    """Bytes, as in the module's docstring."""

    kept: int
    unpacked: int
    reading: int
    packing: int

    @property
    def nbytes(self) -> int:
        return self.kept + self.unpacked + max(self.reading, self.packing)


def logits_bytes(batch: int, vocab_size: int) -> int:
    """Bytes of a step's logits and of their softmax, both in fp32."""
    return 2 * FLOAT_BYTES * batch * vocab_size


def step_workspace(layers: Sequence[LayerPlan], cache_dtype: CacheDtype, batch: int, max_tokens: int) -> StepWorkspace:
    """Of ``batch`` rows of up to ``max_tokens`` tokens."""
    paged = [layer for layer in layers if layer.is_paged]
    return StepWorkspace(
        sum(FLOAT_BYTES * math.prod(slot) for slot in kept_slots(paged, batch, max_tokens)),
        max((_dense(layer, cache_dtype) for layer in paged), default=0) * batch * max_tokens,
        SCRATCH_BYTES
        * min(VALUES_AT_ONCE, max((_side_values(layer) for layer in paged), default=0) * batch * max_tokens),
        largest_transient(paged, cache_dtype, batch, max_tokens),
    )


def _dense(layer: LayerPlan, cache_dtype: CacheDtype) -> int:
    """One token's keys and values, and the larger of them again. A latent's heads are made when all is
    unpacked: keys and values without RoPE by the projection, and keys with it once more."""
    geometry, passing = layer.attention, _side_values(layer)
    if geometry.expanded is not None:
        keys, values = geometry.expanded.k_head_dim, geometry.expanded.v_head_dim
        passing = max(passing, geometry.num_query_heads * (2 * keys - geometry.v_head_dim + values))
    return (geometry.values_per_token + passing) * ITEM_BYTES[cache_dtype]


def _side_values(layer: LayerPlan) -> int:
    """Of one token, the larger of keys and values."""
    return layer.attention.num_kv_heads * max(layer.head_dim(side) for side in SIDES)


def kept_slots(paged: Sequence[LayerPlan], batch: int, max_tokens: int) -> list[Slot]:
    """A slot for all pages that something is predicted from, shared by those that are not needed at the same
    time."""
    last_reader: dict[tuple[int, Side], int] = {}
    for layer in paged:
        for side in SIDES:
            last_reader |= dict.fromkeys(layer.sources(side), layer.geometry.index)
    slots: list[Slot] = []
    busy_until: list[int] = []
    for layer in paged:
        for side in SIDES:
            key = layer.geometry.index, side
            if key not in last_reader:
                continue
            pages = num_pages(max_tokens)
            shape = (batch, pages, PAGE_TOKENS, layer.attention.num_kv_heads, layer.head_dim(side))
            free = [n for n, slot in enumerate(slots) if slot == shape and busy_until[n] < key[0]]
            if not free:
                slots.append(shape)
                busy_until.append(-1)
                free = [len(slots) - 1]
            busy_until[free[0]] = last_reader[key]
    return slots
