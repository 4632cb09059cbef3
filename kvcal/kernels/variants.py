"""What a kernel is specialised for: one head range of a layer.

A *head range* is a run of neighbouring KV heads in which both formats, of keys and of values, stay the same. Every
kernel is compiled for one of them, with its macros (kvcal.kernels.macros). A ``Variant`` names one specialisation; its
``key``, a canonical JSON string, is what a torch operator can be handed.

Lattices, residuals of a prediction and keys before RoPE do not fold into a query: they are stored forms, which are
reconstructed into pages of 16 bits before the kernels meet them (``stored_form``).
"""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import dataclass

from pydantic.dataclasses import dataclass as strict_dataclass

from kvcal.errors import UsageError
from kvcal.geometry import AttentionGeometry, CacheDtype
from kvcal.kernels.macros import DTYPES, Defines, page_layout, side_defines
from kvcal.pages.layout import RAW_BITS
from kvcal.pages.tiered import TieredLayout
from kvcal.pages.uniform import PageLayout
from kvcal.plan.format import RAW, SIDES, Format, Side
from kvcal.plan.layer import LayerPlan
from kvcal.strict import STRICT, dump, parse


@dataclass(frozen=True)
class HeadRange:
    """KV heads ``heads`` of a layer, all of them in formats ``k`` and ``v``."""

    heads: slice
    k: Format
    v: Format

    @property
    def num_heads(self) -> int:
        return self.heads.stop - self.heads.start

    def format(self, side: Side) -> Format:
        return self.k if side == "k" else self.v


@strict_dataclass(frozen=True, config=STRICT)
class Variant:
    """One specialisation of the kernels. ``group_heads`` query heads share a KV head. ``rescale``, ``offset``: pages
    hold (K - offset) / rescale. ``first_head`` numbers the range's heads for the score "random", and is 0 otherwise:
    ranges of equal formats share their kernels. ``k_bits``, ``v_bits``: bits of the pages as the kernel meets them,
    where those are not the format's own: more before they shrink, 16 where a stored form was decoded into tokens.
    ``ring_tokens``: of a sliding window, whose buffer is a ring of so many tokens, with one sink and no pages
    (kvcal.kernels.window). ``plain``: ``decode`` is to be served by the plain kernel, also where the other
    one could (kvcal.kernels.choice)."""

    k: Format
    v: Format
    head_dim: int
    cache_dtype: CacheDtype
    group_heads: int
    rescale: bool
    offset: bool
    first_head: int
    k_bits: int | None = None
    v_bits: int | None = None
    ring_tokens: int | None = None
    plain: bool = False

    def __hash__(self) -> int:
        return hash(self.key)  # kernels are looked up by it at every launch

    def format(self, side: Side) -> Format:
        return self.k if side == "k" else self.v

    def num_bits(self, side: Side) -> int:
        """Bits of the pages that the kernel meets."""
        given = self.k_bits if side == "k" else self.v_bits
        return self.format(side).num_bits if given is None else given

    def layout(self, side: Side) -> PageLayout | TieredLayout:
        """The record of one page of one KV head."""
        return page_layout(side, self.format(side), self.head_dim, self.cache_dtype, self.num_bits(side))

    @functools.cached_property
    def key(self) -> str:
        """Canonical JSON, the same for equal variants; :func:`parse_key` reads it."""
        return json.dumps(dump(self), sort_keys=True, separators=(",", ":"))

    @functools.cached_property
    def defines(self) -> Defines:
        """The macros."""
        found = {
            "DTYPE": DTYPES[self.cache_dtype],
            "GROUP_HEADS": self.group_heads,
            "K_RESCALE": int(self.rescale),
            "K_OFFSET": int(self.offset),
        }
        for side in SIDES:
            found |= side_defines(side, self.format(side), self.head_dim, self.cache_dtype, self.num_bits(side))
            if self.ring_tokens is not None:
                found |= {f"{side.upper()}_SINKS": 1, f"{side.upper()}_BUFFER": self.ring_tokens}
        return found


@functools.cache
def parse_key(key: str) -> Variant:
    """The variant that a key names. UsageError for a key that is not one."""
    return parse(Variant, json.loads(key), "the kernels' variant", UsageError)


def variant_of(plan: LayerPlan, pair: HeadRange, cache_dtype: CacheDtype) -> Variant:
    """The specialisation that serves a head range of a layer."""
    bits = {side: _met_bits(plan, side, pair.format(side)) for side in SIDES}
    is_raw = RAW_BITS in (pair.k.num_bits, bits["k"])
    is_random = pair.k.boost is not None and pair.k.boost.score == "random"
    return Variant(
        pair.k,
        pair.v,
        plan.attention.k_head_dim,
        cache_dtype,
        plan.attention.num_query_heads // plan.attention.num_kv_heads,
        rescale=plan.k_rescale and not is_raw,
        offset=plan.k_offset and not is_raw,
        first_head=pair.heads.start if is_random else 0,
        k_bits=bits["k"],
        v_bits=bits["v"],
    )


def stored_form(plan: LayerPlan, side: Side, fmt: Format) -> str | None:
    """What keeps the kernels from reading pages of this format as they are stored; None if nothing does."""
    if fmt.lattice_dim is not None:
        return "are on a lattice"
    if plan.predictor(side) is not None:
        return "hold residuals of a prediction"
    if side == "k" and plan.k_pages == "pre":
        return "hold keys before RoPE"
    return None


def _met_bits(plan: LayerPlan, side: Side, fmt: Format) -> int | None:
    """``Variant.k_bits`` or ``v_bits``: 16 for a stored form."""
    return None if stored_form(plan, side, fmt) is None else RAW_BITS


def window_variant(geometry: AttentionGeometry, ring_tokens: int, cache_dtype: CacheDtype) -> Variant:
    """The specialisation that serves all heads of a sliding-window layer, which stays at 16 bits."""
    return Variant(
        RAW,
        RAW,
        geometry.k_head_dim,
        cache_dtype,
        geometry.num_query_heads // geometry.num_kv_heads,
        rescale=False,
        offset=False,
        first_head=0,
        ring_tokens=ring_tokens,
    )


def head_ranges(plan: LayerPlan) -> tuple[HeadRange, ...]:
    """The layer's heads, cut wherever the format of keys or of values changes."""
    pairs = zip(plan.head_formats("k"), plan.head_formats("v"), strict=True)
    ranges, first = [], 0
    for (k, v), equal in itertools.groupby(pairs):
        last = first + len(list(equal))
        ranges.append(HeadRange(slice(first, last), k, v))
        first = last
    return tuple(ranges)
