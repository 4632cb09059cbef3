"""The artifact of a search, which the plan is compiled from: the chosen layers, their tensors, and a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from kvcal.strict import STRICT, Amount, Count, Number, NumBytes, Positive, dump

KIND = "search"
SCHEMA = 3


@record(frozen=True, config=STRICT)
class OptionResult:
    """An option of a unit in the last round: the change of the score when the unit alone takes it, its standard error,
    and the estimate shrunk towards what the same change does elsewhere."""

    name: str
    nbytes: NumBytes
    change: Number
    error: Amount
    estimate: Number


@record(frozen=True, config=STRICT)
class UnitResult:
    """One unit: what the plan that ships takes there, and what else was measured."""

    unit: str
    chosen: str
    nbytes: NumBytes
    options: tuple[OptionResult, ...]


@record(frozen=True, config=STRICT)
class KindResult:
    """The plan that ships on one kind of text: mean KL in nats per loss token with its standard error over texts, the
    99th percentile of KL, and the share of tokens that flip where 16 bits are sure; means over texts."""

    kind: str
    num_texts: Positive
    kl: Number
    kl_error: Amount
    tail: Number
    flips: Number


@record(frozen=True, config=STRICT)
class PoolResult:
    """The plan that ships on one pool: mean KL of texts and its standard error; ``score``: relative to the reference
    plan (kvcal.stages.search.judge)."""

    kl: Number
    kl_error: Amount
    score: Number
    kinds: tuple[KindResult, ...]


@record(frozen=True, config=STRICT)
class CandidateResult:
    """A plan that was measured on all texts of the selection: its scores, and the paired standard error of its
    difference from the plan that ships (0 for that one). ``validate``: None where it was not measured there."""

    name: str
    complexity: Count
    nbytes: NumBytes
    select: Number
    select_error: Amount
    validate: Number | None
    validate_error: Amount | None


@record(frozen=True, config=STRICT)
class SearchReport:
    """``shipped``: the name of the plan that ships. ``proxy``: (estimated, measured) score of compositions.
    ``refitted``: whether its predictors were fitted on its own layers. Both pools measured exactly the plan that ships.
    ``num_plans``: plans whose KL was measured in the folder so far."""

    shipped: str
    refitted: bool
    serve: str
    select: PoolResult
    validate: PoolResult
    candidates: tuple[CandidateResult, ...]
    units: tuple[UnitResult, ...]
    proxy: tuple[tuple[Number, Number], ...]
    num_plans: Count

    def __post_init__(self) -> None:
        names = [candidate.name for candidate in self.candidates]
        if self.shipped not in names:
            raise ValueError(f"shipped = {self.shipped!r}, expected one of the candidates {names[:20]}")

    @property
    def proxy_correlation(self) -> float | None:
        """Spearman's rank correlation of estimated and measured scores; None for fewer than three plans, or equal
        ones."""
        predicted, measured = [p for p, _ in self.proxy], [m for _, m in self.proxy]
        if len(self.proxy) < 3 or len(set(predicted)) == 1 or len(set(measured)) == 1:
            return None
        from scipy.stats import spearmanr  # imported here: it takes half a second

        return float(spearmanr(predicted, measured).statistic)


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
        """The measurement."""
        chosen = self.allocation
        return Plan(chosen.model, chosen.cache_dtype, chosen.layers, chosen.workload, {}, self.plan_tensors)


def pool_result(table_NS: Tensor, kinds: Sequence[str], score: float) -> PoolResult:
    """From ``divergence.STATISTICS`` of each text [N, 3]."""
    found = []
    for kind in dict.fromkeys(kinds):
        mine_nS = table_NS[[number for number, name in enumerate(kinds) if name == kind]]
        kl, tail, flips = mine_nS.mean(0).tolist()
        found.append(KindResult(kind, len(mine_nS), kl, _error(mine_nS[:, 0]), tail, flips))
    return PoolResult(float(table_NS[:, 0].mean()), _error(table_NS[:, 0]), score, tuple(found))


def _error(values_n: Tensor) -> float:
    """Of their mean; 0 for a single one."""
    return float(values_n.std() / len(values_n) ** 0.5) if len(values_n) > 1 else 0.0


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
    found = SearchRecord(chosen, report, stored.tensors)
    with refusing(path):
        chosen.require_sound()
        assert found.plan is not None  # its tensors are those needed
        if chosen.loss != report.select.kl:
            raise ValueError(
                f"the allocation's loss is {chosen.loss}, the KL of the plan that ships {report.select.kl}"
            )
    return found
