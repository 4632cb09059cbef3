"""Pages that the kernels cannot read as they are stored: lattices, residuals of a prediction, keys before RoPE.

None of them folds into a query. So they stay what they are in memory, the same bytes as in the dynamic cache, and in
every step the pages of one layer are decoded by the page codec (kvcal.pages.codec) into pages of 16 bits, in a
workspace that all layers share (kvcal.store.workspace), over which the ordinary kernels run. What is predicted from is
kept for its readers as well, before RoPE and in fp32.

A step knows no lengths on the host. So all pages that there is room for are decoded, ``VALUES_AT_ONCE`` at a time. One
page of every sequence is encoded, and kept where ``append`` has just completed it at 16 bits. The cost is that of full
sequences, whatever they hold, which the cache says by ``SlowPath``. Prompts take the way of the dynamic cache
(kvcal.store.pages_and_ring).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels.operands import Place
from kvcal.kernels.reference import NON_FINITE
from kvcal.kernels.variants import stored_form
from kvcal.pages.codec import VALUES_AT_ONCE, PageCodec
from kvcal.pages.predictor import LinearPredictor
from kvcal.pages.record_layout import PAGE_TOKENS, noted_in
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES, Side
from kvcal.store.pages_and_ring import PagedTensor
from kvcal.store.prediction import predicted, predictor_of
from kvcal.store.state import StepState


@dataclass(frozen=True)
class Predicted:
    """The predictor of a side's pages, and its ``inputs`` [B, P, 128, .., ..] fp32, of the source first."""

    predictor: LinearPredictor
    inputs: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class StepForm:
    """One side of a layer, of N heads.

    ``records`` uint8 [slots, r, record_bytes]. ``tokens`` [slots, N, 128, D] in the cache's dtype: what the kernels
    read; None where they read the records. ``kept`` [B, P, 128, N, D] fp32: for predictors. ``place`` and ``error`` are
    the cache's.
    """

    codec: PageCodec
    records: Tensor
    tokens: Tensor | None
    kept: Tensor | None
    predicted: Predicted | None
    place: Place
    error: Tensor

    def step(self) -> None:
        """After ``append``: encode the page that it completed of every sequence, where it did, then decode all pages.
        The other sides that this one is predicted from come before."""
        if not self.place.table.numel():
            return
        if self.tokens is not None:
            self._encode(self.tokens)
        self._decode()

    def _encode(self, tokens: Tensor) -> None:
        """Encode one page of every sequence, complete or not, of which anything may be the content, NaN included."""
        place, num_bits = self.place, self.codec.format.num_bits
        pages = place.lengths // PAGE_TOKENS
        is_complete = ((place.lengths + 1) % PAGE_TOKENS == 0) & (pages < place.table.shape[1])
        pages = pages.clamp(max=place.table.shape[1] - 1).long()
        slots = place.table.gather(1, pages.unsqueeze(1)).squeeze(1).long()
        wanted, prediction = is_complete[:, None, None, None], None
        if self.predicted is not None:
            rows = torch.arange(len(pages), device=pages.device)
            prediction = torch.where(wanted, self._prediction([kept[rows, pages] for kept in self.predicted.inputs]), 0)
        x = torch.where(wanted, tokens[slots], 0)
        with noted_in(self.error, NON_FINITE):
            encoded = self.codec.encode(x, pages, num_bits, prediction=prediction)
        self.records[slots] = torch.where(is_complete[:, None, None], encoded, self.records[slots])

    def _decode(self) -> None:
        """All pages, some at a time, which bounds the scratch. What lies beyond a sequence's own is never read."""
        codec, table = self.codec, self.place.table
        at_once = max(1, VALUES_AT_ONCE // (PAGE_TOKENS * codec.num_heads * codec.head_dim))
        for part in torch.arange(table.numel(), device=table.device).split(at_once):
            slots, ordinals, prediction = table.flatten()[part].long(), part % table.shape[1], None
            if self.predicted is not None:
                prediction = self._prediction([source.flatten(0, 1)[part] for source in self.predicted.inputs])
            stored = codec.decode(self.records[slots], codec.format.num_bits, prediction)
            if self.kept is not None:
                self.kept.flatten(0, 1)[part] = codec.before_rope(stored, ordinals).transpose(1, 2)
            if self.tokens is not None:
                self.tokens[slots] = codec.restore(stored, ordinals).to(self.tokens.dtype)

    def _prediction(self, inputs: Sequence[Tensor]) -> Tensor:
        """[M, N, 128, D] fp32 from ``Predicted.inputs`` of M pages, [M, 128, .., ..]."""
        assert self.predicted is not None
        return predicted(self.predicted.predictor, [x.transpose(1, 2) for x in inputs], self.codec.num_heads)


def step_forms(plan: LayerPlan, state: StepState, sides: Mapping[Side, PagedTensor]) -> list[StepForm]:
    """The sides of a layer of a static cache that are decoded in every step; keys first, as values may be predicted
    from them."""
    index, found = plan.geometry.index, []
    for side, part in sides.items():
        kept, is_form = state.forms.kept(index, side), stored_form(plan, side) is not None
        if is_form or kept is not None:
            tokens = dequantized_tokens(state, plan, side) if is_form else None
            place, fitted = state.place(part.format, part.format), _predicted(plan, side, state)
            found.append(StepForm(part.codec, part.pool.records, tokens, kept, fitted, place, state.error))
    return found


def dequantized_tokens(state: StepState, plan: LayerPlan, side: Side) -> Tensor:
    """[slots, N, 128, D] in the cache's dtype: 16-bit pages of a side in a stored form, in the workspace."""
    pages = state.forms.pages(plan, side)
    return pages.view(CACHE_DTYPES[state.plan.cache_dtype]).unflatten(-1, (PAGE_TOKENS, -1))


def form_reasons(plan: LayerPlan, read_sides: Sequence[Side]) -> list[str]:
    """Why steps of a layer are slower than the kernels': what is decoded in each; nothing for packed layers.
    ``read_sides``: those that something is predicted from."""
    found = []
    for side in SIDES if plan.is_paged else ():
        form = stored_form(plan, side)
        if form is not None or side in read_sides:
            found.append(f"{side} pages {form or 'are predicted from'}")
    return found


def _predicted(plan: LayerPlan, side: Side, state: StepState) -> Predicted | None:
    predictor, index = plan.predictor(side), plan.geometry.index
    if predictor is None:
        return None
    read = [(predictor.source, side)] + ([(index, "k")] if side == "v" else [])
    inputs = [state.forms.kept(*place) for place in read]
    fitted = predictor_of(plan, side, state.shared, state.lengths.device)
    return Predicted(fitted, tuple(kept for kept in inputs if kept is not None))
