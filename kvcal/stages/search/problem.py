"""The choices of a search: the options of every unit, their bytes, and plans of one composition for all layers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvcal.errors import InfeasibleBudget
from kvcal.geometry import Geometry
from kvcal.plan.format import SIDES, Side
from kvcal.plan.layer import bare_layers
from kvcal.plan.plan import Workload
from kvcal.recipe import CacheSpec
from kvcal.specs import PredictorSpec, SearchSpec
from kvcal.stages.allocate import solver
from kvcal.stages.search.compositions import Composition, Unit, option_nbytes, options_of, shared_nbytes

# Uniform plans at most, the largest ones: their KLs cost less than those of single options in a deep model.
MAX_UNIFORM = 96

Choice = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Problem:
    """The options of every unit, their bytes, and the bytes they may take together."""

    units: tuple[Unit, ...]
    options: tuple[tuple[Composition, ...], ...]
    nbytes: tuple[tuple[int, ...], ...]
    capacity: int

    def size(self, choice: Choice) -> int:
        return sum(sizes[option] for sizes, option in zip(self.nbytes, choice, strict=True))

    def chosen(self, choice: Choice) -> dict[Unit, Composition]:
        return {unit: options[option] for unit, options, option in zip(self.units, self.options, choice, strict=True)}

    def solve(self, losses: Sequence[Mapping[int, float]]) -> Choice:
        """The choice of least loss among the options that ``losses`` names. InfeasibleBudget if none fits."""
        numbers = [sorted(row) for row in losses]
        lowest = [min(row.values()) for row in losses]  # the solver wants no negative losses
        rows = [
            solver.Unit(
                str(unit),
                tuple(solver.Option(str(number), sizes[number], row[number] - low) for number in allowed),
            )
            for unit, sizes, row, low, allowed in zip(self.units, self.nbytes, losses, lowest, numbers, strict=True)
        ]
        found = solver.solve(rows, self.capacity)
        return tuple(allowed[position] for allowed, position in zip(numbers, found.choice, strict=True))


def problem_of(
    geometry: Geometry,
    spec: SearchSpec,
    cache: CacheSpec,
    predictors: PredictorSpec | None,
    workload: Workload,
    paged_bytes: int,
    per_head: bool,
) -> Problem:
    """Units and options of a model, those that fit beside the smallest ones of all other units. ``paged_bytes``: what
    the paged layers and their tensors may take.

    Raises:
        UsageError: a choice that cannot be composed. InfeasibleBudget: not even the smallest options fit.
    """
    units, options, nbytes = [], [], []
    source = None
    paged = [layer for layer in bare_layers(geometry) if layer.is_paged]
    for layer in paged:
        for side in SIDES:
            found = options_of(layer, side, source, layer is paged[-1], spec, cache, predictors)
            for head in range(layer.attention.num_kv_heads) if per_head else (None,):
                unit = Unit(layer.geometry.index, side, head)
                allowed = found if head is None else tuple(o for o in found if fits_one_head(o))
                units.append(unit)
                options.append(allowed)
                nbytes.append(tuple(option_nbytes(unit, option, layer, geometry, workload) for option in allowed))
        source = layer.geometry.index
    capacity = paged_bytes - shared_nbytes(dict(zip(units, options, strict=True)))
    smallest = sum(min(sizes) for sizes in nbytes)
    if smallest > capacity:
        missing = smallest - capacity
        raise InfeasibleBudget(
            f"the smallest compositions of [search] take {smallest} bytes at batch {workload.batch} x "
            f"{workload.context} tokens, {missing} more than the budget leaves for them",
            paged_bytes + missing,
            hint="raise the budget, or add choices with fewer bits",
        )
    for position, sizes in enumerate(nbytes):
        fits = [size - min(sizes) <= capacity - smallest for size in sizes]
        options[position] = tuple(itertools.compress(options[position], fits))
        nbytes[position] = tuple(itertools.compress(sizes, fits))
    return Problem(tuple(units), tuple(options), tuple(nbytes), capacity)


def fits_one_head(option: Composition) -> bool:
    """Lattices and predictors take all heads of a layer in a row."""
    return option.format.lattice_dim is None and option.predictor is None


def uniform_choices(problem: Problem) -> list[Choice]:
    """One composition by name for all keys and one for all values: every such plan within the capacity, the largest
    ``MAX_UNIFORM``, by bytes from most to fewest; the smallest options where none fits.

    The first layer cannot be predicted: where the others are, it takes its smallest options, and in a second plan the
    largest that there is room for (AQUA-KV stores its first layer with more bits)."""
    smallest = tuple(sizes.index(min(sizes)) for sizes in problem.nbytes)
    found: dict[Choice, int] = {}
    for names in itertools.product(_names(problem, "k"), _names(problem, "v")):
        wanted = dict(zip(SIDES, names, strict=True))
        choice, lacking = list(smallest), []
        for position, (unit, options) in enumerate(zip(problem.units, problem.options, strict=True)):
            offered = [option.name for option in options]
            if wanted[unit.side] in offered:
                choice[position] = offered.index(wanted[unit.side])
            else:
                lacking.append(position)
        found[tuple(choice)] = problem.size(tuple(choice))
        for position in lacking:
            sizes = problem.nbytes[position]
            room = problem.capacity - problem.size(tuple(choice)) + sizes[choice[position]]
            choice[position] = max(range(len(sizes)), key=lambda option: (sizes[option] <= room) * sizes[option])
        found[tuple(choice)] = problem.size(tuple(choice))
    fitting = [choice for choice, size in found.items() if size <= problem.capacity]
    return sorted(fitting, key=found.__getitem__, reverse=True)[:MAX_UNIFORM] or [smallest]


def _names(problem: Problem, side: Side) -> list[str]:
    """Names of the options that all layers behind the first have."""
    first = problem.units[0].index
    of_side = [
        (unit, options) for unit, options in zip(problem.units, problem.options, strict=True) if unit.side == side
    ]
    offered = {unit: {option.name for option in options} for unit, options in of_side}
    every = set().union(*offered.values())
    return sorted(
        name for name in every if all(name in names for unit, names in offered.items() if unit.index != first)
    )
