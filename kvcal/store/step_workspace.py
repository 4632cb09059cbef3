"""Bytes that a decode step of a plan takes beside its cache: what whole-device budgets count, what a static cache then
allocates for stored forms (kvcal.store.dequantize_workspace), and what the bench reckons with.

    kept       pages that predictors read, fp32, before RoPE; a slot is free again behind its last reader
    tokens     static cache: pages of one layer's stored forms in 16 bits, in the cache's dtype
    turns      static cache: cosine and sine of every position, one table for all layers of the same RoPE
    passing    static cache: what a step that reconstructs pages computes with on the way, some pages at a time
    unpacked   dynamic cache: keys and values of one layer as attention reads them, one side's pages on their way there
    reading    dynamic cache: scratch of the pages that are decoded at once
    packing    dynamic cache: what storing takes for a moment (kvcal.store.transient)

A step is served by one of the two caches: the larger sum counts; of the dynamic cache, the larger of reading and
storing, which follow each other. Logits, and the scratch of ``decode`` on CUDA (some MB a shape), are not in it. Left
out: activations of a prompt that is fed in one piece; and temporaries of the dynamic cache while it decodes predicted
pages, which are decoded whole: 40 bytes a value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvcal.geometry import CACHE_DTYPES, CacheDtype
from kvcal.kernels.page_codec import VALUES_AT_ONCE
from kvcal.kernels.predict import ROWS_AT_ONCE
from kvcal.kernels.variants import head_ranges, page_layout, stored_form
from kvcal.pages.layout import PAGE_TOKENS, RAW_BITS
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import RAW, SIDES, Side, num_pages
from kvcal.plan.tensors import needed_tensors, predictor_shape
from kvcal.store.transient import SCRATCH_BYTES, largest_transient

FLOAT_BYTES = 4
# Room in fp32 for pages that are reconstructed at once, of which torch makes a copy at every turn: inputs, prediction,
# codes, values, transforms.
PART_COPIES = 16
# Of a predictor's weight on the way to its digits: two digits, fp32, fp64.
WEIGHT_BYTES = 2 + 4 + 8
SUMS = 3  # int32 products of digits for every output (kvcal.kernels.predict)

Slot = tuple[int, int, int, int, int]  # [B, pages, 128, N, D]


@dataclass(frozen=True)
class StepWorkspace:
    """Bytes, as in the module's docstring. ``slots``: the shapes of ``kept``; ``slot_of``: which of them holds the
    pages of a layer's side."""

    tokens: Mapping[Side, int]
    slots: tuple[Slot, ...]
    slot_of: Mapping[tuple[int, Side], int]
    turns: int
    passing: int
    unpacked: int
    reading: int
    packing: int

    @property
    def kept(self) -> int:
        return sum(FLOAT_BYTES * math.prod(slot) for slot in self.slots)

    @property
    def forms(self) -> int:
        """Of a static cache, allocated once."""
        return self.kept + sum(self.tokens.values()) + self.turns

    @property
    def nbytes(self) -> int:
        """Of a step, whichever cache serves it."""
        return max(self.forms + self.passing, self.kept + self.unpacked + max(self.reading, self.packing))


def logits_bytes(batch: int, vocab_size: int) -> int:
    """Bytes of a step's logits and of their softmax, both in fp32."""
    return 2 * FLOAT_BYTES * batch * vocab_size


def step_workspace(
    layers: Sequence[LayerPlan],
    cache_dtype: CacheDtype,
    batch: int,
    max_tokens: int,
    tensors: Mapping[str, Tensor] | None = None,
) -> StepWorkspace:
    """Of ``batch`` rows of up to ``max_tokens`` tokens. ``tensors``: the plan's, None before they are known, when all
    rotary tables of a head size count as one."""
    paged = [layer for layer in layers if layer.is_paged]
    slots, slot_of = _slots(paged, batch, max_tokens)
    turns = sum(2 * FLOAT_BYTES * max_tokens * pairs for pairs in _rotary_pairs(layers, cache_dtype, tensors))
    sizes = {side: [sum(form_bytes(layer, side, cache_dtype, batch, max_tokens)) for layer in paged] for side in SIDES}
    return StepWorkspace(
        {side: max(sizes[side], default=0) for side in SIDES},
        slots,
        slot_of,
        turns,
        max((_passing(layer, layers, cache_dtype, batch, max_tokens) for layer in paged), default=0),
        max((_dense(layer, cache_dtype) for layer in paged), default=0) * batch * max_tokens,
        SCRATCH_BYTES
        * min(VALUES_AT_ONCE, max((_side_values(layer) for layer in paged), default=0) * batch * max_tokens),
        largest_transient(paged, cache_dtype, batch, max_tokens),
    )


def form_bytes(layer: LayerPlan, side: Side, cache_dtype: CacheDtype, batch: int, max_tokens: int) -> list[int]:
    """16-bit pages of every head range in a stored form; 0 for the others."""
    record, found = raw_record_bytes(layer, side, cache_dtype), []
    for pair in head_ranges(layer):
        is_form = stored_form(layer, side, pair.format(side)) is not None
        found.append(batch * num_pages(max_tokens) * pair.num_heads * record if is_form else 0)
    return found


def raw_record_bytes(layer: LayerPlan, side: Side, cache_dtype: CacheDtype) -> int:
    """Of a 16-bit page of one head."""
    return page_layout(side, RAW, layer.head_dim(side), cache_dtype, RAW_BITS).record_bytes


def _dense(layer: LayerPlan, cache_dtype: CacheDtype) -> int:
    """One token's keys and values, and the larger of them again."""
    values = layer.attention.num_kv_heads * sum(layer.head_dim(side) for side in SIDES)
    return (values + _side_values(layer)) * CACHE_DTYPES[cache_dtype].itemsize


def _side_values(layer: LayerPlan) -> int:
    """Of one token, the larger of keys and values."""
    return layer.attention.num_kv_heads * max(layer.head_dim(side) for side in SIDES)


def _passing(
    layer: LayerPlan, layers: Sequence[LayerPlan], cache_dtype: CacheDtype, batch: int, max_tokens: int
) -> int:
    """Of the larger side; one follows the other."""
    heads, most = layer.attention.num_kv_heads, 0
    for side in SIDES:
        forms = [fmt for fmt in layer.formats(side) if stored_form(layer, side, fmt) is not None]
        if not forms:
            continue
        tokens = batch * PAGE_TOKENS * num_pages(max_tokens)
        found = PART_COPIES * FLOAT_BYTES * min(VALUES_AT_ONCE, tokens * heads * layer.head_dim(side))
        predictor = layer.predictor(side)
        if predictor is not None:
            (source,) = [other for other in layers if other.geometry.index == predictor.source]
            shape = predictor_shape(layer, source, side, cache_dtype)
            row = 2 * shape.num_inputs + SUMS * FLOAT_BYTES * shape.num_outputs
            found += min(ROWS_AT_ONCE, tokens) * row + WEIGHT_BYTES * shape.num_inputs * shape.num_outputs
        most = max(most, found)
    return most


def _rotary_pairs(
    layers: Sequence[LayerPlan], cache_dtype: CacheDtype, tensors: Mapping[str, Tensor] | None
) -> list[int]:
    """Pairs of channels of every distinct rotary table."""
    names = {f"layers.{layer.geometry.index}.rotary": layer for layer in layers if layer.is_paged}
    needed = [name for name in needed_tensors(layers, cache_dtype) if name in names]
    if tensors is None:
        return [dim // 2 for dim in {names[name].attention.k_head_dim for name in needed}]
    tables = {tensors[name].cpu().contiguous().numpy().tobytes(): len(tensors[name]) for name in needed}
    return list(tables.values())


def _slots(
    paged: Sequence[LayerPlan], batch: int, max_tokens: int
) -> tuple[tuple[Slot, ...], dict[tuple[int, Side], int]]:
    """A slot for all pages that something is predicted from, shared by those that are not needed at the same time."""
    last_reader: dict[tuple[int, Side], int] = {}
    for layer in paged:
        for side in SIDES:
            predictor = layer.predictor(side)
            if predictor is None:
                continue
            last_reader[predictor.source, side] = layer.geometry.index
            if side == "v":
                last_reader[layer.geometry.index, "k"] = layer.geometry.index
    slots: list[Slot] = []
    busy_until: list[int] = []
    slot_of: dict[tuple[int, Side], int] = {}
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
            slot_of[key] = free[0]
            busy_until[free[0]] = last_reader[key]
    return tuple(slots), slot_of
