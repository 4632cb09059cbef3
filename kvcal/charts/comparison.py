"""Quality against all-in bits: the comparison of systems, and the trials of a threshold search.

The comparison has KL on the left and accuracy on the right. A system has one colour and one marker in both panels; its
budgets are joined by a line. The baselines are horizontal lines, KIVI also points where their bits are in sight; 16
bits has no KL to show on a logarithmic axis, its axis label says it. The trials of a search show their accuracy, the
Pareto front and the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvcal.charts import BLUE, COLOURS, GREY, MARKERS, RED, SMALLEST_KL, Mark, Panel, Picture, accuracy_mark, kl_mark
from kvcal.stages.compare.record import BASELINES, RAW_RECIPE, WORST_RECIPE, Comparison
from kvcal.stages.evaluate import Row
from kvcal.stages.tune.record import Trial, Tuning

BASELINE_DASHES = dict(zip(BASELINES, ("-", ":", "--"), strict=True))
BITS = "bits per cached value, everything counted"


class System(NamedTuple):
    """A recipe's points by bits: in each panel (``kl``, ``accuracy`` in %) one mark a plan."""

    name: str
    colour: str
    marker: str
    kl: list[Mark]
    accuracy: list[Mark]


def draw_comparison(comparison: Comparison, path: str | Path) -> None:
    """Write the picture, whole or not at all.

    Raises:
        ArtifactError: the file cannot be written.
    """
    systems, baselines, workload = systems_of(comparison), baselines_of(comparison), comparison.workload
    panels = [draw_kl, draw_accuracy] if any(system.accuracy for system in baselines) else [draw_kl]
    lengths = "".join(f"texts of {row.text_bits.mean_tokens:.0f} tokens; " for _, row in comparison.measured[:1])
    picture = Picture(
        15 if len(panels) > 1 else 9,
        6.5,
        f"{comparison.model}: quality against size, bits at batch {workload.batch} x {workload.context} tokens; "
        f"{lengths}bars: 1 standard error",
    )
    for number, draw in enumerate(panels):
        panel = picture.panel(1, len(panels), number + 1)
        draw(panel, systems, baselines)
    handles, names = panel.axes.get_legend_handles_labels()
    picture.figure.legend(handles, names, loc="outside lower center", ncols=max(1, len(names)), frameon=False)
    picture.save(path)


def systems_of(comparison: Comparison) -> list[System]:
    """The measured recipes that are no baselines, in the order given; colours and markers follow the order of all
    recipes, measured or not."""
    names = dict.fromkeys(entry.recipe for entry in comparison.entries if not entry.is_baseline)
    systems = []
    for number, name in enumerate(names):
        rows = [row for entry, row in comparison.measured if entry.recipe == name]
        if rows:
            systems.append(_system(name, COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)], rows))
    return systems


def baselines_of(comparison: Comparison) -> list[System]:
    """16 bits, KIVI-2 and KIVI-4."""
    return [_system(entry.name, GREY, "*", [row]) for entry, row in comparison.measured if entry.is_baseline]


def _system(name: str, colour: str, marker: str, rows: list[Row]) -> System:
    rows = sorted(rows, key=lambda row: row.bits_per_value)
    kl = [kl_mark(row.bits_per_value, row) for row in rows]
    accuracy = [accuracy_mark(row.bits_per_value, row) for row in rows if row.accuracy is not None]
    return System(name, colour, marker, kl, accuracy)


def draw_kl(panel: Panel, systems: Sequence[System], baselines: Sequence[System]) -> None:
    """The left panel."""
    raw = [system.kl[0].y for system in baselines if system.name == RAW_RECIPE]
    lines = [(system, system.kl[0]) for system in baselines if system.name != RAW_RECIPE]
    panel.log_kl([mark for system in systems for mark in system.kl] + [mark for _, mark in lines])
    reference = f"; {RAW_RECIPE} has {'at most ' if raw[0] <= SMALLEST_KL else ''}{raw[0]:.2g}" if raw else ""
    _draw(panel, [(system, system.kl) for system in systems], lines)
    panel.frame("KL on text (lower left is better)", BITS, f"KL to 16 bits (nats per token{reference})")


def draw_accuracy(panel: Panel, systems: Sequence[System], baselines: Sequence[System]) -> None:
    """The right panel."""
    panel.axes.set_ylim(-6, 112)
    _draw(panel, [(system, system.accuracy) for system in systems], [(b, b.accuracy[0]) for b in baselines])
    panel.frame("Accuracy (upper left is better)", BITS, "exact match (%), mean over tasks")


def _draw(panel: Panel, curves: Sequence[tuple[System, list[Mark]]], lines: Sequence[tuple[System, Mark]]) -> None:
    near = [mark.x for _, curve in curves for mark in curve]
    near += [mark.x for system, mark in lines if system.name == WORST_RECIPE]
    low, high = (min(near), max(near)) if near else (0.0, 16.0)
    margin = max(0.2, 0.15 * (high - low))
    low, high = low - margin, high + margin
    panel.axes.set_xlim(low, high)
    for system, mark in lines:
        name, dashes = f"{system.name} ({mark.x:.2f} bits)", BASELINE_DASHES[system.name]
        panel.axes.axhline(mark.y, color=system.colour, linestyle=dashes, linewidth=1, label=name)
        panel.lines.append((Mark(low, mark.y), Mark(high, mark.y)))
        if low < mark.x < high:
            panel.point(mark, system.colour, system.marker, system.name)
    for system, curve in curves:
        panel.axes.plot([mark.x for mark in curve], [mark.y for mark in curve], color=system.colour, linewidth=1.2)
        for number, mark in enumerate(curve):
            panel.point(mark, system.colour, system.marker, "" if number else system.name, is_bold=True)
        panel.lines += zip(curve, curve[1:], strict=False)


TRIAL_COLOUR = "#9a9a9a"
# More labels than this on the front cannot be read: those with the fewest bits are kept.
MOST_LABELS = 14


def draw_tuning(tuning: Tuning, path: str | Path, chosen: Trial | None = None, max_bits: float | None = None) -> None:
    """Write the picture, whole or not at all. ``chosen`` is marked, and ``max_bits`` drawn as a line.

    Raises:
        ArtifactError: the file cannot be written.
    """
    picture = Picture(9, 5.5)
    panel = picture.panel()
    axes, marks = panel.axes, []
    names = [threshold.name for threshold in tuning.search.thresholds]
    for trial in tuning.trials:
        error = 100 * (trial.outcome.accuracy_se or 0) if trial.number in tuning.front else 0.0
        marks.append(Mark(trial.outcome.bits_per_value, 100 * trial.outcome.accuracy, error, error))
    front = [marks[number] for number in tuning.front]
    others = [mark for number, mark in enumerate(marks) if number not in tuning.front]
    if others:
        axes.plot([m.x for m in others], [m.y for m in others], "o", color=TRIAL_COLOUR, markersize=5, label="trial")
        panel.marks += others
    if front:
        x, y = [mark.x for mark in front], [mark.y for mark in front]
        axes.plot(x, y, "o-", color=BLUE, drawstyle="steps-post", linewidth=1, markersize=6, label="Pareto front")
    for first, last in zip(front, front[1:], strict=False):
        corner = Mark(last.x, first.y)
        panel.lines += [(first, corner), (corner, last)]
    for count, number in enumerate(tuning.front):
        values = ", ".join(f"{tuning.trials[number].thresholds[name]:.2f}" for name in names)
        panel.point(marks[number], BLUE, "o", values if count < MOST_LABELS else "")
    if chosen is not None:
        mark = marks[chosen.number]
        axes.plot(mark.x, mark.y, "D", color=RED, markersize=9, zorder=3, label=f"chosen: trial {chosen.number}")
    if max_bits is not None:
        axes.axvline(max_bits, color=RED, linestyle=":", linewidth=1, label=f"cap: {max_bits:g} bits")
    title = f"Threshold search: {len(tuning.trials)} trials over {', '.join(names)} (upper left is better)"
    panel.frame(title, "bits per cached value, everything counted", "accuracy (%); bars: 1 standard error")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", frameon=False)
    picture.save(path)
