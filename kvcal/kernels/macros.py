"""The macros that kernels are compiled with: what a page looks like in bytes, and how its codes are to be read.

Bit widths, groups, offsets and head sizes are constants of a kernel, so that every loop over planes, tiles and groups
unrolls. All offsets come from the layouts in ``kvcal.quantizers``: the bit layout is defined there and nowhere else.
Names are as in ``csrc``, and so are the numbers of dtypes, axes and scores (``csrc/common.cuh``, ``tiers.cuh``).
"""

from __future__ import annotations

import struct

from kvcal.geometry import CACHE_DTYPES
from kvcal.pages.layout import RAW_BITS
from kvcal.pages.tiered import TieredLayout
from kvcal.pages.uniform import PageLayout
from kvcal.plan.format import RAW, Format, Side

AXES = {"channel": 0, "token": 1}
DTYPES = {"float16": 0, "bfloat16": 1, "float32": 2}
DTYPE_NAMES = {dtype: name for name, dtype in CACHE_DTYPES.items()}
SCORES = {"magnitude": 0, "variance": 1, "range": 2, "query_magnitude": 3, "query_range": 4, "random": 5}

Defines = dict[str, int]


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
    found = _tier_defines(fmt, layout) if isinstance(layout, TieredLayout) else record_defines(layout) | {"TIERS": 0}
    found |= {
        "DIM": head_dim,
        "AXIS": AXES[fmt.axis],
        "GROUP": fmt.group_size,
        "PARAM": DTYPES[fmt.param_dtype],
        "SINKS": fmt.num_sink_tokens,
        "WINDOW": fmt.recent_window,
        "BUFFER": fmt.buffer_tokens,
    }
    return {f"{side.upper()}_{name}": value for name, value in found.items()}


def record_defines(layout: PageLayout) -> Defines:
    """The macros of a record whose channels all have the same bits: where what lies in it."""
    scale = 0 if layout.num_bits == RAW_BITS else sum(layout.plane_sizes)
    zero = 0 if layout.num_bits == RAW_BITS else scale + layout.param_size
    return {"BITS": layout.num_bits, "RECORD": layout.record_bytes, "SCALE": scale, "ZERO": zero}


def _tier_defines(fmt: Format, layout: TieredLayout) -> Defines:
    assert fmt.boost is not None
    offset = sum(layout.plane_sizes)
    found = {
        "BITS": layout.num_bits,
        "RECORD": layout.record_bytes,
        "TIERS": len(layout.tiers),
        "SCORE": SCORES[fmt.boost.score],
        "SLOTS": layout.num_slots,
        "RAW_SLOTS": 0,
    }
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
