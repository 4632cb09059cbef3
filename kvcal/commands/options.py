"""Options that several commands share, and how a command loads its model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcal.errors import UsageError
from kvcal.quantities import MAX_BATCH

if TYPE_CHECKING:
    from kvcal.models.load import LoadedModel

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No messages and no progress.")]
Dtype = Annotated[str, typer.Option(help="auto (float32 on a CPU, else the checkpoint's), bfloat16, float16, float32.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
ModelOption = Annotated[str, typer.Option("--model", help="Folder, hub id, or an embedded model's name.")]
PlanArgument = Annotated[Path, typer.Argument(help="A plan.safetensors file.", show_default=False)]
FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the artifacts.")]
Batch = Annotated[int | None, typer.Option(help="Sequences in the batch.", min=1, max=MAX_BATCH)]
Context = Annotated[int | None, typer.Option(help="Tokens of each sequence.", min=1)]


def load(source: str, dtype: str, device: str) -> LoadedModel:
    """The model that a command was given; transformers' own progress bars are off."""
    from transformers.utils import logging

    from kvcal.models.load import load as load_model

    logging.disable_progress_bar()
    return load_model(source, dtype=dtype, device=device)


def prompt_text(prompt: str) -> str:
    """The prompt that a command was given; - reads stdin. UsageError for bytes that are not UTF-8."""
    if prompt != "-":
        return prompt
    try:
        text = sys.stdin.read()
        text.encode("utf-8")  # a lenient stdin hands bytes that it cannot decode on, as surrogates
    except UnicodeError as refused:
        raise UsageError(f"--prompt -: stdin is not UTF-8: {refused}") from None
    return text
