"""``kvcal eval``: a plan beside its baselines."""

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
    Json,
    ModelOption,
    PlanArgument,
    Problems,
    Quiet,
    Samples,
    Seed,
    SeqLen,
    Split,
    Tasks,
    load,
    with_tasks,
)


def eval_command(
    plan: PlanArgument,
    model: ModelOption,
    recipe: Annotated[str, typer.Option(help="Recipe whose [evaluate] is used.")] = "default",
    against: Annotated[list[str] | None, typer.Option(help="Baseline recipe to measure too; may be repeated.")] = None,
    data: Data = None,
    columns: Columns = None,
    split: Split = None,
    config: Config = None,
    samples: Samples = None,
    seq_len: SeqLen = None,
    seed: Seed = None,
    task: Tasks = None,
    problems: Problems = None,
    out: Annotated[Path, typer.Option(help="Folder of the table and the picture.")] = Path("artifacts/eval"),
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Perplexity, KL to 16 bits, top-1 agreement and exact match, through the packed cache.

    Example: `kvcal eval plan.safetensors --model reasoner-10m --against kivi-2`
    """
    from kvcal import console
    from kvcal import tables as views
    from kvcal.errors import UsageError
    from kvcal.plan.plan import load_plan
    from kvcal.recipe_files import load_recipe, require_baselines
    from kvcal.run import pipeline
    from kvcal.stages.verify import require_same_model
    from kvcal.strict import changed

    loaded_plan = load_plan(plan)
    base = load_recipe(recipe)
    given = DataOptions(data, columns, split, config, samples, seq_len, seed)
    spec = with_tasks(replace(base.evaluate, data=given.of(base.evaluate.data)), task, problems)
    spec = changed(spec, {"against": against or []}, "eval", UsageError)
    require_baselines(spec.against, "--against")
    folder = pipeline.Folder.create(out)
    with console.TerminalReporter(quiet).running() as reporter:
        loaded = load(model, dtype, device)
        require_same_model(loaded_plan, loaded)
        named = replace(base, name=plan.stem, evaluate=spec)
        evaluation = pipeline.evaluate_plan(named, loaded, loaded_plan, folder, reporter)
    if json:
        console.print_json(views.evaluation_json(evaluation))
    else:
        console.print_table(*views.evaluation_table(evaluation))
