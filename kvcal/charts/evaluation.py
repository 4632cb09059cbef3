"""The evaluation as a table and as one picture: where the bits went, and what they bought.

Matplotlib is imported when a picture is drawn, on its Agg canvas without pyplot: no window, no global state. The PNG
carries no date and no version, so the same evaluation gives the same bytes with the same matplotlib.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcal.artifact import write_bytes_atomic
from kvcal.charts.allocation import draw_allocation
from kvcal.charts.labels import Label, Mark, place_labels
from kvcal.plan.plan import Plan
from kvcal.quantities import format_bytes
from kvcal.stages.evaluate.stage import Evaluation, Row, priced_header

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLAN_COLOUR, BASELINE_COLOUR = "#c0392b", "#4d4d4d"
# KL below this is rounding (a 16-bit cache against the model without it); the logarithmic axis ends here.
SMALLEST_KL = 1e-6


@dataclass(frozen=True)
class Point:
    """A row in a chart; ``below`` and ``above`` are the lengths of its error bar."""

    row: Row
    y: float
    below: float
    above: float


def table_rows(evaluation: Evaluation) -> list[tuple[str, tuple[str, ...]]]:
    """The table as (header, one cell a row) columns: text, ready to print. None without rows."""
    rows = evaluation.rows
    if not rows:
        return []
    tasks = [task.task for task in rows[0].tasks]
    columns = [
        ("plan", [row.name for row in rows]),
        (priced_header(rows[0].workload), [f"{row.bits_per_value:.3f}" for row in rows]),
        ("cache", [format_bytes(row.total_bytes) for row in rows]),
        (rows[0].text_bits.header, [f"{row.text_bits.bits_per_value:.3f}" for row in rows]),
        ("KL to 16 bits", [_with_error(row.text.kl, row.text.kl_se, 5) for row in rows]),
        ("top-1 %", [_percent(row.text.top1_agreement, row.text.top1_se) for row in rows]),
        ("perplexity", [_with_error(row.text.perplexity, row.text.perplexity_se, 4) for row in rows]),
    ]
    for number, name in enumerate(tasks):
        results = [row.tasks[number] for row in rows]
        columns.append((f"{name} %", [_percent(task.accuracy, task.accuracy_se) for task in results]))
    if tasks:
        columns.append(("all tasks %", [_percent(row.accuracy or 0.0, row.accuracy_se) for row in rows]))
        columns.append(("bits at the tasks' lengths", [row.task_bits.cell if row.task_bits else "" for row in rows]))
        columns.append(("generated", [str(sum(task.generated_tokens for task in row.tasks)) for row in rows]))
    return [(header, tuple(cells)) for header, cells in columns]


def draw(evaluation: Evaluation, plan: Plan, path: str | Path) -> None:
    """Write the picture of ``plan``'s allocation and of all rows' quality against bytes, whole or not at all.

    Raises:
        ArtifactError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.5, 7.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, width_ratios=(1, 1.9))
    draw_allocation(figure.add_subplot(grid[:, 0]), plan)
    rows = evaluation.rows
    digest = plan.sha256
    has_tasks = any(row.tasks for row in rows)
    charts = [(_draw_kl, grid[0, 1] if has_tasks else grid[:, 1])] if rows else []
    charts += [(_draw_accuracy, grid[1, 1])] if has_tasks else []
    drawn = []
    for chart, place in charts:
        axes = figure.add_subplot(place)
        drawn.append((axes, chart(axes, rows, digest)))
    workload = plan.workload
    name = next((row.name for row in rows if row.plan_sha256 == digest), "plan")
    figure.suptitle(
        f"{name} on {plan.model.id}: {plan.bits_per_value():.2f} bits per cached value with everything counted, "
        f"{format_bytes(plan.predicted_bytes)} at batch {workload.batch} x {workload.context} tokens",
        fontsize=12,
    )
    figure.draw_without_rendering()
    for axes, points in drawn:
        _label(axes, points, digest)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    write_bytes_atomic(path, picture.getvalue())


def _draw_kl(axes: Axes, rows: Sequence[Row], digest: str) -> list[Point]:
    points = []
    for row in rows:
        kl, error = max(row.text.kl, SMALLEST_KL), row.text.kl_se or 0.0
        # On a logarithmic axis the lower end of an error bar must stay above zero.
        points.append(Point(row, kl, min(error, 0.7 * kl), error))
    axes.set_yscale("log")
    axes.set_ylim(min(p.y - p.below for p in points) / 2, 2 * max(p.y + p.above for p in points))
    axes.set_ylabel(f"KL to 16 bits (nats per token)\nbelow {SMALLEST_KL:g} drawn there")
    axes.set_title(f"KL on texts of {rows[0].text_bits.mean_tokens:.0f} tokens against size (lower left is better)")
    return _plot(axes, points, digest)


def _draw_accuracy(axes: Axes, rows: Sequence[Row], digest: str) -> list[Point]:
    points = [Point(row, 100 * (row.accuracy or 0), *[100 * (row.accuracy_se or 0)] * 2) for row in rows if row.tasks]
    axes.set_ylim(-8, 116)
    axes.set_ylabel("exact match (%)")
    axes.set_title("Accuracy, mean over tasks, against size (upper left is better)")
    return _plot(axes, points, digest)


def _plot(axes: Axes, points: list[Point], digest: str) -> list[Point]:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for point in points:
        is_plan = point.row.plan_sha256 == digest
        axes.errorbar(
            point.row.total_bytes,
            point.y,
            yerr=[[point.below], [point.above]],
            color=PLAN_COLOUR if is_plan else BASELINE_COLOUR,
            marker="D" if is_plan else "o",
            markersize=6,
            elinewidth=1,
            capsize=3,
        )
    sizes = [point.row.total_bytes for point in points]
    axes.set_xscale("log")
    axes.set_xlim(min(sizes) / 1.35, max(sizes) * 1.35)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(int(size))))
    workload = points[0].row.workload
    axes.set_xlabel(
        f"whole cache at {workload.batch} x {workload.context} tokens (bytes, logarithmic); bars: 1 standard error"
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return points


def _label(axes: Axes, points: Sequence[Point], digest: str) -> None:
    """Name every point. After the layout is final."""
    marks = [Mark(point.row.total_bytes, point.y, point.below, point.above) for point in points]
    labels = []
    for mark, point in zip(marks, points, strict=True):
        is_plan = point.row.plan_sha256 == digest
        labels.append(Label(mark, point.row.name, PLAN_COLOUR if is_plan else "black", is_plan))
    place_labels(axes, marks, labels)


def _with_error(value: float, error: float | None, digits: int) -> str:
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def _percent(share: float, error: float | None) -> str:
    return f"{100 * share:.1f}" + ("" if error is None else f" ± {100 * error:.1f}")
