"""One caching layer of a model in a plan: a Format for its keys and its values, and the transforms of its
pages, of which a prediction is one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, GetCoreSchemaHandler
from pydantic.dataclasses import dataclass
from pydantic_core import core_schema

from kvcal.errors import UnsupportedModel
from kvcal.geometry import AttentionGeometry, Geometry, LayerGeometry, StateGeometry
from kvcal.pages.layout_protocol import AXES, Layout
from kvcal.plan.page_format import RAW, SIDES, Format, Side
from kvcal.quantities import format_bytes
from kvcal.stored_tensor import ITEM_BYTES
from kvcal.strict import MAX_COUNT, STRICT, knob
from kvcal.systems.aqua_kv.predictor import Kind, require_sizes

Pages = Literal["post", "pre"]
LATENTS = "latents take no λ, offsets, predictors or error feedback, which are made for keys and values of heads"
QUERIES_AND_LATENTS = "they take no score by queries, which meet the keys of heads that a latent is expanded to"
# Left out of JSON where there is none: plans without the key stay the same bytes.
Present = Annotated[bool, Field(exclude_if=lambda is_there: not is_there)]


class _InList:
    """A Format that JSON writes as a list: of one, or of none."""

    @staticmethod
    def __get_pydantic_core_schema__(kind: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        listed = handler.generate_schema(tuple[Format, ...])
        return core_schema.json_or_python_schema(
            json_schema=core_schema.no_info_after_validator_function(_only_one, listed),
            python_schema=handler(kind),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda fmt: () if fmt is None else (fmt,), return_schema=listed
            ),
        )


def _only_one(formats: tuple[Format, ...]) -> Format | None:
    if len(formats) > 1:
        raise ValueError(f"{len(formats)} formats, expected one, of all KV heads")
    return formats[0] if formats else None


@dataclass(frozen=True, config=STRICT)
class Predictor:
    """AQUA-KV's predictor of a layer's keys (from the keys of layer ``source``) or values (from its values,
    then the layer's own keys), all KV heads in a row, keys before RoPE. ``rank`` is of "low_rank",
    ``group_size`` of "int4"."""

    kind: Kind
    source: int
    rank: int | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        require_sizes(self.kind, self.rank, self.group_size)


@dataclass(frozen=True, config=STRICT)
class LayerPlan:
    """One caching layer. ``k`` and ``v`` are the Format of all KV heads; both are None for layers that stay
    as the model has them: sliding windows (16 bits, bounded) and states.

    Transforms of pages, whose tensors the plan holds: ``k_rescale`` (PM-KVQ's λ: pages hold K_post / λ),
    ``k_offset`` (subtracted before; of keys before RoPE their mean), ``k_pages`` "pre" (pages hold K before
    RoPE), predictors (AQUA-KV: pages hold the residual). ``k_feedback``, ``v_feedback``: codes are chosen
    with error feedback (kvcal.pages.error_feedback), whose factor the plan holds; pages are read as without
    it. ``k_basis``, ``v_basis``: the cache holds keys or values in a basis of each head (kvcal.systems.basis.basis),
    at 16 bits, too. ``v_gain``: values are enlarged by what their codes lose (kvcal.systems.basis.rotated).

    Of latent attention, ``k`` is the latent's format and ``v`` the rotary key's; such a layer takes no
    transforms, which are made for keys and values of heads.
    """

    geometry: LayerGeometry
    k: Annotated[Format | None, _InList] = None
    v: Annotated[Format | None, _InList] = None
    k_rescale: bool = False
    k_offset: bool = False
    k_pages: Pages = "post"
    k_predictor: Predictor | None = None
    v_predictor: Predictor | None = None
    k_feedback: Present = False
    v_feedback: Present = False
    k_basis: Present = False
    v_basis: Present = False
    v_gain: Present = False

    def __post_init__(self) -> None:
        index = self.geometry.index
        for side, fmt in zip(SIDES, (self.k, self.v), strict=True):
            if self.is_paged and fmt is None:
                raise ValueError(f"layer {index} has no {side} format, expected one, of all its KV heads")
            if not self.is_paged and fmt is not None:
                raise ValueError(f"layer {index} is bounded and takes no {side} format")
            if fmt is not None and fmt != RAW and fmt.axis not in AXES[side]:
                raise ValueError(f"layer {index} has {side} axis {fmt.axis!r}, expected one of {AXES[side]}")
        for reason in self._conflicts():
            raise ValueError(f"layer {index} {reason}")

    def _conflicts(self) -> list[str]:
        """Why these transforms and formats do not go together; usually nothing."""
        found = []
        transformed = self.k_rescale or self.k_offset or self.k_pages == "pre" or self.predictor("k") is not None
        has_feedback = self.k_feedback or self.v_feedback or self.k_basis or self.v_basis
        if (transformed or has_feedback or self.predictor("v") is not None) and not self.takes_transforms:
            return [f"caches latents: {LATENTS}" if self.is_paged else "is bounded and takes no transforms"]
        if self.needs_queries and self.attention.is_latent:
            return [f"caches latents: {QUERIES_AND_LATENTS}"]
        if self.k_pages == "pre" and self.k_rescale:
            found.append("has k_pages 'pre': k_rescale is for keys after RoPE")
        if self.k_predictor is not None and self.k_offset:
            found.append("has a k_predictor, whose bias holds the mean: expected no k_offset")
        if self.k_predictor is not None and self.k_pages != "pre":
            found.append("has a k_predictor, which predicts keys before RoPE: expected k_pages 'pre'")
        if self.k_pages == "pre" and self.needs_queries:
            found.append("has k_pages 'pre' and a query score: queries are known after RoPE")
        for side in SIDES if self.is_paged else ():
            fmt = self.format(side)
            if self.feedback(side) and not fmt.takes_feedback:
                found.append(f"has {side}_feedback, and no {side} format whose codes can be chosen with it")
            if self.feedback(side) and fmt.shrink_at:
                found.append(f"has {side}_feedback and {side} pages that shrink, which rounds their codes again")
            if self.basis(side) and fmt.quantizer != "rotated":
                found.append(f"has {side}_basis, which is for rotated pages: expected quantizer 'rotated'")
        if self.k_basis and transformed:
            found.append("has k_basis, which takes the place of k_rescale, k_offset, k_pages 'pre' and k_predictor")
        if self.v_gain and not (self.v_basis and self.v_feedback):
            found.append("has a v_gain, which is for values in a basis: expected v_basis and v_feedback")
        if self.v_basis and self.v_predictor is not None:
            found.append("has v_basis and a v_predictor; expected one of them")
        return found

    @property
    def is_paged(self) -> bool:
        """Full attention: grows with tokens, stored in pages."""
        return isinstance(self.geometry, AttentionGeometry) and self.geometry.window is None

    @property
    def takes_transforms(self) -> bool:
        """Whether its pages may hold transformed or predicted keys and values, or codes of error feedback."""
        return self.is_paged and not self.attention.is_latent

    @property
    def attention(self) -> AttentionGeometry:
        assert isinstance(self.geometry, AttentionGeometry)
        return self.geometry

    def format(self, side: Side) -> Format:
        """The format of a side of a paged layer."""
        fmt = self.k if side == "k" else self.v
        assert fmt is not None
        return fmt

    @property
    def formats(self) -> tuple[Format, ...]:
        """The formats of both sides; none of a bounded layer."""
        return tuple(fmt for fmt in (self.k, self.v) if fmt is not None)

    @property
    def needs_queries(self) -> bool:
        """Whether pages of keys are written with the help of the model's queries."""
        return self.k is not None and self.k.needs_queries

    def layout(self, side: Side, cache_dtype: str) -> Layout:
        """The pages of a side of a paged layer, at its own bits."""
        fmt = self.format(side)
        return fmt.layout(side, self.attention.num_kv_heads, self.head_dim(side), cache_dtype, fmt.num_bits)

    def predictor(self, side: Side) -> Predictor | None:
        return self.k_predictor if side == "k" else self.v_predictor

    def feedback(self, side: Side) -> bool:
        return self.k_feedback if side == "k" else self.v_feedback

    def basis(self, side: Side) -> bool:
        return self.k_basis if side == "k" else self.v_basis

    def head_dim(self, side: Side) -> int:
        return self.attention.k_head_dim if side == "k" else self.attention.v_head_dim

    def state_nbytes(self, num_sequences: int) -> int:
        """Bytes of the state of so many sequences; 0 without one."""
        return self.geometry.state_bytes * num_sequences

    def nbytes(self, cache_dtype: str, lengths: Sequence[int], columns: int) -> int:
        """Bytes of the layer's cache; ``columns`` is the padded length: what a sliding window holds, and what
        says when pages shrink."""
        return sum(self.parts(cache_dtype, lengths, columns).values())

    def parts(self, cache_dtype: str, lengths: Sequence[int], columns: int) -> Counter[str]:
        """The same bytes by what takes them."""
        found = Counter({"states": self.state_nbytes(len(lengths))})
        if isinstance(self.geometry, StateGeometry):
            return found
        if self.is_paged:
            heads = self.attention.num_kv_heads
            for side in SIDES:
                fmt, dim = self.format(side), self.head_dim(side)
                found.update(fmt.parts(side, heads, dim, cache_dtype, lengths, columns))
            return found
        window = self.geometry.window
        assert window is not None
        values = len(lengths) * min(columns, window - 1) * self.geometry.values_per_token
        found["sliding_windows"] = values * ITEM_BYTES[cache_dtype]
        return found


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
                if fmt is not None and fmt.num_sink_tokens + fmt.max_window > MAX_COUNT:
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
