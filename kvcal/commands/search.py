"""``kvcal search``: the combination, layer by layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcal.commands.options import (
    Batch,
    Columns,
    Config,
    Context,
    Data,
    DataOptions,
    Device,
    Dtype,
    Json,
    Quiet,
    Samples,
    Seed,
    SeqLen,
    Split,
    load,
    tell_toy_data,
    with_data,
)


def search(
    recipe: Annotated[str, typer.Argument(help="A recipe with [search].")] = "best",
    model: Annotated[str | None, typer.Option(help="Folder, hub id or embedded name; default: the recipe's.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the artifacts; made if needed.")] = Path("artifacts/search"),
    budget: Annotated[str | None, typer.Option(help="Whole device, such as 24GB.")] = None,
    kv_budget: Annotated[str | None, typer.Option(help="The cache alone, such as 1.5GiB.")] = None,
    bits: Annotated[float | None, typer.Option(help="All-in bits per cached value.", min=0.1)] = None,
    batch: Batch = None,
    context: Context = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of refinement at most.", min=0)] = None,
    data: Data = None,
    columns: Columns = None,
    split: Split = None,
    config: Config = None,
    samples: Samples = None,
    seq_len: SeqLen = None,
    seed: Seed = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Choose among compositions of all five systems for every layer, on measured KL, and write the plan.

    Interrupted, it goes on after the last group of plans.
    Example: `kvcal search best --model Qwen/Qwen3-8B --bits 2.5 --batch 8 --context 32768 --data corpus.jsonl`
    """
    from kvcal import console
    from kvcal import tables as views
    from kvcal.errors import UsageError
    from kvcal.recipe import AllocateSpec
    from kvcal.recipe_files import load_recipe
    from kvcal.run import pipeline
    from kvcal.stages.search import load as load_search
    from kvcal.strict import changed, dump, parse

    base = with_data(load_recipe(recipe), DataOptions(data, columns, split, config, samples, seq_len, seed))
    if base.search is None or base.allocate is None:
        raise UsageError(f"recipe {base.name!r} has no [search]", hint="use `kvcal run`, or the recipe best")
    budgets: dict[str, Any] = {"budget": budget, "kv_budget": kv_budget, "bits": bits}
    knobs: dict[str, Any] = dump(base.allocate)
    if any(value is not None for value in budgets.values()):
        knobs |= {**budgets, "same_bytes_as": None}
    knobs |= {"batch": batch or base.allocate.batch, "context": context or base.allocate.context}
    base = replace(base, allocate=parse(AllocateSpec, knobs, "search", UsageError))
    base = replace(base, search=changed(base.search, {"refine_rounds": rounds}, "search", UsageError))
    folder = pipeline.Folder.create(out)
    with console.TerminalReporter(quiet).running() as reporter:
        loaded = load(model or base.model, dtype, device)
        tell_toy_data(base.data, loaded, reporter)
        plan = pipeline.build_plan(base, loaded, folder, None, reporter)
    found = load_search(folder.search)
    if json:
        console.print_json({"report": dump(found.report), "plan": views.plan_json(plan, None)})
        return
    console.print_table(*views.search_table(found.report))
    console.print_table(*views.budget_table(found.allocation))
    reporter.say(f"plan: {folder.plan}")
