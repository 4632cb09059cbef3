"""Pages of HTML that need nothing but themselves: text, tables, and charts as inline SVG.

There is no script, no font and no address in a page, and its policy forbids the browser to load any. Values show when
the pointer rests on a mark. Colours are CSS variables, so that a page follows the reader's dark mode and prints. The
same content gives the same bytes. A chart library was weighed and left out: plotly.js alone is 4.5 MB in every file.

Everything that comes from a file goes through ``escaped``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import NamedTuple

from kvcal.console import View

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 74, 16, 14, 46
BAR, LABEL = 22, 190  # a bar's height, and the room for its label, in pixels
NUM_COLOURS = 8

STYLE = (files("kvcal.charts") / "report.css").read_text("utf-8") + "".join(
    f".f{n} {{ fill: var(--s{n}); }} .s{n} {{ stroke: var(--s{n}); }}\n" for n in range(NUM_COLOURS)
)


def escaped(value: object) -> str:
    """Text of an element or of a quoted attribute."""
    return escape(str(value), quote=True)


def page(title: str, parts: Sequence[str]) -> str:
    """A whole document; ``parts`` are HTML."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escaped(title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escaped(title)}</h1>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def section(name: str, title: str, parts: Sequence[str], about: str = "") -> str:
    """A part of the page, with ``name`` as its anchor; ``parts`` are HTML, ``about`` is text."""
    said = [f"<p>{escaped(about)}</p>"] if about else []
    return f'<section id="{name}">\n<h2>{escaped(title)}</h2>\n' + "\n".join([*said, *parts]) + "\n</section>"


def side_by_side(parts: Sequence[str]) -> str:
    return '<div class="row">\n' + "\n".join(f"<div>{part}</div>" for part in parts) + "\n</div>"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], text_column: int | None = None) -> str:
    """``text_column``: whose cells are sentences and wrap."""
    head = "".join(f"<th>{escaped(header)}</th>" for header in headers)
    body = "\n".join(
        "<tr>"
        + "".join(
            f"<td{' class=text' if number == text_column else ''}>{escaped(cell)}</td>"
            for number, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'


def view(part: View) -> str:
    """A table of kvcal.tables under its title."""
    title, headers, rows = part
    return f"<h3>{escaped(title)}</h3>\n{table(headers, rows)}"


class Heat(NamedTuple):
    """A cell of a heat map: its text, what it says in full, and its heat, 0 to 1."""

    text: str
    hover: str
    heat: float
    is_chosen: bool = False


def heat_map(headers: Sequence[str], rows: Sequence[tuple[str, Sequence[Heat | None]]]) -> str:
    """A table with coloured cells; the first header is over the rows' names."""
    head = "".join(f"<th>{escaped(header)}</th>" for header in headers)
    lines = []
    for name, cells in rows:
        drawn = "".join("<td></td>" if cell is None else _heat_cell(cell) for cell in cells)
        lines.append(f"<tr><td>{escaped(name)}</td>{drawn}</tr>")
    return f'<div class="wide"><table class="map">\n<tr>{head}</tr>\n' + "\n".join(lines) + "\n</table></div>"


def _heat_cell(cell: Heat) -> str:
    kind = "heat chosen" if cell.is_chosen else "heat"
    heat = f"{100 * min(1.0, max(0.0, cell.heat)):.0f}"
    return f'<td class="{kind}" style="--h:{heat}" title="{escaped(cell.hover)}">{escaped(cell.text)}</td>'


class Point(NamedTuple):
    """A mark at (x, y) with the length of its error bar to either side, and what it says."""

    x: float
    y: float
    error: float
    hover: str


@dataclass(frozen=True)
class Series:
    """Points of one colour; joined by a line or not, large or not."""

    name: str
    colour: int
    points: Sequence[Point]
    is_joined: bool = False
    is_large: bool = False


def scatter(series: Sequence[Series], x_name: str, y_name: str, log_y: bool = False) -> str:
    """A chart with a legend; nothing without points. With ``log_y``, every y is above 0."""
    points = [point for one in series for point in one.points]
    if not points:
        return ""
    x = _Axis.over([point.x for point in points], LEFT, WIDTH - RIGHT)
    ends = [point.y + sign * point.error for point in points for sign in (-1, 1)]
    ends = [max(end, min(point.y for point in points) / 2) for end in ends] if log_y else ends
    y = _Axis.over(ends, HEIGHT - BOTTOM, TOP, log_y)
    parts = [_ticks(x, y), _names(x_name, y_name)]
    for one in series:
        colour = one.colour % NUM_COLOURS
        places = [(x.at(point.x), y.at(point.y)) for point in one.points]
        if one.is_joined:
            line = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
            parts.append(f'<polyline class="line s{colour}" points="{line}"/>')
        for point, (px, py) in zip(one.points, places, strict=True):
            low, high = (y.at(max(point.y + sign * point.error, y.low)) for sign in (-1, 1))
            bar = f'<line class="s{colour}" x1="{px:.1f}" x2="{px:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
            parts.append(
                f'<g class="mark">{bar if point.error else ""}<circle class="f{colour}" cx="{px:.1f}" cy="{py:.1f}" '
                f'r="{7 if one.is_large else 4}"/><title>{escaped(point.hover)}</title></g>'
            )
    legend = [(one.name, f"f{one.colour % NUM_COLOURS}") for one in series if one.name]
    return _figure(parts, HEIGHT, legend, f"{y_name} against {x_name}")


class Part(NamedTuple):
    """A part of a bar; ``colour`` None: what is left free."""

    name: str
    value: float
    colour: int | None
    hover: str
    error: float = 0.0


def bars(rows: Sequence[tuple[str, Sequence[Part]]], x_name: str, limit: tuple[float, str] | None = None) -> str:
    """Horizontal bars, the parts of each one after the other; an error bar at the end of each part that has one.
    ``limit``: a value and its name, drawn as a line."""
    most = max(
        [sum(part.value for part in parts) + max((p.error for p in parts), default=0) for _, parts in rows] or [0]
    )
    most = max(most, limit[0] if limit else 0.0)
    if not most > 0:
        return ""
    height = TOP + (BAR + 8) * len(rows) + BOTTOM
    x = _Axis(0.0, most, LABEL, WIDTH - RIGHT - 8)
    drawn = [_ticks(x, None, height), _names(x_name, "", height)]
    for number, (name, parts) in enumerate(rows):
        y, start = TOP + (BAR + 8) * number, 0.0
        drawn.append(f'<text x="{LABEL - 8}" y="{y + 16}" text-anchor="end">{escaped(name)}</text>')
        for part in parts:
            left, right = x.at(start), x.at(start + part.value)
            kind = "free" if part.colour is None else f"f{part.colour % NUM_COLOURS}"
            whisker = ""
            if part.error:
                ends = (x.at(max(0.0, start + part.value + sign * part.error)) for sign in (-1, 1))
                low, high = ends
                middle = y + BAR / 2
                whisker = f'<line class="axis" x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}"/>'
            drawn.append(
                f'<g class="bar"><rect class="{kind}" x="{left:.1f}" y="{y}" width="{right - left:.1f}" '
                f'height="{BAR}"/>{whisker}<title>{escaped(part.hover)}</title></g>'
            )
            start += part.value
    if limit:
        at = x.at(limit[0])
        drawn.append(
            f'<g class="mark"><line class="limit" x1="{at:.1f}" x2="{at:.1f}" y1="4" y2="{height - BOTTOM}"/>'
            f"<title>{escaped(limit[1])}</title></g>"
        )
    names = dict.fromkeys((part.name, part.colour) for _, parts in rows for part in parts if part.name)
    legend = [(name, "free" if colour is None else f"f{colour % NUM_COLOURS}") for name, colour in names]
    return _figure(drawn, height, legend, x_name)


@dataclass(frozen=True)
class _Axis:
    """Values from ``low`` to ``high`` on pixels from ``first`` to ``last``."""

    low: float
    high: float
    first: float
    last: float
    is_log: bool = False

    @classmethod
    def over(cls, values: Sequence[float], first: float, last: float, is_log: bool = False) -> _Axis:
        low, high = min(values), max(values)
        if is_log:
            return cls(low / 1.5, high * 1.5, first, last, True)
        margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        return cls(low - margin, high + margin, first, last)

    def at(self, value: float) -> float:
        low, high = (math.log(self.low), math.log(self.high)) if self.is_log else (self.low, self.high)
        place = math.log(value) if self.is_log else value
        return self.first + (place - low) / (high - low) * (self.last - self.first)

    def ticks(self) -> list[float]:
        if self.is_log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            few = (1,) if len(decades) > 4 else (1, 2, 5)
            found = [step * 10.0**decade for decade in decades for step in few]
        else:
            rough = (self.high - self.low) / 5
            power = 10.0 ** math.floor(math.log10(rough))
            step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
            found = [step * number for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [tick for tick in found if self.low <= tick <= self.high]


def _ticks(x: _Axis, y: _Axis | None, height: int = HEIGHT) -> str:
    parts, bottom = [], height - BOTTOM
    for tick in x.ticks():
        at = x.at(tick)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{_short(tick)}</text>')
    for tick in [] if y is None else y.ticks():
        at = y.at(tick) if y is not None else 0.0
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_short(tick)}</text>')
    return "".join(parts)


def _short(tick: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(tick) >= 10 * size or (abs(tick) >= size and size > 1e3):
            return f"{tick / size:g} {unit}"
    return f"{tick:.6g}"


def _names(x_name: str, y_name: str, height: int = HEIGHT) -> str:
    middle = (height - BOTTOM + TOP) / 2
    turned = f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">{escaped(y_name)}</text>'
    return f'<text x="{WIDTH / 2:.0f}" y="{height - 10}" text-anchor="middle">{escaped(x_name)}</text>' + turned


def _figure(parts: Sequence[str], height: int, legend: Sequence[tuple[str, str]], label: str) -> str:
    key = "".join(
        f'<span><svg width="12" height="12" style="min-width:0" aria-hidden="true"><rect class="{kind}" width="12" '
        f'height="12"/></svg> {escaped(name)}</span> '
        for name, kind in legend
    )
    drawing = "\n".join(parts)
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'aria-label="{escaped(label)}">\n{drawing}\n</svg><figcaption>{key}</figcaption></figure>'
    )
