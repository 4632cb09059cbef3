"""The terminal: messages and progress on stderr, data on stdout, plain lines where there is no terminal."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import StringIO, UnsupportedOperation
from textwrap import wrap
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from kvcal.errors import ArtifactError, KvcalError
from kvcal.quantities import format_seconds

# Without a terminal, a line of progress at most this often.
PLAIN_SECONDS = 15.0
# The speed is that of all steps in so many seconds: a step may take minutes.
SPEED_SECONDS = 3600.0
# Columns of longer cells are aligned on the left; cells of more than LONG_CELL are sentences, which wrap.
SHORT_CELL, LONG_CELL = 16, 24
HEADER_LINES = 3  # at most, on a narrow terminal
BORDER = 3  # around a cell
# Wider than any table: without a terminal nothing is wrapped.
PIPED_WIDTH = 1000
# The colour of so many bits, or fewer.
HEAT = {2: "green", 3: "yellow", 4: "red", 16: "magenta"}

stdout = Console()
stderr = Console(stderr=True)


class View(NamedTuple):
    """A table. Columns come in the order of their weight: on a narrow terminal the last ones leave.
    ``legend``: lines below it. ``bits``: by header, what colours the cells of a column, row by row."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    legend: str = ""
    bits: Mapping[str, Sequence[int | None]] = {}

    def is_short(self, number: int) -> bool:
        """Whether a column's cells are aligned on the right: numbers, mostly."""
        return number > 0 and all(len(row[number]) <= SHORT_CELL for row in self.rows)


class TerminalReporter:
    """A Reporter: bars with the remaining time on a terminal, else a line now and then.

    Work goes on within other work: a label that is not finished keeps its bar while others come and go below
    it, such as the plans of an evaluation above the tokens of one."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet, self._printed = quiet, time.monotonic()
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=stderr,
            transient=True,
            disable=quiet or not stderr.is_terminal,
            speed_estimate_period=SPEED_SECONDS,
        )
        self._open: dict[str, TaskID] = {}  # by label, the outermost work first

    def say(self, message: str) -> None:
        if not self._quiet:
            stderr.print(message, highlight=False, markup=False, soft_wrap=True)

    def __call__(self, done: int, total: int, label: str) -> None:
        tasks = {task.id: task for task in self._bars.tasks}
        for name, number in reversed(list(self._open.items())):
            if name == label or (label not in self._open and not tasks[number].finished):
                break
            self._bars.remove_task(self._open.pop(name))
        if label not in self._open:
            self._open[label] = self._bars.add_task(label, total=total, completed=done)
        elif done < tasks[self._open[label]].completed:  # begun again
            self._bars.reset(self._open[label], total=total)
        self._bars.update(self._open[label], completed=done, total=total)
        if not stderr.is_terminal and done and time.monotonic() - self._printed > PLAIN_SECONDS:
            self._printed = time.monotonic()
            self.say("; ".join(self.lines()))

    def lines(self) -> list[str]:
        """Such as "evaluate: text: 300 of 900, about 20 s left", of each open label."""
        found = []
        for task in self._bars.tasks:
            left = task.time_remaining
            text = "" if left is None or task.finished else f", about {format_seconds(left)} left"
            found.append(f"{task.description}: {task.completed:g} of {task.total:g}{text}")
        return found

    @contextmanager
    def running(self) -> Iterator[TerminalReporter]:
        with self._bars:
            yield self


def command_line(*words: object) -> str:
    """A command of kvcal, as a shell takes it: also with spaces in a path."""
    return shlex.join(["kvcal", *map(str, words)])


def print_json(value: Any) -> None:
    print_text(json.dumps(value, indent=2, sort_keys=True))


def print_text(text: str) -> None:
    """Text and a line's end on stdout, at once. Who closes the pipe has read enough: the command ends
    well."""
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


def show(part: View | str) -> None:
    """A table or a text on stdout. A table keeps to the terminal's width: its last columns leave, and are
    named below it. Piped output is as wide as it needs to be."""
    if isinstance(part, str):
        print_text(part)
        return
    width = stdout.width if stdout.is_terminal else PIPED_WIDTH
    widths = _widths(part, width, 1)
    if len(widths) < len(part.headers):
        widths = _widths(part, width, HEADER_LINES)
    left_out = part.headers[len(widths) :]
    table = Table()
    for number, (header, longest) in enumerate(zip(part.headers, widths, strict=False)):
        cells = [row[number] for row in part.rows]
        is_sentence = max(map(cell_len, cells), default=0) > longest
        justify: JustifyMethod = "right" if part.is_short(number) else "left"
        lines = "\n".join(wrap(header, longest))
        table.add_column(lines, justify=justify, overflow="fold", no_wrap=not is_sentence)
    for number, row in enumerate(part.rows):
        shown = [Text(cell) for cell in row[: len(widths)]]
        for header, bits in part.bits.items():
            if header not in left_out and (count := bits[number]) is not None:
                shown[part.headers.index(header)].stylize(next(HEAT[most] for most in HEAT if count <= most))
        table.add_row(*shown)
    drawn = StringIO()
    console = Console(file=drawn, width=width, force_terminal=stdout.is_terminal, markup=False, emoji=False)
    console.print(part.title, style="italic", highlight=False)
    console.print(table)
    if part.legend:
        console.print(part.legend, highlight=False)
    if left_out:
        console.print(f"left out on {width} columns: {', '.join(left_out)}", highlight=False)
    print_text(drawn.getvalue().removesuffix("\n"))


def _widths(view: View, width: int, header_lines: int) -> list[int]:
    """Widths of the columns that a terminal of ``width`` has room for, two at least: of the longest cell and
    of a header in so many lines; of sentences, of as much as must stand on a line."""
    found: list[int] = []
    left = width - 1
    for number, header in enumerate(view.headers):
        cells = [row[number] for row in view.rows]
        least = max(map(cell_len, cells), default=0)
        if least > LONG_CELL and number:
            least = max(LONG_CELL, *(cell_len(word) for cell in cells for word in cell.split()))
        least = max(least, *map(cell_len, header.split()), 1)
        while len(wrap(header, least)) > header_lines:
            least += 1
        if number > 1 and least + BORDER > left:
            break
        found.append(least)
        left -= least + BORDER
    return found


def print_error_json(error: KvcalError) -> None:
    """One line of JSON on stderr, its last: what went wrong, where, what to do, and the exit code. stdout is
    empty, or has the result that the error is about."""
    names = ("message", "hint", "place", "exit_code", "smallest_bytes", "least_bits", "parts")
    about = {name: getattr(error, name) for name in names if hasattr(error, name)}
    with suppress(OSError):
        print(json.dumps({"error": {"kind": type(error).__name__} | about}), file=sys.stderr, flush=True)


def print_error(error: KvcalError) -> None:
    with suppress(OSError):  # the exit code is left
        for name, style, text in (("error", "red", error.message), ("hint", "cyan", error.hint)):
            if text:
                stderr.print(f"{name}: ", style=f"bold {style}", end="")
                stderr.print(text, highlight=False, markup=False, soft_wrap=True)
