"""``kvcal profile``: what every candidate costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcal.commands.options import Device, Dtype, Json, Quiet, load


def profile(
    model: Annotated[str, typer.Argument(help="Folder, hub id, or an embedded model's name.")],
    out: Annotated[Path, typer.Option(help="Folder of the artifacts; made if needed.")],
    recipe: Annotated[str, typer.Option(help="Recipe with the candidates and the data.")] = "default",
    data: Annotated[
        str | None, typer.Option(help="tasks, a text, JSONL or parquet file or folder, or a hub id.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of a hub data set.")] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="Column of text or messages; twice: prompt, completion.")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Calibration sequences.", min=1)] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a sequence.", min=2)] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sample.")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure how a model's keys and values bear quantization. Interrupted, it goes on where it stopped.

    Example: `kvcal profile meta-llama/Llama-3.1-8B --out artifacts/llama --data corpus.jsonl --samples 32`
    """
    from kvcal import console, pipeline, views
    from kvcal.recipe import load_recipe

    base = load_recipe(recipe)
    given: dict[str, Any] = {"source": data, "split": split, "columns": column and tuple(column)}
    given |= {"num_samples": samples, "seq_len": seq_len, "seed": seed}
    spec = replace(base.data, **{key: value for key, value in given.items() if value is not None})
    folder = pipeline.Folder.create(out)
    with console.TerminalReporter(quiet).running() as reporter:
        loaded = load(model, dtype, device)
        result = pipeline.profile_recipe(replace(base, data=spec), loaded, folder, reporter)
    if json:
        console.print_json(views.profile_json(result))
    else:
        console.print_table(*views.profile_table(result))
