"""What the layers of one PlanCache share: the plan, its tensors on the device, the batch's padding, the predictions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvcal.errors import UsageError
from kvcal.plan.format import SIDES, Side
from kvcal.plan.layer import LayerPlan
from kvcal.plan.plan import Plan
from kvcal.store.paged_tensor import Span
from kvcal.store.rows import Padding


class Source(Protocol):
    """A layer as others see it that are predicted from it (kvcal.store.prediction)."""

    plan: LayerPlan

    def before_rope(self, side: Side, spans: Sequence[Span]) -> Tensor:
        """[M, n, 128, D] fp32: these pages as predictors read them."""

    def forget(self) -> None:
        """Drop what was kept for readers."""


class PlanState:
    """``sources``: (layer, side) of the pages that something is predicted from; ``later_sources``: layers that a
    later one is predicted from; ``predictions``: every layer's, by its index."""

    def __init__(self, plan: Plan, attention_mask: Tensor | None) -> None:
        self.plan = plan
        self.padding = Padding(attention_mask)
        self.tensors: Mapping[str, Tensor] = plan.tensors
        self.sources: set[tuple[int, Side]] = set()
        for layer, side in itertools.product(plan.layers, SIDES):
            predictor = layer.predictor(side)
            if predictor is not None:
                self.sources.add((predictor.source, side))
                self.sources |= {(layer.geometry.index, "k")} if side == "v" else set()
        predictors = [layer.predictor(side) for layer in plan.layers for side in SIDES]
        self.later_sources = {predictor.source for predictor in predictors if predictor is not None}
        self.predictions: dict[int, Source] = {}
        self.is_scheduled = plan.is_progressive

    def tensors_on(self, device: torch.device) -> Mapping[str, Tensor]:
        """The plan's tensors on ``device``, moved there once."""
        if any(tensor.device != device for tensor in self.tensors.values()):
            self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return self.tensors

    def require_scheduled(self, batch: int, columns: int) -> None:
        """UsageError beyond the workload of a plan whose pages shrink: nothing is known to fit there."""
        workload = self.plan.workload
        if self.is_scheduled and (batch > workload.batch or columns > workload.context):
            raise UsageError(
                f"{batch} sequences of {columns} tokens: the plan's pages shrink on a schedule for at most "
                f"{workload.batch} of {workload.context}",
                hint="allocate again with the batch and context you need",
            )
