"""The difference of two plans: formats and bytes layer by layer, tensors, and where they came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcal.artifact import canonical_json
from kvcal.plan.layer import LayerPlan
from kvcal.plan.plan import Plan, Workload
from kvcal.stored_tensor import stored
from kvcal.strict import flat


@dataclass(frozen=True)
class LayerDiff:
    """A layer that differs, None where a plan has no such layer; bytes at the workload."""

    index: int
    before: LayerPlan | None
    after: LayerPlan | None
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class PlanDiff:
    """The differences of two plans. ``facts``: of the model, the cache's dtype and the plans' workloads; ``tensors``:
    by name "added", "removed" or "changed"; ``provenance``: flat; each with the value before and the one
    after, None for absent."""

    facts: dict[str, tuple[Any, Any]]
    layers: tuple[LayerDiff, ...]
    tensors: dict[str, str]
    provenance: dict[str, tuple[Any, Any]]

    @property
    def is_same(self) -> bool:
        """Whether both plans do the same: provenance does not count."""
        return not (self.facts or self.layers or self.tensors)


def diff_plans(before: Plan, after: Plan, workload: Workload) -> PlanDiff:
    """The difference, with bytes at ``workload``."""
    return PlanDiff(
        _changes(_facts(before), _facts(after)),
        tuple(_layers(before, after, workload)),
        _tensors(before, after),
        _changes(flat("", before.provenance), flat("", after.provenance)),
    )


def _facts(plan: Plan) -> dict[str, Any]:
    model = {f"model.{name}": getattr(plan.model, name) for name in type(plan.model).__dataclass_fields__}
    workload = {"workload.batch": plan.workload.batch, "workload.context": plan.workload.context}
    return {**model, "cache_dtype": plan.cache_dtype, **workload}


def _layers(before: Plan, after: Plan, workload: Workload) -> list[LayerDiff]:
    sides = [{layer.geometry.index: layer for layer in plan.layers} for plan in (before, after)]
    dtypes = before.cache_dtype, after.cache_dtype
    found = []
    for index in sorted(sides[0].keys() | sides[1].keys()):
        pair = sides[0].get(index), sides[1].get(index)
        if pair[0] != pair[1]:
            sizes = [
                0 if layer is None else layer.nbytes(dtype, workload.lengths, workload.context)
                for layer, dtype in zip(pair, dtypes, strict=True)
            ]
            found.append(LayerDiff(index, *pair, *sizes))
    return found


def _tensors(before: Plan, after: Plan) -> dict[str, str]:
    found, old, new = {}, stored(before.tensors), stored(after.tensors)
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            found[name] = "removed"
        elif name not in old:
            found[name] = "added"
        elif old[name] != new[name]:
            found[name] = "changed"
    return found


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = sorted(before.keys() | after.keys())
    pairs = {name: (before.get(name), after.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if canonical_json(pair[0]) != canonical_json(pair[1])}
