"""Options that several commands share, each declared once: as a type, or as a field of a dataclass that
``decorators.spread`` turns into options. And what they do: change a recipe, load a model, show a result."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvcal import console, distributed
from kvcal.commands.values import TOKENS, complete_model, complete_recipe, of_bytes, of_memory
from kvcal.embedded import MODEL_NAME
from kvcal.errors import InfeasibleBudget, UsageError
from kvcal.lazy_torch import lazy_imports
from kvcal.progress import Reporter
from kvcal.quantities import MAX_BATCH, parse_bytes

with lazy_imports():
    from transformers.utils import logging

    from kvcal import folder as artifacts
    from kvcal import recipe as recipe_keys
    from kvcal import recipe_files
    from kvcal import report as report_page
    from kvcal.data import reading
    from kvcal.data import sequences as data_sequences
    from kvcal.models import files as model_files
    from kvcal.models import load as model_load
    from kvcal.models import residence
    from kvcal.plan import damage as damage_file
    from kvcal.plan import plan as plan_file


MODEL_HELP = "Folder, .gguf file, hub id, or an embedded model's name."
RecipeArgument = Annotated[
    str,
    typer.Argument(help="A recipe's path, or the name of one that comes with kvcal.", autocompletion=complete_recipe),
]
RecipeOption = Annotated[
    str,
    typer.Option("--recipe", help="A recipe's path, or the name of one of kvcal's.", autocompletion=complete_recipe),
]
ModelArgument = Annotated[str, typer.Argument(help=MODEL_HELP, autocompletion=complete_model)]
PlanArgument = Annotated[Path, typer.Argument(help="A plan.safetensors file.", show_default=False)]
PlanOption = Annotated[Path, typer.Option("--plan", help="A plan.safetensors file.", show_default=False)]
FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the artifacts.")]
Out = Annotated[Path, typer.Option("--out", help="Folder of the results; made if needed.")]
ModelOption = Annotated[str, typer.Option("--model", help=MODEL_HELP, autocompletion=complete_model)]
OtherModel = Annotated[
    str | None,
    typer.Option(
        "--model", help="Folder, .gguf file, hub id or embedded; default: the recipe's.", autocompletion=complete_model
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        help="Bytes of the weights, such as 16GB; default: as their files or index state.",
        callback=of_bytes,
    ),
]
KvBudget = Annotated[
    str | None, typer.Option("--kv-budget", help="The cache alone, such as 1.5GiB.", callback=of_bytes)
]
AllowDamage = Annotated[
    bool,
    typer.Option("--allow-damage", help="Take a plan that destroys the model, with a warning, instead of exit code 7."),
]
SETS_HELP = """Change a knob of the recipe, such as `reparam.num_steps=10`: a TOML value or a word, nothing for the
default; may be repeated."""

DATA_HELP = """tasks, python:docs, python:code, python:chat, lookups, a text, JSONL or parquet file or folder, or a hub
id; may be repeated. Options: columns, split, config."""

# Recipe keys that options set, by dotted name; the longest first.
OPTIONS = {
    "evaluate.data.seq_len": "--seq-len", "evaluate.data.source": "--data", "data.num_samples": "--samples",
    "data.seq_len": "--seq-len", "data.source": "--data", "allocate.budget": "--budget",
    "allocate.kv_budget": "--kv-budget", "allocate.bits": "--bits", "allocate.batch": "--batch",
    "allocate.context": "--context",
}  # fmt: skip


@dataclass(frozen=True)
class OutputOptions:
    """Options of a command's output."""

    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No messages and no progress.")] = False

    def reporter(self) -> console.TerminalReporter:
        return console.TerminalReporter(self.quiet or distributed.rank() > 0)

    def reporting(self) -> AbstractContextManager[console.TerminalReporter]:
        return self.reporter().running()

    def show(self, value: Any, *parts: console.View | str) -> None:
        """The result on stdout: ``value`` as JSON, or ``parts`` for people."""
        if self.json:
            console.print_json(value)
            return
        for part in parts:
            console.show(part)


@dataclass(frozen=True)
class ModelOptions(OutputOptions):
    """Options of loading a model."""

    dtype: Annotated[
        str, typer.Option(help="auto (float32 on a CPU, else the checkpoint's), bfloat16, float16, float32.")
    ] = "auto"
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto"
    memory: Annotated[
        str | None,
        typer.Option(
            help="Of the device, such as 24GB: layers beyond are streamed from the files. Default: all of it.",
            callback=of_memory,
        ),
    ] = None

    def load(
        self, source: str, calibrated_on: data_sequences.DataSpec | None = None, reporter: Reporter | None = None
    ) -> model_load.LoadedModel:
        """The model; transformers' own progress bars are off. Says so when one of the user's is calibrated on
        text that the user did not choose: the embedded model's tasks, or text of the installed packages."""
        model_files.locate(source)  # before torch is imported, which takes seconds
        logging.disable_progress_bar()
        num_tokens = residence.NUM_TOKENS if calibrated_on is None else calibrated_on.seq_len
        memory = None if self.memory is None else parse_bytes(self.memory)
        device = distributed.device(self.device)
        loaded = model_load.load(source, dtype=self.dtype, device=device, memory=memory, num_tokens=num_tokens)
        if reporter is not None and loaded.residence is not None:
            reporter.say(str(loaded.residence))
        if reporter is not None and calibrated_on is not None and loaded.source not in model_files.embedded_models():
            advice = "give --data with text such as the model will read"
            if calibrated_on.is_toy:
                toys = "the embedded toy tasks (ledgers, chains, products)"
                reporter.say(f"note: {loaded.identity.id} is calibrated on {toys}; {advice}, or --data python:docs")
            elif calibrated_on.source == "auto":
                reporter.say(f"note: {loaded.identity.id} is calibrated on installed packages' text; {advice}")
        return loaded


@dataclass(frozen=True)
class RecipeOptions(ModelOptions):
    """Changes of a recipe by a command line; None: as the recipe has it."""

    sets: Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help=SETS_HELP)] = None
    data: Annotated[list[str] | None, typer.Option(metavar="SOURCE[,columns=NAME]", help=DATA_HELP)] = None
    samples: Annotated[int | None, typer.Option(help="Sequences, of calibration where there is one.", min=1)] = None
    seq_len: Annotated[int | None, typer.Option(help="Tokens of each at most, also to evaluate.", **TOKENS)] = None
    thorough: Annotated[bool, typer.Option("--thorough", help="Profile with KL at all bits, on more text: slower.")] = (
        False
    )

    def recipe(
        self, name: str, others: Mapping[str, Any] | None = None, section: str | None = None
    ) -> recipe_keys.Recipe:
        """The recipe named ``name``, changed; see ``change``."""
        return self.change(recipe_files.load_recipe(name), others, section)

    def change(
        self, recipe: recipe_keys.Recipe, others: Mapping[str, Any] | None = None, section: str | None = None
    ) -> recipe_keys.Recipe:
        """The recipe with ``section``, in its defaults unless it is there; with the knobs of ``others``
        (None: not given), --data, --samples and --seq-len; and with --set, which counts most. --data and
        --seq-len are for calibration and evaluation alike; --samples and --seq-len also for what [reparam],
        [basis] and [feedback] have more of."""
        settings = recipe_files.read_settings(self.sets or ())
        given: dict[str, Any] = {} if section is None or getattr(recipe, section) is not None else {section: {}}
        given |= {name: value for name, value in (others or {}).items() if value is not None}
        if self.thorough:
            given |= {"profile.kl_measured": "all", "profile.kl_samples": 8, "profile.kl_tokens": 1024}
        if self.samples is not None:
            given["data.num_samples"] = self.samples
        for place, spec in (("data", recipe.data), ("evaluate.data", recipe.evaluate.data)):
            if self.seq_len is not None:
                given |= {f"{place}.seq_len": self.seq_len, f"{place}.min_len": min(spec.min_len, self.seq_len)}
            if self.data:
                source = self.data[0] if len(self.data) == 1 else self.data
                given |= {f"{place}.source": source, f"{place}.min_len": None}
        for place, fewer in (("reparam", recipe.reparam), ("basis", recipe.basis), ("feedback", recipe.feedback)):
            if self.seq_len is not None and fewer is not None:
                given[f"{place}.seq_len"] = min(fewer.seq_len, self.seq_len)
            if self.samples is not None and fewer is not None:
                given[f"{place}.num_samples"] = min(fewer.num_samples, self.samples)
        try:
            return recipe_files.with_knobs(recipe, given | settings)
        except UsageError as refused:
            raise _of_options(refused, settings) from None

    @contextmanager
    def job(
        self,
        model: str,
        recipe: recipe_keys.Recipe,
        folder: artifacts.Folder | None,
        others: Mapping[str, Any] | None = None,
    ) -> Iterator[artifacts.Job]:
        """The recipe on the model, in the folder (None: in none yet), within progress; but `sensitivity`,
        changed as by ``others``, in place of `default` for latent attention."""
        with self.reporting() as reporter:
            loaded = self.load(model, recipe.data if recipe.calibrates else None, reporter)
            if recipe.name == "default" and loaded.geometry.has_latents:
                reporter.say("latent attention takes no basis: recipe sensitivity in place of default")
                recipe = self.change(recipe_files.load_recipe("sensitivity"), others)
            yield artifacts.Job(recipe, loaded, folder or artifacts.Folder(Path()), reporter)

    def finish(
        self,
        folder: artifacts.Folder,
        value: dict[str, Any],
        *shown: console.View | str,
        said: Mapping[str, object],
        damage: damage_file.Damage | None = None,
        allow_damage: bool = False,
    ) -> None:
        """The end of a command that leaves a folder: its result, its report, what is ``said`` by name, and
        GateFailed for a plan that destroys the model, unless ``allow_damage``."""
        self.show(value, *shown)
        report_page.write_report(folder)  # after the result: what is damaged there must not hide it
        self.reporter().say("\n".join(f"{name}: {what}" for name, what in {**said, "report": folder.report}.items()))
        damage_file.require_undamaged(damage, allow_damage)


def _of_options(refused: UsageError, settings: Mapping[str, Any]) -> UsageError:
    """The refusal of a changed recipe, for one who has typed options: with these in place of the recipe's
    keys."""
    message = refused.message.removeprefix(f"{refused.place}: ")
    for key, option in OPTIONS.items():
        message = message if key in settings else message.replace(f"{key} =", f"{option} =")
    typed = " ".join(f"--set {key}" for key in settings)
    return UsageError(
        f"{typed}: {message}" if typed else message, refused.hint or "`kvcal list recipes NAME` prints a recipe"
    )


@dataclass(frozen=True)
class TaskOptions:
    """The tasks of an evaluation, and its draft."""

    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="Tasks: rows:TOKENS (also pairs, late, hops, copies, calls, retrieval, completion), those of the "
            "embedded model (ledger, chain, times), and those of lm-eval (NAME or NAME:METRIC); '' is none.",
        ),
    ] = None
    include_path: Annotated[str | None, typer.Option(help="A folder with lm-eval task files (YAML) of your own.")] = (
        None
    )
    limit: Annotated[int | None, typer.Option(help="Problems of each task at most.", min=1)] = None
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL|layers:N",
            help="Also measure what the model accepts of the tokens of a draft: a smaller model with the same tokens, "
            "or the model's own first N layers.",
        ),
    ] = None

    def knobs(self, recipe: str, model: str) -> dict[str, Any]:
        """The knobs of [evaluate] that were given, by dotted name, over ``users_evaluation``."""
        names = None
        if self.tasks is not None:
            given = [name.strip() for name in self.tasks.split(",") if name.strip()]
            prefix = reading.LM_EVAL
            names = [name if reading.is_own_task(name) else prefix + name.removeprefix(prefix) for name in given]
        values = {
            "tasks": names, "include_path": self.include_path, "num_problems": self.limit, "draft": self.draft,
        }  # fmt: skip
        named = {f"evaluate.{key}": value for key, value in values.items() if value is not None}
        return users_evaluation(recipe, model) | named


def users_evaluation(recipe: str, model: str) -> dict[str, Any]:
    """Knobs of [evaluate]: ledgers and tasks of kvcal's recipes are the embedded model's. Another one is
    measured on installed text, and on no tasks but those given. A recipe of the user's counts as it is."""
    if model in model_files.embedded_models() or recipe not in recipe_files.recipe_names():
        return {}
    return {"evaluate.tasks": [], "evaluate.data.source": "auto", "evaluate.data.min_len": 0}


@dataclass(frozen=True)
class WorkloadOptions:
    """The workload that a plan's bytes are counted for."""

    batch: Annotated[
        int | None, typer.Option(help="Sequences; default: a plan's or a recipe's, or 8.", min=1, max=MAX_BATCH)
    ] = None
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens of each, such as 32k; default: a plan's or a recipe's, or 4096; of `kvcal plan` the model's "
            "own maximum.",
            **TOKENS,
        ),
    ] = None

    def workload(self, default: plan_file.Workload) -> plan_file.Workload:
        return plan_file.Workload(self.batch or default.batch, self.context or default.context)


@dataclass(frozen=True)
class BudgetOptions(WorkloadOptions):
    """The budget of [allocate], and its workload."""

    budget: Annotated[str | None, typer.Option(help="Whole device, such as 24GB or 22.5GiB.", callback=of_memory)] = (
        None
    )
    kv_budget: KvBudget = None
    bits: Annotated[float | None, typer.Option(help="All-in bits per cached value.", min=0.1)] = None
    tp: Annotated[int | None, typer.Option("--tp", help="Ranks of tensor parallelism, with --for-engine.", min=1)] = (
        None
    )

    engine: Annotated[
        Literal["vllm", "sglang"] | None,
        typer.Option(
            "--for-engine",
            help="For this serving engine with prefix caching: bytes as it counts them.",
        ),
    ] = None
    drafts: Annotated[
        int | None, typer.Option(help="Draft tokens with each token, with --for-engine.", min=0, max=7)
    ] = None

    def __post_init__(self) -> None:
        if len(self.kinds()) > 1:
            given = " and ".join(f"--{name.replace('_', '-')}" for name in self.kinds())
            raise UsageError(f"{given}; expected one of --budget, --kv-budget and --bits", hint="leave out the others")

    def kinds(self) -> list[str]:
        return [name for name in ("budget", "kv_budget", "bits") if getattr(self, name) is not None]

    def knobs(self) -> dict[str, Any]:
        """The knobs of [allocate] that were given, by dotted name."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {f"allocate.{name}": value for name, value in given.items() if value is not None}


def generate_line(model: str, plan: Path) -> str:
    """The command line that generates text with a plan."""
    return f"{console.command_line('generate', '--model', model, '--plan', plan, '--prompt', '-')} < prompt.txt"


@contextmanager
def naming_what_works(budgets: BudgetOptions, besides: str = "") -> Iterator[None]:
    """A context whose InfeasibleBudget has this command with the least budget as its hint, and
    ``besides``."""
    try:
        yield
    except InfeasibleBudget as refused:
        if refused.least_bits is not None:
            kind = next(iter(budgets.kinds()), "bits")
            value = f"{refused.least_bits:.2f}" if kind == "bits" else f"{refused.smallest_bytes}B"
            line = console.command_line(*_with_option(sys.argv[1:], f"--{kind.replace('_', '-')}", value))
            fewer = "; a longer --context or a larger --batch takes fewer bits" if kind == "bits" else ""
            beyond = "; 16 bits need no more than that" if refused.least_bits >= 16 else ""
            refused.hint = f"{line}{besides}{beyond}{fewer}"
        raise


def _with_option(words: Sequence[str], option: str, value: str) -> list[str]:
    """The words of a command line, with this value of an option."""
    for number, word in enumerate(words):
        if word.partition("=")[0] == option:
            rest = words[number + 1 :] if "=" in word else words[number + 2 :]
            return [*words[:number], option, value, *rest]
    return [*words, option, value]


def is_model(text: str) -> bool:
    """Whether ``text`` names an embedded model, or a folder with a configuration: no recipe, and no
    artifacts."""
    return text == MODEL_NAME or (Path(text) / "config.json").is_file()
