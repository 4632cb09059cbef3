"""Cross-layer prediction (AQUA-KV, Alg. 2-4, faithful mode): pages of a layer hold residuals.

    K = f_key(K of the source layer) + residual,   V = f_value([V of the source layer; K of this layer]) + residual

all of them as read back from pages, keys before RoPE, KV heads in a row. A dynamic cache decodes a layer
after its source, at every read: reconstructions are handed from layer to layer and dropped as soon as the
next layer has used them, so that at any time two layers' are held. Where none was left (a crop, a layer read
alone), the source is decoded again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES, Side
from kvcal.store.pool import Span, ordinals_of
from kvcal.store.sinks_ring_pages import PagedTensor, Predict
from kvcal.store.state import PlanState
from kvcal.systems.aqua_kv.predictor import LinearPredictor
from kvcal.systems.aqua_kv.transform import predictor_of, predictor_shape


def fitted_predictor(layer: LayerPlan, side: Side, state: PlanState, device: torch.device) -> LinearPredictor:
    """The predictor of a layer that has one, from the plan's tensors on ``device``, which the plan has
    checked."""
    predictor = predictor_of(layer, side)
    assert predictor is not None
    (source,) = [other for other in state.plan.layers if other.geometry.index == predictor.source]
    shape = predictor_shape(layer, source, side, state.plan.cache_dtype)
    prefix = f"layers.{layer.geometry.index}.{side}_predictor"
    return LinearPredictor.from_tensors(shape, state.tensors_on(device), prefix)


def predicted(predictor: LinearPredictor, inputs: Sequence[Tensor], num_heads: int) -> Tensor:
    """[M, N, 128, D] fp32: what it says about M pages, from pages [M, .., 128, ..] fp32 as predictors read
    them: the source's; for values, this layer's keys after them."""
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
        return None if predictor_of(self.plan, side) is None else functools.partial(self._predict, side)

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
        """New pages: decode them at once where they are predicted from, before the next layer writes its
        own."""
        if spans and side in self.read_sides:
            self.before_rope(side, spans)

    def release(self) -> None:
        """After an update: nobody needs the source's reconstructions any more, nor its own without
        readers."""
        sources = {predictor.source for side in SIDES if (predictor := predictor_of(self.plan, side)) is not None}
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
        predictor = predictor_of(self.plan, side)
        assert predictor is not None
        inputs = [self.state.predictions[predictor.source].before_rope(side, spans)]
        if side == "v":
            inputs.append(self.before_rope("k", spans))
        if side not in self._predictors:
            self._predictors[side] = fitted_predictor(self.plan, side, self.state, inputs[0].device)
        return predicted(self._predictors[side], inputs, self.plan.attention.num_kv_heads)
