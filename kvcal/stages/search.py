"""The search: compositions of all five systems, chosen layer by layer under one byte budget, on measured KL.

1. Every option of every unit is measured in a background plan: one composition for all layers that fits the budget.
   Distortion is never carried over from one quantizer to another, and the background shows what layers break together.
2. The exact solver chooses (``stages.solver``), taking the differences of these KLs as if they added up.
3. Random plans say whether they do: the rank correlation of predicted and measured KL is part of the result.
4. Refinement: with the best plan as background, neighbouring options of every unit are measured again and solved for,
   moving few units or many (a penalty for each unit that changes), until no plan is better.

The best plan is always that of least real KL among all within the budget that were measured, whatever for: also a
random one, or one that differs from a background in one unit.

The texts of the KL are calibration data; the evaluation uses others. Left out: pairs of units, beyond what 4 sees.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvcal.errors import InfeasibleBudget
from kvcal.geometry import Geometry
from kvcal.layer_plan import bare_layers
from kvcal.plan import SIDES, Workload
from kvcal.recipe import CacheSpec
from kvcal.specs import PredictorSpec, SearchSpec
from kvcal.stages import solver
from kvcal.stages.compositions import Composition, Unit, option_nbytes, options_of, shared_nbytes

# Penalties for a unit that changes, as shares of the largest gain that one change promises: few moves to all of them.
TRUST = (1.0, 0.5, 0.25, 0.1, 0.03, 0.0)

Choice = tuple[int, ...]
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


@dataclass(frozen=True)
class Outcome:
    """What was found. ``proxy``: (predicted, measured) KL of random plans; ``history``: the measured KL of the
    background, of the solver's first plan, and of the best plan after every round of refinement, which is ``kl`` after
    the last one (without a round, ``kl`` may be a plan's that ``history`` does not name). The last round may have
    found nothing."""

    choice: Choice
    kl: float
    background_kl: float
    costs: tuple[tuple[float, ...], ...]
    proxy: tuple[tuple[float, float], ...]
    history: tuple[float, ...]


def problem_of(
    geometry: Geometry,
    spec: SearchSpec,
    cache: CacheSpec,
    predictors: PredictorSpec | None,
    workload: Workload,
    paged_bytes: int,
    per_head: bool,
) -> Problem:
    """Units and options of a model. ``paged_bytes``: what the paged layers and their tensors may take.

    Raises:
        UsageError: a choice that cannot be composed. InfeasibleBudget: not even the smallest options fit.
    """
    units, options, nbytes = [], [], []
    source = None
    for layer in (layer for layer in bare_layers(geometry) if layer.is_paged):
        for side in SIDES:
            found = options_of(layer, side, source, spec, cache, predictors)
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
    return Problem(tuple(units), tuple(options), tuple(nbytes), capacity)


def fits_one_head(option: Composition) -> bool:
    """Lattices and predictors take all heads of a layer in a row."""
    return option.format.lattice_dim is None and option.predictor is None


def search(problem: Problem, spec: SearchSpec, measure: Measure) -> Outcome:
    """See the module's docstring. ``measure``: the KL of choices."""
    known: dict[Choice, float] = {}  # within the budget, in the order of measurement

    def measured(choices: Sequence[Choice], what: str) -> list[float]:
        kls = measure(choices, what)
        found = zip(choices, kls, strict=True)
        known.update((choice, kl) for choice, kl in found if problem.size(choice) <= problem.capacity)
        return kls

    background = background_of(problem)
    [background_kl] = measured([background], "background")
    costs = _costs(problem, background, _all_options(problem), measured, "compositions")
    costs = [{option: kl - background_kl for option, kl in row.items()} for row in costs]
    [solved_kl] = measured([problem.solve(costs)], "the solver's plan")
    history = [background_kl, solved_kl]
    proxy = _check_proxy(problem, costs, background_kl, spec, measured)
    best = min(known, key=known.__getitem__)
    for number in range(spec.refine_rounds):
        _refine(problem, best, known[best], spec.neighbours, measured, number + 1)
        before, best = best, min(known, key=known.__getitem__)
        history.append(known[best])
        if best == before:
            break
    table = tuple(tuple(row[option] for option in range(len(row))) for row in costs)
    return Outcome(best, known[best], background_kl, table, proxy, tuple(history))


def background_of(problem: Problem) -> Choice:
    """One composition by name for all keys, and one for all values: the largest that fits, K before V where two are
    equally large; the smallest options where none fits."""
    names = {
        side: {
            o.name
            for unit, options in zip(problem.units, problem.options, strict=True)
            if unit.side == side
            for o in options
        }
        for side in SIDES
    }
    best, best_size = tuple(sizes.index(min(sizes)) for sizes in problem.nbytes), -1
    for k_name in sorted(names["k"]):
        for v_name in sorted(names["v"]):
            wanted = {"k": k_name, "v": v_name}
            choice = tuple(
                next(
                    (n for n, option in enumerate(options) if option.name == wanted[unit.side]), sizes.index(min(sizes))
                )
                for unit, options, sizes in zip(problem.units, problem.options, problem.nbytes, strict=True)
            )
            if best_size < problem.size(choice) <= problem.capacity:
                best, best_size = choice, problem.size(choice)
    return best


def _all_options(problem: Problem) -> list[list[int]]:
    return [list(range(len(options))) for options in problem.options]


def _costs(
    problem: Problem, background: Choice, wanted: Sequence[Sequence[int]], measure: Measure, what: str
) -> list[dict[int, float]]:
    """For every unit: {option: KL with that option alone changed in the background}, for the ``wanted`` ones."""
    changed = [
        (position, option, background[:position] + (option,) + background[position + 1 :])
        for position, options in enumerate(wanted)
        for option in options
    ]
    found = measure([choice for _, _, choice in changed], what)
    rows: list[dict[int, float]] = [{} for _ in problem.units]
    for (position, option, _), kl in zip(changed, found, strict=True):
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
    measured = measure(list(choices), "random plans")
    predicted = [background_kl + sum(row[o] for row, o in zip(costs, choice, strict=True)) for choice in choices]
    return tuple(zip(predicted, measured, strict=True))


def _random_choice(problem: Problem, draw: random.Random) -> Choice:
    """Units in random order take a random option of those that leave room for the smallest of all others."""
    left = problem.capacity - sum(min(sizes) for sizes in problem.nbytes)
    choice = [0] * len(problem.units)
    for position in draw.sample(range(len(choice)), len(choice)):
        sizes = problem.nbytes[position]
        affordable = [option for option, size in enumerate(sizes) if size - min(sizes) <= left]
        choice[position] = draw.choice(affordable)
        left -= sizes[choice[position]] - min(sizes)
    return tuple(choice)


def _refine(problem: Problem, best: Choice, best_kl: float, num_neighbours: int, measure: Measure, number: int) -> None:
    """One round from ``best``: measures its neighbours, and the plans that are solved for with them."""
    wanted = [_neighbours(sizes, current, num_neighbours) for sizes, current in zip(problem.nbytes, best, strict=True)]
    around = _costs(problem, best, wanted, measure, f"round {number}")
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
