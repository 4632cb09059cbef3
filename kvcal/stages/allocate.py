"""Allocation: which Format every layer's (or KV head's) K and V gets, within a byte budget (PM-KVQ Eq. 6-8).

A unit of the integer program is one layer's K or V, or one head's; its options are the profile's candidates, each
with its measured loss and with the bytes that ``Format.nbytes`` says the runtime will allocate at the workload. What
does not depend on the choice (bounded layers, states) is taken off the budget first. 16 bits is always an option,
with loss 0.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass

from kvcal import artifact
from kvcal.errors import ArtifactError, InfeasibleBudget, UsageError
from kvcal.geometry import CACHE_DTYPES, CacheDtype, Geometry, ModelIdentity
from kvcal.plan import RAW, SIDES, Format, LayerPlan, Side, Workload, bare_layers
from kvcal.quantities import format_bytes, parse_bytes
from kvcal.recipe import AllocateSpec, CacheSpec, FormatsSpec, Recipe, fixed_layers, load_recipe
from kvcal.stages.profile import Profile
from kvcal.stages.solver import Option, Sweep, Unit, solve, sweep
from kvcal.strict import STRICT, dump, parse

KIND = "allocation"
SCHEMA = 1


@dataclass(frozen=True, config=STRICT)
class Split:
    """Where the bytes of a budget go. ``weights`` and ``workspace`` are None when only the cache was budgeted;
    ``fixed`` are bounded layers and states, ``paged`` the chosen formats."""

    budget: int
    weights: int | None
    workspace: int | None
    fixed: int
    paged: int

    @property
    def cache(self) -> int:
        return self.fixed + self.paged


@dataclass(frozen=True, config=STRICT)
class Allocation:
    """The chosen layers of a model. ``provenance`` says what they were chosen from; ``loss``, ``bound``, ``gap`` and
    ``proof`` are the solver's (see solver.Solution), None where a recipe fixed the formats."""

    model: ModelIdentity
    cache_dtype: CacheDtype
    layers: tuple[LayerPlan, ...]
    workload: Workload
    provenance: dict[str, Any]
    split: Split
    loss: float | None = None
    bound: float | None = None
    gap: float | None = None
    proof: str | None = None


def fixed_allocation(
    formats: FormatsSpec,
    model: ModelIdentity,
    geometry: Geometry,
    workload: Workload,
    provenance: dict[str, Any],
) -> Allocation:
    """What a recipe with [formats] gives: no choice, no budget but its own bytes."""
    layers = fixed_layers(formats, bare_layers(geometry))
    fixed, paged = _bytes(layers, geometry.cache_dtype, workload)
    split = Split(fixed + paged, None, None, fixed, paged)
    return Allocation(model, geometry.cache_dtype, layers, workload, provenance, split)


def allocate(profile: Profile, spec: AllocateSpec, cache: CacheSpec, provenance: dict[str, Any]) -> Allocation:
    """Solve one budget.

    Raises:
        InfeasibleBudget: nothing fits; the message says the smallest budget of the same kind that would.
        UsageError: an unreadable budget, or an objective that was not profiled.
    """
    problem = _Problem(profile, spec, cache)
    layers = problem.layers_of([0] * len(problem.units))
    fixed, _ = _bytes(layers, profile.geometry.cache_dtype, problem.workload)
    budget, weights, workspace = _resolve_budget(profile, spec, layers, fixed)
    overhead = fixed + (weights or 0) + (workspace or 0)
    smallest = sum(min(option.nbytes for option in unit.options) for unit in problem.units)
    if budget - overhead < smallest:
        bits = 8 * smallest / _num_values(profile.geometry, problem.workload)
        raise _infeasible(spec, budget, overhead + smallest, bits, weights, workspace)
    solution = solve(problem.units, budget - overhead)
    layers = problem.layers_of(solution.choice)
    split = Split(budget, weights, workspace, fixed, _bytes(layers, profile.geometry.cache_dtype, problem.workload)[1])
    assert split.paged == solution.nbytes, "the solver's bytes are not the plan's"
    return Allocation(
        model=profile.identity,
        cache_dtype=profile.geometry.cache_dtype,
        layers=layers,
        workload=problem.workload,
        provenance=provenance,
        split=split,
        loss=solution.loss,
        bound=solution.bound,
        gap=solution.gap,
        proof=solution.proof,
    )


def pareto(
    profile: Profile, spec: AllocateSpec, cache: CacheSpec, num_points: int
) -> tuple[Sweep, list[dict[str, Any]]]:
    """All useful budgets: the solver's sweep, and a row for each point: bytes of the whole cache, all-in bits per
    value, loss, and the bits chosen per layer."""
    problem = _Problem(profile, spec, cache)
    found = sweep(problem.units, num_points=num_points)
    geometry, rows = profile.geometry, []
    for point in found.points:
        layers = problem.layers_of(point.choice)
        fixed, paged = _bytes(layers, geometry.cache_dtype, problem.workload)
        bits = {
            side: [[fmt.num_bits for fmt in layer.formats(side)] for layer in layers if layer.is_paged]
            for side in SIDES
        }
        rows.append(
            {
                "cache_bytes": fixed + paged,
                "bits_per_value": 8 * paged / _num_values(geometry, problem.workload),
                "loss": point.loss,
                "gap": point.gap,
                "k_bits": bits["k"],
                "v_bits": bits["v"],
            }
        )
    return found, rows


def save(allocation: Allocation, inputs: dict[str, Any], path: Path) -> None:
    artifact.write(path, artifact.Artifact(KIND, SCHEMA, inputs, dump(allocation), {}))


def load(path: Path) -> tuple[Allocation, dict[str, Any]]:
    """The allocation and its inputs. ArtifactError when missing, corrupt or foreign."""
    stored = artifact.read(path, KIND, SCHEMA)
    return parse(Allocation, stored.body, str(path), ArtifactError), stored.inputs


class _Problem:
    """Units of the integer program, with the format behind every option."""

    def __init__(self, profile: Profile, spec: AllocateSpec, cache: CacheSpec) -> None:
        if spec.granularity == "head" and spec.objective != "sensitivity":
            raise UsageError(
                f"objective = {spec.objective!r} is measured per layer, and granularity = 'head' was asked for",
                hint="use objective = 'sensitivity' for heads",
            )
        self.workload = Workload(spec.batch, spec.context)
        self.geometry = profile.geometry
        self.units: list[Unit] = []
        self._formats: dict[tuple[int, Side], list[list[Format]]] = {}
        for layer in bare_layers(profile.geometry):
            if layer.is_paged:
                for side in SIDES:
                    self._add(profile, spec, cache, layer, side)

    def _add(self, profile: Profile, spec: AllocateSpec, cache: CacheSpec, layer: LayerPlan, side: Side) -> None:
        index, dim, dtype = layer.geometry.index, layer.head_dim(side), self.geometry.cache_dtype
        losses = profile.losses(spec.objective, index, side)  # candidate -> one loss per KV head
        heads = layer.attention.num_kv_heads
        formats = [cache.format(side, *candidate) for candidate in losses] + [RAW]
        sizes = [fmt.nbytes(side, dim, dtype, self.workload.lengths) for fmt in formats]
        per_head = [*losses.values(), [0.0] * heads]
        names = [f"{fmt.num_bits}-{fmt.axis}-{fmt.group_size}" for fmt in formats]
        if spec.granularity == "layer":
            rows = [[(name, heads * size, sum(loss)) for name, size, loss in zip(names, sizes, per_head, strict=True)]]
        else:
            rows = [
                [(name, size, loss[head]) for name, size, loss in zip(names, sizes, per_head, strict=True)]
                for head in range(heads)
            ]
        for head, row in enumerate(rows):
            options = tuple(Option(name, size, loss) for name, size, loss in row)
            self.units.append(Unit(f"layer {index} {side} {head}", options))
        self._formats[index, side] = [formats] * len(rows)

    def layers_of(self, choice: list[int] | tuple[int, ...]) -> tuple[LayerPlan, ...]:
        """The layers that a choice (an option number per unit) stands for."""
        remaining, chosen = list(choice), {}
        for key, rows in self._formats.items():
            picked, remaining = remaining[: len(rows)], remaining[len(rows) :]
            formats = tuple(row[option] for row, option in zip(rows, picked, strict=True))
            chosen[key] = formats[:1] if len(set(formats)) == 1 else formats
        return tuple(
            LayerPlan(layer.geometry, chosen[layer.geometry.index, "k"], chosen[layer.geometry.index, "v"])
            if layer.is_paged
            else layer
            for layer in bare_layers(self.geometry)
        )


def _bytes(layers: tuple[LayerPlan, ...], cache_dtype: str, workload: Workload) -> tuple[int, int]:
    """Bytes of (bounded and state layers, paged layers)."""
    sizes = {True: 0, False: 0}
    for layer in layers:
        sizes[layer.is_paged] += layer.nbytes(cache_dtype, workload.lengths, workload.context)
    return sizes[False], sizes[True]


def _num_values(geometry: Geometry, workload: Workload) -> int:
    """Values that the paged layers cache at the workload."""
    paged = [layer.attention for layer in bare_layers(geometry) if layer.is_paged]
    per_token = sum(layer.num_kv_heads * (layer.k_head_dim + layer.v_head_dim) for layer in paged)
    return per_token * workload.batch * workload.context


def workspace_bytes(profile: Profile, workload: Workload) -> int:
    """The stated workspace of one decode step: fp32 logits and their softmax, and one layer's K and V unpacked.

    The CUDA kernels need no unpacked layer; a long prefill in one piece needs more: give ``workspace`` then.
    """
    logits = 2 * 4 * workload.batch * profile.vocab_size
    per_token = [
        layer.attention.num_kv_heads * (layer.attention.k_head_dim + layer.attention.v_head_dim)
        for layer in bare_layers(profile.geometry)
        if layer.is_paged
    ]
    itemsize = CACHE_DTYPES[profile.geometry.cache_dtype].itemsize
    return logits + max(per_token, default=0) * workload.batch * workload.context * itemsize


def _resolve_budget(
    profile: Profile, spec: AllocateSpec, layers: tuple[LayerPlan, ...], fixed: int
) -> tuple[int, int | None, int | None]:
    """(budget, weights, workspace) in bytes; the latter two only for a whole-device budget."""
    workload = Workload(spec.batch, spec.context)
    if spec.budget is not None:
        auto = spec.workspace == "auto"
        workspace = workspace_bytes(profile, workload) if auto else parse_bytes(spec.workspace)
        return parse_bytes(spec.budget), profile.weight_bytes, workspace
    if spec.kv_budget is not None:
        return parse_bytes(spec.kv_budget), None, None
    if spec.bits is not None:
        return int(spec.bits * _num_values(profile.geometry, workload) / 8) + fixed, None, None
    assert spec.same_bytes_as is not None
    other: Recipe = load_recipe(spec.same_bytes_as)
    if other.formats is None:
        raise UsageError(
            f"same_bytes_as = {spec.same_bytes_as!r} has no fixed formats, so its bytes are not known beforehand",
            hint="name a recipe with [formats], such as kivi-2",
        )
    return (
        sum(_bytes(fixed_layers(other.formats, layers), profile.geometry.cache_dtype, workload)),
        None,
        None,
    )


def _infeasible(
    spec: AllocateSpec, budget: int, smallest: int, bits: float, weights: int | None, workspace: int | None
) -> InfeasibleBudget:
    """``smallest`` in bytes, ``bits`` what that is per cached value (shown rounded up, so that it is feasible)."""
    rounded_up = math.ceil(bits * 1000) / 1000
    device = f" ({format_bytes(weights)} weights + {format_bytes(workspace or 0)} workspace)" if weights else ""
    return InfeasibleBudget(
        f"a budget of {format_bytes(budget)} is too small for batch {spec.batch} x {spec.context} tokens: the smallest "
        f"feasible one is {format_bytes(smallest)} = {smallest} bytes{device}, {rounded_up:.3f} bits per cached value",
        smallest,
        hint="raise the budget, lower --batch or --context, or profile fewer bits or larger groups",
    )
