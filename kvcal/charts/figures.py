"""The two figures: bits of every layer with what quantization costs there, and quality against bits.

Matplotlib is imported when a figure is drawn, on its Agg canvas: no window. The PNG carries no date and no version, so
that equal content gives equal bytes with the same matplotlib.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcal.artifact import write_bytes_atomic
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES, Side
from kvcal.stages.evaluate.record import Row
from kvcal.stages.tune.study import Tuning

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDE_NAMES: Mapping[Side, str] = {"k": "keys", "v": "values"}
BITS = "bits per cached value, everything counted"
# KL below this is rounding (a 16-bit cache against the model without it): the logarithmic axis ends here.
SMALLEST_KL = 1e-6
TICKS = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10, 12, 16, 20, 24)
STYLES = [(f"C{number % 10}", "osD^vPX"[number % 7]) for number in range(70)]


class Point(NamedTuple):
    """A plan: all-in bits, and a value with its standard error."""

    bits: float
    value: float
    error: float = 0.0


class Series(NamedTuple):
    """Points of one name, joined in the order of their bits if ``is_joined``."""

    name: str
    points: Sequence[Point]
    is_joined: bool = True


def draw_bits(layers: Sequence[LayerPlan], sensitivity: Mapping[Side, Sequence[float]], path: Path) -> None:
    """Write the code bits of every paged layer, and below them its ``sensitivity`` in the worst candidate, where that
    was measured. Pages that shrink are shown in their final bits."""
    paged = [layer for layer in layers if layer.is_paged]
    figure = _figure(max(7.0, 0.22 * len(paged)), 5.5 if sensitivity else 3.2)
    axes = figure.subplots(2 if sensitivity else 1, 1, sharex=True, squeeze=False)[:, 0]
    indices = [layer.geometry.index for layer in paged]
    for offset, side in ((-0.2, SIDES[0]), (0.2, SIDES[1])):
        bits = [sum(fmt.num_bits for fmt in layer.formats(side)) / len(layer.formats(side)) for layer in paged]
        bars = axes[0].bar([index + offset for index in indices], bits, 0.4, label=SIDE_NAMES[side])
        if len(paged) <= 48:
            axes[0].bar_label(bars, [f"{count:g}" for count in bits], fontsize=7)
        if side in sensitivity:
            axes[1].plot(indices, [value or float("nan") for value in sensitivity[side]], ".-", label=SIDE_NAMES[side])
    axes[0].set(title="Bits of a code, by layer", ylabel="bits")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    if sensitivity:
        axes[1].set(title="Sensitivity in the worst candidate (PM-KVQ, Eq. 5)", yscale="log")
    axes[-1].set_xlabel("layer")
    _save(figure, path)


def draw_quality(title: str, kl: Sequence[Series], accuracy: Sequence[Series], path: Path) -> None:
    """Write KL (nats per token, logarithmic) and accuracy (%) against bits: a panel for each that has points. Bars are
    one standard error."""
    shown = [(name, series) for name, series in (("kl", kl), ("accuracy", accuracy)) if any(s.points for s in series)]
    figure = _figure(7.0 * max(1, len(shown)), 5.5)
    figure.suptitle(title, fontsize=11)
    for axes, (name, series) in zip(figure.subplots(1, max(1, len(shown)), squeeze=False)[0], shown, strict=False):
        for (colour, marker), one in zip(STYLES, series, strict=False):
            points = sorted(one.points)
            values = [max(point.value, SMALLEST_KL) if name == "kl" else point.value for point in points]
            below = [min(p.error, 0.7 * v) if name == "kl" else p.error for p, v in zip(points, values, strict=True)]
            axes.errorbar(
                [point.bits for point in points], values, [below, [point.error for point in points]],
                color=colour, marker=marker, linestyle="-" if one.is_joined else "", capsize=3, label=one.name,
            )  # fmt: skip
        found = [point.bits for one in series for point in one.points]
        axes.set(xscale="log", xlim=(min(found) / 1.1, max(found) * 1.1), xlabel=f"{BITS} (logarithmic)")
        axes.set_xticks([tick for tick in TICKS if min(found) / 1.1 < tick < max(found) * 1.1])
        axes.minorticks_off()
        axes.xaxis.set_major_formatter("{x:g}")
        if name == "kl":
            axes.set(yscale="log", ylabel=f"KL to 16 bits (nats per token); {SMALLEST_KL:g} and less drawn there")
        else:
            axes.set(ylabel="accuracy (%), mean over tasks")
        axes.grid(alpha=0.25)
    if shown:
        handles, names = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=min(4, len(names)), frameon=False)
    _save(figure, path)


def rows_series(rows: Iterable[tuple[str, Row]]) -> tuple[list[Series], list[Series]]:
    """KL and accuracy of measured plans (for ``draw_quality``), a series for each name."""
    kl, accuracy = dict[str, list[Point]](), dict[str, list[Point]]()
    for name, row in rows:
        kl.setdefault(name, []).append(Point(row.bits_per_value, row.text.kl, row.text.kl_se or 0.0))
        points = accuracy.setdefault(name, [])
        if row.accuracy is not None:
            points.append(Point(row.bits_per_value, 100 * row.accuracy, 100 * (row.accuracy_se or 0.0)))
    return [Series(*one) for one in kl.items()], [Series(*one) for one in accuracy.items()]


def trials_series(tuning: Tuning, thresholds: Any) -> list[Series]:
    """Accuracy of a study's trials: all, the Pareto front, and the one that has ``thresholds``."""
    points = {}
    for trial in tuning.trials:
        outcome, error = trial.outcome, 100 * (trial.outcome.accuracy_se or 0.0)
        points[trial.number] = Point(outcome.bits_per_value, 100 * outcome.accuracy, error)
    chosen = [points[trial.number] for trial in tuning.trials if trial.thresholds == thresholds]
    front = [points[number] for number in tuning.front]
    trials = [point._replace(error=0.0) for point in points.values()]
    return [Series("trial", trials, False), Series("Pareto front", front), Series("chosen", chosen, False)]


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> None:
    png = io.BytesIO()
    figure.savefig(png, format="png", metadata={"Software": None})
    write_bytes_atomic(path, png.getvalue())
