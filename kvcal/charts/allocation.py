"""The allocation as a chart: a row per layer, K and V side by side, a cell per KV head where heads differ.

Colour and number say the bits of a code; groups, sinks and windows are in ``kvcal inspect``'s table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcal.plan.plan import SIDES, LayerPlan, Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Code bits, light to dark: one hue, so that more bits are darker in print, too.
COLOURS = {1: "#f1eef6", 2: "#d0d1e6", 3: "#a6bddb", 4: "#74a9cf", 8: "#2b8cbe", 16: "#045a8d"}
DARK_BITS = 8
BOUNDED_COLOUR = "#e6e6e6"
# Beyond these, cells are too small for their numbers, and not every layer is named.
MOST_NUMBERED_LAYERS, MOST_NUMBERED_HEADS, MOST_NAMED_LAYERS = 48, 8, 32
GAP = 0.04

Bits = tuple[int | None, ...]


def draw_allocation(axes: Axes, plan: Plan) -> None:
    """Fill ``axes`` with the code bits of every layer of ``plan``."""
    layers = [tuple(_bits(layer, number) for number in range(2)) for layer in plan.layers]
    for y, sides in enumerate(layers):
        for x, bits in enumerate(sides):
            _draw_cells(axes, x, y, bits, len(layers))
    step = -(-len(layers) // MOST_NAMED_LAYERS)
    axes.set_xlim(0, 2)
    axes.set_ylim(len(layers) - 0.4, -0.6)
    axes.set_xticks([0.5, 1.5], ["keys", "values"])
    axes.xaxis.tick_top()
    axes.set_yticks(range(0, len(layers), step), [str(layer.geometry.index) for layer in plan.layers[::step]])
    axes.set_ylabel("layer")
    is_per_head = any(len(bits) > 1 for sides in layers for bits in sides)
    axes.set_title("Bits of a code, by layer" + (" and KV head" if is_per_head else ""))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    _draw_legend(axes, {value for sides in layers for bits in sides for value in bits})


def _bits(layer: LayerPlan, side: int) -> Bits:
    """Code bits of a layer's K (0) or V (1): one value, or one per KV head where they differ; None: bounded."""
    if not layer.is_paged:
        return (None,)
    bits = tuple(fmt.num_bits for fmt in layer.formats(SIDES[side]))
    return bits if len(set(bits)) > 1 else bits[:1]


def _draw_cells(axes: Axes, x: int, y: int, bits: Bits, num_layers: int) -> None:
    from matplotlib.patches import Rectangle

    width = (1 - 2 * GAP) / len(bits)
    for head, value in enumerate(bits):
        left = x + GAP + head * width
        colour = BOUNDED_COLOUR if value is None else COLOURS[value]
        axes.add_patch(Rectangle((left, y - 0.46), width, 0.92, facecolor=colour, edgecolor="white"))
        if value is not None and num_layers <= MOST_NUMBERED_LAYERS and len(bits) <= MOST_NUMBERED_HEADS:
            axes.text(
                left + width / 2,
                y,
                str(value),
                ha="center",
                va="center",
                color="white" if value >= DARK_BITS else "black",
                fontsize=10 if num_layers <= MOST_NUMBERED_LAYERS // 2 else 7,
            )


def _draw_legend(axes: Axes, used: set[int | None]) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=colour, edgecolor="grey", label=f"{bits} bit{'s' * (bits > 1)}")
        for bits, colour in COLOURS.items()
        if bits in used
    ]
    if None in used:
        handles.append(Patch(facecolor=BOUNDED_COLOUR, edgecolor="grey", label="bounded, 16 bits"))
    axes.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.01),
        ncols=min(3, len(handles)),
        frameon=False,
    )
