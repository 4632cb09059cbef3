"""A comparison: the plans that it builds, a row for each, its share of KIVI-2's loss recovered, and the table.

    share recovered  R = (a - p) / (a - r),   a, p, r: loss of KIVI-2, of the plan, and of 16 bits

once with KL as the loss and once with 1 - mean accuracy. 0 is KIVI-2 and 1 is 16 bits, both exactly; less and more are
possible. By the delta method, with the partial derivatives -1, 1 - R and R over (a - r),

    se(R) = sqrt(se(p)^2 + (1 - R)^2 se(a)^2 + R^2 se(r)^2) / (a - r)

This takes the three errors as independent. They are not: all plans are measured on the same texts and problems. The
three derivatives sum to 0, so whatever such a sample does to all three losses alike cancels in R, yet each loss's own
error still counts it: with a covariance c between any two losses the variance is smaller than stated, by
2 c (1 - R + R^2) / (a - r)^2. So where losses rise and fall together the stated error is too large. The exact one would
need every problem's outcome under every plan.

There is no share where KIVI-2 loses nothing beyond the error of that loss, a - r <= sqrt(se(a)^2 + se(r)^2): it would
be noise over noise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as record

from kvcal.errors import UsageError
from kvcal.plan.plan import Workload
from kvcal.recipe import Recipe
from kvcal.recipe_files import load_recipe
from kvcal.records import read_json, write_json
from kvcal.stages.evaluate import Row, percent, require_same_tasks, table_columns
from kvcal.strict import STRICT, Amount, Number

KIND = "comparison"
SCHEMA = 3
RAW_RECIPE, WORST_RECIPE = "16-bit", "kivi-2"
BASELINES = (RAW_RECIPE, WORST_RECIPE, "kivi-4")
MIN_BITS, MAX_BITS = 0.1, 16.0
NOTHING = "-"  # of a cell
# Columns of an evaluation that have no place beside the shares recovered.
EVALUATION_ALONE = ("plan", "top-1 %", "generated")

# (loss, its standard error or None where it is unknown)
Loss = tuple[float, float | None]


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


@record(frozen=True, config=STRICT)
class Share:
    """The share of KIVI-2's loss that is recovered; ``se`` None: exact, or unknown."""

    value: Number
    se: Amount | None


@record(frozen=True, config=STRICT)
class StageTime:
    """The time that making one artifact took; None where no comparison has seen it made."""

    file: str
    sha256: str
    seconds: Amount | None


@record(frozen=True, config=STRICT)
class Calibration:
    """``seconds``: the sum over ``stages``, in the order in which they were made, None where one of them is unknown."""

    seconds: Amount | None
    stages: tuple[StageTime, ...]


@record(frozen=True, config=STRICT)
class Refusal:
    """The error of a recipe without numbers: its own words, and the exit code it has by itself."""

    stage: Literal["build", "evaluate"]
    message: str
    hint: str | None
    exit_code: Annotated[int, Field(ge=1, le=255)]


@record(frozen=True, config=STRICT)
class Entry:
    """One plan. ``bits``: the budget it was built for, None for the recipe's own. ``row`` is None until it is measured,
    and for ever with a ``refusal``."""

    name: str
    recipe: str
    recipe_sha256: str
    bits: Amount | None
    is_baseline: bool
    calibration: Calibration
    refusal: Refusal | None = None
    row: Row | None = None
    kl_recovered: Share | None = None
    accuracy_recovered: Share | None = None


@record(frozen=True, config=STRICT)
class Comparison:
    """``inputs``: what the rows were measured with, flat; ``stage_seconds``: what every artifact ever made
    for this comparison took, by its sha256. ``entries``: the baselines, then the recipes as they were given."""

    model: str
    inputs: dict[str, Any]
    data: str
    data_fingerprint: str
    task_seed: int
    workload: Workload
    stage_seconds: dict[str, Amount]
    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        names = [entry.name for entry in self.entries]
        if len(set(names)) < len(names):
            raise ValueError(f"entries {names[:8]}, expected each name once")
        require_same_tasks([row for _, row in self.measured])

    @property
    def measured(self) -> tuple[tuple[Entry, Row], ...]:
        """The entries that have numbers, with them."""
        return tuple((entry, entry.row) for entry in self.entries if entry.row is not None)


def share_recovered(plan: Loss, worst: Loss, raw: Loss) -> Share | None:
    """See the module's docstring; None where ``worst`` loses nothing beyond its error. An unknown error counts as 0 for
    that, and leaves the share without one."""
    (p, p_se), (a, a_se), (r, r_se) = plan, worst, raw
    lost = a - r
    if lost <= math.hypot(a_se or 0.0, r_se or 0.0):
        return None
    share = (a - p) / lost
    if p_se is None or a_se is None or r_se is None:
        return Share(share, None)
    return Share(share, math.hypot(p_se, (1 - share) * a_se, share * r_se) / lost)


def with_shares(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """The entries with the shares that their rows give. Without both baselines' rows there are none."""
    rows = {entry.name: entry.row for entry in entries if entry.is_baseline}
    raw, worst = rows.get(RAW_RECIPE), rows.get(WORST_RECIPE)
    if raw is None or worst is None:
        return tuple(entries)
    return tuple(entry if entry.row is None else _with_shares(entry, entry.row, worst, raw) for entry in entries)


def _with_shares(entry: Entry, row: Row, worst: Row, raw: Row) -> Entry:
    kl = share_recovered(*((r.text.kl, r.text.kl_se) for r in (row, worst, raw)))
    accuracy = share_recovered(*((1 - (r.accuracy or 0.0), r.accuracy_se) for r in (row, worst, raw)))
    accuracy = accuracy if row.tasks else None
    if row.plan_sha256 in (worst.plan_sha256, raw.plan_sha256):  # 0 and 1 by definition, not by measurement
        kl = kl and replace(kl, se=None)
        accuracy = accuracy and replace(accuracy, se=None)
    return replace(entry, kl_recovered=kl, accuracy_recovered=accuracy)


def save_comparison(comparison: Comparison, path: str | Path) -> None:
    """Write the JSON file whole or not at all; ArtifactError when it cannot be written."""
    write_json(path, KIND, SCHEMA, comparison)


def load_comparison(path: str | Path) -> Comparison:
    """Read what ``save_comparison`` wrote. ArtifactError as ``read_json``."""
    hint = "delete the file and run kvcal compare again: plans and rows are kept beside it"
    return read_json(path, KIND, SCHEMA, Comparison, hint)


def comparison_title(comparison: Comparison) -> str:
    """The table's title: what its numbers are."""
    workload = comparison.workload
    return (
        f"{comparison.data}; bytes at batch {workload.batch} x {workload.context} tokens; ± standard errors; "
        f"recovered: share of {WORST_RECIPE}'s loss against {RAW_RECIPE}"
    )


def comparison_columns(comparison: Comparison) -> list[tuple[str, tuple[str, ...]]]:
    """The table: (header, one cell an entry) columns. Reasons of refusals are in a last one, where there are any."""
    entries, rows = comparison.entries, [row for _, row in comparison.measured]
    columns = [("plan", tuple(entry.name for entry in entries))]
    for header, cells in table_columns(rows):
        if header not in EVALUATION_ALONE:
            measured = iter(cells)
            columns.append((header, tuple(NOTHING if entry.row is None else next(measured) for entry in entries)))
    columns.append(("KL recovered %", tuple(_share(entry.kl_recovered) for entry in entries)))
    if rows and rows[0].tasks:
        columns.append(("tasks recovered %", tuple(_share(entry.accuracy_recovered) for entry in entries)))
    columns.append(("calibration s", tuple(_calibration(entry.calibration) for entry in entries)))
    if any(entry.refusal for entry in entries):
        columns.append(("refused", tuple(entry.refusal.message if entry.refusal else "" for entry in entries)))
    return columns


def _share(share: Share | None) -> str:
    return NOTHING if share is None else percent(share.value, share.se)


def _calibration(calibration: Calibration) -> str:
    return NOTHING if calibration.seconds is None else f"{calibration.seconds:.1f}"
