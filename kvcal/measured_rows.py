"""Measured plans side by side: rows for a page, and series for a picture.

kvcal's own plan is told from its rivals, which are the baselines, and from all others. The recipe of `kvcal
plan` is called kvcal in pictures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvcal.pictures import SMALLEST_KL, Point, Role, Series
from kvcal.stages.compare import Comparison, Verdict
from kvcal.stages.evaluate.stage import Evaluation, Row, task_cell, task_header

OWN_RECIPE = "default"


class Measured(NamedTuple):
    """A plan's row; plans of one ``series`` are joined in a picture."""

    series: str
    name: str
    role: Role
    row: Row


def of_comparison(comparison: Comparison, found: Verdict | None) -> list[Measured]:
    """All measured plans. kvcal's are those of its own recipe, without one those of the recipe that does
    best."""
    recipes = {entry.recipe for entry, _ in comparison.measured}
    ours = OWN_RECIPE if OWN_RECIPE in recipes or found is None else found.winner.recipe
    roles: dict[str, Role] = {entry.name: "kvcal" if entry.recipe == ours else "other" for entry in comparison.entries}
    roles |= {entry.name: "rival" for entry in comparison.entries if entry.is_baseline}
    return [Measured(entry.recipe, entry.name, roles[entry.name], row) for entry, row in comparison.measured]


def of_evaluation(evaluation: Evaluation) -> list[Measured]:
    """The last row is the plan's, which the others are measured next to."""
    *others, ours = evaluation.rows
    rivals = [Measured(row.name, row.name, "rival", row) for row in others]
    return [*rivals, Measured(ours.name, ours.name, "kvcal", ours)]


class Dot(NamedTuple):
    """A row of measured plans: KL at ``at`` % of a logarithmic axis, its error from ``low`` to ``high`` %."""

    name: str
    role: Role
    bits: str
    kl: str
    at: float
    low: float
    high: float
    others: tuple[str, ...]


def decimal(kl: float, error: float | None) -> str:
    """A KL without powers of ten, its first two digits: "0.0025 ± 0.0003"."""
    if kl < 1e-4:
        return "below 0.0001"
    digits = max(0, 1 - math.floor(math.log10(kl)), -math.floor(math.log10(error)) if error else 0)
    digits = min(digits, 5)
    return f"{kl:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def series_of(rows: Sequence[Measured]) -> tuple[list[Series], list[Series]]:
    """KL and accuracy of measured plans (for ``draw_quality``), a series for each name."""
    kl: dict[str, tuple[list[Point], Role]] = {}
    accuracy: dict[str, tuple[list[Point], Role]] = {}
    for recipe, name, role, row in rows:
        series, label = "kvcal" if recipe == OWN_RECIPE else recipe, name.removeprefix(recipe).strip(" @")
        bits, error = row.bits_per_value, 100 * (row.accuracy_se or 0.0)
        kl.setdefault(series, ([], role))[0].append(Point(bits, row.text.kl, row.text.kl_se or 0.0, label))
        points = accuracy.setdefault(series, ([], role))[0]
        if row.accuracy is not None:
            points.append(Point(bits, 100 * row.accuracy, error, label))
    return [Series(name, *one) for name, one in kl.items()], [Series(name, *one) for name, one in accuracy.items()]


def dots_of(rows: Sequence[Measured]) -> dict[str, Any]:
    """Rows by bits, most first, on one logarithmic axis of KL, its ends, and the headers of the others'
    columns. 16 bits lie at its left end, however little they lose."""
    kls = [row.text.kl for *_, row in rows if row.text.kl > 10 * SMALLEST_KL] or [SMALLEST_KL]
    low, high = math.floor(math.log10(min(kls))), math.ceil(math.log10(max(kls)) + 1e-9)

    def place(kl: float) -> float:
        at = (math.log10(max(kl, SMALLEST_KL)) - low) / max(1, high - low)
        return 100 * min(1.0, max(0.0, at))

    dots = []
    for _, name, role, row in sorted(rows, key=lambda one: -one[3].bits_per_value):
        kl, error = row.text.kl, row.text.kl_se or 0.0
        cells = f"{100 * row.text.top1_agreement:.1f} %", *(task_cell(task) for task in row.tasks)
        ends = place(kl), place(kl - error), place(kl + error)
        dots.append(Dot(name, role, f"{row.bits_per_value:.2f}", decimal(kl, row.text.kl_se), *ends, cells))
    headers = ["same next token", *map(task_header, rows[0][3].tasks)]
    return {"dots": dots, "columns": headers, "ends": [f"{10.0**end:g}" for end in (low, high)]}
