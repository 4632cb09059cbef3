"""``kvcal reparam``: calibrate PM-KVQ's λ for a folder's allocation."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from kvcal.commands.options import (
    Columns,
    Config,
    Data,
    DataOptions,
    Device,
    Dtype,
    FolderArgument,
    Json,
    ModelOption,
    Quiet,
    Samples,
    Seed,
    SeqLen,
    Split,
    load,
    tell_toy_data,
    with_data,
)
from kvcal.errors import UsageError


def reparam(
    folder: FolderArgument,
    model: ModelOption,
    recipe: Annotated[str, typer.Option(help="Recipe with [reparam] and the data.")] = "pm-kvq",
    position_scale: Annotated[
        float | None, typer.Option(help="Multiply positions, so that short text stands for long text.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the grid of α from 0 to 1.", min=1)] = None,
    offset: Annotated[
        bool | None, typer.Option(help="Try a static offset of the keys, too.", show_default=False)
    ] = None,
    shared_heads: Annotated[
        bool | None,
        typer.Option(help="One λ for all KV heads: QK-norms need it to be folded.", show_default=False),
    ] = None,
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
    """Find the channel factors λ that make each layer's keys easiest to quantize, for the formats that DIR's allocation
    chose, and say what they bring. `kvcal compile` then puts them into the plan, or into the weights with `--fold`.
    Interrupted, it goes on where it stopped.

    Example: `kvcal reparam artifacts/llama --model meta-llama/Llama-3.1-8B --data corpus.jsonl --samples 64`
    """
    from kvcal import console
    from kvcal.folder import Folder
    from kvcal.recipe import ReparamSpec
    from kvcal.recipe_files import load_recipe
    from kvcal.run import transform as transform_folder
    from kvcal.stages.reparam.record import load as load_record
    from kvcal.stages.reparam.record import table_rows
    from kvcal.strict import dump, parse

    base = with_data(load_recipe(recipe), DataOptions(data, columns, split, config, seed=seed))
    given: dict[str, Any] = {"position_scale": position_scale, "num_steps": steps, "offset": offset}
    given |= {"shared_heads": shared_heads, "num_samples": samples, "seq_len": seq_len}
    knobs = dump(base.reparam or ReparamSpec()) | {key: value for key, value in given.items() if value is not None}
    base = replace(base, reparam=parse(ReparamSpec, knobs, "reparam", UsageError))
    paths = Folder(folder)
    with console.TerminalReporter(quiet).running() as reporter:
        loaded = load(model, dtype, device)
        tell_toy_data(base.data, loaded, reporter)
        transform_folder.reparam_folder(base, loaded, paths, reporter)
        record = load_record(paths.reparam)
        for warning in record.warnings:
            reporter.say(warning)
    if json:
        console.print_json(
            {
                "layers": [dump(layer) for layer in record.layers],
                "position_scale": record.subject.position_scale,
                "path": str(paths.reparam),
            }
        )
        return
    headers, rows = table_rows(record)
    title = f"λ from {record.subject.num_tokens} tokens at positions x {record.subject.position_scale:.3g}"
    console.print_table(title, headers, rows)
    reporter.say(f"reparam: {paths.reparam}")
