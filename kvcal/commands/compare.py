"""``kvcal compare``: recipes side by side on one model, at stated budgets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvcal.commands.options import (
    Columns,
    Config,
    Data,
    DataOptions,
    Device,
    Dtype,
    EvalData,
    Json,
    ModelOption,
    Problems,
    Quiet,
    Samples,
    Seed,
    SeqLen,
    Split,
    Tasks,
    load,
    tell_toy_data,
    with_data,
    with_tasks,
)
from kvcal.quantities import MAX_BATCH, MAX_CONTEXT


def compare(
    recipes: Annotated[
        list[str], typer.Argument(metavar="RECIPE...", help="Recipes: paths, or names of those that come with kvcal.")
    ],
    model: ModelOption,
    bits: Annotated[
        list[float] | None,
        typer.Option(help="All-in bits per cached value for the recipes with [allocate]; may be repeated."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences in the batch, for all plans.", min=1, max=MAX_BATCH)] = 8,
    context: Annotated[
        int, typer.Option(help="Tokens of each sequence, for all plans.", min=1, max=MAX_CONTEXT)
    ] = 4096,
    recipe_evaluate: Annotated[str, typer.Option(help="Recipe whose [evaluate] is used for all.")] = "default",
    data: Data = None,
    columns: Columns = None,
    split: Split = None,
    config: Config = None,
    samples: Samples = None,
    seq_len: SeqLen = None,
    seed: Seed = None,
    eval_data: EvalData = None,
    task: Tasks = None,
    problems: Problems = None,
    out: Annotated[Path, typer.Option(help="Folder of the plans, the table and the picture.")] = Path(
        "artifacts/compare"
    ),
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Build and measure several recipes on one model, beside 16 bits, KIVI-2 and KIVI-4.

    Recipes with [allocate] are built once for each --bits, others once. A recipe that is refused is a row with the
    reason. What is finished is kept in --out: the same command goes on from there, and --bits or recipes may be added.

    Example: `kvcal compare pm-kvq kitty best --model reasoner-10m --bits 2.25 --bits 2.5 --bits 3`

    Example: `kvcal compare mine.toml --model Qwen/Qwen3-8B --bits 2.5 --batch 16 --context 32768 --json`
    """
    from kvcal import console
    from kvcal.charts.comparison import draw_comparison
    from kvcal.data.sequences import TASK_SOURCES
    from kvcal.plan.plan import Workload
    from kvcal.recipe_files import load_recipe
    from kvcal.run import pipeline
    from kvcal.run.transform import sequences
    from kvcal.stages.compare import FILE
    from kvcal.stages.compare import compare as compare_points
    from kvcal.stages.compare.record import comparison_columns, comparison_title, points_of
    from kvcal.strict import dump

    given = DataOptions(data, columns, split, config, samples, seq_len, seed)
    points = tuple(replace(p, recipe=with_data(p.recipe, given, eval_data)) for p in points_of(recipes, bits or ()))
    spec = with_tasks(with_data(load_recipe(recipe_evaluate), given, eval_data).evaluate, task, problems)
    workload, folder = Workload(batch, context), pipeline.Folder.create(out)
    with console.TerminalReporter(quiet).running() as reporter:
        loaded = load(model, dtype, device)
        toy = next(
            (p.recipe.data for p in points if p.recipe.calibrates and p.recipe.data.source in TASK_SOURCES), None
        )
        if toy is not None:
            tell_toy_data(toy, loaded, reporter)
        texts = sequences(spec.data, loaded, "report")
        found = compare_points(loaded, points, workload, spec, texts, folder, pipeline.build_plan, reporter)
        picture = folder.path / "compare.png"
        draw_comparison(found, picture)
    if json:
        console.print_json(dump(found))
    else:
        table = comparison_columns(found)
        headers, cells = [header for header, _ in table], [column for _, column in table]
        console.print_table(comparison_title(found), headers, list(zip(*cells, strict=True)))
        reporter.say(f"table: {folder.path / FILE}\npicture: {picture}")
    refusals = [entry.refusal for entry in found.entries if entry.refusal is not None]
    if refusals and not any(not entry.is_baseline for entry, _ in found.measured):
        raise typer.Exit(refusals[0].exit_code)
