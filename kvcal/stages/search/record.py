"""The artifact of a search, which the plan is compiled from: the chosen layers, their tensors, and a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass as record
from torch import Tensor

from kvcal import artifact
from kvcal.plan.layer import LayerPlan
from kvcal.plan.plan import Plan
from kvcal.records import record_of, refusing
from kvcal.stages.allocate.record import Allocation
from kvcal.strict import STRICT, Amount, Number, Positive, dump

KIND = "search"
SCHEMA = 4


@record(frozen=True, config=STRICT)
class SystemResult:
    """The plan of one system. KL to the 16-bit cache in nats per loss token: means over the texts of a pool, with their
    standard errors.

    ``bits``: all-in, per cached value. ``validate``: of the finalists alone. ``difference``: of its KL on *validate*
    from that of the plan that ships, with the paired error. ``left_out``: why there is no plan, and no figures."""

    name: str
    bits: Amount | None = None
    select: Number | None = None
    select_error: Amount | None = None
    validate: Number | None = None
    validate_error: Amount | None = None
    difference: Number | None = None
    difference_error: Amount | None = None
    left_out: str | None = None


@record(frozen=True, config=STRICT)
class SearchReport:
    """``shipped``: the name of the system whose plan ships; ``serve``: decode or storage; ``num_select`` and
    ``num_validate``: texts. ``systems``: least KL on *select* first, those without a plan last."""

    shipped: str
    serve: str
    num_select: Positive
    num_validate: Positive
    systems: tuple[SystemResult, ...]

    def __post_init__(self) -> None:
        finalists = [one.name for one in self.systems if one.validate is not None]
        if self.shipped not in finalists:
            raise ValueError(f"shipped = {self.shipped!r}, expected one of the finalists {finalists[:20]}")

    @property
    def kl(self) -> float:
        """Of the plan that ships, on *validate*."""
        return next(one.validate for one in self.systems if one.name == self.shipped and one.validate is not None)


@dataclass(frozen=True, eq=False)
class SearchRecord:
    """The chosen layers with their transforms, and the tensors that these need."""

    allocation: Allocation
    report: SearchReport
    plan_tensors: Mapping[str, Tensor]

    @property
    def layers(self) -> tuple[LayerPlan, ...]:
        return self.allocation.layers

    @property
    def plan(self) -> Plan:
        """What was measured."""
        found = self.allocation
        return Plan(found.model, found.cache_dtype, found.layers, found.workload, {}, self.plan_tensors)


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
    found = SearchRecord(body.allocation, body.report, stored.tensors)
    with refusing(path):
        found.allocation.require_sound()
        assert found.plan is not None  # its tensors are those needed
        if found.allocation.loss != found.report.kl:
            raise ValueError(f"the allocation's loss is {found.allocation.loss}, the report's KL {found.report.kl}")
    return found
