"""``kvcal compare``: several recipes built and measured on one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvcal import console
from kvcal.commands import options
from kvcal.commands.decorators import spread
from kvcal.errors import UsageError
from kvcal.lazy_torch import lazy_imports

with lazy_imports():
    from kvcal import folder as artifacts
    from kvcal import recipe as recipe_keys
    from kvcal import recipe_files, strict, tables
    from kvcal.plan import plan as plan_file
    from kvcal.stages import compare as compare_stage
    from kvcal.stages import pipeline
    from kvcal.stages.evaluate import harness


@spread
def compare(
    recipes: Annotated[
        list[str], typer.Argument(metavar="RECIPE...", help="Recipes: paths, or names of those that come with kvcal.")
    ],
    model: options.ModelOption,
    given: options.RecipeOptions,
    sizes: options.WorkloadOptions,
    posed: options.TaskOptions,
    bits: Annotated[
        list[float] | None,
        typer.Option(help="All-in bits per cached value for the recipes with [allocate]; may be repeated."),
    ] = None,
    recipe: options.RecipeOption = "default",
    out: options.Out = Path("artifacts/compare"),
) -> None:
    """Build and measure several recipes on one model, next to 16 bits, KIVI-2 and KIVI-4.

    Recipes with [allocate] are built once for each --bits, others once. A recipe that fails is a row with the
    reason. All are measured by the [evaluate] of --recipe. What is finished is kept in --out: the same
    command resumes there, and --bits or recipes may be added. `--set evaluate.KEY` changes what is measured,
    any other the recipes that have its section.

    Example: `kvcal compare pm-kvq kitty best --model reasoner-10m --bits 2.25 --bits 2.5 --bits 3`

    Example: `kvcal compare mine.toml --model Qwen/Qwen3-8B --bits 2.5 --batch 16 --context 32768 --json`

    Example: `kvcal compare best kitty --model M --bits 2.5 --data texts.jsonl --tasks gsm8k,arc_easy --limit
    200`
    """
    evaluating = [text for text in given.sets or () if text.startswith(("evaluate.", "data."))]
    spec = replace(given, sets=evaluating, samples=None).recipe(recipe, posed.knobs(recipe, model)).evaluate
    if spec.harness_tasks:
        harness.require_tasks(spec)
    points = _changed(compare_stage.points_of(recipes, bits or ()), given)
    workload = sizes.workload(plan_file.DEFAULT_WORKLOAD)
    folder = artifacts.Folder.create(out)
    calibrations = [point.recipe.data for point in points if point.recipe.calibrates]
    toy = next((data for data in calibrations if data.is_toy or data.source == "auto"), None)
    with given.reporting() as reporter:
        loaded = given.load(model, toy, reporter)
        texts = artifacts.sequences(spec.data, loaded, "report", folder)
        comparison = compare_stage.compare(loaded, points, workload, spec, texts, folder, pipeline.build_plan, reporter)
    found = compare_stage.verdict(comparison)
    said: dict[str, object] = {"table": folder.path / compare_stage.FILE}
    shown: list[console.View | str] = [tables.comparison_table(comparison)]
    if found is not None:
        shown.append(str(found))
        winner = found.winner.folder(folder.path / "plans").plan
        said["next"] = options.generate_line(model, winner)
    given.finish(folder, strict.dump(comparison), *shown, said=said)
    refusals = [entry.refusal for entry in comparison.entries if entry.refusal is not None]
    if refusals and not any(not entry.is_baseline for entry, _ in comparison.measured):
        raise typer.Exit(refusals[0].exit_code)


def _changed(points: Sequence[compare_stage.Point], given: options.RecipeOptions) -> tuple[compare_stage.Point, ...]:
    """The plans to compare, with the knobs of --set in those sections that their recipes have. UsageError for
    a section that none has, and for budgets and workloads, which are the same for all."""
    sets = [text for text in given.sets or () if not text.startswith("evaluate.")]
    common = {f"allocate.{key}" for key in (*recipe_keys.BUDGET_KINDS, "batch", "context")}
    for name in recipe_files.read_settings(sets):
        section = name.partition(".")[0]
        if name in common:
            raise UsageError(f"--set {name}: the same for all recipes", hint="use --bits, --batch and --context")
        if all(getattr(point.recipe, section) is None for point in points):
            raise UsageError(f"--set {name}: none of the recipes has [{section}]", hint="leave it out")
    changed = []
    for point in points:
        own = [text for text in sets if getattr(point.recipe, text.partition("=")[0].partition(".")[0]) is not None]
        changed.append(replace(point, recipe=replace(given, sets=own).change(point.recipe)))
    return tuple(changed)
