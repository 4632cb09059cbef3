"""Pictures of the first stages: what a profile measured, the formats of an allocation, and the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcal.charts import BLUE, COLOURS, MARKERS, Picture
from kvcal.charts.evaluation import draw_allocation
from kvcal.plan.page_format import SIDES
from kvcal.quantities import format_bytes
from kvcal.stages.allocate.record import Allocation
from kvcal.stages.explain import format_name
from kvcal.stages.profile.record import Profile


def draw_profile(profile: Profile, path: str | Path) -> None:
    """Write the cost of each format in each layer's keys and values: KL where it was measured, else sensitivity, summed
    over heads. What is 0 has no place on the logarithmic axis. ArtifactError when the file cannot be written."""
    setup = profile.setup
    has_kl = bool(setup.kl_candidates("k"))
    picture = Picture(13, 4.8, f"{setup.identity.id}: cost of quantizing one layer's keys or values alone")
    indices = [layer.index for layer in setup.layers]
    for number, side in enumerate(SIDES):
        panel = picture.panel(1, 2, number + 1)
        costs = [profile.losses("kl" if has_kl else "sensitivity", index, side) for index in indices]
        for place, candidate in enumerate(costs[0] if costs else ()):
            values = [sum(cost[candidate]) or float("nan") for cost in costs]
            name = format_name(profile.cache.format(side, *candidate))
            colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
            panel.axes.plot(indices, values, marker=marker, color=colour, linewidth=1, label=name)
        panel.axes.set_yscale("log")
        measure = "KL to 16 bits (nats per token)" if has_kl else "sensitivity (PM-KVQ Eq. 5)"
        panel.frame("keys" if side == "k" else "values", "layer", measure)
        if costs:
            panel.axes.legend(frameon=False, fontsize=8, ncols=2)
    picture.save(path)


def draw_formats(allocation: Allocation, path: str | Path) -> None:
    """Write the bits of every layer. ArtifactError when the file cannot be written."""
    workload = allocation.workload
    size = f"{format_bytes(allocation.split.cache)} at batch {workload.batch} x {workload.context} tokens"
    picture = Picture(5.5, 7.2, f"{allocation.model.id}: {size}")
    draw_allocation(picture.panel().axes, allocation.layers)
    picture.save(path)


def draw_front(rows: Sequence[dict[str, Any]], objective: str, path: str | Path) -> None:
    """Write the Pareto front of a sweep (``allocate.pareto``). ArtifactError when the file cannot be written."""
    picture = Picture(9, 5.5)
    panel = picture.panel()
    drawn = [(row["bits_per_value"], row["loss"]) for row in rows if row["loss"] > 0]
    panel.axes.plot(
        [bits for bits, _ in drawn], [loss for _, loss in drawn], "o-", color=BLUE, markersize=4, linewidth=1
    )
    panel.axes.set_yscale("log")
    panel.frame("Least loss for each budget (lower left is better)", "bits per cached value", f"loss ({objective})")
    picture.save(path)
