"""The kernels' figures: the factor over the fastest 16-bit baseline against the context.

One panel for each batch. A format has one colour and one marker in all panels: its measured factor is a full line, the
factor that its bytes allow a dashed one of the same colour, so that a kernel that is short of its ceiling shows; a
small cross is the target, where one was set. Below the line at 1 a format is slower than 16 bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcal.bench.record import LayerReport
from kvcal.bench.shape import RAW_PAIR, target
from kvcal.charts import COLOURS, GREY, MARKERS, Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Measured(NamedTuple):
    """One measurement: tokens, factor, its ceiling by bytes, its target."""

    context: int
    factor: float
    ceiling: float
    target: float | None


class Curve(NamedTuple):
    """A format at one batch, by context."""

    format: str
    colour: str
    marker: str
    marks: list[Measured]


def curves_of(report: LayerReport) -> dict[int, list[Curve]]:
    """Curves by batch; a format keeps its colour and marker in all of them. What was not measured is left out."""
    names = list(dict.fromkeys(row.format for row in report.rows))
    panels: dict[int, list[Curve]] = {}
    for batch in sorted({row.point.batch for row in report.rows}):
        for index, name in enumerate(names):
            rows = [row for row in report.rows if row.format == name and row.point.batch == batch]
            marks = [
                Measured(point.context, factor, report.factor_ceiling(row), target(name, report.heads, point))
                for row, point, factor in ((row, row.point, report.factor(row)) for row in rows)
                if factor is not None
            ]
            if marks:
                colour = GREY if name == RAW_PAIR.name else COLOURS[index % len(COLOURS)]
                curve = Curve(name, colour, MARKERS[index % len(MARKERS)], sorted(marks))
                panels.setdefault(batch, []).append(curve)
    return panels


def draw_kernels(report: LayerReport, path: str | Path) -> None:
    """Write the picture as ``Picture.save`` does; without a single factor it is not written."""
    panels, heads = curves_of(report), report.heads
    if not panels:
        return
    title = (
        f"Decode attention on {report.machine.device}, {heads.num_kv_heads} KV heads of {heads.head_dim} read by "
        f"{heads.group} query heads each\nfull: measured; dashed: what the bytes allow; +: target"
    )
    picture = Picture(3 + 4 * len(panels), 5.5, title)
    handles: dict[str, Any] = {}
    first = None
    for number, (batch, curves) in enumerate(panels.items()):
        panel = picture.panel(1, len(panels), number + 1, sharey=first)
        first = first or panel.axes
        _draw(panel.axes, curves)
        panel.frame(
            f"batch {batch}", "tokens of context", "" if number else "times faster than the fastest 16-bit kernel"
        )
        panel.axes.tick_params(labelleft=number == 0)
        handles |= {name: line for line, name in zip(*panel.axes.get_legend_handles_labels(), strict=True)}
    picture.figure.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False, title="bits")
    picture.save(path)


def _draw(axes: Axes, curves: list[Curve]) -> None:
    contexts = sorted({mark.context for curve in curves for mark in curve.marks})
    for curve in curves:
        x, y, ceilings, _ = zip(*curve.marks, strict=True)
        aimed = [(mark.context, mark.target) for mark in curve.marks if mark.target is not None]
        axes.plot(x, y, color=curve.colour, marker=curve.marker, label=curve.format)
        axes.plot(x, ceilings, color=curve.colour, linestyle="--", linewidth=0.9, marker="_", alpha=0.7)
        axes.plot([at for at, _ in aimed], [goal for _, goal in aimed], "+", color=curve.colour)
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{context // 1024}K" if context % 1024 == 0 else str(context) for context in contexts])
    axes.set_xlim(contexts[0] / 1.5, contexts[-1] * 1.5)
    axes.set_ylim(bottom=0)
