"""The kernels' figures as one picture: the factor over the fastest 16-bit baseline against the context.

One panel for each batch. A format has one colour and one marker in all panels: its measured factor is a full line, the
factor that its bytes allow a dashed one of the same colour, so that a kernel that is short of its ceiling shows; a
small cross is the target, where one was set. Below the line at 1 a format is slower than 16 bits. As in the other
pictures: Agg canvas without pyplot, no date and no version in the file, equal bytes for equal content.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcal.artifact import write_bytes_atomic
from kvcal.bench.record import LayerReport
from kvcal.bench.shape import RAW_PAIR, target

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#c0392b", "#2471a3", "#148f77", "#d68910", "#7d3c98", "#c2185b", "#6e2c00", "#7d8c0d")
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
RAW_COLOUR = "#4d4d4d"


@dataclass(frozen=True)
class Mark:
    """One measurement: tokens, factor, its ceiling by bytes, its target."""

    context: int
    factor: float
    ceiling: float
    target: float | None


@dataclass(frozen=True)
class Curve:
    """A format at one batch, by context."""

    format: str
    colour: str
    marker: str
    marks: tuple[Mark, ...]


def curves_of(report: LayerReport) -> dict[int, tuple[Curve, ...]]:
    """Curves by batch; a format keeps its colour and marker in all of them. What was not measured is left out."""
    names = list(dict.fromkeys(row.format for row in report.rows))
    found: dict[int, tuple[Curve, ...]] = {}
    for batch in sorted({point.batch for point in (row.point for row in report.rows)}):
        curves = []
        for index, name in enumerate(names):
            marks = [
                Mark(row.point.context, factor, report.factor_ceiling(row), target(row.format, report.heads, row.point))
                for row in report.rows
                if row.format == name and row.point.batch == batch and (factor := report.factor(row)) is not None
            ]
            if marks:
                colour = RAW_COLOUR if name == RAW_PAIR.name else COLOURS[index % len(COLOURS)]
                in_order = tuple(sorted(marks, key=lambda mark: mark.context))
                curves.append(Curve(name, colour, MARKERS[index % len(MARKERS)], in_order))
        if curves:
            found[batch] = tuple(curves)
    return found


def draw_kernels(report: LayerReport, path: str | Path) -> None:
    """Write the picture, whole or not at all; without a single factor it is not written.

    Raises:
        ArtifactError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = curves_of(report)
    if not panels:
        return
    figure = Figure(figsize=(3 + 4 * len(panels), 5.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (batch, curves) in zip(all_axes, panels.items(), strict=True):
        _draw(axes, batch, curves)
    all_axes[0].set_ylabel("times faster than the fastest 16-bit kernel")
    heads = report.heads
    figure.suptitle(
        f"Decode attention on {report.machine.device}, {heads.num_kv_heads} KV heads of {heads.head_dim} read by "
        f"{heads.group} query heads each\nfull: measured; dashed: what the bytes allow; +: target",
        fontsize=11,
    )
    handles = {name: line for axes in all_axes for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False, title="bits")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    write_bytes_atomic(path, picture.getvalue())


def _draw(axes: Axes, batch: int, curves: tuple[Curve, ...]) -> None:
    contexts = sorted({mark.context for curve in curves for mark in curve.marks})
    for curve in curves:
        x = [mark.context for mark in curve.marks]
        axes.plot(x, [mark.factor for mark in curve.marks], color=curve.colour, marker=curve.marker, label=curve.format)
        axes.plot(
            x, [mark.ceiling for mark in curve.marks], color=curve.colour, linestyle="--", linewidth=0.9,
            marker="_", alpha=0.7,
        )  # fmt: skip
        aimed = [(mark.context, mark.target) for mark in curve.marks if mark.target is not None]
        axes.plot(*([value[side] for value in aimed] for side in (0, 1)), color=curve.colour, marker="+", linestyle="")
    axes.axhline(1, color=RAW_COLOUR, linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{context // 1024}K" if context % 1024 == 0 else str(context) for context in contexts])
    axes.set_xlim(contexts[0] / 1.5, contexts[-1] * 1.5)
    axes.set_ylim(bottom=0)
    axes.set_title(f"batch {batch}")
    axes.set_xlabel("tokens of context")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
