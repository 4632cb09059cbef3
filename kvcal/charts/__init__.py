"""Pictures of results, all drawn and written by one helper.

Matplotlib is imported when a picture is drawn, on its Agg canvas without pyplot: no window, no global state. The PNG
carries no date and no version, so equal content gives equal bytes with the same matplotlib.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcal.artifact import write_bytes_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Eight colours and seven markers: 56 systems before a pair comes again.
COLOURS = ("#c0392b", "#2471a3", "#148f77", "#d68910", "#7d3c98", "#c2185b", "#6e2c00", "#7d8c0d")
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
RED, BLUE, GREY = "#c0392b", "#045a8d", "#4d4d4d"
# Places of a label: (dx, dy) in points, best first, and how many times as far away.
DIRECTIONS, DISTANCES = ((9, 0), (-9, 0), (7, 7), (7, -7), (-7, 7), (-7, -7), (0, 9), (0, -9)), (1, 2, 3, 5, 8)
# A line counts as this many points where labels are placed: closer than a name is wide, so names stand beside it.
POINTS_OF_A_LINE = 24


class Mark(NamedTuple):
    """A point in data coordinates; ``below`` and ``above`` are the lengths of its error bar."""

    x: float
    y: float
    below: float = 0.0
    above: float = 0.0


@dataclass
class Panel:
    """Axes, ``labels`` (mark, text, colour, whether bold), and what they must not cover: ``marks``, and ``lines``
    between two of them."""

    axes: Axes
    marks: list[Mark] = field(default_factory=list)
    lines: list[tuple[Mark, Mark]] = field(default_factory=list)
    labels: list[tuple[Mark, str, str, bool]] = field(default_factory=list)

    def point(self, mark: Mark, colour: str, marker: str, name: str = "", is_bold: bool = False) -> None:
        """Draw a mark with its error bar, and name it."""
        bar = [[mark.below], [mark.above]]
        self.axes.errorbar(mark.x, mark.y, bar, color=colour, marker=marker, markersize=6.5, elinewidth=1, capsize=3)
        self.marks.append(mark)
        if name:
            self.labels.append((mark, name, colour, is_bold))

    def frame(self, title: str, x: str, y: str) -> None:
        """Title, names of the axes, and a light grid."""
        self.axes.set(title=title, xlabel=x, ylabel=y)
        self.axes.grid(alpha=0.25)
        self.axes.spines[["top", "right"]].set_visible(False)

    def log_kl(self, marks: Sequence[Mark]) -> None:
        """A logarithmic axis for the KL of ``marks``."""
        self.axes.set_yscale("log")
        if marks:
            low, high = min(mark.y - mark.below for mark in marks), max(mark.y + mark.above for mark in marks)
            self.axes.set_ylim(low / 2, 2 * high)

    def place_labels(self) -> None:
        """Write the labels, clear of marks, lines and each other. Places are found in pixels: the layout must be final.

        Every label takes the first place around its mark that is inside the axes and free; the farthest one where none
        is. Greedy, in order: the same chart always gets the same places.
        """
        from matplotlib.transforms import Bbox

        axes, taken = self.axes, []
        for x, y, below, above in self.marks:
            (left, middle), (_, low), (_, high) = axes.transData.transform([(x, y), (x, y - below), (x, y + above)])
            taken.append(Bbox([[left - 4, min(low, middle - 6)], [left + 4, max(high, middle + 6)]]))
        for line in self.lines:
            first, last = axes.transData.transform([mark[:2] for mark in line])
            for number in range(1, POINTS_OF_A_LINE):
                x, y = first + (last - first) * number / POINTS_OF_A_LINE
                taken.append(Bbox([[x - 4, y - 6], [x + 4, y + 6]]))
        for mark, name, colour, is_bold in self.labels:
            weight = "bold" if is_bold else "normal"
            text = axes.annotate(
                name, mark[:2], (0, 0), textcoords="offset points", fontsize=9, weight=weight, color=colour
            )
            text.set_in_layout(False)
            for dx, dy in ((dx * far, dy * far) for far in DISTANCES for dx, dy in DIRECTIONS):
                text.set(ha="left" if dx > 0 else "right" if dx else "center")
                text.set(va="bottom" if dy > 0 else "top" if dy else "center")
                text.xyann = (dx, dy)
                box = text.get_window_extent()
                is_inside = axes.bbox.containsx(box.x0) and axes.bbox.containsx(box.x1) and axes.bbox.containsy(box.y0)
                if is_inside and not any(box.overlaps(other) for other in taken):
                    break
            taken.append(text.get_window_extent())


class Picture:
    """A ``figure`` of so many inches, and its panels."""

    def __init__(self, width: float, height: float, title: str = "") -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
        FigureCanvasAgg(self.figure)
        if title:
            self.figure.suptitle(title, fontsize=12)
        self._panels: list[Panel] = []

    def panel(self, *place: Any, **options: Any) -> Panel:
        """Another subplot."""
        self._panels.append(Panel(self.figure.add_subplot(*place, **options)))
        return self._panels[-1]

    def save(self, path: str | Path) -> None:
        """Write the PNG whole or not at all. ArtifactError when the file cannot be written."""
        self.figure.draw_without_rendering()
        for panel in self._panels:
            panel.place_labels()
        png = io.BytesIO()
        self.figure.savefig(png, format="png", metadata={"Software": None})
        write_bytes_atomic(path, png.getvalue())
