"""The search: compositions of all five systems, chosen layer by layer under one byte budget, on measured KL.

1. Every plan of one composition for all keys and one for all values that fits the budget is measured. The best of them
   is the background: it shows what layers break together.
2. Every option of every unit is measured in the background. Distortion is never carried over from one quantizer to
   another.
3. The exact solver chooses (``allocate.solver``), taking the differences of these KLs as if they added up.
4. Random plans test whether they do: the rank correlation of predicted and measured KL is part of the result.
5. Refinement: with the best plan as background, neighbouring options of every unit are measured again and solved for,
   moving few units or many (a penalty for each unit that changes), until no plan is better.

The best plan is always that of least real KL among all within the budget that were measured, whatever for: also a
uniform one, a random one, or one that differs from a background in one unit.

The texts of the KL are neither those of the fits nor those of the evaluation. Left out: pairs of units, beyond what 5
sees.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from kvcal.errors import InfeasibleBudget
from kvcal.geometry import Geometry
from kvcal.plan.layer import bare_layers
from kvcal.plan.page_format import SIDES, Side
from kvcal.plan.plan import Workload
from kvcal.recipe import CacheSpec, PredictorSpec, SearchSpec
from kvcal.stages.allocate import solver
from kvcal.stages.search.compositions import Composition, Unit, lattice_nbytes, option_nbytes, options_of

# Uniform plans at most, the largest ones: their KLs cost less than those of single options in a deep model.
MAX_UNIFORM = 96
# Penalties for a unit that changes, as shares of the largest gain that one change promises: few moves to all of them.
TRUST = (1.0, 0.5, 0.25, 0.1, 0.03, 0.0)

Choice = tuple[int, ...]  # an option number for every unit
Measure = Callable[[Sequence[Choice], str], list[float]]


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
        units = []
        for unit, sizes, row, allowed in zip(self.units, self.nbytes, losses, numbers, strict=True):
            low = min(row.values())  # the solver takes no negative losses
            options = (solver.Option(str(number), sizes[number], row[number] - low) for number in allowed)
            units.append(solver.Unit(str(unit), tuple(options)))
        solution = solver.solve(units, self.capacity)
        return tuple(allowed[position] for allowed, position in zip(numbers, solution.choice, strict=True))


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
            offered = options_of(layer, side, source, layer is paged[-1], spec, cache, predictors)
            for head in range(layer.attention.num_kv_heads) if per_head else (None,):
                unit = Unit(layer.geometry.index, side, head)
                allowed = offered if head is None else tuple(o for o in offered if fits_one_head(o))
                units.append(unit)
                options.append(allowed)
                nbytes.append(tuple(option_nbytes(unit, option, layer, geometry, workload) for option in allowed))
        source = layer.geometry.index
    lattices = ((option.format.lattice_dim, option.format.num_bits) for row in options for option in row)
    capacity = paged_bytes - lattice_nbytes(lattices)
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
    choices: dict[Choice, int] = {}
    for names in itertools.product(_names(problem, "k"), _names(problem, "v")):
        name_of = dict(zip(SIDES, names, strict=True))
        choice, lacking = list(smallest), []
        for position, (unit, options) in enumerate(zip(problem.units, problem.options, strict=True)):
            offered = [option.name for option in options]
            if name_of[unit.side] in offered:
                choice[position] = offered.index(name_of[unit.side])
            else:
                lacking.append(position)
        choices[tuple(choice)] = problem.size(tuple(choice))
        for position in lacking:
            sizes = problem.nbytes[position]
            room = problem.capacity - problem.size(tuple(choice)) + sizes[choice[position]]
            choice[position] = max(range(len(sizes)), key=lambda option: (sizes[option] <= room) * sizes[option])
        choices[tuple(choice)] = problem.size(tuple(choice))
    fitting = [choice for choice, size in choices.items() if size <= problem.capacity]
    return sorted(fitting, key=choices.__getitem__, reverse=True)[:MAX_UNIFORM] or [smallest]


def _names(problem: Problem, side: Side) -> list[str]:
    """Names of the options that all layers behind the first have."""
    offered = [
        (unit.index, {option.name for option in options})
        for unit, options in zip(problem.units, problem.options, strict=True)
        if unit.side == side
    ]
    every = set[str]().union(*(names for _, names in offered))
    return sorted(every.intersection(*(names for index, names in offered if index != problem.units[0].index)))


@dataclass(frozen=True)
class Outcome:
    """The best plan. ``proxy``: (predicted, measured) KL of random plans; ``history``: the measured KL of the
    background, of the solver's first plan, and of the best plan after every round of refinement, which is ``kl`` after
    the last one (without a round, ``kl`` may be a plan's that ``history`` does not name). The last round may have
    improved nothing."""

    choice: Choice
    kl: float
    background_kl: float
    costs: tuple[tuple[float, ...], ...]
    proxy: tuple[tuple[float, float], ...]
    history: tuple[float, ...]


def search(problem: Problem, spec: SearchSpec, measure: Measure) -> Outcome:
    """See the module's docstring. ``measure``: the KL of choices."""
    kl_of: dict[Choice, float] = {}  # within the budget, in the order of measurement

    def measured(choices: Sequence[Choice], what: str) -> list[float]:
        kls = measure(choices, what)
        pairs = zip(choices, kls, strict=True)
        kl_of.update((choice, kl) for choice, kl in pairs if problem.size(choice) <= problem.capacity)
        return kls

    uniform = uniform_choices(problem)
    background_kl, background = min(zip(measured(uniform, "uniform plans"), uniform, strict=True), key=itemgetter(0))
    all_options = [range(len(options)) for options in problem.options]
    costs = _costs(problem, background, all_options, measured, "compositions")
    costs = [{option: kl - background_kl for option, kl in row.items()} for row in costs]
    [solved_kl] = measured([problem.solve(costs)], "the solver's plan")
    history = [background_kl, solved_kl]
    proxy = _check_proxy(problem, costs, background_kl, spec, measured)
    best = min(kl_of, key=kl_of.__getitem__)
    for number in range(1, spec.refine_rounds + 1):
        _refine(problem, best, kl_of[best], spec.neighbours, measured, number)
        before, best = best, min(kl_of, key=kl_of.__getitem__)
        history.append(kl_of[best])
        if best == before:
            break
    table = tuple(tuple(row[option] for option in range(len(row))) for row in costs)
    return Outcome(best, kl_of[best], background_kl, table, proxy, tuple(history))


def _costs(
    problem: Problem, background: Choice, options: Sequence[Sequence[int]], measure: Measure, what: str
) -> list[dict[int, float]]:
    """For every unit: {option: KL with that option alone changed in the background}, for its ``options``."""
    places = [(position, option) for position, row in enumerate(options) for option in row]
    kls = measure([(*background[:unit], option, *background[unit + 1 :]) for unit, option in places], what)
    rows: list[dict[int, float]] = [{} for _ in problem.units]
    for (position, option), kl in zip(places, kls, strict=True):
        rows[position][option] = kl
    return rows


def _check_proxy(
    problem: Problem, costs: Sequence[Mapping[int, float]], background_kl: float, spec: SearchSpec, measure: Measure
) -> tuple[tuple[float, float], ...]:
    """(predicted, measured) KL of random plans within the budget."""
    draw = random.Random(f"search:{spec.seed}")
    choices: dict[Choice, None] = {}
    for _ in range(100 * spec.proxy_plans):
        if len(choices) == spec.proxy_plans:
            break
        choices[_random_choice(problem, draw)] = None
    kls = measure(list(choices), "random plans")
    predicted = [background_kl + sum(row[o] for row, o in zip(costs, choice, strict=True)) for choice in choices]
    return tuple(zip(predicted, kls, strict=True))


def _random_choice(problem: Problem, draw: random.Random) -> Choice:
    """Units in random order take a random option of those that leave room for the smallest of all others."""
    left = problem.capacity - sum(min(sizes) for sizes in problem.nbytes)
    choice = [0] * len(problem.units)
    for position in draw.sample(range(len(choice)), len(choice)):
        sizes = problem.nbytes[position]
        choice[position] = draw.choice([option for option, size in enumerate(sizes) if size - min(sizes) <= left])
        left -= sizes[choice[position]] - min(sizes)
    return tuple(choice)


def _refine(problem: Problem, best: Choice, best_kl: float, num_neighbours: int, measure: Measure, number: int) -> None:
    """One round from ``best``: measures its neighbours, and the plans that are solved for with them."""
    near = [_neighbours(sizes, current, num_neighbours) for sizes, current in zip(problem.nbytes, best, strict=True)]
    around = _costs(problem, best, near, measure, f"round {number}")
    gains = [{option: kl - best_kl for option, kl in row.items()} for row in around]
    largest = max((abs(gain) for row in gains for gain in row.values()), default=0.0)
    candidates: dict[Choice, None] = {}
    for trust in TRUST:
        losses = [
            {o: gain + (0.0 if o == current else trust * largest) for o, gain in {**row, current: 0.0}.items()}
            for row, current in zip(gains, best, strict=True)
        ]
        candidates[problem.solve(losses)] = None
    measure(list(candidates), f"round {number}, plans")


def _neighbours(sizes: Sequence[int], current: int, count: int) -> list[int]:
    """The ``count`` next cheaper and next dearer sizes, all options of them, and those as large as the current one."""
    levels = sorted(set(sizes))
    at = levels.index(sizes[current])
    near = set(levels[max(0, at - count) : at + count + 1])
    return [option for option, size in enumerate(sizes) if size in near and option != current]
