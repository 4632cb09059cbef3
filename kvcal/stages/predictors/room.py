"""Predictors within the budget of their allocation: which of them fit, beside what the formats take.

A predictor that pays may still not fit: the solver spends what it is given on formats, but for the bytes that it was
told to reserve. Predictors are taken in the order of layers, as they are fitted, while there is room for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvcal.errors import InfeasibleBudget
from kvcal.plan.layer import LayerPlan
from kvcal.plan.tensors import needed_nbytes
from kvcal.quantities import format_bytes
from kvcal.specs import PredictorSpec
from kvcal.stages.allocate.budget import bytes_left, reserve_hint, transform_bytes
from kvcal.stages.allocate.record import Allocation
from kvcal.stages.predictors.choice import find_targets, unpaid
from kvcal.stages.predictors.record import Finding, PredictorRecord, with_predictors


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
        targets = find_targets(self.layers, self.spec, self.allocation.cache_dtype)
        every = [
            Finding(target.index, target.side, target.source.geometry.index, None, None)
            for target in targets
            if target.shape is not None and target.source is not None
        ]
        lefts = [self.left([one]) for one in every] if self.spec.drop else [self.left(every)]
        if not every or max(lefts) >= 0:
            return
        budget, which = (
            self.allocation.split.budget,
            "no predictor fits" if self.spec.drop else "not all predictors fit",
        )
        raise InfeasibleBudget(
            f"{which} the budget of {format_bytes(budget)} = {budget} bytes: {-max(lefts)} bytes are missing",
            budget - max(lefts),
            hint=reserve_hint(self._taken(every)),
        )

    def message(self, record: PredictorRecord) -> str | None:
        """Says that predictors which pay were left out for the budget; None where none was."""
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
        """The same layers are asked for after every pass."""
        return functools.cache(self._count)

    def _count(self, layers: tuple[LayerPlan, ...]) -> int:
        found = bytes_left(self.allocation, layers, needed_nbytes(layers, self.allocation.cache_dtype))
        assert found is not None, "without a budget there is room for all"
        return found
