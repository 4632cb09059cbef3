"""Stored pages of one sequence, reconstructed once into pages of 16 bits, layer by layer.

A static cache reconstructs what its kernels cannot read (lattices, predicted pages, keys before RoPE) in every step
(kvcal.store.dequantize). Where a prefix comes from host memory or disk, that is done once: the same operators make
16-bit pages, which then cost no step anything (AQUA-KV's codec mode). They take pages of every format. Layers follow
one another as they predict one another; nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels.operands import Place
from kvcal.pages.codec import PageCodec
from kvcal.pages.predictor import LinearPredictor
from kvcal.pages.record_layout import PAGE_TOKENS, RAW_BITS
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import RAW, SIDES, Format, Side, num_pages
from kvcal.plan.plan import Plan
from kvcal.store.dequantize import Predicted, StepForm
from kvcal.store.form_workspace import layer_turns
from kvcal.store.layer_store import parts_of
from kvcal.store.prediction import predictor_of
from kvcal.store.state import PlanState
from kvcal.store.workspace import kept_slots

# Of a predicted side, values that are reconstructed at once: more than in a step, since each launch costs the host as
# much as some hundred rows cost the device. 0.7 GB of scratch.
VALUES_AT_ONCE = 2**25


class StoredPart(NamedTuple):
    """The keys, or values, of n heads of one sequence (kvcal.store.pages_and_ring), without empty places. The tokens in
    ``recent`` are those that no page is read for."""

    pages: Tensor  # uint8 [P, r, record_bytes]
    sinks: Tensor  # [n, sinks, D] in the cache's dtype
    recent: Tensor  # [n, tokens, D]


class RestoredSide(NamedTuple):
    """The keys, or values, of a layer in the cache's dtype: full pages, and the tokens behind them."""

    pages: Tensor  # [P, N, 128, D]
    rest: Tensor  # [N, num_tokens - 128 P, D]

    @property
    def tokens(self) -> Tensor:
        """[N, num_tokens, D]."""
        return torch.cat([self.pages.transpose(0, 1).flatten(1, 2), self.rest], dim=1)


class Restorer:
    """A plan's codecs and predictors on ``device``, for any number of sequences."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        state = PlanState(plan, None)
        tensors = state.tensors_on(device)
        self._parts: dict[tuple[int, Side], list[PageCodec]] = {}
        self.predictors: dict[tuple[int, Side], LinearPredictor] = {}
        for layer in plan.layers:
            index = layer.geometry.index
            for side in SIDES if layer.is_paged else ():
                self._parts[index, side] = [
                    PageCodec.of_layer(layer, side, fmt, heads, plan.cache_dtype, tensors)
                    for fmt, heads in parts_of(layer, side, (index, side) in state.sources)
                ]
                if layer.predictor(side) is not None:
                    self.predictors[index, side] = predictor_of(layer, side, state, device)

    def sequence(self, num_tokens: int) -> SequenceRestorer:
        """Scratch for one sequence of 1 token or more."""
        return SequenceRestorer(self, num_tokens)

    def codecs(self, layer: LayerPlan, side: Side, num_tokens: int) -> list[PageCodec]:
        """Of the parts of a layer's side, as their pages are stored after ``num_tokens``."""
        found = [(codec, held_format(codec.format, num_tokens)) for codec in self._parts[layer.geometry.index, side]]
        return [codec if fmt == codec.format else replace(codec, format=fmt) for codec, fmt in found]


class SequenceRestorer:
    """One sequence; layers in the order of the plan."""

    def __init__(self, restorer: Restorer, num_tokens: int) -> None:
        device, pages = restorer.device, num_pages(num_tokens)
        self._restorer, self.num_tokens = restorer, num_tokens
        paged = [layer for layer in restorer.plan.layers if layer.is_paged]
        slots, slot_of = kept_slots(paged, 1, num_tokens)
        kept = [torch.empty(slot, dtype=torch.float32, device=device) for slot in slots]
        self._kept = {key: kept[number] for key, number in slot_of.items()}
        self._turns = layer_turns(restorer.plan, num_tokens, device)
        self._nothing = torch.empty(0, device=device)
        in_order = torch.empty(0, dtype=torch.int32, device=device)
        lengths = torch.full((1,), num_tokens - 1, dtype=torch.int32, device=device)  # before the last one's step
        table = torch.arange(pages, dtype=torch.int32, device=device).view(1, pages)
        self._place = Place(lengths, table, in_order, in_order, in_order)

    def restore(self, layer: LayerPlan, side: Side, parts: Sequence[StoredPart], pages: Tensor) -> RestoredSide:
        """The parts of a side of a layer, by their heads, as they are read. Keys come before values, which may be
        predicted from them. ``pages`` [P, N, 128, D], heads side by side: is written, and part of what is returned."""
        index, full = layer.geometry.index, PAGE_TOKENS * len(pages)
        rest = pages.new_empty(pages.shape[1], self.num_tokens - full, pages.shape[3])
        codecs = self._restorer.codecs(layer, side, self.num_tokens)
        predicted = self._predicted(layer, side)
        for codec, (records, sinks, recent) in zip(codecs, parts, strict=True):
            own = pages[:, codec.heads]
            form = StepForm(
                codec,
                records,
                (own,),
                self._kept.get((index, side)),
                predicted,
                self._place,
                self._turns.get(index),
                self._nothing,
                self._nothing,
            )
            form.reconstruct(VALUES_AT_ONCE)
            begin = self.num_tokens - recent.shape[1]
            _put(own, begin, recent[:, : max(0, full - begin)])
            _put(own, 0, sinks[:, :full])  # those behind it are recent, too
            rest[codec.heads] = recent[:, full - begin :]
        return RestoredSide(pages, rest)

    def _predicted(self, layer: LayerPlan, side: Side) -> Predicted | None:
        predictor, index = layer.predictor(side), layer.geometry.index
        if predictor is None:
            return None
        inputs = [self._kept[predictor.source, side]] + ([self._kept[index, "k"]] if side == "v" else [])
        return Predicted(self._restorer.predictors[index, side], tuple(inputs))

    def empty_pages(self, layer: LayerPlan, side: Side) -> Tensor:
        """[P, N, 128, D] in the cache's dtype, for ``restore``."""
        shape = (num_pages(self.num_tokens), layer.attention.num_kv_heads, PAGE_TOKENS, layer.head_dim(side))
        return torch.empty(shape, dtype=CACHE_DTYPES[self._restorer.plan.cache_dtype], device=self._restorer.device)


def held_format(fmt: Format, num_tokens: int) -> Format:
    """The format of pages as they are stored after ``num_tokens``: that of pages that have shrunk so far."""
    if not fmt.shrink_at:
        return fmt
    bits: Any = fmt.bits_at(num_tokens)
    return RAW if bits == RAW_BITS else replace(fmt, num_bits=bits, shrink_at=())


def _put(pages: Tensor, first: int, tokens: Tensor) -> None:
    """Write tokens [n, T, D] to the places ``first`` and on of pages [P, n, 128, D]."""
    at, stop = first, first + tokens.shape[1]
    while at < stop:
        page, place = divmod(at, PAGE_TOKENS)
        count = min(stop - at, PAGE_TOKENS - place)
        pages[page, :, place : place + count] = tokens[:, at - first : at - first + count]
        at += count
