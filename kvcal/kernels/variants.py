"""What a kernel is specialised for: the macros that one head range of a layer is compiled with.

A *head range* is a run of neighbouring KV heads in which both formats, of keys and of values, stay the same. Every
kernel is compiled for one of them, so that bit widths, groups, offsets and head sizes are constants and every loop
over planes, tiles and groups unrolls. All offsets come from the layouts in ``kvcal.quantizers``: the bit layout is
defined there and nowhere else.

A ``Variant`` names one specialisation; its ``key``, a canonical JSON string, is what a torch operator can be handed.

Lattices, residuals of a prediction and keys before RoPE do not fold into a query: they are stored forms, which are
reconstructed into pages of 16 bits before the kernels meet them (``stored_form``). What a static cache does not store
is refused with its reason: ``storage_refusals`` hold on every device, ``refusals`` adds what the kernels alone cannot
do.
"""

from __future__ import annotations

import functools
import itertools
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic.dataclasses import dataclass as strict_dataclass

from kvcal.errors import UsageError
from kvcal.formats import RAW, SIDES, Format, Side
from kvcal.geometry import CACHE_DTYPES, AttentionGeometry, CacheDtype
from kvcal.layer_plan import LayerPlan
from kvcal.quantizers.pages import RAW_BITS, PageLayout
from kvcal.quantizers.shift import SHIFTS, Shift
from kvcal.quantizers.tiers import TieredLayout
from kvcal.strict import STRICT, dump, parse

AXES = {"channel": 0, "token": 1}
DTYPES = {"float16": 0, "bfloat16": 1, "float32": 2}
SCORES = {"magnitude": 0, "variance": 1, "range": 2, "query_magnitude": 3, "query_range": 4, "random": 5}
# The kernels load tokens 8 channels at a time, and keep a tile of them in shared memory.
CHANNELS_AT_ONCE, MAX_HEAD_DIM = 8, 512

Defines = dict[str, int]


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
        """The macros: names as in ``csrc``."""
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


def storage_refusals(plan: LayerPlan, cache_dtype: str) -> Iterator[str]:
    """Why a cache of fixed size cannot hold this layer, on any device; nothing if it can."""
    geometry = plan.attention
    if geometry.window == 1:
        yield "its sliding window of 1 token keeps nothing"
    if geometry.k_head_dim != geometry.v_head_dim:
        yield f"head sizes {geometry.k_head_dim} (K) and {geometry.v_head_dim} (V) differ"
    for side in SIDES:
        for fmt in plan.formats(side):
            if not fmt.shrink_at:
                continue
            form = stored_form(plan, side, fmt)
            if form is not None:
                yield f"{side} pages {form} and shrink: only pages that the kernels read as they are can"
            else:
                yield from _growths(side, fmt, plan.head_dim(side), cache_dtype)


def _growths(side: Side, fmt: Format, head_dim: int, cache_dtype: str) -> Iterator[str]:
    """Where pages take more bytes once they have shrunk: with scales and zeros in fp32, heads far below 16 channels."""
    widths = [fmt.start_bits >> halvings for halvings in range(len(fmt.shrink_at) + 1)]
    sizes = [page_layout(side, fmt, head_dim, cache_dtype, bits).record_bytes for bits in widths]
    for wide, narrow, before, after in zip(widths, widths[1:], sizes, sizes[1:], strict=False):
        if after > before:
            yield f"{side} pages of {narrow} bits take {after} bytes, and those of {wide} that are to shrink {before}"


def refusals(plan: LayerPlan, cache_dtype: str) -> Iterator[str]:
    """Why the kernels cannot serve this layer; nothing if they can."""
    geometry = plan.attention
    if cache_dtype == "float32":
        yield "the cache holds float32; the kernels take bfloat16 and float16"
    if geometry.k_head_dim % CHANNELS_AT_ONCE or geometry.k_head_dim > MAX_HEAD_DIM:
        yield f"head size {geometry.k_head_dim}; the kernels take multiples of {CHANNELS_AT_ONCE} up to {MAX_HEAD_DIM}"
    yield from storage_refusals(plan, cache_dtype)


def page_layout(side: Side, fmt: Format, head_dim: int, cache_dtype: str, num_bits: int) -> PageLayout | TieredLayout:
    """The record of one page of one KV head, at ``num_bits``."""
    if num_bits == RAW_BITS:  # whatever the format would quantize them with
        fmt = RAW
    layout = fmt.layout(side, 1, head_dim, cache_dtype, num_bits)
    assert isinstance(layout, PageLayout | TieredLayout)
    return layout


def side_defines(side: Side, fmt: Format, head_dim: int, cache_dtype: str, num_bits: int) -> Defines:
    """The macros of the pages, sinks and buffer of one side, whose pages have ``num_bits``."""
    layout = page_layout(side, fmt, head_dim, cache_dtype, num_bits)
    found = {
        "DIM": head_dim,
        "BITS": num_bits,
        "AXIS": AXES[fmt.axis],
        "GROUP": fmt.group_size,
        "PARAM": DTYPES[fmt.param_dtype],
        "RECORD": layout.record_bytes,
        "SINKS": fmt.num_sink_tokens,
        "WINDOW": fmt.recent_window,
        "BUFFER": fmt.buffer_tokens,
    }
    if isinstance(layout, TieredLayout):
        found |= _tier_defines(fmt, layout)
    else:
        scale = 0 if num_bits == RAW_BITS else sum(layout.plane_sizes)
        found |= {"SCALE": scale, "ZERO": scale if num_bits == RAW_BITS else scale + layout.param_size, "TIERS": 0}
    return {f"{side.upper()}_{name}": value for name, value in found.items()}


def shrink_defines(side: Side, old: PageLayout, new: PageLayout, kind: Shift) -> Defines:
    """The macros of ``shrink``: records of ``old`` become records of ``new``, which differ in ``num_bits`` alone."""
    found = {
        "SIDE": SIDES.index(side),
        "DIM": new.head_dim,
        "AXIS": AXES[new.axis],
        "GROUP": new.group_size,
        "DTYPE": DTYPES[new.cache_dtype],
        "SHIFT": SHIFTS.index(kind),
    }
    for name, layout in (("FROM", old), ("TO", new)):
        scale = 0 if layout.num_bits == RAW_BITS else sum(layout.plane_sizes)
        found |= {
            f"{name}_BITS": layout.num_bits,
            f"{name}_RECORD": layout.record_bytes,
            f"{name}_SCALE": scale,
            f"{name}_ZERO": scale if layout.num_bits == RAW_BITS else scale + layout.param_size,
        }
    return found


def _tier_defines(fmt: Format, layout: TieredLayout) -> Defines:
    assert fmt.boost is not None
    offset = sum(layout.plane_sizes)
    found = {"TIERS": len(layout.tiers), "SCORE": SCORES[fmt.boost.score], "SLOTS": layout.num_slots, "RAW_SLOTS": 0}
    for number, ((bits, room, above), slots, sizes) in enumerate(
        zip(layout.tiers, layout.slots, layout.high_sizes, strict=True)
    ):
        found |= {
            f"TIER{number}_BITS": bits,
            f"TIER{number}_ROOM": room,
            f"TIER{number}_SLOT": slots.start,
            f"TIER{number}_HIGH": offset,
            f"TIER{number}_COLUMNS": 0 if bits == RAW_BITS else layout.padded_slots(bits, room),
            f"TIER{number}_HAS_ABOVE": int(above is not None),
            f"TIER{number}_ABOVE": _double_bits(above or 0.0),
        }
        if bits == RAW_BITS:
            found["RAW_SLOTS"] = room
        offset += sum(sizes)
    return found | {
        "RAW": offset,
        "SCALE": offset + layout.raw_size,
        "ZERO": offset + layout.raw_size + layout.param_size,
        "INDEX": offset + layout.raw_size + 2 * layout.param_size,
    }


def _double_bits(value: float) -> int:
    """An fp64 as the integer (int64) of its bits: scores are compared in fp64, and decimals would not all be exact."""
    return int(struct.unpack("<q", struct.pack("<d", value + 0.0))[0])  # 0 for -0, which is no int64 literal


assert set(DTYPES) == set(CACHE_DTYPES)
