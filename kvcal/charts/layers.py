"""Pictures with a place for every layer: the bits of a plan, what a profile measured, what predictors explain.

The bits have a row per layer, K and V side by side, a cell per KV head where heads differ. Colour and number say the
bits of a code; groups, sinks and windows are in ``kvcal inspect``'s table.

Every ``draw_`` function of a path writes its picture as ``Picture.save`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvcal.charts import BLUE, COLOURS, MARKERS, RED, Picture
from kvcal.charts.heat_map import DARK_BITS, SHADES
from kvcal.plan.page_format import SIDES, Side
from kvcal.plan.plan import LayerPlan
from kvcal.quantities import format_bytes
from kvcal.stages.allocate.record import Allocation
from kvcal.stages.predictors.record import PredictorRecord
from kvcal.stages.profile.record import Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Beyond these, cells are too small for their numbers, and not every layer is named.
MOST_NUMBERED_LAYERS, MOST_NUMBERED_HEADS, MOST_NAMED_LAYERS = 48, 8, 32
GAP = 0.04


def draw_formats(allocation: Allocation, path: str | Path) -> None:
    """Write the bits of every layer."""
    workload = allocation.workload
    size = f"{format_bytes(allocation.split.cache)} at batch {workload.batch} x {workload.context} tokens"
    picture = Picture(5.5, 7.2, f"{allocation.model.id}: {size}")
    draw_bits(picture.panel().axes, allocation.layers)
    picture.save(path)


def draw_bits(axes: Axes, layers: Sequence[LayerPlan]) -> None:
    """Fill ``axes`` with the code bits of every layer: one value a side, or one per KV head where they differ."""
    from matplotlib.patches import Patch, Rectangle

    is_per_head, used = False, set[int | None]()
    for y, layer in enumerate(layers):
        for x, side in enumerate(SIDES):
            bits = [fmt.num_bits for fmt in layer.formats(side)] if layer.is_paged else [None]
            bits = bits if len(set(bits)) > 1 else bits[:1]
            used, is_per_head = used | {*bits}, is_per_head or len(bits) > 1
            width = (1 - 2 * GAP) / len(bits)
            for head, value in enumerate(bits):
                left = x + GAP + head * width
                axes.add_patch(Rectangle((left, y - 0.46), width, 0.92, facecolor=SHADES[value], edgecolor="white"))
                if value is not None and len(layers) <= MOST_NUMBERED_LAYERS and len(bits) <= MOST_NUMBERED_HEADS:
                    axes.text(
                        left + width / 2, y, str(value), ha="center", va="center",
                        color="white" if value >= DARK_BITS else "black",
                        fontsize=10 if len(layers) <= MOST_NUMBERED_LAYERS // 2 else 7,
                    )  # fmt: skip
    step = -(-len(layers) // MOST_NAMED_LAYERS)
    axes.set_xlim(0, 2)
    axes.set_ylim(len(layers) - 0.4, -0.6)
    axes.set_xticks([0.5, 1.5], ["keys", "values"])
    axes.xaxis.tick_top()
    axes.set_yticks(range(0, len(layers), step), [str(layer.geometry.index) for layer in layers[::step]])
    axes.set_ylabel("layer")
    axes.set_title("Bits of a code, by layer" + (" and KV head" if is_per_head else ""))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    names = {bits: "bounded, 16 bits" if bits is None else f"{bits} bit{'s' * (bits > 1)}" for bits in SHADES}
    handles = [Patch(facecolor=SHADES[b], edgecolor="grey", label=names[b]) for b in SHADES if b in used]
    axes.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.01), ncols=min(3, len(handles)), frameon=False
    )


def draw_profile(profile: Profile, path: str | Path) -> None:
    """Write the cost of each format in each layer's keys and values: KL where it was measured, else sensitivity, summed
    over heads. What is 0 has no place on the logarithmic axis."""
    setup = profile.setup
    has_kl = bool(setup.kl_candidates("k"))
    picture = Picture(13, 4.8, f"{setup.identity.id}: cost of quantizing one layer's keys or values alone")
    indices = [layer.index for layer in setup.layers]
    for number, side in enumerate(SIDES):
        panel = picture.panel(1, 2, number + 1)
        costs = [profile.losses("kl" if has_kl else "sensitivity", index, side) for index in indices]
        for place, candidate in enumerate(costs[0] if costs else ()):
            values = [sum(cost[candidate]) or float("nan") for cost in costs]
            name = profile.cache.format(side, *candidate).label
            colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
            panel.axes.plot(indices, values, marker=marker, color=colour, linewidth=1, label=name)
        panel.axes.set_yscale("log")
        measure = "KL to 16 bits (nats per token)" if has_kl else "sensitivity (PM-KVQ Eq. 5)"
        panel.frame("keys" if side == "k" else "values", "layer", measure)
        if costs:
            panel.axes.legend(frameon=False, fontsize=8, ncols=2)
    picture.save(path)


NAMED_SIDES: tuple[tuple[Side, str, str], ...] = (("k", "keys", BLUE), ("v", "values", RED))


def draw_predictors(record: PredictorRecord, path: str | Path) -> None:
    """Write what each layer's predictor explains, and what the errors of the cache became."""
    picture = Picture(11, 4.5)
    left, right = picture.panel(1, 2, 1), picture.panel(1, 2, 2)
    for side, name, colour in NAMED_SIDES:
        _draw_explained(left.axes, record, side, name, colour)
        _draw_errors(right.axes, record, side, name, colour)
    left.axes.axhline(record.subject.spec.min_explained, color="grey", linestyle=":", linewidth=1)
    left.axes.set_ylim(top=1.0)
    left.frame("What a layer's predictor explains", "layer", "explained variance, held out")
    right.frame("What the cache reads back", "layer", "squared error / variance, held out")
    for panel in (left, right):
        if panel.axes.get_legend_handles_labels()[0]:
            panel.axes.legend(frameon=False)
    picture.save(path)


def _draw_explained(axes: Axes, record: PredictorRecord, side: Side, name: str, colour: str) -> None:
    """Explained variance on held-out tokens; predictors that are left out are hollow."""
    fits = [(f.layer, f.fit.explained, f.is_kept) for f in record.findings if f.side == side and f.fit is not None]
    if fits:
        axes.plot([fit[0] for fit in fits], [fit[1] for fit in fits], "-", color=colour, linewidth=1)
    for is_kept, fill, text in ((True, colour, name), (False, "white", f"{name}, left out")):
        points = [fit[:2] for fit in fits if fit[2] == is_kept]
        if points:
            axes.plot(*zip(*points, strict=True), "o", color=colour, markerfacecolor=fill, label=text)


def _draw_errors(axes: Axes, record: PredictorRecord, side: Side, name: str, colour: str) -> None:
    """Squared error of what the cache reads back, as a share of the variance, without predictors and with them."""
    fits = [(finding.layer, finding.fit) for finding in record.findings if finding.side == side and finding.fit]
    plain = [(layer, fit.plain_error) for layer, fit in fits if fit.plain_error is not None]
    predicted = [(layer, fit.error) for layer, fit in fits if fit.error is not None]
    if plain and predicted:
        axes.plot(*zip(*plain, strict=True), "o--", color=colour, alpha=0.5, label=f"{name}, without")
        axes.plot(*zip(*predicted, strict=True), "o-", color=colour, label=f"{name}, with predictors")
        axes.set_yscale("log")
