"""Results of the benchmarks as data, saved after every measurement, so that an interruption keeps them.

Only what was measured is stored; factors, shares and ceilings are derived here, in one place, for the tables, the
picture and the JSON alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeVar

from pydantic.dataclasses import dataclass

from kvcal.artifact import write_text_atomic
from kvcal.bench.case import KernelUse
from kvcal.bench.device import Machine, ReadCeiling, Times
from kvcal.bench.plan_layers import TimedPlan
from kvcal.bench.shape import Heads, Pair, Point, StepBytes, raw_bytes, target
from kvcal.errors import KvcalError
from kvcal.pages.record_layout import PAGE_TOKENS, RAW_BITS
from kvcal.progress import Reporter
from kvcal.quantities import format_bytes
from kvcal.strict import STRICT, dump

SCHEMA = 4
NOTHING = "–"
# Bits of other libraries' caches that factors stand for beside those over 16 bits.
RIVALS = {8: "fp8", 4: "int4"}
# Share of a step's time that quantizing and packing may take on average, at this batch or more.
PACK_SHARE, PACK_SHARE_BATCH = 0.002, 32
# Below the titles of tables.
KERNELS = (
    "kernel: decode (tensor cores), decode_plain (every head size and pair of formats); reconstruct + (pages that are "
    "not read as they are stored become 16-bit ones first)"
)
BYTES = (
    "bytes: records and unquantized tokens; with reconstruct + also 16-bit pages, written and read, and what predictors"
    " read"
)


class Interrupted(KvcalError):
    """Ctrl-C, after what was measured was written."""

    exit_code = 130


class Column(NamedTuple):
    """``value``: of a row; ``spec``: the format of a number ("bytes" is one, too), ``unit`` behind it."""

    header: str
    value: Callable[[Any], Any]
    spec: str = ""
    unit: str = ""

    def cell(self, entry: Any) -> str:
        """Its text; times in µs, what has a name by it."""
        value = self.value(entry)
        if value is None:
            return NOTHING
        if isinstance(value, str | Times):
            return str(value)
        if isinstance(value, KernelUse | Baseline):
            return value.name
        return format_bytes(value) if self.spec == "bytes" else f"{value:{self.spec}}".replace("%", " %") + self.unit


class Table(NamedTuple):
    """``entries``: one for each row; ``name``: in JSON."""

    name: str
    title: str
    columns: Sequence[Column]
    entries: Sequence[Any]

    def text(self) -> tuple[str, list[str], list[tuple[str, ...]]]:
        """As ``kvcal.console.show`` takes it."""
        rows = [tuple(column.cell(entry) for column in self.columns) for entry in self.entries]
        return self.title, [column.header for column in self.columns], rows

    def values(self) -> list[dict[str, Any]]:
        """JSON: the value of each column by its header, texts of times and names."""
        return [{c.header: c.value(e) if c.spec else c.cell(e) for c in self.columns} for e in self.entries]


@dataclass(frozen=True, config=STRICT)
class Baseline:
    """Attention of another library. ``version`` names it; without ``times`` there is a ``reason``. ``nbytes``: those of
    the cache, which a baseline for memory alone has, too; ``bits``: of a stored value, without scales."""

    point: Point
    name: str
    version: str
    nbytes: int | None = None
    times: Times | None = None
    reason: str | None = None
    bits: int = RAW_BITS


def fastest(baselines: Iterable[Baseline]) -> Baseline | None:
    """The first of the fastest, None if none ran."""
    ran = [(entry.times.median_us, entry) for entry in baselines if entry.times is not None]
    return min(ran, key=lambda pair: pair[0])[1] if ran else None


@dataclass(frozen=True, config=STRICT)
class Row:
    """One pair of formats. ``nbytes`` must be moved, ``bits_per_value`` are those that are stored. Without ``times``
    there is a ``reason``.

    ``bench kernels``: ``times`` of attention; ``relative_error`` of the first sequence's output against fp64 over the
    decoded pages, the rounding of the output to 16 bits included. ``bench layer``: ``times`` of a step that packs no
    page; ``packing``: those of PAGE_TOKENS successive steps that pack one, in every sequence at once; ``append``:
    storing the step's token, alone; ``prefill``: packing a whole prompt's keys and values, which reads and writes
    ``prefill_bytes``."""

    point: Point
    format: str
    nbytes: StepBytes
    bits_per_value: float
    kernel: KernelUse | None = None
    times: Times | None = None
    relative_error: float | None = None
    packing: tuple[Times, ...] = ()
    append: Times | None = None
    prefill: Times | None = None
    prefill_bytes: int = 0
    reason: str | None = None

    @property
    def mean_us(self) -> float | None:
        """The mean of PAGE_TOKENS steps."""
        if self.times is None:
            return None
        others = (PAGE_TOKENS - len(self.packing)) * self.times.median_us
        return (others + sum(times.median_us for times in self.packing)) / PAGE_TOKENS

    @property
    def pack_share(self) -> float | None:
        """Share of the mean step that goes to quantizing and packing pages."""
        return None if self.times is None or self.mean_us is None else 1 - self.times.median_us / self.mean_us

    @property
    def prefill_gb_per_s(self) -> float | None:
        return None if self.prefill is None else self.prefill_bytes / self.prefill.median_us * 1e-3


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Report:
    """Results of a run. ``kind``: the command; ``formats``: the pairs that names in rows stand for; ``plan``: the plan
    whose kinds of layers they stand for."""

    kind: str
    machine: Machine
    formats: tuple[Pair, ...] = ()
    plan: TimedPlan | None = None
    rows: tuple[Any, ...] = ()
    baselines: tuple[Baseline, ...] = ()
    is_complete: bool = False

    @property
    def file(self) -> str:
        """The document's name in its folder."""
        return f"{self.kind}.json"

    def with_entries(self, entries: Sequence[Any]) -> Self:
        """The report with what a step measured."""
        baselines = [entry for entry in entries if isinstance(entry, Baseline)]
        rows = [entry for entry in entries if not isinstance(entry, Baseline)]
        return replace(self, rows=(*self.rows, *rows), baselines=(*self.baselines, *baselines))

    def tables(self) -> list[Table]:
        """All that is shown; what follows from the measurements is derived here."""
        raise NotImplementedError

    @property
    def unfinished(self) -> str:
        """The end of a table's title."""
        return "" if self.is_complete else " (interrupted)"

    def document(self) -> dict[str, Any]:
        """``measured``, the report itself, and ``derived``, the values of its tables."""
        derived = {table.name: table.values() for table in self.tables()}
        return {"kind": f"bench-{self.kind}", "schema": SCHEMA, "measured": dump(self), "derived": derived}

    def save(self, folder: Path) -> None:
        """Write the document whole or not at all. ArtifactError when the file cannot be written."""
        text = json.dumps(self.document(), indent=2, sort_keys=True, allow_nan=False)
        write_text_atomic(folder / self.file, text + "\n")


@dataclass(frozen=True, config=STRICT, kw_only=True)
class LayerReport(Report):
    """Results of ``bench kernels`` or ``bench layer``."""

    kind: Literal["kernels", "layer"]
    ceiling: ReadCeiling
    heads: Heads
    rows: tuple[Row, ...] = ()

    def fastest(self, point: Point, bits: int = RAW_BITS) -> Baseline | None:
        """The fastest baseline of so many bits at ``point``; None if none ran."""
        return fastest(entry for entry in self.baselines if (entry.point, entry.bits) == (point, bits))

    def factor(self, row: Row, bits: int = RAW_BITS) -> float | None:
        """Factor to the time of the fastest baseline of so many bits, packing included; above 1 is faster."""
        best = self.fastest(row.point, bits)
        if row.mean_us is None or best is None or best.times is None:
            return None
        return best.times.median_us / row.mean_us

    def plan_us(self, point: Point) -> float | None:
        """Microseconds of a step in all paged layers of the plan; None where one of its kinds was not timed."""
        mean_us = {row.format: row.mean_us for row in self.rows if row.point == point}
        found = [(len(kind.indices), mean_us.get(kind.name)) for kind in (self.plan.kinds if self.plan else ())]
        times = [count * us for count, us in found if us is not None]
        return sum(times) if times and len(times) == len(found) else None

    def plan_factor(self, point: Point, bits: int = RAW_BITS) -> float | None:
        """The time of the fastest baseline of so many bits in as many layers, over that of the plan's layers."""
        us, best = self.plan_us(point), self.fastest(point, bits)
        if us is None or best is None or best.times is None or self.plan is None:
            return None
        return sum(len(kind.indices) for kind in self.plan.kinds) * best.times.median_us / us

    def factor_ceiling(self, row: Row) -> float:
        """The factor if bytes were all that counts: those of 16 bits over the row's."""
        return raw_bytes(self.heads, row.point) / row.nbytes.total

    def gb_per_s(self, entry: Row | Baseline) -> float | None:
        """Bytes that must be moved over the time taken, in 10^9 a second."""
        nbytes = entry.nbytes.total if isinstance(entry, Row) else entry.nbytes
        return None if entry.times is None or nbytes is None else nbytes / entry.times.median_us * 1e-3

    def share(self, entry: Row | Baseline) -> float | None:
        """Share of the read bandwidth measured in the same run."""
        rate = self.gb_per_s(entry)
        return None if rate is None else rate / self.ceiling.gb_per_s

    def tables(self) -> list[Table]:
        size = Column("batch x context", lambda entry: entry.point.name)
        speed = (Column("GB/s", self.gb_per_s, ".0f"), Column("of ceiling", self.share, ".0%"))
        of_kind: tuple[Column, ...] = (
            Column("step µs", lambda row: row.times),
            Column("append alone µs", lambda row: row.append),
            Column("packing step µs", lambda row: ", ".join(f"{t.median_us:.4g}" for t in row.packing) or None),
            Column("mean of 128 µs", lambda row: row.mean_us, ".1f"),
            Column("packing share", lambda row: row.pack_share, ".3%"),
            Column("target", lambda row: PACK_SHARE if row.point.batch >= PACK_SHARE_BATCH else None, ".1%"),
            Column("prompt packing GB/s", lambda row: row.prefill_gb_per_s, ".0f"),
        )
        what, heads = "One layer's cache work in a decode step", self.heads
        if self.kind == "kernels":
            what = "Decode attention"
            of_kind = (
                Column("bits stored", lambda row: row.bits_per_value, ".2f"),
                Column("µs", lambda row: row.times),
                *speed,
                Column("by bytes", self.factor_ceiling, ".2f", "x"),
                Column("target", lambda row: target(row.format, heads, row.point), ".2f", "x"),
            )
        rows = (
            size,
            Column("format", lambda row: row.format),
            Column("kernel", lambda row: row.kernel),
            Column("bytes", lambda row: row.nbytes.total, "bytes"),
            *of_kind,
            Column("factor", self.factor, ".2f", "x"),
            Column("against", lambda row: row.reason or self.fastest(row.point)),
            *(self._over_rivals(self.factor) if self.kind == "kernels" else ()),
        )
        baselines = (
            size,
            Column(
                "baseline",
                lambda entry: entry.name + (" *" if entry == self.fastest(entry.point, entry.bits) else ""),
            ),
            Column("µs", lambda entry: entry.times),
            Column("bytes", lambda entry: entry.nbytes, "bytes"),
            Column("bits", lambda entry: entry.bits, "d"),
            *speed,
            Column("version", lambda entry: entry.version),
            Column("reason", lambda entry: entry.reason or ""),
        )
        title = (
            f"{what}, {heads.num_kv_heads} KV heads of {heads.head_dim}, {heads.group} query heads each, on "
            f"{self.machine.device}; read ceiling {self.ceiling.gb_per_s:.0f} GB/s{self.unfinished}"
        )
        of_baselines = "Baselines (* the fastest of its bits, which factors are against)"
        tables = [
            Table("rows", f"{title}\n{KERNELS}\n{BYTES}", rows, self.rows),
            Table("baselines", of_baselines, baselines, self.baselines),
        ]
        return tables if self.plan is None else [*tables, self._of_plan(self.plan)]

    def _over_rivals(self, factor: Callable[..., float | None]) -> list[Column]:
        """Factors over other libraries' caches of fewer bits."""
        return [Column(f"over {name}", partial(factor, bits=bits), ".2f", "x") for bits, name in RIVALS.items()]

    def _of_plan(self, plan: TimedPlan) -> Table:
        """The plan's whole step."""
        num_layers = sum(len(kind.indices) for kind in plan.kinds)
        others = f"; {plan.num_others} layers without pages are not timed" if plan.num_others else ""
        columns = (
            Column("batch x context", lambda point: point.name),
            Column("layers", lambda point: num_layers, "d"),
            Column("step µs", self.plan_us, ".1f"),
            Column("factor", self.plan_factor, ".2f", "x"),
            *self._over_rivals(self.plan_factor),
        )
        points = tuple(dict.fromkeys(row.point for row in self.rows))
        return Table("plan", f"All {num_layers} layers of {plan.name} ({plan.sha256[:12]}){others}", columns, points)


AnyReport = TypeVar("AnyReport", bound=Report)
# What one step of a run measures, lazily: entries of a report, and a line about them.
Step = Iterable[tuple[Sequence[Any], str]]


def measure(report: AnyReport, folder: Path, reporter: Reporter, steps: Sequence[Step]) -> AnyReport:
    """Run all ``steps``; the document is written anew after every measurement.

    Raises:
        Interrupted: on Ctrl-C. Times of two runs are not mixed, so nothing goes on from there.
    """
    count = 0
    try:
        for number, step in enumerate(steps):
            reporter(number, len(steps), f"bench {report.kind}")
            for entries, text in step:
                report = report.with_entries(entries)
                report.save(folder)
                count += len(entries)
                reporter.say(text)
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted: {count} measurements are in {folder / report.file}"
            if count
            else "interrupted before anything was measured",
            hint="the next run measures everything again: a factor needs both of its times from one run",
        ) from None
    report = replace(report, is_complete=True)
    report.save(folder)
    return report
