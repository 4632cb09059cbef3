"""Options that several commands share, and how a command loads its model."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcal.errors import UsageError
from kvcal.quantities import MAX_BATCH, MAX_CONTEXT

if TYPE_CHECKING:
    from kvcal.data.sequences import DataSpec
    from kvcal.models.load import LoadedModel
    from kvcal.progress import Reporter
    from kvcal.recipe import EvaluateSpec, Recipe

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No messages and no progress.")]
Dtype = Annotated[str, typer.Option(help="auto (float32 on a CPU, else the checkpoint's), bfloat16, float16, float32.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
ModelOption = Annotated[str, typer.Option("--model", help="Folder, hub id, or an embedded model's name.")]
PlanArgument = Annotated[Path, typer.Argument(help="A plan.safetensors file.", show_default=False)]
FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the artifacts.")]
Batch = Annotated[int | None, typer.Option(help="Sequences in the batch.", min=1, max=MAX_BATCH)]
Context = Annotated[int | None, typer.Option(help="Tokens of each sequence.", min=1, max=MAX_CONTEXT)]
Data = Annotated[
    str | None, typer.Option("--data", help="tasks, a text, JSONL or parquet file or folder, or a hub id.")
]
EvalData = Annotated[str | None, typer.Option("--eval-data", help="Data to evaluate on; default: those of --data.")]
Columns = Annotated[str | None, typer.Option("--columns", help="Column of text or messages, or prompt,completion.")]
Split = Annotated[str | None, typer.Option("--split", help="Split of a hub data set.")]
Config = Annotated[str | None, typer.Option("--config", help="Configuration of a hub data set.")]
Samples = Annotated[int | None, typer.Option("--samples", help="Sequences, of calibration where there is one.", min=1)]
SeqLen = Annotated[
    int | None, typer.Option("--seq-len", help="Tokens of every sequence at most, also to evaluate.", min=2)
]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of the sample.")]
Tasks = Annotated[list[str] | None, typer.Option("--task", help="Task to generate; repeatable; 'none' for none.")]
Problems = Annotated[int | None, typer.Option("--problems", help="Problems of each task.", min=1)]


@dataclass(frozen=True)
class DataOptions:
    """Data options of a command line; None: as the recipe has it."""

    source: str | None = None
    columns: str | None = None
    split: str | None = None
    config: str | None = None
    samples: int | None = None
    seq_len: int | None = None
    seed: int | None = None

    def of(self, spec: DataSpec) -> DataSpec:
        """``spec`` with the source, the length, the sample's size and the seed that were given."""
        return replace(self.source_of(spec), **_given({"num_samples": self.samples, "seed": self.seed}))

    def source_of(self, spec: DataSpec, source: str | None = None) -> DataSpec:
        """``spec`` with the length that was given, and another source (default: --data), whose columns, split, config
        and least length are not the old one's."""
        source = source or self.source
        if source is not None:
            spec = replace(spec, source=source, columns=(), split=None, config=None, min_len=0)
        if self.seq_len is not None:
            spec = replace(spec, seq_len=self.seq_len, min_len=min(spec.min_len, self.seq_len))
        columns = None if self.columns is None else tuple(name.strip() for name in self.columns.split(","))
        return replace(spec, **_given({"columns": columns, "split": self.split, "config": self.config}))


def with_data(recipe: Recipe, data: DataOptions, eval_data: str | None = None) -> Recipe:
    """The recipe calibrated on the given data, and evaluated on another pool of them or on ``eval_data``."""
    evaluate = replace(recipe.evaluate, data=data.source_of(recipe.evaluate.data, eval_data))
    return replace(recipe, data=data.of(recipe.data), evaluate=evaluate)


def with_tasks(spec: EvaluateSpec, tasks: list[str] | None, problems: int | None) -> EvaluateSpec:
    """The evaluation of the given tasks. UsageError for an unknown one."""
    from kvcal.strict import changed

    names = [] if tasks == ["none"] else tasks
    return changed(spec, {"tasks": names, "num_problems": problems}, "--task and --problems", UsageError)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def tell_toy_data(spec: DataSpec, loaded: LoadedModel, reporter: Reporter) -> None:
    """Say so when a model of the user's is calibrated on the embedded model's tasks."""
    from kvcal.data.sequences import TASK_SOURCES
    from kvcal.models.load import embedded_models

    if spec.source in TASK_SOURCES and loaded.source not in embedded_models():
        reporter.say(
            f"note: {loaded.identity.id} is calibrated on the embedded toy tasks (ledgers, chains, products); "
            "give --data with text such as the model will read"
        )


def load(source: str, dtype: str, device: str) -> LoadedModel:
    """The model that a command was given; transformers' own progress bars are off."""
    from transformers.utils import logging

    from kvcal.models.load import load as load_model

    logging.disable_progress_bar()
    return load_model(source, dtype=dtype, device=device)


def prompt_text(prompt: str) -> str:
    """The prompt that a command was given; - reads stdin. UsageError for bytes that are not UTF-8."""
    place = "--prompt -: stdin" if prompt == "-" else "--prompt"
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode("utf-8")  # arguments, and a lenient stdin, have surrogates for bytes that are not text
    except UnicodeError as refused:
        raise UsageError(f"{place} is not UTF-8: {refused}") from None
    return text
