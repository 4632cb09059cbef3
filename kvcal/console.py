"""The terminal: messages and progress on stderr, data on stdout, plain lines where there is no terminal."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from io import StringIO, UnsupportedOperation
from typing import Any

from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from kvcal.errors import ArtifactError, KvcalError
from kvcal.progress import Forecast, Pace, Phase, seconds_of_steps
from kvcal.quantities import format_seconds

View = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # a table: title, headers, rows
# Without a terminal, a line of progress at most this often.
PLAIN_SECONDS = 15.0
# Wider than any table: without a terminal nothing is wrapped.
PIPED_WIDTH = 1000
# Longer cells may wrap; each column takes three characters more than its cells.
LONG_CELL, BORDER = 24, 3

stdout = Console()
stderr = Console(stderr=True)


@dataclass
class Work:
    """Progress of one label: of ``total`` steps, ``first`` were done when it was first reported, at ``started``, and
    ``done`` at ``updated`` (seconds)."""

    label: str
    first: int
    done: int
    total: int
    started: float
    updated: float
    bar: TaskID

    def seconds_left(self, now: float) -> float | None:
        """By the mean time of the steps that were taken, and of the current one if it is slower (kvcal.progress); None
        before the first. Steps of an earlier run do not count as fast ones."""
        pace = Pace(self.updated - self.started, self.done - self.first)
        return seconds_of_steps(pace, 1, self.total - self.done, now - self.updated)


class TerminalReporter:
    """A Reporter: bars with the remaining time on a terminal, that of the whole command above those of its parts; else
    a line now and then, and one for each phase of the command.

    Work goes on within other work: a label that is not finished keeps its bar while others come and go below it, such
    as the plans of an evaluation above the tokens of one."""

    def __init__(self, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._quiet, self._clock = quiet, clock
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            _TimeLeftColumn(self),
            console=stderr,
            transient=True,
            disable=quiet or not stderr.is_terminal,
        )
        self._open: list[Work] = []
        self._printed = clock()
        self._forecast: Forecast | None = None
        self._whole: TaskID | None = None  # the bar of all phases

    def say(self, message: str) -> None:
        if not self._quiet:
            stderr.print(message, highlight=False, markup=False, soft_wrap=True)

    def expect(self, phases: Sequence[Phase]) -> None:
        self._forecast = Forecast(phases)
        if self._whole is not None:
            self._bars.remove_task(self._whole)
        self._whole = self._bars.add_task("all stages", total=len(phases))

    def __call__(self, done: int, total: int, label: str) -> None:
        now = self._clock()
        if self._forecast is not None and self._forecast.step(done, total, label, now):
            self._begin_phase(self._forecast, now)
        self._close_after(label)
        if not self._open or self._open[-1].label != label:
            self._open.append(Work(label, done, done, total, now, now, self._bars.add_task(label, total=total)))
        work = self._open[-1]
        if done < work.done:  # begun again
            work.first, work.started = done, now
            self._bars.reset(work.bar)
        if done != work.done:
            work.updated = now
        work.done, work.total = done, total
        self._bars.update(work.bar, completed=done, total=total)
        if not stderr.is_terminal and now - self._printed > PLAIN_SECONDS and done:
            self.say("; ".join([*map(self.line, self._open), *self._whole_line(now)]))
            self._printed = now
        if done >= total and len(self._open) > 1:
            self._bars.remove_task(self._open.pop().bar)

    def _begin_phase(self, forecast: Forecast, now: float) -> None:
        """Move the bar of all phases; without a terminal, one line."""
        if self._whole is not None:
            self._bars.update(self._whole, completed=forecast.number)
        if stderr.is_terminal:
            return
        parts = [f"stage {forecast.number + 1} of {len(forecast.phases)}: {forecast.phases[forecast.number].label}"]
        if forecast.last_seconds:
            parts.append(f"the one before took {format_seconds(forecast.last_seconds)}")
        self.say("; ".join([*parts, *self._whole_line(now)]))
        self._printed = now

    def _whole_line(self, now: float) -> list[str]:
        left = None if self._forecast is None else self._forecast.seconds_left(now)
        return [] if left is None else [f"about {format_seconds(left)} left in all"]

    def _close_after(self, label: str) -> None:
        """Remove what was begun after ``label``; of others, what is finished."""
        labels = [work.label for work in self._open]
        kept = labels.index(label) + 1 if label in labels else sum(work.done < work.total for work in self._open)
        while len(self._open) > kept:
            self._bars.remove_task(self._open.pop().bar)

    def line(self, work: Work) -> str:
        """Such as "evaluate: text: 300 of 900, about 20 s left"."""
        left = work.seconds_left(self._clock())
        text = "" if left is None else f", about {format_seconds(left)} left"
        return f"{work.label}: {work.done} of {work.total}{text}"

    def seconds_left(self, bar: TaskID) -> float | None:
        """Of the work with this bar."""
        if bar == self._whole and self._forecast is not None:
            return self._forecast.seconds_left(self._clock())
        return next((work.seconds_left(self._clock()) for work in self._open if work.bar == bar), None)

    @contextmanager
    def running(self) -> Iterator[TerminalReporter]:
        with self._bars:
            yield self


class _TimeLeftColumn(ProgressColumn):
    """Unlike rich's, of all steps so far: a step may take minutes."""

    def __init__(self, reporter: TerminalReporter) -> None:
        super().__init__()
        self._reporter = reporter

    def render(self, task: Task) -> Text:
        left = self._reporter.seconds_left(task.id)
        text = "" if left is None else f"{timedelta(seconds=round(left))} left"
        return Text(text, style="progress.remaining")


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


def show(part: View | Text | str) -> None:
    """A table or a text on stdout. Tables fit the terminal; piped output is as wide as it needs to be."""
    if isinstance(part, str):
        print_text(part)
        return
    width = stdout.width if stdout.is_terminal else PIPED_WIDTH
    drawn = StringIO()
    Console(file=drawn, width=width, force_terminal=stdout.is_terminal, markup=False, emoji=False).print(
        part if isinstance(part, Text) else _table(*part, width)
    )
    print_text(drawn.getvalue().removesuffix("\n"))


def _table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Table:
    """The first column is left-aligned, others right-aligned, or left where cells are wrapped. Columns that do not fit
    are left out and named below."""
    widths = column_widths(headers, rows, width)
    dropped = [header for header, room in zip(headers, widths, strict=True) if not room]
    caption = f"not shown in {width} columns: {', '.join(dropped)}" if dropped else None
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for number, (header, room) in enumerate(zip(headers, widths, strict=True)):
        if room:
            is_wrapped = any(cell_len(row[number]) > room for row in rows)
            justify: JustifyMethod = "left" if number == 0 or is_wrapped else "right"
            table.add_column(header, justify=justify, overflow="fold", width=room)
    for row in rows:
        table.add_row(*(cell for cell, room in zip(row, widths, strict=True) if room))
    return table


def column_widths(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Characters for each column of a table of ``width``, 0 for a column that is left out: from the left, each column
    is kept that still fits. Headers and long cells wrap between words, short cells do not; only words that are longer
    than any of a language, such as paths, are broken."""
    cells = [[header, *(row[number] for row in rows)] for number, header in enumerate(headers)]
    least = [max(_longest_word(texts[0]), *map(_least_width, texts[1:]), 1) for texts in cells]
    most = [max(1, *map(cell_len, texts)) for texts in cells]
    left, widths = width - 1, [0] * len(headers)
    for number, needed in enumerate(least):
        if number == 0 or needed + BORDER <= left:
            widths[number] = needed
            left -= needed + BORDER
    while left > 0 and (wanting := [n for n, room in enumerate(widths) if 0 < room < most[n]]):
        for number in wanting[:left]:
            widths[number] += 1
            left -= 1
    return widths


def _least_width(cell: str) -> int:
    return min(LONG_CELL, cell_len(cell) if cell_len(cell) <= LONG_CELL else _longest_word(cell))


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)


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
