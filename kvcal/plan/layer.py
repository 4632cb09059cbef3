"""The layers of plans, [formats], and layers in given formats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from kvcal.errors import UnsupportedModel
from kvcal.geometry import AttentionGeometry, Geometry
from kvcal.pages.layout_protocol import AXES
from kvcal.plan.page_format import RAW, Format
from kvcal.plan.plain_layer import LATENTS, QUERIES_AND_LATENTS, Pages, PlainLayer, Present
from kvcal.quantities import format_bytes
from kvcal.strict import MAX_COUNT, STRICT, knob
from kvcal.systems import extended

__all__ = [
    "LATENTS",
    "FormatsSpec",
    "LayerPlan",
    "Present",
    "bare_layers",
    "describe_parts",
    "fixed_layers",
    "in_formats",
    "parts_of",
]


@extended("transform")
@dataclass(frozen=True, config=STRICT)
class LayerPlan(PlainLayer):
    """One caching layer, with the keys of all systems."""


def parts_of(layers: Sequence[LayerPlan], cache_dtype: str, lengths: Sequence[int], columns: int) -> Counter[str]:
    """Bytes of the layers' caches by what takes them; nothing of what takes none."""
    total = Counter[str]()
    for layer in layers:
        total.update(layer.parts(cache_dtype, lengths, columns))
    return +total


def describe_parts(parts: Mapping[str, int]) -> str:
    """For people: "codes 20.97 MB (66 %), open pages 2.621 MB (8 %)", the most first."""
    total = max(1, sum(parts.values()))
    shown = sorted(((nbytes, name) for name, nbytes in parts.items() if nbytes), reverse=True)
    return ", ".join(
        f"{name.replace('_', ' ')} {format_bytes(nbytes)} ({100 * nbytes / total:.0f} %)" for nbytes, name in shown
    )


def in_formats(layer: LayerPlan, k: Format, v: Format, rotary: Format = RAW, k_pages: Pages = "post") -> LayerPlan:
    """A paged layer in these formats. Of latent attention, the latent is stored as keys are and the rotary
    key in ``rotary``; a latent has no RoPE, so that its ``k_pages`` are the same before and after."""
    if not layer.attention.is_latent:
        return LayerPlan(layer.geometry, k, v, k_pages=k_pages)
    if k.needs_queries:
        raise UnsupportedModel(
            f"layer {layer.geometry.index} caches latents (multi-head latent attention): {QUERIES_AND_LATENTS}",
            hint="take a score of keys alone: magnitude, variance or range",
        )
    return LayerPlan(layer.geometry, k, rotary)


def bare_layers(geometry: Geometry) -> tuple[LayerPlan, ...]:
    """Every layer unquantized: what the model caches by itself, in the cache's dtype."""
    return tuple(
        LayerPlan(layer, RAW, RAW)
        if isinstance(layer, AttentionGeometry) and layer.window is None
        else LayerPlan(layer)
        for layer in geometry.layers
    )


@dataclass(frozen=True, config=STRICT)
class FormatsSpec:
    """[formats]: fixed formats for every layer; the first one may differ (AQUA-KV)."""

    k: Format = Field(description="Format of the keys.")
    v: Format = Field(description="Format of the values.")
    first_k: Format | None = knob(None, "Format of the first layer's keys, if it differs.")
    first_v: Format | None = knob(None, "Format of the first layer's values, if it differs.")
    k_pages: Literal["post", "pre"] = knob("post", "Pages hold keys after or before RoPE.")
    rotary: Annotated[Format | None, Field(exclude_if=lambda fmt: fmt is None)] = knob(
        None, "Format of latent attention's rotary keys; default: 16 bits. Its latents are stored as keys are."
    )

    def __post_init__(self) -> None:
        for side, formats in (("k", (self.k, self.first_k)), ("v", (self.v, self.first_v, self.rotary))):
            for fmt in formats:
                if fmt is not None and fmt != RAW and fmt.axis not in AXES[side]:
                    raise ValueError(f"{side} axis {fmt.axis!r}, expected one of {AXES[side]}")
                if fmt is not None and fmt.kept_tokens > MAX_COUNT:
                    raise ValueError(
                        f"{side}: num_sink_tokens = {fmt.num_sink_tokens} and a window of {fmt.max_window}; allowed: "
                        f"up to {MAX_COUNT} together"
                    )


def fixed_layers(formats: FormatsSpec, layers: tuple[LayerPlan, ...]) -> tuple[LayerPlan, ...]:
    """The given layers with every paged one in the recipe's formats. UnsupportedModel as ``in_formats``."""
    first = next((layer.geometry.index for layer in layers if layer.is_paged), None)
    fixed = []
    for layer in layers:
        k, v = formats.k, formats.v
        if layer.geometry.index == first:
            k, v = formats.first_k or k, formats.first_v or v
        fixed.append(in_formats(layer, k, v, formats.rotary or RAW, formats.k_pages) if layer.is_paged else layer)
    return tuple(fixed)
