"""The command line: its commands, errors and exit codes; the commands are in ``kvcal.commands``.

Exit codes: 0 ok, 2 usage, 3 infeasible budget, 4 unsupported model, 5 stale, mismatched or corrupt artifact,
6 no GPU kernel, 7 a gate failed, 8 another rank ended, 130 interrupted.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from kvcal import distributed
from kvcal.commands import run, stages
from kvcal.commands.card import card
from kvcal.commands.compare import compare
from kvcal.commands.decorators import for_ranks, needs_compile
from kvcal.commands.doctor import doctor
from kvcal.commands.eval import eval_command
from kvcal.commands.generate import generate
from kvcal.commands.inspect import inspect
from kvcal.commands.list import list_command
from kvcal.commands.plan import plan
from kvcal.commands.serve_args import serve_args
from kvcal.commands.size import size
from kvcal.console import discard_stdout, print_error, print_error_json, print_text
from kvcal.errors import ArtifactError, KvcalError, UsageError
from kvcal.lazy_torch import lazy_imports

with lazy_imports():
    from importlib import metadata

# click's error of a command line, of which typer has a copy of its own since 0.16.
WrongArguments: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="kvcal",
    help="Compile a KV-cache quantization plan for a language model, and run it.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 ok, 2 usage, 3 infeasible budget, 4 unsupported model, 5 bad artifact, 6 no GPU kernel, "
    "7 a gate failed, 8 another rank ended, 130 interrupted.",
)


def main() -> None:
    # `datasets` logs what it raises: a line besides the error's own, JSON with --json.
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")
    if {"-q", "--quiet"} & set(sys.argv[1:]):  # other packages' bars: of GGUF files, downloads, lm-eval
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        # typer's own errors are raised instead of drawn, and an exit code is returned; alone it draws help.
        code = app(standalone_mode=not sys.argv[1:])
        if isinstance(code, int):
            sys.exit(code)
    except KvcalError as error:
        _fail(error)
    except OSError as refused:  # the system's, where no stage expects it: a name too long, a full disk
        place = refused.filename
        if place is None:  # stdout's, of help
            discard_stdout()
        _fail(ArtifactError(f"{place or 'stdout'}: {refused.strerror or refused}", "check the path and the space"))
    except (MemoryError, RuntimeError) as error:
        text = " ".join(str(error).split())
        if not isinstance(error, MemoryError) and not re.search("allocate memory|out of memory", text):
            raise
        _fail(UsageError(f"not enough memory: {text[:200]}", "lower --batch, --context or the recipe's sizes"))
    except WrongArguments as refused:
        _fail(_wrong_argument(refused))
    except SystemExit as end:
        if end.code == 130 and distributed.prints_errors():  # typer has caught the interrupt
            print("interrupted: what was finished is kept; the same command resumes from there", file=sys.stderr)
        raise


def _wrong_argument(refused: Any) -> UsageError:
    """typer's error in a line: the option or argument, what was typed, and what is allowed."""
    context = getattr(refused, "ctx", None)
    hint = f"`{context.command_path} --help` tells its arguments and options" if context else None
    parameter = getattr(refused, "param", None)
    if parameter is None or not refused.message:  # no such option, a missing one
        return UsageError(refused.format_message(), hint)
    name, typed = parameter.opts[-1], _typed(parameter.opts)
    reason = refused.message.removeprefix("Value error, ").removesuffix(".")
    if kind := re.match("Input should be a valid (integer|number)", reason):
        reason = f"expected a {'whole ' if kind[1] == 'integer' else ''}number"
        if near := re.match(r"\d+(\.\d+)?" if kind[1] == "number" else r"\d+", typed):
            hint = f"did you mean {name} {near[0]}?"
    return UsageError(f"{name} {typed}: {reason.replace('Input should be', 'expected a value')}", hint)


def _typed(names: list[str]) -> str:
    """The word after an option on the command line, the last of several."""
    words = [*sys.argv[1:], ""]
    after = [words[at + 1] for at, word in enumerate(words[:-1]) if word in names]
    after += [word.partition("=")[2] for word in words if word.partition("=")[0] in names and "=" in word]
    return after[-1] if after else ""


def _fail(error: KvcalError) -> NoReturn:
    if isinstance(error, UsageError) and error.hint is None:
        command = next((word for word in sys.argv[1:2] if word in COMMANDS), "")
        error.hint = f"`kvcal {command}{' ' * bool(command)}--help` tells its arguments and options"
    if distributed.prints_errors():
        print_error_json(error) if "--json" in sys.argv[1:] else print_error(error)
    sys.exit(error.exit_code)


def _print_version(wanted: bool) -> None:
    if wanted:
        print_text(metadata.version("kvcal"))
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Compile a KV-cache quantization plan for a language model, and run it."""


# Help's panels, by what a user wants, and in each the commands by name.
PANELS: dict[str, dict[str, Callable[..., None]]] = {
    "Make a plan": {"plan": plan, "run": run.run, "search": run.search, "tune": run.tune, "compare": compare},
    "Look at a plan": {"inspect": inspect, "eval": eval_command, "card": card},
    "Run it, serve it": {"generate": generate, "serve-args": serve_args},
    "What fits, what there is": {"size": size, "list": list_command, "doctor": doctor},
    "Step by step": {
        "profile": stages.profile,
        "allocate": stages.allocate,
        "transform": stages.transform,
        "fit-predictors": stages.fit_predictors,
        "compile": stages.compile_command,
    },
}
# The commands that need no more than the runtime and the command line.
OF_RUNTIME = ("inspect", "generate", "serve-args", "size", "list", "doctor")
# The commands that torchrun may start in several processes: those that measure.
RANKED = ("plan", "run", "search", "tune", "compare", "profile", "transform", "fit-predictors", "eval")
COMMANDS = [name for commands in PANELS.values() for name in commands]
for panel, commands in PANELS.items():
    for name, command in commands.items():
        checked = command if name in OF_RUNTIME else needs_compile(command)
        app.command(name, rich_help_panel=panel)(for_ranks(checked, name in RANKED))


if __name__ == "__main__":
    main()
