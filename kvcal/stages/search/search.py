"""The search: compositions of all five systems, chosen layer by layer under one byte budget, on measured KL.

1. Every plan of one composition for all keys and one for all values that fits the budget is measured. The best of them
   is the background: it shows what layers break together.
2. Every option of every unit is measured in the background. Distortion is never carried over from one quantizer to
   another.
3. The exact solver chooses (``stages.solver``), taking the differences of these KLs as if they added up.
4. Random plans say whether they do: the rank correlation of predicted and measured KL is part of the result.
5. Refinement: with the best plan as background, neighbouring options of every unit are measured again and solved for,
   moving few units or many (a penalty for each unit that changes), until no plan is better.

The best plan is always that of least real KL among all within the budget that were measured, whatever for: also a
uniform one, a random one, or one that differs from a background in one unit.

The texts of the KL are neither those of the fits nor those of the evaluation. Left out: pairs of units, beyond what 5
sees.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from kvcal.specs import SearchSpec
from kvcal.stages.search.problem import Choice, Problem, uniform_choices

# Penalties for a unit that changes, as shares of the largest gain that one change promises: few moves to all of them.
TRUST = (1.0, 0.5, 0.25, 0.1, 0.03, 0.0)

Measure = Callable[[Sequence[Choice], str], list[float]]


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


def search(problem: Problem, spec: SearchSpec, measure: Measure) -> Outcome:
    """See the module's docstring. ``measure``: the KL of choices."""
    known: dict[Choice, float] = {}  # within the budget, in the order of measurement

    def measured(choices: Sequence[Choice], what: str) -> list[float]:
        kls = measure(choices, what)
        found = zip(choices, kls, strict=True)
        known.update((choice, kl) for choice, kl in found if problem.size(choice) <= problem.capacity)
        return kls

    uniform = uniform_choices(problem)
    background_kl, background = min(zip(measured(uniform, "uniform plans"), uniform, strict=True), key=itemgetter(0))
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
