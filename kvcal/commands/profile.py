"""``kvcal profile``: what every candidate costs."""

from __future__ import annotations

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
    Quiet,
    Samples,
    Seed,
    SeqLen,
    Split,
    load,
    tell_toy_data,
    with_data,
)


def profile(
    model: Annotated[str, typer.Argument(help="Folder, hub id, or an embedded model's name.")],
    out: Annotated[Path, typer.Option(help="Folder of the artifacts; made if needed.")],
    recipe: Annotated[str, typer.Option(help="Recipe with the candidates and the data.")] = "default",
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
    """Measure how a model's keys and values bear quantization. Interrupted, it goes on where it stopped.

    Example: `kvcal profile meta-llama/Llama-3.1-8B --out artifacts/llama --data corpus.jsonl --samples 32`
    """
    from kvcal import console
    from kvcal import tables as views
    from kvcal.recipe_files import load_recipe
    from kvcal.run import pipeline

    base = with_data(load_recipe(recipe), DataOptions(data, columns, split, config, samples, seq_len, seed))
    folder = pipeline.Folder.create(out)
    with console.TerminalReporter(quiet).running() as reporter:
        loaded = load(model, dtype, device)
        tell_toy_data(base.data, loaded, reporter)
        result = pipeline.profile_recipe(base, loaded, folder, reporter)
    if json:
        console.print_json(views.profile_json(result))
    else:
        console.print_table(*views.profile_table(result))
