"""Limits that an evaluation is held against, such as those of a CI job: of KL, of accuracy, and of bytes.

A measured value is compared as it stands. Its standard error is told beside it; a limit should leave room for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcal.errors import GateFailed, UsageError

if TYPE_CHECKING:
    from kvcal.stages.evaluate.record import Row

ALL_TASKS = "all"  # the mean over tasks


@dataclass(frozen=True)
class GateResult:
    """One limit and what was measured; ``standard_error`` is None where there is none."""

    gate: str
    limit: float
    measured: float
    standard_error: float | None
    passed: bool


@dataclass(frozen=True)
class Gates:
    """Limits of one plan: ``max_kl`` in nats per token, ``min_accuracy`` as a share by task or "all" for their mean,
    ``max_bytes`` of the cache at the plan's workload; what is None or not named is not limited."""

    max_kl: float | None = None
    min_accuracy: Mapping[str, float] = field(default_factory=dict)
    max_bytes: int | None = None

    def require_measured(self, tasks: Sequence[str]) -> None:
        """UsageError for a limit out of range, or for a task that is not among ``tasks``, those to be measured."""
        if self.max_kl is not None and not (math.isfinite(self.max_kl) and self.max_kl >= 0):
            raise UsageError(f"--max-kl {self.max_kl}; expected a number from 0 on, in nats per token")
        allowed = (*tasks, ALL_TASKS) if tasks else ()
        for task, share in self.min_accuracy.items():
            if not 0 <= share <= 1:
                raise UsageError(f"--min-accuracy {task}={share}; expected a share from 0 to 1")
            if task not in allowed:
                raise UsageError(
                    f"--min-accuracy {task}={share}: {task!r} is not measured; allowed: {', '.join(allowed) or 'none'}",
                    hint=f"add it to the tasks: --tasks {task}",
                )

    def results(self, row: Row) -> Iterator[GateResult]:
        """The verdict of each limit on the plan of ``row``."""
        if self.max_kl is not None:
            kl = row.text.kl
            yield GateResult("max_kl", self.max_kl, kl, row.text.kl_se, kl <= self.max_kl)
        by_task = {one.task: (one.accuracy, one.accuracy_se) for one in row.tasks}
        for task, share in self.min_accuracy.items():
            measured, error = by_task.get(task, (row.accuracy, row.accuracy_se))
            assert measured is not None
            yield GateResult(f"min_accuracy {task}", share, measured, error, measured >= share)
        if self.max_bytes is not None:
            yield GateResult("max_bytes", self.max_bytes, row.total_bytes, None, row.total_bytes <= self.max_bytes)


def read_accuracies(texts: Sequence[str]) -> dict[str, float]:
    """Least shares by task, of ``task=share`` texts; a share alone is of all tasks together. UsageError for others."""
    found = {}
    for text in texts:
        task, equals, share = text.rpartition("=")
        try:
            found[task if equals else ALL_TASKS] = float(share)
        except ValueError:
            raise UsageError(
                f"--min-accuracy {text}: {share!r} is no number", hint="for example --min-accuracy chain=0.9"
            ) from None
    return found


def require_passed(name: str, results: Sequence[GateResult]) -> None:
    """GateFailed, naming every limit that the plan ``name`` is beyond."""
    failed = [f"{one.gate}: {one.measured:.6g}, limit {one.limit:.6g}" for one in results if not one.passed]
    if failed:
        raise GateFailed(
            f"{name} fails {len(failed)} of {len(results)} gates: {'; '.join(failed)}",
            hint="give the plan more bytes, or raise the limit",
        )
