"""``kvcal allocate``: formats for a byte budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcal.commands.options import Json, Quiet
from kvcal.errors import UsageError
from kvcal.quantities import MAX_BATCH, MAX_CONTEXT, parse_bytes


def allocate(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with a profile.")],
    budget: Annotated[str | None, typer.Option(help="Whole device, such as 24GB or 22.5GiB.")] = None,
    kv_budget: Annotated[str | None, typer.Option(help="The cache alone, such as 1.5GiB.")] = None,
    bits: Annotated[float | None, typer.Option(help="All-in bits per cached value.", min=0.1)] = None,
    same_bytes_as: Annotated[str | None, typer.Option(help="A baseline recipe, such as kivi-2.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences in the batch.", min=1, max=MAX_BATCH)] = 8,
    context: Annotated[int, typer.Option(help="Tokens of each sequence.", min=1, max=MAX_CONTEXT)] = 4096,
    workspace: Annotated[str, typer.Option(help="Bytes kept free with --budget, or auto.")] = "auto",
    reserve: Annotated[
        str | None, typer.Option(help="Bytes kept free for what reparam and fit-predictors will take; default none.")
    ] = None,
    granularity: Annotated[str, typer.Option(help="layer, block (K and V alike) or head.")] = "layer",
    objective: Annotated[
        str | None,
        typer.Option(help="sensitivity, kl, combined or importance (KVmix); default: combined, heads: sensitivity."),
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Print the whole Pareto front instead; no budget needed.")
    ] = False,
    sweep_points: Annotated[
        int, typer.Option(help="Budgets to solve where the front is too long.", min=2, max=10_000)
    ] = 48,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Choose every layer's (or head's) K and V format for a byte budget, exactly. Its bytes are those of the compiled
    plan: λ and predictors, which come later, take part of them (--reserve).

    GB = 10^9 bytes, GiB = 2^30. Example: `kvcal allocate artifacts/llama --budget 24GB --batch 8 --context 32768`
    """
    from kvcal import console
    from kvcal import tables as views
    from kvcal.recipe import AllocateSpec
    from kvcal.run import pipeline
    from kvcal.strict import parse

    knobs: dict[str, Any] = {"budget": budget, "kv_budget": kv_budget, "bits": bits, "same_bytes_as": same_bytes_as}
    knobs |= {"batch": batch, "context": context, "workspace": workspace}
    knobs |= {"granularity": granularity}
    knobs |= {"objective": objective or ("sensitivity" if granularity == "head" else "combined")}
    if sweep and not any((budget, kv_budget, bits, same_bytes_as)):
        knobs["bits"] = 16.0
    spec = parse(AllocateSpec, knobs, "allocate", UsageError)
    reporter = console.TerminalReporter(quiet)
    paths = pipeline.Folder(folder)
    if sweep:
        method, rows = pipeline.sweep_folder(paths, spec, sweep_points)
        if json:
            console.print_json({"method": method, "points": rows})
        else:
            console.print_table(*views.sweep_table(method, rows))
        return
    reserved = 0 if reserve is None else parse_bytes(reserve)
    result = pipeline.allocate_folder(paths, spec, {"recipe": None}, reporter, reserved=reserved)
    if json:
        console.print_json(views.allocation_json(result))
        return
    console.print_table(*views.budget_table(result))
    console.print_table(*views.layer_table(result.layers, result.cache_dtype, result.workload))
