"""``kvcal run``: all stages of a recipe."""

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


def run(
    recipe: Annotated[str, typer.Argument(help="A recipe's path, or the name of one that comes with kvcal.")],
    model: Annotated[str | None, typer.Option(help="Folder, hub id or embedded name; default: the recipe's.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the artifacts; made if needed.")] = Path("artifacts/run"),
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
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run all stages of a recipe, skipping those that are current, and print the table.

    One source serves both calibration and evaluation: they draw from different pools of it.
    Example: `kvcal run default --model Qwen/Qwen3-8B --data corpus.jsonl --out artifacts/qwen3`
    """
    from kvcal import console
    from kvcal import tables as views
    from kvcal.recipe_files import load_recipe
    from kvcal.run import pipeline

    given = DataOptions(data, columns, split, config, samples, seq_len, seed)
    chosen = with_data(load_recipe(recipe), given, eval_data)
    chosen = replace(chosen, evaluate=with_tasks(chosen.evaluate, task, problems))
    folder = pipeline.Folder.create(out)
    with console.TerminalReporter(quiet).running() as reporter:
        loaded = load(model or chosen.model, dtype, device)
        if chosen.calibrates:
            tell_toy_data(chosen.data, loaded, reporter)
        result = pipeline.run(chosen, loaded, folder, reporter)
    if json:
        console.print_json(views.run_json(result))
        return
    console.print_table(*views.budget_table(result.allocation))
    console.print_table(*views.evaluation_table(result.evaluation))
    reporter.say(f"plan: {folder.plan}\ntable: {folder.evaluation}\npicture: {folder.picture}")
