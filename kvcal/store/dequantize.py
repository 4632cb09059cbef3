"""Pages that the kernels cannot read as they are stored: lattices, residuals of a prediction, keys before RoPE.

None of them folds into a query. So they stay what they are in memory, the same bytes as in the dynamic cache, and in
every step the pages of one layer are decoded by the page codec (kvcal.pages.codec) into pages of 16 bits, in a
workspace that all layers share (kvcal.store.workspace), over which the ordinary kernels run. What is predicted from is
kept for its readers as well, before RoPE and in fp32.

A step knows no lengths on the host. So all pages that there is room for are decoded, ``VALUES_AT_ONCE`` at a time. One
page of every sequence is encoded, and kept where ``append`` has just completed it at 16 bits. The cost is that of full
sequences, whatever they hold, which the cache says by ``SlowPath``. Prompts take the way of the dynamic cache
(kvcal.store.sinks_ring_pages).

Cross-layer prediction (AQUA-KV, Alg. 2-4, faithful mode): pages of a layer hold residuals.

    K = f_key(K of the source layer) + residual,   V = f_value([V of the source layer; K of this layer]) + residual

all of them as read back from pages, keys before RoPE, KV heads in a row. A layer is decoded after its source, every
step: reconstructions are handed from layer to layer and dropped as soon as the next layer has used them, so that at any
time two layers' are held. Where none was left (a crop, a layer read alone), the source is decoded again.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels.operands import Place
from kvcal.kernels.reference import NON_FINITE
from kvcal.kernels.variants import stored_form
from kvcal.pages.codec import VALUES_AT_ONCE, PageCodec
from kvcal.pages.layout_protocol import PAGE_TOKENS, noted_in
from kvcal.pages.predictor import LinearPredictor
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES, Side
from kvcal.plan.tensors import predictor_shape
from kvcal.store.pool import Span, ordinals_of
from kvcal.store.sinks_ring_pages import PagedTensor, Predict
from kvcal.store.state import PlanState, StepState


def predictor_of(layer: LayerPlan, side: Side, state: PlanState, device: torch.device) -> LinearPredictor:
    """The predictor of a layer that has one, from the plan's tensors on ``device``, which the plan has checked."""
    predictor = layer.predictor(side)
    assert predictor is not None
    (source,) = [other for other in state.plan.layers if other.geometry.index == predictor.source]
    shape = predictor_shape(layer, source, side, state.plan.cache_dtype)
    prefix = f"layers.{layer.geometry.index}.{side}_predictor"
    return LinearPredictor.from_tensors(shape, state.tensors_on(device), prefix)


def predicted(predictor: LinearPredictor, inputs: Sequence[Tensor], num_heads: int) -> Tensor:
    """[M, N, 128, D] fp32: what it says about M pages, from pages [M, .., 128, ..] fp32 as predictors read them: the
    source's; for values, this layer's keys after them."""
    x = torch.cat([part.transpose(1, 2).flatten(-2) for part in inputs], dim=-1)
    return predictor.apply(x).unflatten(-1, (num_heads, -1)).transpose(1, 2)


class Prediction:
    """One layer's part: what its pages are predicted to be, and what others predict from them."""

    def __init__(self, plan: LayerPlan, state: PlanState) -> None:
        self.plan = plan
        self.state = state
        index = plan.geometry.index
        self.read_sides: tuple[Side, ...] = tuple(side for side in SIDES if (index, side) in state.sources)
        self.sides: dict[Side, PagedTensor] = {}
        self.kept: dict[tuple[Side, tuple[Span, ...]], Tensor] = {}
        self._predictors: dict[Side, LinearPredictor] = {}
        state.predictions[plan.geometry.index] = self

    def of(self, side: Side) -> Predict | None:
        """The predictor that the pages of ``side`` ask; None where nothing is predicted."""
        return None if self.plan.predictor(side) is None else functools.partial(self._predict, side)

    def attach(self, sides: dict[Side, PagedTensor]) -> None:
        """Takes the places of the layer's pages."""
        self.sides = sides
        for side in self.read_sides:
            sides[side].keep = functools.partial(self._keep, side)

    def before_rope(self, side: Side, spans: Sequence[Span]) -> Tensor:
        """[M, n, 128, D] fp32: these pages as predictors read them, decoded unless they were kept."""
        key = (side, tuple(spans))
        if key not in self.kept:
            self._keep(side, spans, self.sides[side].stored(spans))
        return self.kept[key]

    def written(self, side: Side, spans: Sequence[Span]) -> None:
        """New pages: decode them at once where they are predicted from, before the next layer writes its own."""
        if spans and side in self.read_sides:
            self.before_rope(side, spans)

    def release(self) -> None:
        """After an update: nobody needs the source's reconstructions any more, nor its own without readers."""
        sources = {predictor.source for side in SIDES if (predictor := self.plan.predictor(side)) is not None}
        for source in sources:
            self.state.predictions[source].forget()
        if self.plan.geometry.index not in self.state.later_sources:
            self.forget()

    def forget(self) -> None:
        self.kept = {}

    def _keep(self, side: Side, spans: Sequence[Span], stored: Tensor) -> None:
        paged, ordinals = self.sides[side], ordinals_of(spans, stored.device)
        self.kept[side, tuple(spans)] = paged.codec.before_rope(stored, ordinals, paged.num_bits)

    def _predict(self, side: Side, spans: Sequence[Span]) -> Tensor:
        """[M, n, 128, D] fp32: what the predictor says about these pages."""
        predictor = self.plan.predictor(side)
        assert predictor is not None
        inputs = [self.state.predictions[predictor.source].before_rope(side, spans)]
        if side == "v":
            inputs.append(self.before_rope("k", spans))
        if side not in self._predictors:
            self._predictors[side] = predictor_of(self.plan, side, self.state, inputs[0].device)
        return predicted(self._predictors[side], inputs, self.plan.attention.num_kv_heads)


@dataclass(frozen=True, eq=False)
class StepForm:
    """One side of a layer, of N heads.

    ``records`` uint8 [slots, r, record_bytes]. ``tokens`` [slots, N, 128, D] in the cache's dtype: what the kernels
    read; None where they read the records. ``kept`` [B, P, 128, N, D] fp32: for predictors. ``predictor``, of
    the side's own pages, has ``inputs`` [B, P, 128, .., ..] fp32, of the source first. ``place`` and ``error`` are the
    cache's.
    """

    codec: PageCodec
    records: Tensor
    tokens: Tensor | None
    kept: Tensor | None
    predictor: LinearPredictor | None
    inputs: tuple[Tensor, ...]
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
        if self.predictor is not None:
            rows = torch.arange(len(pages), device=pages.device)
            prediction = torch.where(wanted, self._prediction([kept[rows, pages] for kept in self.inputs]), 0)
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
            if self.predictor is not None:
                prediction = self._prediction([source.flatten(0, 1)[part] for source in self.inputs])
            stored = codec.decode(self.records[slots], codec.format.num_bits, prediction)
            if self.kept is not None:
                self.kept.flatten(0, 1)[part] = codec.before_rope(stored, ordinals).transpose(1, 2)
            if self.tokens is not None:
                self.tokens[slots] = codec.restore(stored, ordinals).to(self.tokens.dtype)

    def _prediction(self, inputs: Sequence[Tensor]) -> Tensor:
        """[M, N, 128, D] fp32 from ``inputs`` of M pages, [M, 128, .., ..]."""
        assert self.predictor is not None
        return predicted(self.predictor, [x.transpose(1, 2) for x in inputs], self.codec.num_heads)


def step_forms(plan: LayerPlan, state: StepState, sides: Mapping[Side, PagedTensor]) -> list[StepForm]:
    """The sides of a layer of a static cache that are decoded in every step; keys first, as values may be predicted
    from them."""
    index, found = plan.geometry.index, []
    for side, part in sides.items():
        kept, is_form = state.forms.kept(index, side), stored_form(plan, side) is not None
        if not is_form and kept is None:
            continue
        fitted, read, predictor = None, list[Tensor | None](), plan.predictor(side)
        if predictor is not None:
            fitted = predictor_of(plan, side, state.shared, state.lengths.device)
            read = [state.forms.kept(predictor.source, side)]
            read += [state.forms.kept(index, "k")] if side == "v" else []
        tokens = dequantized_tokens(state, plan, side) if is_form else None
        place = state.place(part.format, part.format)
        inputs = tuple(source for source in read if source is not None)
        found.append(StepForm(part.codec, part.pool.records, tokens, kept, fitted, inputs, place, state.error))
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
