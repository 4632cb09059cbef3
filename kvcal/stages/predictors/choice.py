"""Predictors that pay, and that fit the budget of their allocation.

A predictor is worth 1/2 log2(1 / (1 - explained variance)) bits a value: the error of a scaled quantizer is a share of
the variance that is left, and every bit divides it by 4. Where that, times the quantized values of the workload, is
less than the predictor's own bytes, or the explained variance is at most ``min_explained``, it is left out.

A predictor that pays may still not fit: the solver spends what it is given on formats, but for the bytes that it was
told to reserve. Predictors are taken in the order of layers, as they are fitted, while there is room for them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvcal.errors import InfeasibleBudget
from kvcal.pages.predictor import LinearPredictor
from kvcal.pages.record_layout import PAGE_TOKENS
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import num_pages
from kvcal.plan.plan import Workload
from kvcal.plan.tensors import needed_nbytes
from kvcal.quantities import format_bytes
from kvcal.recipe import PredictorSpec
from kvcal.stages.allocate.budget import bytes_left, reserve_hint, transform_bytes
from kvcal.stages.allocate.record import Allocation
from kvcal.stages.predictors.record import Finding, Fit, PredictorRecord, Target, every_finding, with_predictors
from kvcal.stages.predictors.regression import LinearFit, NormalEquations, to_int4

# What a perfect predictor is said to save: no more bits are there to be saved.
MAX_SAVED_BITS = 16.0


class Measured(NamedTuple):
    """The variance of held-out tokens, and the shares that are explained (see ``Fit``)."""

    variance: float
    explained: float
    explained_whole: float
    explained_nearest: float | None = None


def measure(fit: LinearFit, predictor: LinearPredictor, held_out: NormalEquations, spec: PredictorSpec) -> Measured:
    """The shares of held-out tokens' variance that ``predictor`` and the fit explain."""
    found = Measured(
        held_out.result().y_variance_O.sum().item(),
        held_out.explained_variance(*predictor.dense()),
        held_out.explained_variance(fit.weight_OF, fit.bias_O),
    )
    if spec.group_size is None:
        return found
    nearest = to_int4(fit, spec.group_size, predictor.shape.cache_dtype, compensate=False)
    return found._replace(explained_nearest=held_out.explained_variance(*nearest.dense()))


def decide(target: Target, measured: Measured | None, spec: PredictorSpec, workload: Workload) -> Finding:
    """Whether the predictor pays at ``workload``; without a measurement, that it was not tried."""
    source, shape = None if target.source is None else target.source.geometry.index, target.shape
    if measured is None or shape is None:
        return Finding(target.index, target.side, source, target.reason or "was not fitted", None)
    num_tokens = sum(PAGE_TOKENS * num_pages(length) for length in workload.lengths)
    saved_bits = saved_bits_per_value(measured.explained)
    saved_bytes = int(saved_bits * shape.num_outputs * num_tokens / 8)
    fit = Fit(shape.num_inputs, shape.num_outputs, *measured[1:], shape.nbytes, saved_bits, saved_bytes)
    return Finding(target.index, target.side, source, unpaid(fit, spec, workload), fit)


def unpaid(fit: Fit, spec: PredictorSpec, workload: Workload) -> str | None:
    """Why a fitted predictor does not pay; None where it does, or none is to be left out."""
    if spec.drop and fit.explained <= spec.min_explained:
        return f"explains {fit.explained:.4f} of the variance, at most min_explained = {spec.min_explained:g}"
    if spec.drop and fit.saved_bytes < fit.nbytes:
        return (
            f"saves {format_bytes(fit.saved_bytes)} at {workload.batch} x {workload.context} tokens and takes "
            f"{format_bytes(fit.nbytes)}"
        )
    return None


def saved_bits_per_value(explained: float) -> float:
    """See the module's docstring; 0 for a predictor that explains nothing."""
    left = 1.0 - max(explained, 0.0)
    return MAX_SAVED_BITS if left <= 4.0**-MAX_SAVED_BITS else 0.5 * math.log2(1.0 / left)


@dataclass(frozen=True, eq=False)
class Room:
    """Bytes that ``allocation``, which has a budget, leaves for the predictors ``spec`` of its ``layers``, which have
    their other transforms by now."""

    allocation: Allocation
    layers: tuple[LayerPlan, ...]
    spec: PredictorSpec

    def left(self, findings: Sequence[Finding] = ()) -> int:
        """Bytes of the budget that the predictors of the kept ``findings`` leave; below zero beyond it."""
        return self._left(with_predictors(self.layers, findings, self.spec))

    def afford(self, finding: Finding, others: Sequence[Finding]) -> Finding:
        """``finding``, left out where its predictor does not fit beside the others."""
        if not (finding.is_kept and self.spec.drop):
            return finding
        missing = -self.left((*others, finding))
        return finding if missing <= 0 else replace(finding, reason=f"would take {missing} bytes beyond the budget")

    def require_some(self) -> None:
        """InfeasibleBudget where not one predictor fits, or, where none is to be left out, not all of them."""
        every = every_finding(self.layers, self.spec, self.allocation.cache_dtype)
        lefts = [self.left([one]) for one in every] if self.spec.drop else [self.left(every)]
        if not every or max(lefts) >= 0:
            return
        budget = self.allocation.split.budget
        which = "no predictor fits" if self.spec.drop else "not all predictors fit"
        raise InfeasibleBudget(
            f"{which} the budget of {format_bytes(budget)} = {budget} bytes: {-max(lefts)} bytes are missing",
            budget - max(lefts),
            hint=reserve_hint(self._taken(every)),
        )

    def message(self, record: PredictorRecord) -> str | None:
        """The warning that predictors which pay were left out for the budget; None where none was."""
        paying = [
            replace(finding, reason=None)
            for finding in record.findings
            if finding.fit is not None and unpaid(finding.fit, self.spec, self.allocation.workload) is None
        ]
        if len(paying) == len(record.kept):
            return None
        return (
            f"predictors: {len(paying) - len(record.kept)} of {len(paying)} that pay do not fit the budget; to have "
            f"all of them, {reserve_hint(self._taken(paying))}"
        )

    def _taken(self, findings: Sequence[Finding]) -> int:
        layers = with_predictors(self.layers, findings, self.spec)
        return transform_bytes(self.allocation, layers, needed_nbytes(layers, self.allocation.cache_dtype))

    @functools.cached_property
    def _left(self) -> Callable[[tuple[LayerPlan, ...]], int]:
        """Bytes that layers leave; the same layers are asked for after every pass."""
        return functools.cache(self._count)

    def _count(self, layers: tuple[LayerPlan, ...]) -> int:
        found = bytes_left(self.allocation, layers, needed_nbytes(layers, self.allocation.cache_dtype))
        assert found is not None, "without a budget there is room for all"
        return found
