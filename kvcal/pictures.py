"""Pictures of plans, as PNGs: the bits of every layer, and quality against bits.

Points are labelled where they lie: one colour for kvcal's own plan, black for its rivals, grey for all
others. A PNG has no date and no version: equal content gives equal bytes. Matplotlib is imported when a
figure is drawn, on its Agg canvas: no window.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kvcal.artifact import write_bytes_atomic
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES, Side

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIDE_NAMES: Mapping[Side, str] = {"k": "keys", "v": "values"}
BITS = "bits per cached value, everything counted"
# KL below this is rounding (a 16-bit cache against the model without it): the logarithmic axis ends here.
SMALLEST_KL = 1e-6
TICKS = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10, 12, 16, 20, 24)
Role = Literal["kvcal", "rival", "other"]
COLOURS: Mapping[Role, str] = {"kvcal": "#2f4fd6", "rival": "#16181d", "other": "#8b919c"}
MARKERS: Mapping[Role, str] = {"kvcal": "o", "rival": "s", "other": "o"}
# Where a label may stand, in points from its point: right, left, above, below, then the corners, then further
# away.
PLACES = [(dx * far, dy * far) for far in (7, 12, 18) for dx, dy in
          ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))]  # fmt: skip


class Point(NamedTuple):
    """A plan: all-in bits, and a value with its standard error. ``label``: besides the series' name."""

    bits: float
    value: float
    error: float = 0.0
    label: str = ""


class Series(NamedTuple):
    """Points of one name: joined in the order of their bits, and each labelled; or a cloud with one label."""

    name: str
    points: Sequence[Point]
    role: Role = "other"
    is_joined: bool = True


def draw_bits(layers: Sequence[LayerPlan], costs: Mapping[Side, Mapping[int, float]], title: str, path: Path) -> None:
    """Write the code bits of every layer, and below them what each would ``costs`` (by side and cache index)
    have it, with the ``title`` of that. Pages on a schedule are shown in their final bits, layers without pages
    in grey."""
    costs = {side: values for side, values in costs.items() if any(value > 0 for value in values.values())}
    figure = _figure(max(7.0, 1.2 + 0.24 * len(layers)), 4.6 if costs else 1.9)
    rows = figure.subplots(2 if costs else 1, 1, sharex=True, squeeze=False, height_ratios=[1, 2] if costs else [1])[
        :, 0
    ]
    indices = [layer.geometry.index for layer in layers]
    for row, side in enumerate(SIDES):
        for place, layer in enumerate(layers):
            bits = layer.format(side).num_bits if layer.is_paged else 16
            colour, ink = _heat(bits) if layer.is_paged else ("#e4e6ea", "#5b616c")
            rows[0].bar(place, 0.92, 0.92, bottom=-row - 0.46, color=colour)
            rows[0].text(place, -row, f"{bits}", color=ink, ha="center", va="center", fontsize=8)
    rows[0].set(title="Bits of a code, by layer; grey: no pages", yticks=[0, -1], yticklabels=["keys", "values"])
    rows[0].tick_params(length=0)
    rows[0].spines[:].set_visible(False)
    for (side, values), colour, marker in zip(costs.items(), (COLOURS["kvcal"], "#16181d"), "os", strict=False):
        found = [(place, values[index]) for place, index in enumerate(indices) if values.get(index, 0) > 0]
        rows[-1].plot(*zip(*found, strict=True), marker, color=colour, ms=4, label=SIDE_NAMES[side])
    if costs:
        rows[1].set(title=title, yscale="log")
        rows[1].grid(axis="y", alpha=0.25)
        rows[1].legend(frameon=False, loc="best", fontsize=8)
    step = 1 if len(indices) <= 48 else 4
    rows[-1].set_xticks(range(0, len(indices), step), [str(index) for index in indices[::step]], fontsize=8)
    rows[-1].set(xlabel="layer", xlim=(-0.6, len(indices) - 0.4))
    _save(figure, path)


def _heat(bits: int) -> tuple[str, str]:
    """The colour of a cell with so many bits, and of the number in it."""
    shades = {1: "#edf0fd", 2: "#dbe2fb", 3: "#b3c1f6", 4: "#8299ef", 8: "#4f6be2", 16: "#2a3fa8"}
    return shades[bits], "#16181d" if bits <= 3 else "#ffffff"


def draw_quality(title: str, kl: Sequence[Series], accuracy: Sequence[Series], path: Path) -> None:
    """Write KL (nats per token, logarithmic) and accuracy (%) against bits: a panel for each that has points.
    Bars are one standard error."""
    shown = [(name, series) for name, series in (("kl", kl), ("accuracy", accuracy)) if any(s.points for s in series)]
    figure = _figure(7.6 * max(1, len(shown)), 5.2)
    figure.suptitle(title, fontsize=11)
    panels = figure.subplots(1, max(1, len(shown)), squeeze=False)[0]
    for axes, (name, series) in zip(panels, shown, strict=False):
        for one in sorted(series, key=lambda one: ("other", "rival", "kvcal").index(one.role)):
            points = sorted(one.points)
            values = [max(point.value, SMALLEST_KL) if name == "kl" else point.value for point in points]
            below = [min(p.error, 0.7 * v if name == "kl" else v) for p, v in zip(points, values, strict=True)]
            above = [p.error if name == "kl" else min(p.error, 100 - v) for p, v in zip(points, values, strict=True)]
            axes.errorbar(
                [point.bits for point in points], values, [below, above], color=COLOURS[one.role],
                marker=MARKERS[one.role], linestyle="-" if one.is_joined else "", label=one.name,
                ms=6 if one.role == "kvcal" else 4.5, lw=2 if one.role == "kvcal" else 1, elinewidth=1,
            )  # fmt: skip
        found = [point.bits for one in series for point in one.points]
        axes.set(xscale="log", xlim=(min(found) / 1.15, max(found) * 1.15), xlabel=f"{BITS} (logarithmic)")
        axes.set_xticks([tick for tick in TICKS if min(found) / 1.15 < tick < max(found) * 1.15])
        axes.minorticks_off()
        axes.xaxis.set_major_formatter("{x:g}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
        if name == "kl":
            axes.set(yscale="log", ylabel="KL to 16 bits, nats per token")
        else:
            axes.set(ylabel="accuracy (%), mean over tasks", ylim=(-3, 103))
    figure.draw_without_rendering()
    for axes, (name, series) in zip(panels, shown, strict=False):
        _label_points(axes, [(one, point) for one in series for point in sorted(one.points)], name == "kl")
    _save(figure, path)


def _label_points(axes: Axes, points: Sequence[tuple[Series, Point]], is_kl: bool) -> None:
    """Names at their points, kvcal's and the rivals' first; of the others, those that find a free place."""
    from matplotlib.transforms import Bbox

    data = axes.transData
    at = [data.transform((p.bits, max(p.value, SMALLEST_KL) if is_kl else p.value)) for _, p in points]
    on_lines = [
        start + (end - start) * part / 20
        for (one, _), (other, _), start, end in zip(points, points[1:], at, at[1:], strict=False)
        for part in range(21 if one is other and one.is_joined else 0)
    ]
    taken = [Bbox.from_extents(x - r, y - r, x + r, y + r) for r, dots in ((5, at), (1, on_lines)) for x, y in dots]
    for _, point in points:
        low = max(point.value - point.error, 0.3 * max(point.value, SMALLEST_KL))
        (x, bottom), (_, top) = (data.transform((point.bits, end)) for end in (low, point.value + point.error))
        taken.append(Bbox.from_extents(x - 1, bottom, x + 1, top))
    order = sorted(range(len(points)), key=lambda i: ("kvcal", "rival", "other").index(points[i][0].role))
    for number in order:
        one, point = points[number]
        if not one.is_joined and number and points[number - 1][0] is one:
            continue
        text = " ".join(part for part in (one.name, point.label) if part)
        for place, offset in enumerate(PLACES):
            label = _label(axes, text, at[number], offset, one.role)
            box = label.get_window_extent().padded(1)
            inside = axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 + 40 and axes.bbox.y0 <= box.y0
            if inside and box.y1 <= axes.bbox.y1 + 4 and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            if place < len(PLACES) - 1 or one.role == "other":
                label.remove()


def _label(axes: Axes, text: str, at: Any, offset: tuple[float, float], role: Role) -> Any:
    dx, dy = offset
    return axes.annotate(
        text, tuple(axes.transData.inverted().transform(at)), (dx, dy), textcoords="offset points", color=COLOURS[role],
        ha="center" if not dx else "left" if dx > 0 else "right",
        va="center" if not dy else "bottom" if dy > 0 else "top",
        fontsize=8 if role == "other" else 9, weight="bold" if role == "kvcal" else "normal",
    )  # fmt: skip


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
