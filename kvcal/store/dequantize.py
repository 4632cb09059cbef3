"""Pages that the kernels cannot read as they are stored: lattices, residuals of a prediction, keys before RoPE.

None of them folds into a query. So they stay what they are in memory, the same bytes as in the dynamic cache, and in
every step the pages of one layer are reconstructed into pages of 16 bits, in a workspace that all layers share
(kvcal.store.workspace), over which the ordinary kernels run. Reconstruction is a kernel of its own
(kvcal.kernels.reconstruct), in fp32, rounded once to the cache's dtype. What is predicted from is reconstructed for its
readers as well, before RoPE and in fp32.

A step knows no lengths on the host. The kernel reads them, and reconstructs the pages that sequences hold. Predictions
(kvcal.pages.predictor) are made of all pages that there is room for, ``VALUES_AT_ONCE`` at a time: their cost is that
of full sequences, whatever they hold, which the cache says by ``SlowPath``. A page that ``append`` has just packed, at
16 bits, is encoded by a kernel (kvcal.kernels.encode), which returns at once where none was; pages whose channels have
different bits in torch, one of every sequence. What would be cheaper than to predict in every step: to reconstruct once
(AQUA-KV's codec mode), at 16 bits. Prompts take the way of the dynamic cache (kvcal.store.pages_and_ring).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels.encode import completed_pages, encode_page
from kvcal.kernels.operands import Place
from kvcal.kernels.page_codec import VALUES_AT_ONCE, PageCoding, Reconstruction
from kvcal.kernels.reconstruct import HeadPages, reconstruct
from kvcal.kernels.reference import NON_FINITE
from kvcal.kernels.variants import head_ranges, stored_form
from kvcal.pages.codec import PageCodec
from kvcal.pages.predictor import LinearPredictor
from kvcal.pages.record_layout import PAGE_TOKENS, RAW_BITS, noted_in
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES, Side
from kvcal.store.pages_and_ring import PagedTensor
from kvcal.store.prediction import predictor_of
from kvcal.store.state import StepState


@dataclass(frozen=True)
class Predicted:
    """The predictor of a side's pages, and its ``inputs`` [B, P, 128, .., ..] fp32, of the source first."""

    predictor: LinearPredictor
    inputs: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class StepForm:
    """One side of N neighbouring heads in one format.

    ``records`` uint8 [slots, r, record_bytes]. ``tokens`` [slots, n, 128, D] in the cache's dtype: what the kernels of
    each head range read; none where they read the records. ``kept`` [B, P, 128, N, D] fp32: for predictors. ``turns``
    as in kvcal.kernels; ``place`` and ``error`` are the cache's; ``nothing`` is empty.
    """

    codec: PageCodec
    records: Tensor
    tokens: tuple[Tensor, ...]
    kept: Tensor | None
    predicted: Predicted | None
    place: Place
    turns: Tensor | None
    error: Tensor
    nothing: Tensor

    def step(self) -> None:
        """Behind ``append``: encode the page that it packed of every sequence, where it did, then reconstruct the pages
        that sequences hold. The other sides that this one is predicted from come before."""
        if not self.place.table.numel():
            return
        if self.tokens:
            self._encode()
        self.reconstruct()

    def _encode(self) -> None:
        """Predicts one page of every sequence, complete or not."""
        is_tiered, prediction = self.codec.format.boost is not None, self.nothing
        pages, slots, is_complete = completed_pages(self.place)
        if self.predicted is not None:
            rows = torch.arange(len(pages), device=pages.device)
            prediction = self._prediction([kept[rows, pages] for kept in self.predicted.inputs])
        if not is_tiered:
            encode_page(
                self.tokens,
                self.records,
                self.place,
                self._coding,
                prediction,
                self.error,
                self._form,
            )
            return
        # What is not complete may be anything, NaN included.
        wanted = is_complete[:, None, None, None]
        x = torch.where(wanted, torch.cat([part[slots] for part in self.tokens], dim=1), 0)
        told = torch.where(wanted, prediction.transpose(1, 2), 0) if prediction.numel() else None
        with noted_in(self.error, NON_FINITE):
            encoded = self.codec.encode(x, pages, self.codec.format.num_bits, prediction=told)
        self.records[slots] = torch.where(is_complete[:, None, None], encoded, self.records[slots])

    def reconstruct(self, values_at_once: int = VALUES_AT_ONCE) -> None:
        """The pages that sequences hold; of a predicted side some at a time, which bounds what is predicted."""
        kept = self.nothing if self.kept is None else self.kept
        stop = self.place.table.numel()
        at_once = max(1, stop)
        if self.predicted is not None:
            at_once = max(1, values_at_once // (PAGE_TOKENS * self.codec.num_heads * self.codec.head_dim))
        for start in range(0, stop, at_once):
            end, prediction = min(start + at_once, stop), self.nothing
            if self.predicted is not None:
                inputs = [source.flatten(0, 1)[start:end] for source in self.predicted.inputs]
                prediction = self._prediction(inputs)
            for heads in self._head_ranges:
                reconstruct(heads, self.place, self._coding, prediction, kept, range(start, end), self._form)

    def _prediction(self, inputs: Sequence[Tensor]) -> Tensor:
        """[M, 128, N, D] fp32 from ``Predicted.inputs`` of M pages."""
        assert self.predicted is not None
        x = torch.cat([part.flatten(-2) for part in inputs], dim=-1)
        return self.predicted.predictor.apply(x).unflatten(-1, (self.codec.num_heads, -1))

    @functools.cached_property
    def _form(self) -> Reconstruction:
        codec, is_coded = self.codec, self.codec.format.num_bits != RAW_BITS
        rotary = codec.rotary if codec.is_pre or self.kept is not None else None
        return Reconstruction(
            codec.side,
            codec.format,
            codec.num_heads,
            codec.head_dim,
            codec.cache_dtype,
            is_pre=codec.is_pre,
            rescale=codec.rescale is not None and is_coded,
            offset=codec.offset is not None and is_coded,
            num_pairs=0 if rotary is None else len(rotary),
        )

    @functools.cached_property
    def _head_ranges(self) -> list[HeadPages]:
        if not self.tokens:
            return [HeadPages(self.records, self.nothing, 0)]
        ranges, first = [], 0
        for tokens in self.tokens:
            num_heads = tokens.shape[1]
            is_lattice = self.codec.format.lattice_dim is not None
            records = self.records if is_lattice else self.records[:, first : first + num_heads]
            ranges.append(HeadPages(records, tokens, first))
            first += num_heads
        return ranges

    @functools.cached_property
    def _coding(self) -> PageCoding:
        codec = self.codec
        rescale, offset = (None if x is None else x.squeeze(-2) for x in (codec.rescale, codec.offset))
        given = (codec.grid, codec.signs, rescale, offset, codec.rotary, self.turns)
        return PageCoding(*(self.nothing if x is None else x for x in given))


def step_forms(plan: LayerPlan, state: StepState, sides: dict[Side, list[PagedTensor]]) -> list[StepForm]:
    """The parts of a layer of a static cache that are dequantized in every step; keys first, as values may be
    predicted from them. ``sides``: the layer's parts."""
    index, found = plan.geometry.index, []
    for side in SIDES:
        kept = state.forms.kept(index, side)
        for part in sides[side]:
            is_form = stored_form(plan, side, part.format) is not None
            if not is_form and kept is None:
                continue
            tokens = []
            for pair in head_ranges(plan) if is_form else ():
                if part.heads.start <= pair.heads.start < part.heads.stop:
                    tokens.append(dequantized_tokens(state, plan, pair.heads, side))
            found.append(
                StepForm(
                    part.codec,
                    part.pool.records,
                    tuple(tokens),
                    kept,
                    _predicted(plan, side, state),
                    state.place(part.format, part.format),
                    state.forms.turns(index),
                    state.error,
                    state.nothing,
                )
            )
    return found


def dequantized_tokens(state: StepState, plan: LayerPlan, heads: slice, side: Side) -> Tensor:
    """[slots, n, 128, D] in the cache's dtype: 16-bit pages of a head range in a stored form, in the workspace."""
    (pair,) = [pair for pair in head_ranges(plan) if pair.heads == heads]
    pages = state.forms.pages(plan, pair, side)
    return pages.view(CACHE_DTYPES[state.plan.cache_dtype]).unflatten(-1, (PAGE_TOKENS, -1))


def form_reasons(plan: LayerPlan, read_sides: Sequence[Side]) -> list[str]:
    """Why steps of a layer are slower than the kernels': what is reconstructed in each; nothing for packed layers.
    ``read_sides``: those that something is predicted from."""
    found = []
    for side in SIDES:
        forms = [stored_form(plan, side, fmt) for fmt in plan.formats(side)]
        found += [f"{side} pages {form}" for form in dict.fromkeys(forms) if form is not None]
        if side in read_sides and None in forms:
            found.append(f"{side} pages are predicted from")
    return found


def _predicted(plan: LayerPlan, side: Side, state: StepState) -> Predicted | None:
    predictor, index = plan.predictor(side), plan.geometry.index
    if predictor is None:
        return None
    read = [(predictor.source, side)] + ([(index, "k")] if side == "v" else [])
    inputs = [state.forms.kept(*place) for place in read]
    fitted = predictor_of(plan, side, state.shared, state.lengths.device)
    return Predicted(fitted, tuple(kept for kept in inputs if kept is not None))
