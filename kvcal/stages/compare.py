"""All recipes on one model: every plan built, then every plan measured on the same texts and problems, as
rows of name, bits, KL and accuracy with standard errors.

The workload is the comparison's, for all plans alike, so that bytes can be compared. 16 bits, KIVI-2 and
KIVI-4 come along. A recipe that raises an error, in building or in measuring, becomes a row with the reason
and the others go on; an error of a baseline ends the comparison, which would have nothing to stand on.

Every plan has its own folder of artifacts, plans/RECIPE/BITS, so that a second run finds all of them current.
A profile does not depend on the budget: the plans of one recipe share it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from kvcal.data.reading import EvaluateSpec
from kvcal.data.sequences import TokenDataset
from kvcal.distributed import gather
from kvcal.errors import KvcalError, RankFailed, UsageError
from kvcal.folder import Folder, model_inputs, require_model
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import Plan, Workload
from kvcal.progress import SILENT, Reporter
from kvcal.recipe import Recipe
from kvcal.recipe_files import load_recipe
from kvcal.records import read_json, write_json
from kvcal.stages.evaluate.stage import Row, evaluate, evaluation_inputs, kept_rows, scheduled_batch, table_columns
from kvcal.strict import STRICT, Amount

FILE = "compare.json"
KIND = "comparison"
SCHEMA = 5
BASELINES = ("16-bit", "kivi-2", "kivi-4")
MIN_BITS, MAX_BITS = 0.1, 16.0
# Columns of an evaluation that a comparison leaves out, besides the names.
EVALUATION_ALONE = ("plan", "generated")

# All stages of a recipe up to its plan, resuming from the folder's artifacts.
Build = Callable[[LoadedModel, Folder, Recipe, Workload, Reporter], Plan]


@dataclass(frozen=True)
class Point:
    """A plan to build. ``bits``: the budget that was put into the recipe, None where it has its own or
    none."""

    name: str
    recipe: Recipe
    bits: float | None
    is_baseline: bool

    def folder(self, plans: Path) -> Folder:
        """Its folder below ``plans``, with the profile of all budgets one folder up; no name leads
        elsewhere."""
        return _folder(plans, self.recipe.name, self.bits)


def _folder(plans: Path, recipe: str, bits: float | None) -> Folder:
    above = plans / re.sub(r"^\.+|[^\w.+-]", "_", recipe)
    return Folder(above / ("own" if bits is None else format(bits, "g")), above)


@pydantic_dataclass(frozen=True, config=STRICT)
class Refusal:
    """The error of a recipe without numbers: its own words, and the exit code it has by itself."""

    stage: Literal["build", "evaluate"]
    message: str
    hint: str | None
    exit_code: Annotated[int, Field(ge=1, le=255)]


@pydantic_dataclass(frozen=True, config=STRICT)
class Entry:
    """One plan. ``bits``: its budget, None for the recipe's own. ``row``: its numbers, None with a
    ``refusal``."""

    name: str
    recipe: str
    recipe_sha256: str
    bits: Amount | None
    is_baseline: bool
    refusal: Refusal | None = None
    row: Row | None = None

    def folder(self, plans: Path) -> Folder:
        """The folder of its plan; see ``Point.folder``."""
        return _folder(plans, self.recipe, self.bits)


@pydantic_dataclass(frozen=True, config=STRICT)
class Comparison:
    """``inputs``: what the rows were measured with, flat. ``entries``: the baselines, then the recipes as
    given."""

    model: str
    inputs: dict[str, Any]
    data: str
    data_fingerprint: str
    task_seed: int
    workload: Workload
    entries: tuple[Entry, ...]

    @property
    def measured(self) -> tuple[tuple[Entry, Row], ...]:
        """The entries that have numbers, with them."""
        return tuple((entry, entry.row) for entry in self.entries if entry.row is not None)


def points_of(names: Sequence[str], bits: Sequence[float]) -> tuple[Point, ...]:
    """The points for recipes named ``names`` (paths, or names of those that come with kvcal): the baselines,
    then each recipe once, or, if it allocates a budget, once for each of ``bits`` (all-in bits per cached
    value), fewest first."""
    for value in bits:
        if not MIN_BITS <= value <= MAX_BITS:  # NaN, too
            raise UsageError(f"--bits {value:g} is out of range, expected {MIN_BITS:g} to {MAX_BITS:g} bits per value")
        if sum(other == value for other in bits) > 1:
            raise UsageError(f"--bits {value:g} is given twice", hint="give each budget once")
    recipes = {name: load_recipe(name) for name in BASELINES}
    for recipe in map(load_recipe, names):
        for other in recipes.values():
            is_baseline = other.sha256 == recipe.sha256 and other.name in BASELINES
            if other.name == recipe.name and not is_baseline:
                raise UsageError(f"two recipes are named {recipe.name!r}", hint="give each once, or rename a file")
        recipes[recipe.name] = recipe
    others = [recipe for name, recipe in recipes.items() if name not in BASELINES]
    if not others:
        raise UsageError(f"no recipe to compare with: {', '.join(BASELINES)} come along anyway", hint="name one more")
    if bits and all(recipe.allocate is None for recipe in others):
        raise UsageError(
            f"--bits given, but none of {[recipe.name for recipe in others]} has [allocate]",
            hint="leave --bits out: these recipes have the bytes they have",
        )
    points = [Point(name, recipes[name], None, True) for name in BASELINES]
    for recipe in others:
        if recipe.allocate is None or not bits:
            points.append(Point(recipe.name, recipe, None, False))
            continue
        for value in sorted(bits):
            spec = replace(recipe.allocate, bits=value, budget=None, kv_budget=None, same_bytes_as=None)
            points.append(Point(f"{recipe.name} @ {value:g}", replace(recipe, allocate=spec), value, False))
    if len({point.folder(Path()) for point in points}) < len(points):
        raise UsageError("two recipes' names differ in punctuation only, or two --bits in their last digits")
    return tuple(points)


def compare(
    loaded: LoadedModel,
    points: Sequence[Point],
    workload: Workload,
    spec: EvaluateSpec,
    data: TokenDataset,
    folder: Folder,
    build: Build,
    reporter: Reporter,
) -> Comparison:
    """Build and measure all ``points``; plans and rows stay in ``folder`` for the next run. ``spec`` and
    ``data``: what everything is measured with; ``spec.against`` is not used."""
    path = folder.path / FILE
    if path.exists():
        require_model(path, model_inputs(loaded), load_comparison(path).inputs)
    entries, plans = dict[str, Entry](), dict[str, Plan]()
    for number, point in enumerate(points):
        reporter.say(f"compare: {point.name} ({number + 1} of {len(points)})")
        recipe, into = point.recipe, point.folder(folder.path / "plans")
        Folder.create(into.path)
        refusal = None
        try:
            plans[point.name] = build(loaded, into, recipe, workload, reporter)
        except KvcalError as error:
            if point.is_baseline or isinstance(error, RankFailed):
                raise
            refusal = Refusal("build", error.message, error.hint, error.exit_code)
            reporter.say(f"compare: {point.name} is refused: {error.message}")
        entries[point.name] = Entry(point.name, recipe.name, recipe.sha256, point.bits, point.is_baseline, refusal)
    spec = scheduled_batch(spec, plans.items(), reporter)
    inputs = evaluation_inputs(loaded, spec, data)
    rows, refusals = _measure(loaded, plans, spec, data, inputs, folder.evaluation, reporter)
    for name in plans:
        entries[name] = replace(entries[name], row=rows.get(name), refusal=refusals.get(name))
    comparison = Comparison(
        loaded.identity.id, inputs, data.description, data.fingerprint, spec.seed, workload, tuple(entries.values())
    )
    write_json(path, KIND, SCHEMA, comparison)
    return comparison


def _measure(
    loaded: LoadedModel,
    plans: Mapping[str, Plan],
    spec: EvaluateSpec,
    data: TokenDataset,
    inputs: dict[str, Any],
    path: Path,
    reporter: Reporter,
) -> tuple[dict[str, Row], dict[str, Refusal]]:
    """Rows and refusals, by name. A plan that cannot be measured is left out, and the others are taken up
    again."""
    remaining, refusals = dict(plans), dict[str, Refusal]()
    while True:
        try:
            evaluation = evaluate(loaded, list(remaining.items()), spec, data, inputs, path, reporter)
            return {row.name: row for row in evaluation.rows}, refusals
        except RankFailed:
            raise
        except KvcalError as error:
            gather(None)  # until rank 0 has written the rows
            measured = kept_rows(path, inputs, SILENT)
            name = next((name for name, plan in remaining.items() if plan.sha256 not in measured), None)
            if name is None or name in BASELINES:
                raise
            refusals[name] = Refusal("evaluate", error.message, error.hint, error.exit_code)
            reporter.say(f"compare: {name} cannot be measured: {error.message}")
            del remaining[name]


def load_comparison(path: Path) -> Comparison:
    hint = "delete the file and run kvcal compare again: plans and rows are kept next to it"
    return read_json(path, KIND, SCHEMA, Comparison, hint)


def comparison_columns(comparison: Comparison) -> list[tuple[str, tuple[str, ...]]]:
    """The table: (header, one cell an entry) columns."""
    entries = comparison.entries
    columns = [("plan", tuple(entry.name for entry in entries))]
    for header, cells in table_columns([row for _, row in comparison.measured]):
        if header not in EVALUATION_ALONE:
            measured = iter(cells)
            columns.append((header, tuple("-" if entry.row is None else next(measured) for entry in entries)))
    return columns


@dataclass(frozen=True)
class Verdict:
    """The plan that does best, and the baseline next to it in bytes: their entries and rows."""

    winner: Entry
    row: Row
    rival: Entry
    rival_row: Row

    def __str__(self) -> str:
        """Such as "default @ 3: 1/9 of kivi-2's KL at .96 of its bytes"."""
        ours, theirs = self.row.text, self.rival_row.text
        error = math.hypot(ours.kl_se or 0.0, theirs.kl_se or 0.0)
        if abs(ours.kl - theirs.kl) <= 2 * error:
            share = f"the KL of {self.rival.name}, within the errors,"
        elif ours.kl < theirs.kl:
            share = f"1/{_times(theirs.kl, ours.kl)} of {self.rival.name}'s KL"
        else:
            share = f"{_times(ours.kl, theirs.kl)} times {self.rival.name}'s KL"
        size = self.row.total_bytes / self.rival_row.total_bytes
        return f"{self.winner.name}: {share} at {'its' if abs(size - 1) < 0.01 else f'{size:.2f} of its'} bytes"


def _times(more: float, less: float) -> str:
    """A number of times, 1000 at most."""
    times = more / max(less, more / 1000)
    return f"{times:.0f}" if times > 9 else f"{times:.2g}"


def verdict(comparison: Comparison) -> Verdict | None:
    """Of the recipes' plans that take no more bytes than KIVI-2, or of all where none does, the one of least
    KL, next to the baseline that is nearest in bytes. None where no recipe was measured."""
    rivals = [(entry, row) for entry, row in comparison.measured if entry.is_baseline and entry.name != BASELINES[0]]
    plans = [(entry, row) for entry, row in comparison.measured if not entry.is_baseline]
    if not rivals or not plans:
        return None
    most = 1.01 * min(row.total_bytes for _, row in rivals)
    winner, row = min([one for one in plans if one[1].total_bytes <= most] or plans, key=lambda one: one[1].text.kl)
    rival = min(rivals, key=lambda one: abs(math.log(one[1].total_bytes / row.total_bytes)))
    return Verdict(winner, row, *rival)
