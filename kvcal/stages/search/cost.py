"""The cost of a search: how many plans it measures on how many texts, and what that takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcal.plan.page_format import SIDES
from kvcal.recipe import SearchSpec
from kvcal.stages.search.compose import FINALISTS, MAX_COMPOSED, MAX_UNIFORM, singles_of
from kvcal.stages.search.problem import Problem, shared_styles

FINISHED = 4  # the champion with predictors of its own, and with error feedback of both sides or of one


class Cost(NamedTuple):
    """At most: different ``plans``, and how often one of them is measured on a text."""

    plans: int
    texts: int


def planned(problem: Problem, tiers: Sequence[int], num_systems: int, num_rounds: int) -> Cost:
    """The cost of a search at most, on the texts of the selection; the validation sees a dozen plans."""
    steps = [after - before for before, after in zip((0, *tiers), tiers, strict=False)]

    def halved(count: int) -> int:
        total = 0
        for step in steps:
            total += step * count
            count = max(FINALISTS, -(-count // 2))
        return total

    styles = sum(len(shared_styles(problem, side)) for side in SIDES)
    num_units = len(problem.units)
    most = [singles_of(num_units) + 1] * num_units
    singles = sum(min(limit, len(row) - 1) for limit, row in zip(most, problem.options, strict=True))
    whole = MAX_UNIFORM + num_systems
    plans = styles + whole + num_rounds * (singles + MAX_COMPOSED) + FINISHED
    texts = tiers[0] * (styles + num_rounds * singles) + halved(whole) + num_rounds * halved(MAX_COMPOSED)
    return Cost(plans, texts + FINISHED * tiers[-1])


def expected_plans(spec: SearchSpec, num_layers: int) -> int:
    """Plans that a search measures, about, before its problem is known."""
    singles = num_layers * (len(spec.keys) + len(spec.values))
    styles = len(spec.keys) + len(spec.values)
    return styles + MAX_UNIFORM + len(spec.systems) + spec.refine_rounds * (singles + MAX_COMPOSED) + FINISHED
