"""The command line: its options, errors and exit codes; every command is a file of ``kvcal.commands``.

Heavy imports happen inside commands, so that --help is quick. Exit codes: 0 ok, 2 usage, 3 infeasible budget,
4 unsupported model, 5 stale, mismatched or corrupt artifact, 6 no GPU kernel, 130 interrupted.
"""

from __future__ import annotations

import re
import sys
from typing import Annotated, NoReturn

import typer

from kvcal.commands.allocate import allocate
from kvcal.commands.bench import bench
from kvcal.commands.compare import compare
from kvcal.commands.compile import compile_command
from kvcal.commands.evaluate import eval_command
from kvcal.commands.fit_predictors import fit_predictors
from kvcal.commands.generate import generate
from kvcal.commands.inspect import inspect
from kvcal.commands.pack_prefix import pack_prefix
from kvcal.commands.profile import profile
from kvcal.commands.reparam import reparam
from kvcal.commands.run import run
from kvcal.commands.search import search
from kvcal.commands.tune import tune
from kvcal.commands.verify import verify
from kvcal.errors import ArtifactError, KvcalError, UsageError

app = typer.Typer(
    name="kvcal",
    help="Compile a KV-cache quantization plan for a language model, and run it.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 ok, 2 usage, 3 infeasible budget, 4 unsupported model, 5 bad artifact, 6 no GPU kernel, "
    "130 interrupted.",
)


def main() -> None:
    """Entry point of the ``kvcal`` command."""
    try:
        app()
    except KvcalError as error:
        _fail(error)
    except OSError as refused:  # the system's, where no stage expects it: a name too long, a full disk
        place = refused.filename
        if place is None:  # stdout's, of help
            from kvcal.console import discard_stdout

            discard_stdout()
        _fail(ArtifactError(f"{place or 'stdout'}: {refused.strerror or refused}", "check the path and the space"))
    except (MemoryError, RuntimeError) as error:
        text = " ".join(str(error).split())
        if not isinstance(error, MemoryError) and not re.search("allocate memory|out of memory", text):
            raise
        _fail(UsageError(f"not enough memory: {text[:200]}", "lower --batch, --context or the recipe's sizes"))
    except SystemExit as end:
        if end.code == 130:  # typer has caught the interrupt
            print("interrupted: what was finished is kept; the same command goes on from there", file=sys.stderr)
        raise


def _fail(error: KvcalError) -> NoReturn:
    from kvcal.console import print_error

    print_error(error)
    sys.exit(error.exit_code)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        from kvcal.console import print_text

        print_text(version("kvcal"))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Compile a KV-cache quantization plan for a language model, and run it."""


app.command()(run)
app.command()(profile)
app.command()(allocate)
app.command()(search)
app.command()(reparam)
app.command(name="fit-predictors")(fit_predictors)
app.command(name="compile")(compile_command)
app.command()(inspect)
app.command()(verify)
app.command(name="eval")(eval_command)
app.command()(compare)
app.command()(tune)
app.command(name="pack-prefix")(pack_prefix)
app.command()(generate)
app.add_typer(bench, name="bench")


if __name__ == "__main__":
    main()
