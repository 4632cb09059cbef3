"""The terminal: messages and progress on stderr, data on stdout, plain lines where there is no terminal."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import StringIO, UnsupportedOperation
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kvcal.errors import ArtifactError, KvcalError

View = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # a table: title, headers, rows
# Without a terminal, a line of progress at most this often.
PLAIN_SECONDS = 15.0
# Wider than any table: without a terminal nothing is wrapped.
PIPED_WIDTH = 1000

stdout = Console()
stderr = Console(stderr=True)


class TerminalReporter:
    """A Reporter: a bar with the remaining time on a terminal, else a line now and then."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=stderr,
            transient=True,
            disable=quiet or not stderr.is_terminal,
        )
        self._task: Any = None
        self._label = ""
        self._started = self._printed = time.monotonic()

    def say(self, message: str) -> None:
        if not self._quiet:
            stderr.print(message, highlight=False, markup=False, soft_wrap=True)

    def __call__(self, done: int, total: int, label: str) -> None:
        if label != self._label:
            self._label, self._started = label, time.monotonic()
            if self._task is not None:
                self._bars.remove_task(self._task)
            self._task = self._bars.add_task(label, total=total)
        self._bars.update(self._task, completed=done, total=total)
        now = time.monotonic()
        if not stderr.is_terminal and (now - self._printed > PLAIN_SECONDS) and done:
            left = (now - self._started) / done * (total - done)
            self.say(f"{label}: {done} of {total}, about {left:.0f} s left")
            self._printed = now

    @contextmanager
    def running(self) -> Iterator[TerminalReporter]:
        with self._bars:
            yield self


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print_text(json.dumps(value, indent=2, sort_keys=True))


def print_text(text: str) -> None:
    """Text and a line's end on stdout, at once. Who closes the pipe has read enough: the command ends well.

    Raises:
        ArtifactError: the system does not take the text, such as a full disk.
    """
    if sys.stdout is None:
        raise ArtifactError("cannot write to stdout: it is closed", "redirect it")
    try:
        print(text, flush=True)
    except BrokenPipeError:
        discard_stdout()
        sys.exit(0)
    except OSError as refused:
        discard_stdout()
        raise ArtifactError(f"cannot write to stdout: {refused.strerror}", "free some space, or redirect it") from None
    except UnicodeEncodeError:  # a terminal of another encoding, or a model's text
        sys.stdout.buffer.write((text + "\n").encode("utf-8", "backslashreplace"))
        sys.stdout.flush()


def discard_stdout() -> None:
    """Drops the rest of stdout's buffer: the interpreter would try to write it again when it ends."""
    with suppress(UnsupportedOperation):  # a stdout in memory
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout; the first column is left-aligned, the others right-aligned. A narrow terminal wraps cells;
    piped output is as wide as it needs to be."""
    table = Table(title=title, title_justify="left")
    for number, header in enumerate(headers):
        table.add_column(header, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    drawn = StringIO()
    width = stdout.width if stdout.is_terminal else PIPED_WIDTH
    Console(file=drawn, width=width, force_terminal=stdout.is_terminal).print(table)
    print_text(drawn.getvalue().removesuffix("\n"))


def print_error_json(error: KvcalError) -> None:
    """One line of JSON on stderr, its last: what went wrong, where, what to do, and the exit code. stdout is empty, or
    has the result that the error is about."""
    names = ("message", "hint", "place", "exit_code", "smallest_bytes")
    about = {name: getattr(error, name) for name in names if hasattr(error, name)}
    with suppress(OSError):
        print(json.dumps({"error": {"kind": type(error).__name__} | about}), file=sys.stderr, flush=True)


def print_error(error: KvcalError) -> None:
    """Prints the error and its hint on stderr."""
    with suppress(OSError):  # the exit code is left
        stderr.print("error: ", style="bold red", end="")
        stderr.print(error.message, highlight=False, markup=False, soft_wrap=True)
        if error.hint:
            stderr.print("hint: ", style="bold cyan", end="")
            stderr.print(error.hint, highlight=False, markup=False, soft_wrap=True)
