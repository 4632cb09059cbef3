"""The search: whole plans are compared, then composed, and a composition has to win.

1. Every style alone, for all keys or all values, shows what it does to the KL.
2. Whole plans are compared: those of the systems, those of smaller budgets in the folder, and one style for all keys
   and one for all values (the ``MAX_UNIFORM`` best by the sum of 1). Many on few texts, few on all (``judge.halve``).
3. From the simplest on, a plan gives way to another only if that is better (``judge.better``): the champion.
4. In each round, single changes of the champion are measured on few texts, shrunk towards what the same change does in
   all layers, and added up by the exact solver, with penalties of 0 to 4 of their own errors for a unit that changes;
   once more as they were measured. The plans that it finds and the best single changes, shrunk and measured, are
   measured as in 2, and must beat the champion as in 3.
5. The champion is finished: what fits and encodes its pages anew has to win as in 3.
6. No plan that was compared whole may be significantly better than the champion on the texts of the validation, and no
   plan of a smaller budget better at all: it would ship instead, unless a plan of 2, 4 or 5 is better (as in 3) than
   it. It is finished as in 5.

``planned`` (kvcal.stages.search.cost) says beforehand what is measured at most: of 64 units in two rounds about 850
plans, nearly all on the first tier of texts alone.

Left out: pairs of units, beyond what a next round sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcal.plan.page_format import SIDES, Side
from kvcal.stages.search.compositions import RAW_OPTION, Style
from kvcal.stages.search.judge import SIGNIFICANT, Pool, better, difference, halve, score, shrink
from kvcal.stages.search.problem import Choice, Problem, shared_styles, side_choice, uniform_choices

# Uniform plans that are compared, single changes that are measured in a round, plans that see all texts.
MAX_UNIFORM, MAX_SINGLES, FINALISTS = 24, 320, 4
# Of a unit, and 16 bits, however many units there are. With 2, a search of 24 units shipped 1.2 to 5.5 times the KL.
MIN_SINGLES = 4
# Penalties of a unit that changes, in standard deviations of its estimate.
CAUTION = (0.0, 0.5, 1.0, 2.0, 4.0)
MAX_COMPOSED = len(CAUTION) + 3


@dataclass(frozen=True)
class Candidate:
    """A plan to judge. ``choice``: None where the problem's options do not compose it; ``plan``: what is measured."""

    name: str
    choice: Choice | None
    complexity: int
    nbytes: int
    plan: Any = field(default=None, compare=False, hash=False)


Make = Callable[[str, Choice], Candidate]
# The candidate, or a better plan of the same options; and all plans that were tried in its place.
Finish = Callable[[Candidate], tuple[Candidate, list[Candidate]]]


@dataclass(frozen=True)
class Change:
    """A unit in another option: the change of the score as measured, its standard error, and the shrunk estimate."""

    position: int
    option: int
    measured: float
    error: float
    estimate: float
    deviation: float


@dataclass(frozen=True)
class Outcome:
    """``champion``: the plan that ships. ``compared``: all plans that saw every text of the selection;
    ``background`` and ``changes``: of the last round; ``proxy``: (estimated, measured) score of compositions."""

    champion: Candidate
    compared: tuple[Candidate, ...]
    background: Candidate | None
    changes: tuple[Change, ...]
    proxy: tuple[tuple[float, float], ...]


def search(
    problem: Problem,
    num_rounds: int,
    select: Pool[Candidate],
    validate: Pool[Candidate],
    systems: Sequence[Candidate],
    earlier: Sequence[Candidate],
    make: Make,
    finish: Finish,
) -> Outcome:
    """See the module's docstring. ``systems`` and ``earlier``: whole plans within the budget."""
    effects = style_effects(problem, select, make)
    uniform = [make(name, choice) for name, choice in uniform_choices(problem, effects, MAX_UNIFORM).items()]
    whole = _distinct([*systems, *earlier, *uniform]) or [make("the smallest", problem.smallest)]
    compared = halve(select, whole, FINALISTS, "whole plans")
    champion = choose(compared, select, validate)
    background, changes, proxy = None, tuple[Change, ...](), list[tuple[float, float]]()
    ingredients = _distinct([*compared, *systems, *earlier])
    for number in range(1, num_rounds + 1):
        background = next((c for c in (champion, *compared) if c.choice is not None), None)
        if background is None:
            break
        changes = single_changes(problem, background, effects, select, make, number)
        composed = compositions(problem, background, changes, make, number)
        at = select.scores([background])[0]
        found = halve(select, [candidate for candidate, _ in composed], FINALISTS, f"compositions {number}")
        proxy += [
            (score(at, select.kinds) + gain, select.score(candidate))
            for candidate, gain in composed
            if candidate in found
        ]
        before, champion = champion, choose(found, select, validate, champion)
        compared += [candidate for candidate in found if candidate not in compared]
        if champion == before:
            break
    champion, tried = finish(champion)
    compared = _distinct([*compared, champion, *tried])
    guard = guarded(champion, ingredients, earlier, validate)
    if guard != champion:
        champion, tried = finish(choose(compared, select, validate, guard))
        compared = _distinct([*compared, champion, *tried])
    return Outcome(champion, tuple(compared), background, changes, tuple(proxy))


def _distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Each plan once: the first of equal choices, and all that have none."""
    found: dict[object, Candidate] = {}
    for candidate in candidates:
        found.setdefault(candidate if candidate.choice is None else candidate.choice, candidate)
    return list(found.values())


def style_effects(problem: Problem, select: Pool[Candidate], make: Make) -> dict[tuple[Side, Style], float]:
    """The score of every style for all keys, or all values, alone, on the first tier of texts."""
    places = [(side, style) for side in SIDES for style in shared_styles(problem, side)]
    candidates = [make(f"{side.upper()} {style}", side_choice(problem, side, style)) for side, style in places]
    rows = select.scores(candidates, select.tiers[0], "styles alone")
    return {place: score(row, select.kinds) for place, row in zip(places, rows, strict=True)}


def choose(
    candidates: Sequence[Candidate],
    select: Pool[Candidate],
    validate: Pool[Candidate],
    champion: Candidate | None = None,
) -> Candidate:
    """The first of whole plans is the simplest; each that is better takes over, simple ones first. With a champion, the
    compositions that challenge it come by their score."""
    is_first = champion is None
    ranked = sorted(candidates, key=lambda one: (one.complexity if is_first else 0, select.score(one)))
    champion = ranked[0] if champion is None else champion
    for candidate in ranked:
        if candidate != champion and better(candidate, champion, select, validate):
            champion = candidate
    return champion


def singles_of(num_units: int) -> int:
    """Changes of a unit that are measured at most, 16 bits apart."""
    return max(MIN_SINGLES, MAX_SINGLES // num_units)


def single_changes(
    problem: Problem,
    background: Candidate,
    effects: dict[tuple[Side, Style], float],
    select: Pool[Candidate],
    make: Make,
    number: int,
) -> tuple[Change, ...]:
    """Every unit of the background in other options, on the first tier of texts: ``MAX_SINGLES`` in all, or
    ``MIN_SINGLES`` for each unit, nearest in bytes, and 16 bits; of styles that no other betters in both bytes and
    effect."""
    current = background.choice
    assert current is not None
    most = singles_of(len(problem.units))
    places = [
        (position, option)
        for position in range(len(problem.units))
        for option in _near(problem, position, current[position], effects, most)
    ]
    singles = [
        make(f"change {position} to {option}", (*current[:position], option, *current[position + 1 :]))
        for position, option in places
    ]
    few = select.tiers[0]
    rows = select.scores([background, *singles], few, f"single changes, round {number}")
    pairs = [difference(row, rows[0], select.kinds) for row in rows[1:]]
    groups: dict[object, list[int]] = {}
    for at, (position, option) in enumerate(places):
        options = problem.options[position]
        alike = problem.units[position].side, options[current[position]].style, options[option].style
        groups.setdefault(alike, []).append(at)
    changes: dict[int, Change] = {}
    for group in groups.values():
        estimates = zip(group, *shrink(*zip(*(pairs[at] for at in group), strict=True)), strict=True)
        changes |= {at: Change(*places[at], *pairs[at], mean, deviation) for at, mean, deviation in estimates}
    return tuple(changes[at] for at in range(len(places)))


def _near(
    problem: Problem, position: int, current: int, effects: dict[tuple[Side, Style], float], most: int
) -> list[int]:
    """Numbers of the options to try in a unit."""
    side, sizes = problem.units[position].side, problem.nbytes[position]
    effect = [effects.get((side, option.style), math.inf) for option in problem.options[position]]
    points = list(zip(sizes, effect, strict=True))
    allowed = [pairs for k, v, pairs in problem.couples if position in (k, v)][0]
    place = SIDES.index(side)
    raw = problem.options[position].index(RAW_OPTION)
    useful = [
        number
        for number, point in enumerate(points)
        if number not in (current, raw)
        and any(pair[place] == number for pair in allowed)
        and not any(other[0] <= point[0] and other[1] <= point[1] and other != point for other in points)
    ]
    nearest = sorted(useful, key=lambda number: (abs(sizes[number] - sizes[current]), number))[:most]
    can_be_raw = raw != current and any(pair[place] == raw for pair in allowed)
    return [*nearest, *([raw] if can_be_raw else [])]


def compositions(
    problem: Problem, background: Candidate, changes: Sequence[Change], make: Make, number: int
) -> list[tuple[Candidate, float]]:
    """Plans that the solver finds from bold to cautious and from what was measured itself, and the best single changes,
    each with the estimated change of the score. Changes do not add up: what one does alone, a dozen may undo; and the
    layer that matters most is the one that an estimate shrinks most."""
    current = background.choice
    assert current is not None
    guesses = [[c.estimate + caution * c.deviation for c in changes] for caution in CAUTION]
    found: dict[Choice, float] = {}
    for guess in (*guesses, [c.measured for c in changes]):
        losses: list[dict[int, float]] = [{option: 0.0} for option in current]
        for change, loss in zip(changes, guess, strict=True):
            losses[change.position][change.option] = loss
        choice = problem.solve(losses)
        if choice is not None and choice != current:
            taken = {(position, option) for position, option in enumerate(choice)}
            found[choice] = sum(c.estimate for c in changes if (c.position, c.option) in taken)
    alone = {(*current[: c.position], c.option, *current[c.position + 1 :]): c for c in changes}
    fitting = [choice for choice in alone if problem.size(choice) <= problem.capacity and problem.is_allowed(choice)]
    for key in (lambda choice: alone[choice].estimate, lambda choice: alone[choice].measured):
        if fitting:
            best = min(fitting, key=key)
            found.setdefault(best, alone[best].estimate)
    return [(make(f"composition {number}.{n}", choice), gain) for n, (choice, gain) in enumerate(found.items(), 1)]


def guarded(
    champion: Candidate, ingredients: Sequence[Candidate], earlier: Sequence[Candidate], validate: Pool[Candidate]
) -> Candidate:
    """The champion, or an ingredient that the validation shows to be significantly better, or a plan of an earlier
    search that it shows to be better at all."""
    others = [candidate for candidate in ingredients if candidate != champion]
    for candidate in sorted(others, key=lambda c: (c.complexity, c.nbytes)):
        change, error = validate.difference(candidate, champion)
        if change < -SIGNIFICANT * error:
            champion = candidate
    for candidate in earlier:
        if validate.difference(candidate, champion)[0] < 0:
            champion = candidate
    return champion
