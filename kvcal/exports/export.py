"""An export: what another program is given of a plan, and the list of what it cannot be given.

No target takes all of a plan. Each file of this package states the bits that its target will store, and which of
``PARTS`` it carries. Everything else that the plan has is listed as dropped, with its layers. Where a target lacks a
width, the next larger one is taken: no layer gets fewer bits than the plan gave it, unless the target has no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcal.errors import UnsupportedModel
from kvcal.geometry import AttentionGeometry
from kvcal.pages.record_layout import RAW_BITS
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import LATTICE, SIDES, TIERED, UNIFORM, Format
from kvcal.plan.plan import Plan

Bits = tuple[int, int]  # of keys and of values

BITS = "K and V bits of a layer"
HEADS = "bits of single heads"
CODES = "uniform codes with scale and zero"
GROUPS = "axis and group size"


def _any_format(has: Callable[[Format], bool]) -> Callable[[LayerPlan], bool]:
    return lambda layer: any(has(fmt) for side in SIDES for fmt in layer.formats(side))


# What a layer's plan may have beside its bits, and whether it has. A layer's Format and LayerPlan are all here.
PARTS: dict[str, Callable[[LayerPlan], bool]] = {
    HEADS: lambda layer: any(len({fmt.num_bits for fmt in layer.formats(side)}) > 1 for side in SIDES),
    CODES: _any_format(lambda fmt: fmt.num_bits < RAW_BITS and fmt.layout_name in (UNIFORM, TIERED)),
    GROUPS: _any_format(lambda fmt: fmt.num_bits < RAW_BITS and fmt.layout_name != LATTICE),
    "first tokens at 16 bits": _any_format(lambda fmt: fmt.num_sink_tokens > 0),
    "last tokens at 16 bits": _any_format(lambda fmt: fmt.max_window > 0),
    "channels with more bits": _any_format(lambda fmt: fmt.boost is not None),
    "another quantizer than the uniform one": _any_format(lambda fmt: fmt.layout_name not in (UNIFORM, TIERED)),
    "pages that shrink": _any_format(lambda fmt: fmt.shrink_at != ()),
    "factors of key channels (λ)": lambda layer: layer.k_rescale,
    "offsets of key channels": lambda layer: layer.k_offset,
    "pages of keys before RoPE": lambda layer: layer.k_pages == "pre",
    "predictors": lambda layer: any(layer.predictor(side) is not None for side in SIDES),
    "codes chosen with error feedback": lambda layer: any(layer.feedback(side) for side in SIDES),
}


@dataclass(frozen=True)
class Export:
    """The content of a file. ``bits``: what the target then stores of every attention layer, by cache index; ``keeps``:
    the names of the PARTS that it carries; ``notes``: what the reader has to know or do."""

    text: str
    bits: Mapping[int, Bits]
    keeps: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dropped:
    """A part of the plan that the target does not get, and the cache indices of the layers that have it."""

    part: str
    layers: tuple[int, ...]


class Exporter(Protocol):
    """A target: a file of this package and a line in kvcal.exports."""

    def __call__(self, plan: Plan) -> Export:
        """The plan for this target. UnsupportedModel where the target could only store something else."""
        ...


def require_heads(plan: Plan) -> None:
    """UnsupportedModel for a plan of latents: the targets' bits are those of keys and values of heads."""
    if plan.geometry.has_latents:
        raise UnsupportedModel(
            f"{plan.model.id} caches latents and rotary keys (multi-head latent attention); exports are for keys and "
            "values of heads",
            hint="serve the plan with PlanCache(plan, model.config), in transformers",
        )


def planned_bits(plan: Plan) -> dict[int, Bits]:
    """Bits of keys and values of every attention layer, by cache index: those of the head that has most, 16 of a
    sliding window."""
    return {
        layer.geometry.index: (_most(layer.k), _most(layer.v))
        for layer in plan.layers
        if isinstance(layer.geometry, AttentionGeometry)
    }


def _most(formats: Sequence[Format]) -> int:
    return max((fmt.num_bits for fmt in formats), default=RAW_BITS)


def at_least(num_bits: int, widths: Sequence[int]) -> int:
    """The smallest of the ``widths`` that has ``num_bits``; the largest where none has."""
    return min((width for width in widths if width >= num_bits), default=max(widths))


def dropped(plan: Plan, export: Export) -> list[Dropped]:
    """Everything of the plan that the export does not carry: first bits that change, then PARTS."""
    changes: dict[str, list[int]] = {}
    for index, planned in planned_bits(plan).items():
        stored = export.bits[index]
        if stored != planned:
            name = f"{BITS}: {planned[0]} and {planned[1]} become {stored[0]} and {stored[1]}"
            changes.setdefault(name, []).append(index)
    for part, has in PARTS.items():
        layers = [layer.geometry.index for layer in plan.layers if has(layer)]
        if layers and part not in export.keeps:
            changes[part] = layers
    return [Dropped(part, tuple(layers)) for part, layers in changes.items()]
