"""The artifact of a search, which the plan is compiled from: the chosen layers, their tensors, and a report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic.dataclasses import dataclass as record
from torch import Tensor

from kvcal import artifact
from kvcal.plan.layer import LayerPlan
from kvcal.plan.plan import Plan
from kvcal.records import record_of, refusing
from kvcal.stages.allocate.importance import rank_correlation
from kvcal.stages.allocate.record import Allocation
from kvcal.strict import STRICT, Count, Number, NumBytes, dump

KIND = "search"
SCHEMA = 2


@record(frozen=True, config=STRICT)
class UnitResult:
    """One unit's options: names, bytes, and the change of KL (nats per loss token) when it alone takes the option in
    the background plan; ``chosen`` is the number of the one that the final plan takes."""

    unit: str
    options: tuple[str, ...]
    nbytes: tuple[NumBytes, ...]
    costs: tuple[Number, ...]
    chosen: Count

    def __post_init__(self) -> None:
        if not len(self.options) == len(self.nbytes) == len(self.costs) > self.chosen:
            raise ValueError(
                f"unit {self.unit!r} has {len(self.options)} options, {len(self.nbytes)} sizes, {len(self.costs)} "
                f"costs and chosen = {self.chosen}"
            )


Shipped = Literal["searched", "refitted"]


def less_of(searched_kl: float, refitted_kl: float | None) -> tuple[Shipped, float]:
    """The plan of less KL and its KL; the searched one where both are equal."""
    if refitted_kl is not None and refitted_kl < searched_kl:
        return "refitted", refitted_kl
    return "searched", searched_kl


@record(frozen=True, config=STRICT)
class SearchReport:
    """``kl``: of the plan that ships, on the search's texts. ``searched_kl``: of the best plan of the search;
    ``refitted_kl``: of that plan with predictors fitted on its own layers, None where nothing is predicted. The one of
    less KL ships, the searched one where both are equal. ``history``: of the background, the solver's plan, and the
    best after every round of refinement. ``proxy``: (predicted, measured) KL of random plans."""

    units: tuple[UnitResult, ...]
    kl: Number
    shipped: Shipped
    searched_kl: Number
    refitted_kl: Number | None
    history: tuple[Number, ...]
    proxy: tuple[tuple[Number, Number], ...]
    num_plans: Count

    def __post_init__(self) -> None:
        expected = less_of(self.searched_kl, self.refitted_kl)
        if (self.shipped, self.kl) != expected:
            raise ValueError(
                f"shipped = {self.shipped!r} with kl = {self.kl}, expected {expected[0]!r} with {expected[1]}: the "
                f"less of searched_kl = {self.searched_kl} and refitted_kl = {self.refitted_kl}"
            )

    @property
    def proxy_correlation(self) -> float | None:
        """Spearman's rank correlation of predicted and measured KL; None for fewer than three plans, or equal ones."""
        predicted, measured = [p for p, _ in self.proxy], [m for _, m in self.proxy]
        if len(self.proxy) < 3 or len(set(predicted)) == 1 or len(set(measured)) == 1:
            return None
        return rank_correlation(predicted, measured)


@dataclass(frozen=True, eq=False)
class SearchRecord:
    """The chosen layers with their transforms, and the tensors that these need."""

    allocation: Allocation
    report: SearchReport
    plan_tensors: dict[str, Tensor]

    @property
    def layers(self) -> tuple[LayerPlan, ...]:
        return self.allocation.layers


@record(frozen=True, config=STRICT)
class _SearchBody:
    allocation: Allocation
    report: SearchReport


def save(searched: SearchRecord, inputs: dict[str, Any], path: Path) -> None:
    """ArtifactError when the file cannot be written."""
    body = dump(_SearchBody(searched.allocation, searched.report))
    artifact.write(path, artifact.Artifact(KIND, SCHEMA, inputs, body, searched.plan_tensors))


def load(path: Path) -> SearchRecord:
    """ArtifactError when missing, corrupt or foreign."""
    stored = artifact.read(path, KIND, SCHEMA)
    body = record_of(_SearchBody, stored.body, path, hint="delete the file and search again")
    chosen, report = body.allocation, body.report
    with refusing(path):
        chosen.require_sound()
        Plan(chosen.model, chosen.cache_dtype, chosen.layers, chosen.workload, {}, stored.tensors)
        if chosen.loss != report.kl:
            raise ValueError(f"the allocation's loss is {chosen.loss}, the KL of the plan that ships {report.kl}")
    return SearchRecord(chosen, report, stored.tensors)
