"""The part that all layers of a plan share: a Format for its keys and its values, and what is done to their
pages.

Systems add keys (``transform.py`` in their folders); ``kvcal.plan.layer`` has the whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, GetCoreSchemaHandler
from pydantic.dataclasses import dataclass
from pydantic_core import core_schema

from kvcal.geometry import AttentionGeometry, CacheDtype, LayerGeometry, StateGeometry
from kvcal.lazy_torch import Tensor
from kvcal.pages.layout_protocol import AXES, PAGE_TOKENS, Layout
from kvcal.pages.ways import LATENTS as LATENT_WAY
from kvcal.pages.ways import NO_KERNELS, SLIDING_WINDOW, STATE, STATE_BESIDES, Way
from kvcal.plan.page_format import RAW, SIDES, Format, Side
from kvcal.records import TensorSpec
from kvcal.stored_tensor import ITEM_BYTES
from kvcal.strict import STRICT

Pages = Literal["post", "pre"]
LATENTS = "latents take no transforms, which are made for keys and values of heads"
QUERIES_AND_LATENTS = "they take no score by queries, which meet the keys of heads that a latent is expanded to"
# Left out of JSON where there is none: plans without the key stay the same bytes.
Present = Annotated[bool, Field(exclude_if=lambda is_there: not is_there)]

PredictPages = Callable[[Sequence[Tensor]], Tensor]

RESCALED = Way("keys with λ", needs=("text",))
OFFSET = Way("keys with an offset", needs=("text",))
BEFORE_ROPE = Way("pages before RoPE", needs=("RoPE",), refused={"static": NO_KERNELS})
FEEDBACK = Way("codes chosen with error feedback", needs=("text",))
BASIS = Way("keys or values in a basis", needs=("text",))
WAYS = (RESCALED, OFFSET, BEFORE_ROPE, FEEDBACK, BASIS)


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
class PlainLayer:
    """One caching layer. ``k`` and ``v`` are the Format of all KV heads; both are None for layers that stay
    as the model has them: sliding windows (16 bits, bounded) and states.

    Transforms of pages, whose tensors the plan holds: ``k_rescale`` (PM-KVQ's λ: pages hold K_post / λ),
    ``k_offset`` (subtracted before; of keys before RoPE their mean), ``k_pages`` "pre" (pages hold K before
    RoPE). ``k_feedback``, ``v_feedback``: codes are chosen with error feedback (kvcal.pages.error_feedback),
    whose factor the plan holds; pages are read as without it. ``k_basis``, ``v_basis``: the cache holds keys
    or values in a basis of each head (kvcal.systems.basis.basis), at 16 bits, too. ``v_gain``: values are
    enlarged by what their codes lose (kvcal.systems.basis.rotated).

    Of latent attention, ``k`` is the latent's format and ``v`` the rotary key's; such a layer takes no
    transforms, which are made for keys and values of heads.
    """

    geometry: LayerGeometry
    k: Annotated[Format | None, _InList] = None
    v: Annotated[Format | None, _InList] = None
    k_rescale: bool = False
    k_offset: bool = False
    k_pages: Pages = "post"
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
        if not self.takes_transforms and (self.transforms("k") or self.transforms("v")):
            latents = f"caches latents: {LATENTS}" if self.is_paged else "is bounded and takes no transforms"
            raise ValueError(f"layer {index} {latents}")
        if self.needs_queries and self.attention.is_latent:
            raise ValueError(f"layer {index} caches latents: {QUERIES_AND_LATENTS}")
        for reason in self.conflicts() if self.is_paged else ():
            raise ValueError(f"layer {index} {reason}")

    def transforms(self, side: Side) -> list[Way]:
        """Transforms of the pages of a side before its format stores them, or to their codes."""
        found = [FEEDBACK] * self.feedback(side) + [BASIS] * self.basis(side)
        if side == "k":
            found += [RESCALED] * self.k_rescale + [OFFSET] * self.k_offset + [BEFORE_ROPE] * (self.k_pages == "pre")
        return found

    def geometry_ways(self) -> list[Way]:
        """Ways of what is stored as the model has it, or needs more than keys and values of heads."""
        if isinstance(self.geometry, StateGeometry):
            return [STATE]
        found = [STATE_BESIDES] if self.geometry.state_bytes else []
        found += [LATENT_WAY] * self.geometry.is_latent + [SLIDING_WINDOW] * (self.geometry.window is not None)
        return found

    def ways(self, side: Side) -> list[Way]:
        """All ways in which a side is stored."""
        return [self.format(side).pages().way, *self.transforms(side)]

    def conflicts(self) -> list[str]:
        """Why these transforms and formats do not go together; usually nothing."""
        found = []
        if self.k_pages == "pre" and self.k_rescale:
            found.append("has k_pages 'pre': k_rescale is for keys after RoPE")
        if self.k_pages == "pre" and self.needs_queries:
            found.append("has k_pages 'pre' and a query score: queries are known after RoPE")
        if self.k_pages == "pre" and self.format("k").stripe_tokens < PAGE_TOKENS:
            found.append("has k_pages 'pre', which are packed whole: expected stripe_tokens = 128")
        for side in SIDES:
            fmt, others = self.format(side), [way for way in self.transforms(side) if way not in (FEEDBACK, BASIS)]
            if self.feedback(side) and not fmt.takes_feedback:
                found.append(f"has {side}_feedback, which chooses no codes of pages such as {fmt.label!r}")
            if self.basis(side) and fmt.kind != "rotated":
                found.append(f"has {side}_basis, which is for rotated pages: expected quantizer 'rotated'")
            if self.basis(side) and others:
                names = " and ".join(way.name for way in others)
                found.append(f"has {side}_basis, which takes the place of other transforms, and {names}")
        if self.v_gain and not (self.v_basis and self.v_feedback):
            found.append("has a v_gain, which is for values in a basis: expected v_basis and v_feedback")
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

    def sources(self, side: Side) -> tuple[tuple[int, Side], ...]:
        """Layers and sides whose pages are read to pack, or to read, those of ``side``; mostly none."""
        return ()

    def prediction(
        self, side: Side, others: Mapping[int, PlainLayer], dtype: CacheDtype, tensors: Mapping[str, Tensor]
    ) -> PredictPages:
        """A prediction: from pages [M, N, 128, D] fp32 of ``sources`` in order, what those of ``side`` are;
        of a side with sources, from the plan's ``tensors`` on the pages' device."""
        raise NotImplementedError(f"layer {self.geometry.index} has no sources")

    def own_tensors(self, side: Side, others: Mapping[int, PlainLayer], dtype: CacheDtype) -> dict[str, TensorSpec]:
        """Tensors that keys of systems need, by their names in the plan; ``others``: all layers by index."""
        return {}

    def check_sources(self, others: Mapping[int, PlainLayer]) -> None:
        """ValueError unless the layers whose pages it reads are there, and are stored so that it can."""

    @property
    def alone(self) -> Self:
        """The layer as one of index 0 that reads no other: equal for layers that take the same bytes."""
        return replace(self, geometry=replace(self.geometry, index=0))

    def at_16_bits(self, side: Side) -> Self:
        """The layer with one side at 16 bits, and without its transforms."""
        return replace(self, **self.bare_keys(side))

    def bare_keys(self, side: Side) -> dict[str, Any]:
        """The keys of a side, as they are at 16 bits without transforms."""
        if side == "v":
            return {"v": RAW, "v_feedback": False, "v_basis": False, "v_gain": False}
        moved = {"k_pages": "post", "k_rescale": False, "k_offset": False}
        return {"k": RAW, "k_feedback": False, "k_basis": False, **moved}

    def label(self, side: Side) -> str:
        """For people, what is done to the pages of a side: "in basis with feedback"; mostly nothing."""
        words = ["λ"] * self.k_rescale + ["offset"] * self.k_offset + ["before RoPE"] * (self.k_pages == "pre")
        words = words if side == "k" else []
        return " ".join([*words, *["in basis"] * self.basis(side), *["with feedback"] * self.feedback(side)])

    @property
    def kind(self) -> str:
        """The word for a paged layer's pages."""
        if self.attention.is_latent:
            return "latent"
        if self.k_basis or self.v_basis:
            return "basis"
        kinds = [fmt.kind for fmt in self.formats]
        return min(kinds, key=lambda kind: {"16 bits": 2, "uniform": 1}.get(kind, 0))

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
        says when pages get other bits."""
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
