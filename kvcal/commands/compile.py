"""``kvcal compile``: the plan of an allocation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcal.commands.options import Device, Dtype, FolderArgument, Json, Quiet, load


def compile_command(
    folder: FolderArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The plan; default DIR/plan.safetensors.")
    ] = None,
    fold: Annotated[
        Path | None, typer.Option(help="Fold λ into the model's weights and write the model to this new folder.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model to fold into: folder, hub id or embedded name.")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the plan of an allocation, with the λ and the predictors that DIR holds for it.

    Example: `kvcal compile artifacts/llama -o plan.safetensors`, or, with λ in the weights instead of the plan,
    `kvcal compile artifacts/llama --fold llama-folded --model meta-llama/Llama-3.1-8B`
    """
    from kvcal import console
    from kvcal import tables as views
    from kvcal.errors import UsageError
    from kvcal.run import pipeline
    from kvcal.run import transform as transform_folder

    paths = pipeline.Folder(folder)
    reporter = console.TerminalReporter(quiet)
    path = output or paths.plan
    if fold is None:
        plan = pipeline.compile_folder(paths, path, reporter, *transform_folder.found_transforms(paths, reporter))
    else:
        if model is None:
            raise UsageError("--fold needs --model", hint="name the model whose weights are to take λ")
        loaded = load(model, dtype, device)
        plan = transform_folder.fold_folder(
            paths, path, loaded, fold, lambda source: load(source, dtype, device), reporter
        )
    if json:
        console.print_json(views.plan_json(plan, None) | {"path": str(path)})
