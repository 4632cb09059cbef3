"""What ``kvcal bench e2e`` found, as data: tokens a second of a whole model, by plan, context and batch.

Two questions are kept apart. At the same batch: how much faster is a step? With the same memory: how many tokens a
second does a device of so many bytes give, when each plan takes as many sequences as fit?
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic.dataclasses import dataclass

from kvcal.bench.device import Machine
from kvcal.bench.kernel_use import KernelUse
from kvcal.bench.record import document
from kvcal.bench.shape import Pair
from kvcal.bench.timing import Times
from kvcal.strict import STRICT

# What is measured in 16 bits; the factors are against the faster of the two at each place.
TRANSFORMERS_16, FASTEST_16 = "16, transformers", "16, fastest SDPA"
BASELINES = (TRANSFORMERS_16, FASTEST_16)


@dataclass(frozen=True, config=STRICT)
class StepRow:
    """One plan at one batch. ``limit_bytes`` is the device memory that the run was held to, ``peak_bytes`` what was
    taken of it, the CUDA context included; ``kernel``: what attention ran. Without ``steps`` there is a ``reason``."""

    plan: str
    context: int
    batch: int
    limit_bytes: int
    kernel: KernelUse | None = None
    steps: Times | None = None
    tokens_per_s: float | None = None
    peak_bytes: int | None = None
    cache_bytes: int | None = None
    reason: str | None = None

    @property
    def is_baseline(self) -> bool:
        return self.plan in BASELINES


@dataclass(frozen=True, config=STRICT)
class StepReport:
    """``context_bytes``: of the device, held by CUDA itself and by other processes; ``formats``: what plans are made
    of."""

    machine: Machine
    shape: str
    weights: str
    weight_bytes: int
    context_bytes: int
    memory: tuple[int, ...]
    formats: tuple[Pair, ...] = ()
    rows: tuple[StepRow, ...] = ()
    is_complete: bool = False

    @property
    def contexts(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(row.context for row in self.rows))

    @property
    def plans(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.plan for row in self.rows))

    def same_batch(self, row: StepRow) -> float | None:
        """Tokens a second over those of the fastest 16-bit cache at the same context and batch; None where that does
        not fit, or was not measured."""
        base = [other for other in self.rows if (other.context, other.batch) == (row.context, row.batch)]
        return ratio(row, fastest([other for other in base if other.is_baseline]))

    def best(self, plan: str, context: int, memory: int) -> StepRow | None:
        """The plan's most tokens a second within so many bytes of device memory."""
        return fastest(
            [
                row
                for row in self.rows
                if (row.plan, row.context) == (plan, context)
                and row.peak_bytes is not None
                and row.peak_bytes <= memory
            ]
        )

    def same_memory(self, row: StepRow, memory: int) -> float | None:
        """Tokens a second over the best of the 16-bit caches within the same bytes."""
        base = [self.best(plan, row.context, memory) for plan in BASELINES]
        return ratio(row, fastest([other for other in base if other is not None]))

    def with_row(self, row: StepRow) -> StepReport:
        return replace(self, rows=(*self.rows, row))


def fastest(rows: list[StepRow]) -> StepRow | None:
    """By tokens a second; None of rows without any."""
    measured = [row for row in rows if row.tokens_per_s is not None]
    return max(measured, key=lambda row: row.tokens_per_s or 0.0, default=None)


def ratio(row: StepRow, base: StepRow | None) -> float | None:
    if row.tokens_per_s is None or base is None or base.tokens_per_s is None:
        return None
    return row.tokens_per_s / base.tokens_per_s


def step_json(report: StepReport) -> dict[str, Any]:
    """``measured``, the report itself, and ``derived``: factors at the same batch, and the best of every memory."""
    memory = [
        {
            "memory": limit,
            "context": context,
            "plan": plan,
            "batch": None if best is None else best.batch,
            "tokens_per_s": None if best is None else best.tokens_per_s,
            "factor": None if best is None else report.same_memory(best, limit),
        }
        for limit in report.memory
        for context in report.contexts
        for plan in report.plans
        for best in [report.best(plan, context, limit)]
    ]
    batch = [{"factor": report.same_batch(row)} for row in report.rows]
    return document("bench-e2e", report, {"same_batch": batch, "same_memory": memory})
