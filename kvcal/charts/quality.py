"""Quality against size: a plan among others, systems at several budgets, the trials of a threshold search, a sweep.

KL has a logarithmic axis, and accuracy a panel of its own. A comparison gives each system one colour and one marker in
both panels; its budgets are joined by a line. The baselines are horizontal lines, KIVI also points where their bits are
in sight; 16 bits has no KL to show on a logarithmic axis, its axis label says it.

Every ``draw_`` function of a path writes its picture as ``Picture.save`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvcal.charts import BLUE, COLOURS, GREY, MARKERS, RED, Mark, Panel, Picture
from kvcal.charts.layers import draw_bits
from kvcal.plan.plan import Plan
from kvcal.quantities import format_bytes
from kvcal.stages.compare.record import BASELINES, RAW_RECIPE, WORST_RECIPE, Comparison
from kvcal.stages.evaluate import Evaluation, Row
from kvcal.stages.tune.study import Trial, Tuning

# KL below this is rounding (a 16-bit cache against the model without it); the logarithmic axis ends here.
SMALLEST_KL = 1e-6
BASELINE_DASHES = dict(zip(BASELINES, ("-", ":", "--"), strict=True))
BITS = "bits per cached value, everything counted"
TRIAL_COLOUR = "#9a9a9a"
# More labels than this on the front of a search cannot be read: those with the fewest bits are kept.
MOST_LABELS = 14


def kl_mark(x: float, row: Row) -> Mark:
    """A plan's KL on a logarithmic axis, where the lower end of an error bar must stay above zero."""
    kl, error = max(row.text.kl, SMALLEST_KL), row.text.kl_se or 0.0
    return Mark(x, kl, min(error, 0.7 * kl), error)


def accuracy_mark(x: float, row: Row) -> Mark:
    """A plan's mean accuracy over tasks in %."""
    error = 100 * (row.accuracy_se or 0.0)
    return Mark(x, 100 * (row.accuracy or 0.0), error, error)


def draw_evaluation(evaluation: Evaluation, plan: Plan, path: str | Path) -> None:
    """Write the picture of ``plan``'s allocation and of all rows' quality against bytes."""
    rows, digest, workload = evaluation.rows, plan.sha256, plan.workload
    name = next((row.name for row in rows if row.plan_sha256 == digest), "plan")
    picture = Picture(
        13.5,
        7.2,
        f"{name} on {plan.model.id}: {plan.bits_per_value():.2f} bits per cached value with everything counted, "
        f"{format_bytes(plan.predicted_bytes)} at batch {workload.batch} x {workload.context} tokens",
    )
    grid = picture.figure.add_gridspec(2, 2, width_ratios=(1, 1.9))
    draw_bits(picture.panel(grid[:, 0]).axes, plan.layers)
    has_tasks = any(row.tasks for row in rows)
    if rows:
        draw_plans_kl(picture.panel(grid[0, 1] if has_tasks else grid[:, 1]), rows, digest)
    if has_tasks:
        draw_plans_accuracy(picture.panel(grid[1, 1]), [row for row in rows if row.tasks], digest)
    picture.save(path)


def draw_plans_kl(panel: Panel, rows: Sequence[Row], digest: str) -> None:
    """The upper panel; the row of the plan with this digest stands out."""
    marks = [kl_mark(row.total_bytes, row) for row in rows]
    panel.log_kl(marks)
    title = f"KL on texts of {rows[0].text_bits.mean_tokens:.0f} tokens against size (lower left is better)"
    _draw_plans(panel, title, f"KL to 16 bits (nats per token)\nbelow {SMALLEST_KL:g} drawn there", rows, marks, digest)


def draw_plans_accuracy(panel: Panel, rows: Sequence[Row], digest: str) -> None:
    """The lower panel."""
    marks = [accuracy_mark(row.total_bytes, row) for row in rows]
    panel.axes.set_ylim(-8, 116)
    title = "Accuracy, mean over tasks, against size (upper left is better)"
    _draw_plans(panel, title, "exact match (%)", rows, marks, digest)


def _draw_plans(panel: Panel, title: str, y: str, rows: Sequence[Row], marks: Sequence[Mark], digest: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes, workload = panel.axes, rows[0].workload
    for row, mark in zip(rows, marks, strict=True):
        is_plan = row.plan_sha256 == digest
        panel.point(mark, RED if is_plan else GREY, "D" if is_plan else "o", row.name, is_plan)
    axes.set_xscale("log")
    axes.set_xlim(min(mark.x for mark in marks) / 1.35, max(mark.x for mark in marks) * 1.35)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(int(size))))
    size = f"whole cache at {workload.batch} x {workload.context} tokens (bytes, logarithmic); bars: 1 standard error"
    panel.frame(title, size, y)


class System(NamedTuple):
    """A recipe's points by bits: in each panel (``kl``, ``accuracy`` in %) one mark a plan."""

    name: str
    colour: str
    marker: str
    kl: list[Mark]
    accuracy: list[Mark]


def draw_comparison(comparison: Comparison, path: str | Path) -> None:
    """Write the systems' KL, and their accuracy where it was measured, against bits."""
    systems, baselines, workload = systems_of(comparison), baselines_of(comparison), comparison.workload
    panels = [draw_systems_kl]
    panels += [draw_systems_accuracy] if any(system.accuracy for system in baselines) else []
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


def draw_systems_kl(panel: Panel, systems: Sequence[System], baselines: Sequence[System]) -> None:
    """The left panel."""
    raw = [system.kl[0].y for system in baselines if system.name == RAW_RECIPE]
    lines = [(system, system.kl[0]) for system in baselines if system.name != RAW_RECIPE]
    panel.log_kl([mark for system in systems for mark in system.kl] + [mark for _, mark in lines])
    reference = f"; {RAW_RECIPE} has {'at most ' if raw[0] <= SMALLEST_KL else ''}{raw[0]:.2g}" if raw else ""
    _draw_systems(panel, [(system, system.kl) for system in systems], lines)
    panel.frame("KL on text (lower left is better)", BITS, f"KL to 16 bits (nats per token{reference})")


def draw_systems_accuracy(panel: Panel, systems: Sequence[System], baselines: Sequence[System]) -> None:
    """The right panel."""
    panel.axes.set_ylim(-6, 112)
    _draw_systems(panel, [(system, system.accuracy) for system in systems], [(b, b.accuracy[0]) for b in baselines])
    panel.frame("Accuracy (upper left is better)", BITS, "exact match (%), mean over tasks")


def _draw_systems(
    panel: Panel, curves: Sequence[tuple[System, list[Mark]]], lines: Sequence[tuple[System, Mark]]
) -> None:
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


def draw_tuning(tuning: Tuning, path: str | Path, chosen: Trial | None = None, max_bits: float | None = None) -> None:
    """Write the trials' accuracy against bits. ``chosen`` is marked, and ``max_bits`` drawn as a line."""
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
    panel.frame(title, BITS, "accuracy (%); bars: 1 standard error")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", frameon=False)
    picture.save(path)


def draw_front(rows: Sequence[dict[str, Any]], objective: str, path: str | Path) -> None:
    """Write the Pareto front of a sweep (``allocate.pareto``)."""
    picture = Picture(9, 5.5)
    panel = picture.panel()
    drawn = [(row["bits_per_value"], row["loss"]) for row in rows if row["loss"] > 0]
    panel.axes.plot(
        [bits for bits, _ in drawn], [loss for _, loss in drawn], "o-", color=BLUE, markersize=4, linewidth=1
    )
    panel.axes.set_yscale("log")
    panel.frame("Least loss for each budget (lower left is better)", "bits per cached value", f"loss ({objective})")
    picture.save(path)
