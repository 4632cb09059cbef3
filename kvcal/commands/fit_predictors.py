"""``kvcal fit-predictors``: fit AQUA-KV's predictors for a folder's allocation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
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


def fit_predictors(
    folder: FolderArgument,
    model: ModelOption,
    recipe: Annotated[str, typer.Option(help="Recipe with [predictors], the data, and what came before.")] = "aqua-kv",
    kind: Annotated[str | None, typer.Option(help="linear, low_rank or int4; default: the recipe's.")] = None,
    rank: Annotated[int | None, typer.Option(help="Rank of low_rank.", min=1)] = None,
    group_size: Annotated[int | None, typer.Option(help="Weights that share a scale in int4.", min=1)] = None,
    min_explained: Annotated[float | None, typer.Option(help="Leave predictors out up to this variance.")] = None,
    keep_all: Annotated[bool, typer.Option("--keep-all", help="Keep predictors that do not pay, too.")] = False,
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
    """Fit predictors of each layer's keys and values from the layer before, as the cache reads it back, and say which
    pay. Interrupted, it goes on where it stopped.

    Example: `kvcal fit-predictors artifacts/llama --model meta-llama/Llama-3.1-8B --data corpus.jsonl --samples 256`
    """
    from kvcal import console
    from kvcal.charts.predictors import draw_predictors
    from kvcal.folder import Folder
    from kvcal.recipe import PredictorSpec
    from kvcal.recipe_files import load_recipe
    from kvcal.run import transform as transform_folder
    from kvcal.stages.predictors.record import load as load_record
    from kvcal.stages.predictors.record import table_rows
    from kvcal.strict import dump, parse

    base = with_data(load_recipe(recipe), DataOptions(data, columns, split, config, samples, seq_len, seed))
    knobs: dict[str, Any] = dump(base.predictors or PredictorSpec())
    if kind is not None:
        knobs |= {"kind": kind, "rank": None, "group_size": None}
    given: dict[str, Any] = {"rank": rank, "group_size": group_size, "min_explained": min_explained}
    knobs |= {key: value for key, value in given.items() if value is not None}
    knobs |= {"drop": False} if keep_all else {}
    base = replace(base, predictors=parse(PredictorSpec, knobs, "fit-predictors", UsageError))
    paths = Folder(folder)
    picture = Path(folder) / "predictors.png"
    with console.TerminalReporter(quiet).running() as reporter:
        loaded = load(model, dtype, device)
        tell_toy_data(base.data, loaded, reporter)
        transform_folder.fit_predictors_folder(base, loaded, paths, reporter)
        record = load_record(paths.predictors)
        draw_predictors(record, picture)
    if json:
        console.print_json({"findings": [dump(finding) for finding in record.findings], "nbytes": record.nbytes})
        return
    headers, rows = table_rows(record)
    title = f"Predictors: {len(record.kept)} of {len(record.findings)} kept, on {record.subject.num_held_out_tokens} "
    console.print_table(f"{title}held-out tokens", headers, rows)
    reporter.say(f"predictors: {paths.predictors}\npicture: {picture}")
