"""Pages that hold what a prediction from other pages leaves: the order in which layers read each other.

A dynamic cache decodes a layer after those whose pages it reads (``LayerPlan.sources``), at every read:
reconstructions are handed from layer to layer and dropped as soon as the next layer has used them, so that at
any time two layers' are held. Where none was left (a crop, a layer read alone), the source is decoded again.
What the prediction is, the plan's layer says (``LayerPlan.prediction``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor

from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES, Side
from kvcal.plan.plain_layer import PredictPages
from kvcal.store.paged_tensor import PagedTensor, Predict
from kvcal.store.pool import Span, ordinals_of
from kvcal.store.state import PlanState


class Prediction:
    """One layer's part: what its pages are predicted to be, and what others predict from them."""

    def __init__(self, plan: LayerPlan, state: PlanState) -> None:
        self.plan = plan
        self.state = state
        index = plan.geometry.index
        self.read_sides: tuple[Side, ...] = tuple(side for side in SIDES if (index, side) in state.sources)
        self.sides: dict[Side, PagedTensor] = {}
        self.kept: dict[tuple[Side, tuple[Span, ...]], Tensor] = {}
        self._predict_pages: dict[Side, PredictPages] = {}
        state.predictions[index] = self

    def of(self, side: Side) -> Predict | None:
        """The prediction that pages of ``side`` ask for; None where nothing is predicted."""
        return functools.partial(self._predict, side) if self.plan.sources(side) else None

    def attach(self, sides: dict[Side, PagedTensor]) -> None:
        """Takes the places of the layer's pages."""
        self.sides = sides
        for side in self.read_sides:
            sides[side].keep = functools.partial(self._keep, side)

    def before_rope(self, side: Side, spans: Sequence[Span]) -> Tensor:
        """[M, n, 128, D] fp32: these pages as predictions read them, decoded unless they were kept."""
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
        own = self.plan.geometry.index
        for source in {index for side in SIDES for index, _ in self.plan.sources(side)} - {own}:
            self.state.predictions[source].forget()
        if own not in self.state.later_sources:
            self.forget()

    def forget(self) -> None:
        self.kept = {}

    def _keep(self, side: Side, spans: Sequence[Span], stored: Tensor) -> None:
        paged, ordinals = self.sides[side], ordinals_of(spans, stored.device)
        self.kept[side, tuple(spans)] = paged.codec.before_rope(stored, ordinals, paged.num_bits)

    def _predict(self, side: Side, spans: Sequence[Span]) -> Tensor:
        """[M, n, 128, D] fp32: what is said about these pages."""
        inputs = [self.state.predictions[index].before_rope(of, spans) for index, of in self.plan.sources(side)]
        if side not in self._predict_pages:
            others = {layer.geometry.index: layer for layer in self.state.plan.layers}
            tensors = self.state.tensors_on(inputs[0].device)
            self._predict_pages[side] = self.plan.prediction(side, others, self.state.plan.cache_dtype, tensors)
        return self._predict_pages[side](inputs)
