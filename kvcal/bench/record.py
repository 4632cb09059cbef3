"""What ``kvcal bench kernels`` found, as data: written after every measurement, so that an interruption keeps them.

Only what was measured is stored; factors, shares and ceilings are derived here, in one place, for the table, the
picture and the JSON alike.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic.dataclasses import dataclass

from kvcal.artifact import write_text_atomic
from kvcal.bench.device import Machine, ReadCeiling
from kvcal.bench.grid import target
from kvcal.bench.kernel_use import KernelUse
from kvcal.bench.shape import Heads, Pair, Point, raw_bytes
from kvcal.bench.step_bytes import StepBytes
from kvcal.bench.timing import Times
from kvcal.errors import ArtifactError, KvcalError
from kvcal.strict import STRICT, dump, parse

SCHEMA = 2

Report = TypeVar("Report")


class Interrupted(KvcalError):
    """Ctrl-C, after what was measured was written."""

    exit_code = 130


@dataclass(frozen=True, config=STRICT)
class Baseline:
    """Attention over keys and values by another library. ``version`` names it; without ``times`` there is a ``reason``.
    ``nbytes`` are those of the cache, which a baseline for memory alone has, too."""

    point: Point
    name: str
    version: str
    nbytes: int | None = None
    times: Times | None = None
    reason: str | None = None


@dataclass(frozen=True, config=STRICT)
class KernelRow:
    """Our attention with one pair of formats. ``nbytes`` must be moved, ``bits_per_value`` are those that are stored;
    ``relative_error`` is that of the first sequence's output against fp64 over the decoded pages, the rounding of the
    output to 16 bits included."""

    point: Point
    format: str
    nbytes: StepBytes
    bits_per_value: float
    kernel: KernelUse | None = None
    times: Times | None = None
    relative_error: float | None = None
    reason: str | None = None


@dataclass(frozen=True, config=STRICT)
class KernelReport:
    """``formats``: what the names in the rows stand for."""

    machine: Machine
    ceiling: ReadCeiling
    heads: Heads
    formats: tuple[Pair, ...] = ()
    rows: tuple[KernelRow, ...] = ()
    baselines: tuple[Baseline, ...] = ()
    is_complete: bool = False

    @property
    def points(self) -> tuple[Point, ...]:
        """All points with a measurement, in the order in which they were measured."""
        found = [entry.point for entry in self.baselines] + [row.point for row in self.rows]
        return tuple(dict.fromkeys(found))

    def fastest(self, point: Point) -> Baseline | None:
        """The baseline that everything at ``point`` is held against; None if none ran."""
        ran = [entry for entry in self.baselines if entry.point == point and entry.times is not None]
        return min(ran, key=lambda entry: entry.times.median_us if entry.times else 0.0, default=None)

    def factor(self, row: KernelRow) -> float | None:
        """How many times faster than the fastest baseline."""
        best = self.fastest(row.point)
        if row.times is None or best is None or best.times is None:
            return None
        return best.times.median_us / row.times.median_us

    def factor_ceiling(self, row: KernelRow) -> float:
        """The same if bytes were all that counts: those of 16 bits over the row's."""
        return raw_bytes(self.heads, row.point) / row.nbytes.total

    def gb_per_s(self, entry: KernelRow | Baseline) -> float | None:
        """Bytes that must be moved over the time taken, in 10^9 a second."""
        nbytes = entry.nbytes.total if isinstance(entry, KernelRow) else entry.nbytes
        if entry.times is None or nbytes is None:
            return None
        return nbytes / entry.times.median_us * 1e-3

    def share(self, entry: KernelRow | Baseline) -> float | None:
        """Of the read bandwidth measured in the same run."""
        rate = self.gb_per_s(entry)
        return None if rate is None else rate / self.ceiling.gb_per_s

    def target(self, row: KernelRow) -> float | None:
        return target(row.format, self.heads, row.point)

    def with_row(self, row: KernelRow) -> KernelReport:
        return replace(self, rows=(*self.rows, row))

    def with_baselines(self, *found: Baseline) -> KernelReport:
        return replace(self, baselines=(*self.baselines, *found))


def kernel_json(report: KernelReport) -> dict[str, Any]:
    """``measured``, the report itself, and ``derived``, what follows from it, row by row."""
    best = {point: report.fastest(point) for point in report.points}
    return document(
        "bench-kernels",
        report,
        {
            "read_ceiling_gb_per_s": report.ceiling.gb_per_s,
            "rows": [
                {
                    "nbytes": row.nbytes.total,
                    "gb_per_s": report.gb_per_s(row),
                    "share_of_read_ceiling": report.share(row),
                    "baseline": None if (fastest := best[row.point]) is None else fastest.name,
                    "factor": report.factor(row),
                    "factor_ceiling": report.factor_ceiling(row),
                    "target": report.target(row),
                }
                for row in report.rows
            ],
            "baselines": [
                {"gb_per_s": report.gb_per_s(entry), "share_of_read_ceiling": report.share(entry)}
                for entry in report.baselines
            ],
        },
    )


def document(kind: str, report: Any, derived: Any) -> dict[str, Any]:
    """The JSON document of a report."""
    return {"kind": kind, "schema": SCHEMA, "measured": dump(report), "derived": derived}


def save_json(path: Path, content: dict[str, Any]) -> None:
    """Write the document whole or not at all. ArtifactError when the file cannot be written."""
    write_text_atomic(path, json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n")


def load_report(record: type[Report], kind: str, path: Path) -> Report:
    """The report that a document of :func:`save_json` holds.

    Raises:
        ArtifactError: missing, not JSON, another kind or schema, unknown or missing keys.
    """
    again = f"run kvcal {kind.replace('-', ' ')} again"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as broken:
        raise ArtifactError(f"{path}: cannot be read: {broken}", hint=again) from None
    if not isinstance(content, dict) or (content.get("kind"), content.get("schema")) != (kind, SCHEMA):
        raise ArtifactError(f"{path}: is no {kind} document of schema {SCHEMA}", hint=again)
    return parse(record, content.get("measured", {}), str(path), ArtifactError, hint=again)
