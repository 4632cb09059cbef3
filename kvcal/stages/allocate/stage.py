"""Allocation: which Format every layer's (or KV head's) K and V gets, within a byte budget (PM-KVQ Eq. 6-8).

A unit of the integer program is one layer's K or V, or one head's; its options are the profile's candidates, each
with its measured loss and with the bytes that ``Format.nbytes`` says the runtime will allocate at the workload. What
does not depend on the choice (bounded layers, states) is taken off the budget first. 16 bits is always an option,
with loss 0.
"""

from __future__ import annotations

from typing import Any

from kvcal.errors import UnsupportedModel, UsageError
from kvcal.plan.plan import RAW, SIDES, Format, LayerPlan, Side, Workload, bare_layers
from kvcal.recipe import AllocateSpec, CacheSpec
from kvcal.stages.allocate.budget import ModelSizes, infeasible, reserved_bytes, resolve_budget
from kvcal.stages.allocate.record import (
    KIND,
    SCHEMA,
    Allocation,
    Split,
    fixed_allocation,
    important_allocation,
    layer_bytes,
    load,
    made_progressive,
    num_values,
    save,
    unbudgeted,
)
from kvcal.stages.allocate.solver import Option, Sweep, Unit, solve, sweep
from kvcal.stages.profile.stage import Profile

__all__ = [
    "KIND",
    "SCHEMA",
    "Allocation",
    "Split",
    "allocate",
    "fixed_allocation",
    "important_allocation",
    "load",
    "made_progressive",
    "pareto",
    "reserved_bytes",
    "save",
    "unbudgeted",
]


def allocate(
    profile: Profile, spec: AllocateSpec, cache: CacheSpec, provenance: dict[str, Any], reserved: int = 0
) -> Allocation:
    """Solve one budget, of which ``reserved`` bytes are kept for what transforms take (``budget.transform_bytes``).

    Raises:
        InfeasibleBudget: nothing fits; the message says the smallest budget of the same kind that would.
        UsageError: an unreadable budget, or an objective that was not profiled.
        UnsupportedModel: no layer of the model has pages.
    """
    problem = _Problem(profile, spec, cache)
    if not problem.units:
        raise UnsupportedModel(
            "there is nothing to allocate: every layer of the model is a sliding window, kept at 16 bits, or a state",
            hint="a recipe with [formats], such as kivi-2, compiles a plan without choices",
        )
    layers = problem.layers_of(problem.largest)
    fixed, _ = layer_bytes(layers, profile.geometry.cache_dtype, problem.workload)
    sizes = ModelSizes(profile.geometry, profile.weight_bytes, profile.vocab_size)
    budget = resolve_budget(sizes, spec, layers, fixed)
    capacity = budget.cache - fixed - reserved
    smallest = sum(min(option.nbytes for option in unit.options) for unit in problem.units)
    if capacity < smallest:
        bits = 8 * (smallest + reserved) / num_values(layers, problem.workload)
        raise infeasible(spec, budget, budget.total - capacity + smallest, bits, reserved)
    solution = solve(problem.units, min(capacity, problem.most_bytes))
    layers = problem.layers_of(solution.choice)
    paged = layer_bytes(layers, profile.geometry.cache_dtype, problem.workload)[1]
    split = budget.split(fixed, paged, reserved)
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
        fixed, paged = layer_bytes(layers, geometry.cache_dtype, problem.workload)
        bits = {
            side: [[fmt.num_bits for fmt in layer.formats(side)] for layer in layers if layer.is_paged]
            for side in SIDES
        }
        rows.append(
            {
                "cache_bytes": fixed + paged,
                "bits_per_value": 8 * paged / num_values(layers, problem.workload),
                "loss": point.loss,
                "gap": point.gap,
                "k_bits": bits["k"],
                "v_bits": bits["v"],
            }
        )
    return found, rows


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
        self._choices: list[list[dict[tuple[int, Side], tuple[int, Format]]]] = []
        for layer in bare_layers(profile.geometry):
            if layer.is_paged and spec.granularity == "block":
                self._add_block(profile, spec, cache, layer)
            elif layer.is_paged:
                for side in SIDES:
                    self._add(profile, spec, cache, layer, side)

    @property
    def largest(self) -> list[int]:
        """The choice of every unit's largest option."""
        return [max(range(len(unit.options)), key=lambda n: unit.options[n].nbytes) for unit in self.units]

    @property
    def most_bytes(self) -> int:
        """A capacity beyond which nothing is left to spend it on."""
        return sum(unit.options[number].nbytes for unit, number in zip(self.units, self.largest, strict=True))

    def _add(self, profile: Profile, spec: AllocateSpec, cache: CacheSpec, layer: LayerPlan, side: Side) -> None:
        """Units of one layer's keys or values."""
        index, heads = layer.geometry.index, layer.attention.num_kv_heads
        formats, per_head = self._costs(profile, spec, cache, layer, side)
        sizes = [
            fmt.nbytes(side, 1, layer.head_dim(side), self.geometry.cache_dtype, self.workload.lengths)
            for fmt in formats
        ]
        names = [f"{fmt.num_bits}-{fmt.axis}-{fmt.group_size}" for fmt in formats]
        if spec.granularity == "head":
            rows = [
                [(name, size, loss[head]) for name, size, loss in zip(names, sizes, per_head, strict=True)]
                for head in range(heads)
            ]
        else:
            rows = [[(name, heads * size, sum(loss)) for name, size, loss in zip(names, sizes, per_head, strict=True)]]
        for head, row in enumerate(rows):
            options = tuple(Option(name, size, loss) for name, size, loss in row)
            self.units.append(Unit(f"layer {index} {side} {head}", options))
            self._choices.append([{(index, side): (head, fmt)} for fmt in formats])

    def _add_block(self, profile: Profile, spec: AllocateSpec, cache: CacheSpec, layer: LayerPlan) -> None:
        """One unit for a layer, K and V of equal bits, axis and group (PM-KVQ's block)."""
        index = layer.geometry.index
        costs: dict[Side, dict[str, tuple[Format, int, float]]] = {}
        for side in SIDES:
            formats, per_head = self._costs(profile, spec, cache, layer, side)
            dim, heads = layer.head_dim(side), layer.attention.num_kv_heads
            costs[side] = {
                f"{fmt.num_bits}-{fmt.axis}-{fmt.group_size}": (
                    fmt,
                    heads * fmt.nbytes(side, 1, dim, self.geometry.cache_dtype, self.workload.lengths),
                    sum(loss),
                )
                for fmt, loss in zip(formats, per_head, strict=True)
            }
        names = [name for name in costs["k"] if name in costs["v"]]
        pairs = [(costs["k"][name], costs["v"][name]) for name in names]
        options = tuple(Option(n, k[1] + v[1], k[2] + v[2]) for n, (k, v) in zip(names, pairs, strict=True))
        self.units.append(Unit(f"layer {index}", options))
        self._choices.append([{(index, "k"): (0, k[0]), (index, "v"): (0, v[0])} for k, v in pairs])

    def _costs(
        self, profile: Profile, spec: AllocateSpec, cache: CacheSpec, layer: LayerPlan, side: Side
    ) -> tuple[list[Format], list[list[float]]]:
        """All formats of a layer's side, and the loss of each, one number or one for each KV head."""
        losses = profile.losses(spec.objective, layer.geometry.index, side)
        formats = [cache.format(side, *candidate) for candidate in losses] + [RAW]
        return formats, [*losses.values(), [0.0] * layer.attention.num_kv_heads]

    def layers_of(self, choice: list[int] | tuple[int, ...]) -> tuple[LayerPlan, ...]:
        """The layers that a choice (an option number per unit) stands for."""
        chosen: dict[tuple[int, Side], dict[int, Format]] = {}
        for options, number in zip(self._choices, choice, strict=True):
            for key, (head, fmt) in options[number].items():
                chosen.setdefault(key, {})[head] = fmt
        layers = []
        for layer in bare_layers(self.geometry):
            if layer.is_paged:
                k, v = (tuple(chosen[layer.geometry.index, side].values()) for side in SIDES)
                layer = LayerPlan(layer.geometry, k[:1] if len(set(k)) == 1 else k, v[:1] if len(set(v)) == 1 else v)
            layers.append(layer)
        return tuple(layers)
