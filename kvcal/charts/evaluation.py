"""The evaluation as one picture: where the bits went, and what they bought; and a picture of predictors.

The allocation has a row per layer, K and V side by side, a cell per KV head where heads differ. Colour and number say
the bits of a code; groups, sinks and windows are in ``kvcal inspect``'s table. The predictors' picture says what each
explains, layer by layer, and what the errors of the cache became.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvcal.charts import BLUE, GREY, RED, SMALLEST_KL, Mark, Panel, Picture, accuracy_mark, kl_mark
from kvcal.plan.page_format import Side
from kvcal.plan.plan import SIDES, LayerPlan, Plan
from kvcal.quantities import format_bytes
from kvcal.stages.evaluate import Evaluation, Row
from kvcal.stages.predictors.record import PredictorRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Code bits, light to dark: one hue, so that more bits are darker in print, too. None: a bounded layer.
COLOURS = {1: "#f1eef6", 2: "#d0d1e6", 3: "#a6bddb", 4: "#74a9cf", 8: "#2b8cbe", 16: "#045a8d", None: "#e6e6e6"}
DARK_BITS = 8
# Beyond these, cells are too small for their numbers, and not every layer is named.
MOST_NUMBERED_LAYERS, MOST_NUMBERED_HEADS, MOST_NAMED_LAYERS = 48, 8, 32
GAP = 0.04


def draw(evaluation: Evaluation, plan: Plan, path: str | Path) -> None:
    """Write the picture of ``plan``'s allocation and of all rows' quality against bytes, whole or not at all.

    Raises:
        ArtifactError: the file cannot be written.
    """
    rows, digest, workload = evaluation.rows, plan.sha256, plan.workload
    name = next((row.name for row in rows if row.plan_sha256 == digest), "plan")
    picture = Picture(
        13.5,
        7.2,
        f"{name} on {plan.model.id}: {plan.bits_per_value():.2f} bits per cached value with everything counted, "
        f"{format_bytes(plan.predicted_bytes)} at batch {workload.batch} x {workload.context} tokens",
    )
    grid = picture.figure.add_gridspec(2, 2, width_ratios=(1, 1.9))
    draw_allocation(picture.panel(grid[:, 0]).axes, plan.layers)
    has_tasks = any(row.tasks for row in rows)
    if rows:
        draw_kl(picture.panel(grid[0, 1] if has_tasks else grid[:, 1]), rows, digest)
    if has_tasks:
        draw_accuracy(picture.panel(grid[1, 1]), [row for row in rows if row.tasks], digest)
    picture.save(path)


def draw_kl(panel: Panel, rows: Sequence[Row], digest: str) -> None:
    """The upper panel; the row of the plan with this digest stands out."""
    marks = [kl_mark(row.total_bytes, row) for row in rows]
    panel.log_kl(marks)
    title = f"KL on texts of {rows[0].text_bits.mean_tokens:.0f} tokens against size (lower left is better)"
    _draw(panel, title, f"KL to 16 bits (nats per token)\nbelow {SMALLEST_KL:g} drawn there", rows, marks, digest)


def draw_accuracy(panel: Panel, rows: Sequence[Row], digest: str) -> None:
    """The lower panel."""
    marks = [accuracy_mark(row.total_bytes, row) for row in rows]
    panel.axes.set_ylim(-8, 116)
    title = "Accuracy, mean over tasks, against size (upper left is better)"
    _draw(panel, title, "exact match (%)", rows, marks, digest)


def _draw(panel: Panel, title: str, y: str, rows: Sequence[Row], marks: Sequence[Mark], digest: str) -> None:
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


def draw_allocation(axes: Axes, layers: Sequence[LayerPlan]) -> None:
    """Fill ``axes`` with the code bits of every layer: one value a side, or one per KV head where they differ."""
    from matplotlib.patches import Patch, Rectangle

    is_per_head, used = False, set[int | None]()
    for y, layer in enumerate(layers):
        for x, side in enumerate(SIDES):
            bits = [fmt.num_bits for fmt in layer.formats(side)] if layer.is_paged else [None]
            bits = bits if len(set(bits)) > 1 else bits[:1]
            used, is_per_head = used | {*bits}, is_per_head or len(bits) > 1
            width = (1 - 2 * GAP) / len(bits)
            for head, value in enumerate(bits):
                left = x + GAP + head * width
                axes.add_patch(Rectangle((left, y - 0.46), width, 0.92, facecolor=COLOURS[value], edgecolor="white"))
                if value is not None and len(layers) <= MOST_NUMBERED_LAYERS and len(bits) <= MOST_NUMBERED_HEADS:
                    axes.text(
                        left + width / 2, y, str(value), ha="center", va="center",
                        color="white" if value >= DARK_BITS else "black",
                        fontsize=10 if len(layers) <= MOST_NUMBERED_LAYERS // 2 else 7,
                    )  # fmt: skip
    step = -(-len(layers) // MOST_NAMED_LAYERS)
    axes.set_xlim(0, 2)
    axes.set_ylim(len(layers) - 0.4, -0.6)
    axes.set_xticks([0.5, 1.5], ["keys", "values"])
    axes.xaxis.tick_top()
    axes.set_yticks(range(0, len(layers), step), [str(layer.geometry.index) for layer in layers[::step]])
    axes.set_ylabel("layer")
    axes.set_title("Bits of a code, by layer" + (" and KV head" if is_per_head else ""))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    names = {bits: "bounded, 16 bits" if bits is None else f"{bits} bit{'s' * (bits > 1)}" for bits in COLOURS}
    handles = [Patch(facecolor=COLOURS[b], edgecolor="grey", label=names[b]) for b in COLOURS if b in used]
    axes.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.01), ncols=min(3, len(handles)), frameon=False
    )


NAMED_SIDES: tuple[tuple[Side, str, str], ...] = (("k", "keys", BLUE), ("v", "values", RED))


def draw_predictors(record: PredictorRecord, path: str | Path) -> None:
    """Write the picture, whole or not at all. ArtifactError when it cannot be written."""
    picture = Picture(11, 4.5)
    left, right = picture.panel(1, 2, 1), picture.panel(1, 2, 2)
    for side, name, colour in NAMED_SIDES:
        _draw_explained(left.axes, record, side, name, colour)
        _draw_errors(right.axes, record, side, name, colour)
    left.axes.axhline(record.subject.spec.min_explained, color="grey", linestyle=":", linewidth=1)
    left.axes.set_ylim(top=1.0)
    left.frame("What a layer's predictor explains", "layer", "explained variance, held out")
    right.frame("What the cache reads back", "layer", "squared error / variance, held out")
    for panel in (left, right):
        if panel.axes.get_legend_handles_labels()[0]:
            panel.axes.legend(frameon=False)
    picture.save(path)


def _draw_explained(axes: Axes, record: PredictorRecord, side: Side, name: str, colour: str) -> None:
    """Explained variance on held-out tokens; predictors that are left out are hollow."""
    fits = [(f.layer, f.fit.explained, f.is_kept) for f in record.findings if f.side == side and f.fit is not None]
    if fits:
        axes.plot([fit[0] for fit in fits], [fit[1] for fit in fits], "-", color=colour, linewidth=1)
    for is_kept, fill, text in ((True, colour, name), (False, "white", f"{name}, left out")):
        points = [fit[:2] for fit in fits if fit[2] == is_kept]
        if points:
            axes.plot(*zip(*points, strict=True), "o", color=colour, markerfacecolor=fill, label=text)


def _draw_errors(axes: Axes, record: PredictorRecord, side: Side, name: str, colour: str) -> None:
    """Squared error of what the cache reads back, as a share of the variance, without predictors and with them."""
    fits = [(finding.layer, finding.fit) for finding in record.findings if finding.side == side and finding.fit]
    plain = [(layer, fit.plain_error) for layer, fit in fits if fit.plain_error is not None]
    predicted = [(layer, fit.error) for layer, fit in fits if fit.error is not None]
    if plain and predicted:
        axes.plot(*zip(*plain, strict=True), "o--", color=colour, alpha=0.5, label=f"{name}, without")
        axes.plot(*zip(*predicted, strict=True), "o-", color=colour, label=f"{name}, with predictors")
        axes.set_yscale("log")
