"""Where the names of points stand in a chart: beside them, and on nothing else.

Every label tries places around its point, the nearest first, and takes the first one that is inside the axes and free
of markers, error bars and other labels. Greedy, in the order given: the same chart always gets the same places. Where
all places are taken the farthest one is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Best first: (dx, dy) in points, horizontal and vertical alignment.
LABEL_PLACES = [
    (dx * far, dy * far, horizontal, vertical)
    for far in (1, 2, 3, 5, 8)
    for dx, dy, horizontal, vertical in (
        (9, 0, "left", "center"),
        (-9, 0, "right", "center"),
        (7, 7, "left", "bottom"),
        (7, -7, "left", "top"),
        (-7, 7, "right", "bottom"),
        (-7, -7, "right", "top"),
        (0, 9, "center", "bottom"),
        (0, -9, "center", "top"),
    )
]


@dataclass(frozen=True)
class Mark:
    """A drawn point in data coordinates; ``below`` and ``above`` are the lengths of its error bar."""

    x: float
    y: float
    below: float = 0.0
    above: float = 0.0


@dataclass(frozen=True)
class Label:
    """What to write at a mark."""

    mark: Mark
    text: str
    colour: str = "black"
    is_bold: bool = False


def place_labels(axes: Axes, marks: Sequence[Mark], labels: Sequence[Label]) -> None:
    """Write ``labels`` into ``axes``, clear of ``marks`` and of each other. After the layout is final: places are found
    in pixels."""
    from matplotlib.transforms import Bbox

    taken = []
    for mark in marks:
        x, low = axes.transData.transform((mark.x, mark.y - mark.below))
        y, high = axes.transData.transform([(mark.x, v) for v in (mark.y, mark.y + mark.above)])[:, 1]
        taken.append(Bbox([[x - 4, min(low, y - 6)], [x + 4, max(high, y + 6)]]))
    for label in labels:
        text = axes.annotate(
            label.text,
            (label.mark.x, label.mark.y),
            xytext=(0, 0),
            textcoords="offset points",
            fontsize=9,
            weight="bold" if label.is_bold else "normal",
            color=label.colour,
        )
        text.set_in_layout(False)
        for dx, dy, horizontal, vertical in LABEL_PLACES:
            text.set(ha=horizontal, va=vertical)
            text.xyann = (dx, dy)
            box = text.get_window_extent()
            inside = axes.bbox.containsx(box.x0) and axes.bbox.containsx(box.x1) and axes.bbox.containsy(box.y0)
            if inside and not any(box.overlaps(other) for other in taken):
                break
        taken.append(text.get_window_extent())
