"""The bits of a plan as a heat map for the terminal: a row for K and one for V, a cell for every layer.

Where a layer's heads differ, K (or V) has a row for each KV head. More layers than fit 80 columns go below in further
blocks. A cell is the bits of a code, of pages that shrink the last ones; "-" is a layer that is not packed (a sliding
window, a state). Pictures have the same colours; without a terminal the numbers are left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.style import Style
from rich.text import Text

from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES, Side

WIDTH, CELL = 80, 3
# Code bits, light to dark: one hue, so that more bits are darker in print, too. None: a bounded layer.
SHADES = {1: "#f1eef6", 2: "#d0d1e6", 3: "#a6bddb", 4: "#74a9cf", 8: "#2b8cbe", 16: "#045a8d", None: "#e6e6e6"}
DARK_BITS = 8


def heat_map(layers: Sequence[LayerPlan]) -> Text:
    """At most ``WIDTH`` columns wide, without a line's end behind the last row."""
    sides: tuple[tuple[Side, int], ...] = tuple((side, _num_rows(layers, side)) for side in SIDES)
    labels = [(side, head, side.upper() if rows == 1 else f"{side.upper()} head {head}")
              for side, rows in sides for head in range(rows)]  # fmt: skip
    margin = max(len("layer"), *(len(label) for *_, label in labels)) + 1
    per_block = (WIDTH - margin) // CELL
    lines = [Text("Bits of a code, by layer", "italic")]
    for first in range(0, len(layers), per_block):
        block = layers[first : first + per_block]
        numbers = "".join(f"{layer.geometry.index:>{CELL}}" for layer in block)
        lines.append(Text(f"{'layer':<{margin}}{numbers}"))
        for side, head, label in labels:
            lines.append(Text.assemble(f"{label:<{margin}}", *_cells(block, side, head)))
    return Text("\n").join(lines)


def _num_rows(layers: Sequence[LayerPlan], side: Side) -> int:
    """1, or KV heads where those of a layer differ."""
    bits = [[fmt.num_bits for fmt in layer.formats(side)] for layer in layers if layer.is_paged]
    return max([len(heads) for heads in bits if len(set(heads)) > 1], default=1)


def _cells(block: Sequence[LayerPlan], side: Side, head: int) -> Iterator[tuple[str, Style]]:
    for layer in block:
        formats = layer.formats(side) if layer.is_paged else ()
        heads = formats * layer.attention.num_kv_heads if len(formats) == 1 else formats
        bits = heads[head].num_bits if head < len(heads) else None
        style = Style()
        if bits is not None:
            style = Style(color="white" if bits >= DARK_BITS else "black", bgcolor=SHADES[bits])
        yield f"{'-' if bits is None else bits:>{CELL}}", style
