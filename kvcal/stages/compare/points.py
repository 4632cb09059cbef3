"""The plans that a comparison builds: the baselines, and every recipe at every budget it can be given."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcal.errors import UsageError
from kvcal.recipe import Recipe, load_recipe
from kvcal.stages.compare.record import BASELINES

MIN_BITS, MAX_BITS = 0.1, 16.0


@dataclass(frozen=True)
class Point:
    """A plan to build. ``bits``: the budget that was put into the recipe, None where it has its own or none."""

    name: str
    recipe: Recipe
    bits: float | None
    is_baseline: bool

    @property
    def folder(self) -> str:
        """The name of its folder; nothing in it leads elsewhere."""
        safe = re.sub(r"[^\w.+-]", "_", self.recipe.name)
        return f"{safe}@{'own' if self.bits is None else format(self.bits, 'g')}"


def points_of(names: Sequence[str], bits: Sequence[float]) -> tuple[Point, ...]:
    """The points for recipes named ``names`` (paths, or names of those that come with kvcal): the baselines, then each
    recipe once, or, if it allocates a budget, once for each of ``bits`` (all-in bits per cached value), fewest first.

    Raises:
        UsageError: no recipe besides the baselines, an unknown one, or one twice; bits out of range or twice, or given
            to recipes none of which allocates a budget.
    """
    budgets = _budgets(bits)
    baselines = {name: load_recipe(name) for name in BASELINES}
    others = _others(names, baselines)
    if budgets and all(recipe.allocate is None for recipe in others):
        raise UsageError(
            f"--bits given, but none of {[recipe.name for recipe in others]} has [allocate]",
            hint="leave --bits out: these recipes have the bytes they have",
        )
    points = [Point(recipe.name, recipe, None, True) for recipe in baselines.values()]
    for recipe in others:
        if recipe.allocate is None or not budgets:
            points.append(Point(recipe.name, recipe, None, False))
            continue
        for value in budgets:
            spec = replace(recipe.allocate, bits=value, budget=None, kv_budget=None, same_bytes_as=None)
            points.append(Point(f"{recipe.name} @ {value:g}", replace(recipe, allocate=spec), value, False))
    folders = [point.folder for point in points]
    for point in points:
        if folders.count(point.folder) > 1:
            raise UsageError(f"recipe {point.recipe.name!r}: another one's name differs in punctuation only")
    return tuple(points)


def _budgets(bits: Sequence[float]) -> list[float]:
    """The budgets in order, each in range and there once."""
    for value in bits:
        if not MIN_BITS <= value <= MAX_BITS:  # NaN, too
            raise UsageError(f"--bits {value:g} is out of range, expected {MIN_BITS:g} to {MAX_BITS:g} bits per value")
    names = [format(value, "g") for value in bits]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"--bits {twice[0]} is given twice", hint="give each budget once")
    return sorted(bits)


def _others(names: Sequence[str], baselines: dict[str, Recipe]) -> list[Recipe]:
    """The recipes that are no baselines; a baseline may be named, too."""
    others: dict[str, Recipe] = {}
    for recipe in map(load_recipe, names):
        if recipe.name in others or baselines.get(recipe.name, recipe).sha256 != recipe.sha256:
            raise UsageError(f"two recipes are named {recipe.name!r}", hint="give each recipe once, or rename a file")
        if recipe.name in baselines:
            continue
        for other in [*baselines.values(), *others.values()]:
            if other.sha256 == recipe.sha256:
                raise UsageError(
                    f"{other.name!r} and {recipe.name!r} are the same recipe", hint="leave one of them out"
                )
        others[recipe.name] = recipe
    if not others:
        raise UsageError(f"no recipe to compare with: {', '.join(BASELINES)} come along anyway", hint="name one more")
    return list(others.values())
