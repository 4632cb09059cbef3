"""The comparison as one picture: quality against all-in bits, KL on the left and accuracy on the right.

A system has one colour and one marker in both panels; its budgets are joined by a line. The baselines are horizontal
lines, KIVI also points where their bits are in sight; 16 bits has no KL to show on a logarithmic axis, its axis label
says it. As in the report: Agg canvas without pyplot, no date and no version in the file, equal bytes for equal content.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcal.artifact import write_bytes_atomic
from kvcal.charts.evaluation import SMALLEST_KL
from kvcal.charts.labels import Label, Mark, place_labels
from kvcal.stages.compare.record import BASELINES, RAW_RECIPE, WORST_RECIPE, Comparison
from kvcal.stages.evaluate.stage import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Eight colours and seven markers: 56 systems before a pair comes again.
COLOURS = ("#c0392b", "#2471a3", "#148f77", "#d68910", "#7d3c98", "#c2185b", "#6e2c00", "#7d8c0d")
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
BASELINE_COLOUR = "#4d4d4d"
BASELINE_DASHES = dict(zip(BASELINES, ("-", ":", "--"), strict=True))
# A line counts as this many marks where labels are placed: closer than a name is wide, so names stand beside it.
MARKS_OF_A_LINE = 24


@dataclass(frozen=True)
class System:
    """A recipe's points by bits: in each panel (``kl``, ``accuracy`` in %) one mark a plan."""

    name: str
    colour: str
    marker: str
    kl: tuple[Mark, ...]
    accuracy: tuple[Mark, ...]


def draw_comparison(comparison: Comparison, path: str | Path) -> None:
    """Write the picture, whole or not at all.

    Raises:
        ArtifactError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    systems, baselines = systems_of(comparison), baselines_of(comparison)
    has_tasks = any(system.accuracy for system in baselines)
    figure = Figure(figsize=(15, 6.5) if has_tasks else (9, 6.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(1, 2 if has_tasks else 1, squeeze=False)[0]
    panels = [draw_kl(all_axes[0], systems, baselines)]
    if has_tasks:
        panels.append(draw_accuracy(all_axes[1], systems, baselines))
    workload = comparison.workload
    lengths = [f"texts of {row.text_bits.mean_tokens:.0f} tokens; " for _, row in comparison.measured[:1]]
    figure.suptitle(
        f"{comparison.model}: quality against size, bits at batch {workload.batch} x {workload.context} tokens; "
        f"{''.join(lengths)}bars: 1 standard error",
        fontsize=12,
    )
    handles, names = all_axes[-1].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=max(1, len(names)), frameon=False)
    figure.draw_without_rendering()
    for axes, (marks, labels) in zip(all_axes, panels, strict=True):
        place_labels(axes, marks, labels)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    write_bytes_atomic(path, picture.getvalue())


def systems_of(comparison: Comparison) -> tuple[System, ...]:
    """The measured recipes that are no baselines, in the order given; colours and markers follow the order of all
    recipes, measured or not."""
    names = list(dict.fromkeys(entry.recipe for entry in comparison.entries if not entry.is_baseline))
    found = []
    for number, name in enumerate(names):
        rows = [row for entry, row in comparison.measured if entry.recipe == name]
        if rows:
            found.append(_system(name, COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)], rows))
    return tuple(found)


def baselines_of(comparison: Comparison) -> tuple[System, ...]:
    """16 bits, KIVI-2 and KIVI-4."""
    rows = [(entry.name, row) for entry, row in comparison.measured if entry.is_baseline]
    return tuple(_system(name, BASELINE_COLOUR, "*", [row]) for name, row in rows)


def _system(name: str, colour: str, marker: str, rows: list[Row]) -> System:
    rows = sorted(rows, key=lambda row: row.bits_per_value)
    kl, accuracy = [], []
    for row in rows:
        # On a logarithmic axis the lower end of an error bar must stay above zero.
        value, error = max(row.text.kl, SMALLEST_KL), row.text.kl_se or 0.0
        kl.append(Mark(row.bits_per_value, value, min(error, 0.7 * value), error))
        if row.accuracy is not None:
            accuracy.append(Mark(row.bits_per_value, 100 * row.accuracy, *[100 * (row.accuracy_se or 0.0)] * 2))
    return System(name, colour, marker, tuple(kl), tuple(accuracy))


def draw_kl(axes: Axes, systems: tuple[System, ...], baselines: tuple[System, ...]) -> tuple[list[Mark], list[Label]]:
    """The left panel; the marks in it, and the labels still to be placed."""
    raw = [system.kl[0].y for system in baselines if system.name == RAW_RECIPE]
    lines = [(system, system.kl[0]) for system in baselines if system.name != RAW_RECIPE]
    shown = [mark for system in systems for mark in system.kl] + [mark for _, mark in lines]
    axes.set_yscale("log")
    if shown:
        axes.set_ylim(min(mark.y - mark.below for mark in shown) / 2, 2 * max(mark.y + mark.above for mark in shown))
    reference = f"; {RAW_RECIPE} has {'at most ' if raw[0] <= SMALLEST_KL else ''}{raw[0]:.2g}" if raw else ""
    axes.set_ylabel(f"KL to 16 bits (nats per token{reference})")
    axes.set_title("KL on text (lower left is better)")
    return _draw(axes, [(system, system.kl) for system in systems], lines)


def draw_accuracy(
    axes: Axes, systems: tuple[System, ...], baselines: tuple[System, ...]
) -> tuple[list[Mark], list[Label]]:
    """The right panel; the marks in it, and the labels still to be placed."""
    axes.set_ylim(-6, 112)
    axes.set_ylabel("exact match (%), mean over tasks")
    axes.set_title("Accuracy (upper left is better)")
    lines = [(system, system.accuracy[0]) for system in baselines]
    return _draw(axes, [(system, system.accuracy) for system in systems], lines)


def _draw(
    axes: Axes, curves: list[tuple[System, tuple[Mark, ...]]], lines: list[tuple[System, Mark]]
) -> tuple[list[Mark], list[Label]]:
    near = [mark.x for _, curve in curves for mark in curve]
    near += [mark.x for system, mark in lines if system.name == WORST_RECIPE]
    low, high = (min(near), max(near)) if near else (0.0, 16.0)
    margin = max(0.2, 0.15 * (high - low))
    axes.set_xlim(low - margin, high + margin)
    axes.set_xlabel("bits per cached value, everything counted")
    marks, labels = [], []
    for system, mark in lines:
        dashes = BASELINE_DASHES[system.name]
        name = f"{system.name} ({mark.x:.2f} bits)"
        axes.axhline(mark.y, color=system.colour, linestyle=dashes, linewidth=1, label=name)
        marks += _line(Mark(low - margin, mark.y), Mark(high + margin, mark.y), is_log=False)
        if low - margin < mark.x < high + margin:
            marks.append(_point(axes, system, mark))
            labels.append(Label(mark, system.name, system.colour))
    for system, curve in curves:
        axes.plot([mark.x for mark in curve], [mark.y for mark in curve], color=system.colour, linewidth=1.2)
        marks += [_point(axes, system, mark) for mark in curve]
        labels += [Label(curve[0], system.name, system.colour, is_bold=True)] if curve else []
    for _, curve in curves:
        for first, second in zip(curve, curve[1:], strict=False):
            marks += _line(first, second, is_log=axes.get_yscale() == "log")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return marks, labels


def _point(axes: Axes, system: System, mark: Mark) -> Mark:
    axes.errorbar(
        mark.x,
        mark.y,
        yerr=[[mark.below], [mark.above]],
        color=system.colour,
        marker=system.marker,
        markersize=7,
        elinewidth=1,
        capsize=3,
    )
    return mark


def _line(first: Mark, second: Mark, is_log: bool) -> list[Mark]:
    """Marks on the line between two points, as it is drawn."""
    found = []
    for step in range(1, MARKS_OF_A_LINE):
        share = step / MARKS_OF_A_LINE
        if is_log:
            y = math.exp((1 - share) * math.log(first.y) + share * math.log(second.y))
        else:
            y = (1 - share) * first.y + share * second.y
        found.append(Mark((1 - share) * first.x + share * second.x, y))
    return found
