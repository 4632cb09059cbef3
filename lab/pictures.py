"""Pictures of plans, as PNGs: KL against bits.

Points are labelled where they lie: one colour for kvcal's own plan, black for its rivals, grey for all
others. A PNG has no date and no version: equal content gives equal bytes. Matplotlib is imported when a
figure is drawn, on its Agg canvas: no window.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from kvcal.artifact import write_bytes_atomic

BITS = "bits per cached value, everything counted"
# KL below this is rounding (a 16-bit cache against the model without it): the logarithmic axis ends here.
SMALLEST_KL = 1e-6
TICKS = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10, 12, 16, 20, 24)
Role = Literal["kvcal", "rival", "other"]
ROLES: tuple[Role, ...] = ("kvcal", "rival", "other")
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


def draw_quality(title: str, series: Sequence[Series], path: Path) -> None:
    """Write KL (nats per token, logarithmic) against bits. Bars are one standard error."""
    figure = Figure(figsize=(7.6, 5.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots()
    for one in sorted(series, key=lambda one: ROLES.index(one.role), reverse=True):
        points = sorted(one.points)
        values = [max(point.value, SMALLEST_KL) for point in points]
        below = [min(point.error, 0.7 * value) for point, value in zip(points, values, strict=True)]
        axes.errorbar(
            [point.bits for point in points], values, [below, [point.error for point in points]],
            color=COLOURS[one.role], marker=MARKERS[one.role], linestyle="-" if one.is_joined else "", label=one.name,
            ms=6 if one.role == "kvcal" else 4.5, lw=2 if one.role == "kvcal" else 1, elinewidth=1,
        )  # fmt: skip
    found = [point.bits for one in series for point in one.points]
    low, high = min(found) / 1.15, max(found) * 1.15
    axes.set(xscale="log", xlim=(low, high), xlabel=f"{BITS} (logarithmic)")
    axes.set_xticks([tick for tick in TICKS if low < tick < high])
    axes.minorticks_off()
    axes.xaxis.set_major_formatter("{x:g}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    axes.set(yscale="log", ylabel="KL to 16 bits, nats per token")
    figure.draw_without_rendering()
    _label_points(axes, [(one, point) for one in series for point in sorted(one.points)])
    png = io.BytesIO()
    figure.savefig(png, format="png", metadata={"Software": None})
    write_bytes_atomic(path, png.getvalue())


def _label_points(axes: Axes, points: Sequence[tuple[Series, Point]]) -> None:
    """Names at their points, kvcal's and the rivals' first; of the others, those that find a free place."""
    data = axes.transData
    at = [data.transform((p.bits, max(p.value, SMALLEST_KL))) for _, p in points]
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
    order = sorted(range(len(points)), key=lambda i: ROLES.index(points[i][0].role))
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
