"""What ``kvcal bench layer`` found, as data: a layer's cache work in a decode step, and the packing of a prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic.dataclasses import dataclass

from kvcal.bench.device import Machine, ReadCeiling
from kvcal.bench.kernel_use import KernelUse
from kvcal.bench.record import Baseline, document
from kvcal.bench.shape import Heads, Pair, Point
from kvcal.bench.step_bytes import StepBytes
from kvcal.bench.timing import Times
from kvcal.pages.layout import PAGE_TOKENS
from kvcal.strict import STRICT

# Of a step's time, at this batch or more: what quantizing and packing may take, amortised.
PACK_SHARE_TARGET, PACK_SHARE_BATCH = 0.002, 32


@dataclass(frozen=True, config=STRICT)
class LayerRow:
    """One format. ``nbytes``: what attention moves in a step; ``kernel``: what serves it. ``plain``: a step in which no
    page is due; ``packing``: those of PAGE_TOKENS successive steps in which one is, in every sequence at once;
    ``append``: storing the plain step's token, alone. ``prefill``: packing a whole prompt's keys and values, which
    reads and writes ``prefill_bytes``."""

    point: Point
    format: str
    nbytes: StepBytes
    kernel: KernelUse | None = None
    plain: Times | None = None
    packing: tuple[Times, ...] = ()
    append: Times | None = None
    prefill: Times | None = None
    prefill_bytes: int = 0
    reason: str | None = None

    @property
    def amortised_us(self) -> float | None:
        """A step's mean over PAGE_TOKENS of them."""
        if self.plain is None:
            return None
        others = (PAGE_TOKENS - len(self.packing)) * self.plain.median_us
        return (others + sum(times.median_us for times in self.packing)) / PAGE_TOKENS

    @property
    def pack_share(self) -> float | None:
        """Of the amortised step: what it takes longer because pages are quantized and packed."""
        mean = self.amortised_us
        return None if mean is None or self.plain is None else 1 - self.plain.median_us / mean

    @property
    def prefill_gb_per_s(self) -> float | None:
        return None if self.prefill is None else self.prefill_bytes / self.prefill.median_us * 1e-3


@dataclass(frozen=True, config=STRICT)
class LayerReport:
    """``baselines``: StaticCache's update and the fastest SDPA of its point; ``formats``: what names stand for."""

    machine: Machine
    ceiling: ReadCeiling
    heads: Heads
    formats: tuple[Pair, ...] = ()
    rows: tuple[LayerRow, ...] = ()
    baselines: tuple[Baseline, ...] = ()
    is_complete: bool = False

    def baseline(self, point: Point) -> Baseline | None:
        return next((entry for entry in self.baselines if entry.point == point and entry.times is not None), None)

    def factor(self, row: LayerRow) -> float | None:
        """How many times faster than the baseline, packing included."""
        best, mean = self.baseline(row.point), row.amortised_us
        return None if best is None or best.times is None or mean is None else best.times.median_us / mean

    def with_row(self, row: LayerRow) -> LayerReport:
        return replace(self, rows=(*self.rows, row))

    def with_baseline(self, entry: Baseline) -> LayerReport:
        return replace(self, baselines=(*self.baselines, entry))


def layer_json(report: LayerReport) -> dict[str, Any]:
    """``measured``, the report itself, and ``derived``, what follows from it, row by row."""
    derived = [
        {
            "nbytes": row.nbytes.total,
            "amortised_us": row.amortised_us,
            "pack_share": row.pack_share,
            "pack_share_target": PACK_SHARE_TARGET,
            "factor": report.factor(row),
            "prefill_gb_per_s": row.prefill_gb_per_s,
        }
        for row in report.rows
    ]
    return document("bench-layer", report, {"rows": derived})
