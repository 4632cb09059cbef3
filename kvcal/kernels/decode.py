"""Launching ``decode``: macros, shared memory, grid and workspace of its two kernels.

``csrc/decode.cu`` is the fast one, ``csrc/decode_plain.cu`` serves what that does not take
(kvcal.kernels.choice). The grid is fixed: as many blocks as the GPU runs at a time. Work is dealt to them on
the device from the lengths there, so a launch depends on nothing that changes from step to step, and may be
captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcal.errors import UsageError
from kvcal.kernels.choice import (
    MANY_HEADS,
    MAX_STAGED_DIM,
    NARROW_HEAD_DIMS,
    TILE_HEADS,
    WIDE_HEAD_DIMS,
    WIDE_HEADS,
    is_plain,
    is_wide,
    key_lift,
    pass_heads,
)
from kvcal.kernels.compile import Kernel, kernel
from kvcal.kernels.operands import DTYPE_NAMES, Memory, PageTransform, Place
from kvcal.kernels.variants import DTYPES, Defines, Variant
from kvcal.pages.layout_protocol import RAW_BITS, padded_channels
from kvcal.plan.page_format import SIDES
from kvcal.systems.basis.rotated import RotatedLayout
from kvcal.systems.kitty.tiered import TieredLayout

MAX_ROWS = 512  # sequences of a launch
SWAP_BYTES = 644 * 4
MAX_LARGE_WARPS = 8  # 255 registers a thread, for more than 128 channels or 8 query heads of a pass
MAX_WARPS = 12  # 168 registers a thread
MAX_RAW_WARPS = 16  # values of 16 bits are read without a copy on its way: only more warps hide memory
SCHEDULERS = 4  # of an SM: warps come in multiples
# Shared memory of a block at most, in KiB, by compute capability.
SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
OTHER_SHARED_KIB = 99

# The plain kernel. Query heads of a pass, and blocks of an SM, at most: sums of P V take four registers a
# head, and an SM has 65,536.
PLAIN_THREADS, PLAIN_TILE_TOKENS = 256, 32
MAX_HEADS = 16
BLOCKS_BY_HEADS = ((4, 3), (MAX_HEADS, 2))
RESERVED_BYTES = 1024  # of an SM's shared memory, for every block


def shared_room(capability: tuple[int, int]) -> int:
    """Bytes of shared memory that a block gets at most."""
    return 1024 * SHARED_KIB.get(capability, OTHER_SHARED_KIB)


def block_shape(variant: Variant, capability: tuple[int, int]) -> tuple[int, int]:
    """(warps, dynamic shared memory) of a block of the fast kernel, of which an SM runs one: ``Shared`` in
    the source, which asserts that this is enough. UsageError where not even one warp fits."""
    dim, layout = variant.head_dim, variant.layout("k")
    boosted = layout.num_slots if isinstance(layout, TieredLayout) else 0
    is_packed = variant.num_bits("v") != RAW_BITS
    records = [0 if variant.num_bits(side) == RAW_BITS else variant.layout(side).record_bytes for side in SIDES]
    heads = pass_heads(variant)
    tiles = heads // TILE_HEADS
    parts = 2 if variant.rescale and variant.k.axis == "token" else 1  # of the query (QUERY_PARTS)
    limbs = 128 * tiles * -(-dim // 64) * 4  # QUERY_WORDS
    halves = 32 * dim + 32 if is_wide(variant) and variant.k.axis == "channel" else 0
    shared = (
        (16 * tiles + 32 * -(-tiles // 2)) * dim
        + parts * limbs
        + halves
        + 11 * heads * 4
        + 2 * MAX_ROWS * 4
        + 64
        + 64
        + 128
        + 16
    )
    shared += 12 * heads + 8 if variant.query_tokens > 1 else 0  # seen_from ... shared_key_pages
    shared += dim if isinstance(variant.layout("v"), RotatedLayout) else 0
    slots = max(sum(-(-record // 128) * 128 for record in records) if is_packed else 0, heads * dim * 4)
    each = slots + (16 * dim if is_wide(variant) else tiles * SWAP_BYTES) + 2 * heads * 4 + 4 * boosted
    room = shared_room(capability)
    is_large = dim > MAX_STAGED_DIM or heads > WIDE_HEADS
    most = MAX_LARGE_WARPS if is_large else MAX_WARPS if is_packed else MAX_RAW_WARPS
    warps = min(most, (room - shared) // each)
    warps -= warps % SCHEDULERS if warps > SCHEDULERS else 0
    if warps < 1:
        raise UsageError(
            f"pages of {max(records)} bytes need {shared + each} bytes of shared memory, more than the {room} of a GPU "
            f"of compute capability {capability[0]}.{capability[1]}",
            hint="take fewer bits, or the dynamic PlanCache",
        )
    return warps, shared + warps * each


def decode_defines(variant: Variant, q_dtype: str, softcap: bool, capability: tuple[int, int]) -> Defines:
    """All macros of the fast kernel for a GPU of this compute capability."""
    warps, shared = block_shape(variant, capability)
    rules = (variant.k.window_rule, variant.v.window_rule)
    return _call_defines(variant, q_dtype, softcap) | {
        "HAS_WINDOW_RULE": int(any(rule is not None for rule in rules)),
        "WARPS": warps,
        "WIDE": int(is_wide(variant)),
        "HEADS": pass_heads(variant),
        "K_LIFT": key_lift(variant) or 0,
        "SHARED_BYTES": shared,
    }


def _call_defines(variant: Variant, q_dtype: str, softcap: bool) -> Defines:
    return variant.defines | {"Q_DTYPE": DTYPES[q_dtype], "HAS_SOFTCAP": int(softcap)}


def row_defines(has_rows: bool) -> Defines:
    """The macro of a kernel that is given ``Place.rows``."""
    return {"RING_ROWS": 1} if has_rows else {}


@dataclass(frozen=True)
class PlainShape:
    """Of the plain kernel: ``heads`` query heads a pass, ``blocks`` an SM, ``shared_bytes`` a block."""

    heads: int
    blocks: int
    shared_bytes: int

    def part_floats(self, head_dim: int) -> int:
        """``HEADS * PART`` of the source: a block's part of the heads of a pass."""
        return self.heads * (head_dim + 4)


@functools.cache
def plain_shape(head_dim: int, group_heads: int, room: int) -> PlainShape:
    """The fewest passes over the cache whose heads fit in ``room`` bytes of shared memory, the most that a
    block gets (99 KiB or more): one head of 512 channels takes 72 KiB."""
    fewer = (-(-group_heads // passes) for passes in range(1, group_heads + 1))
    heads = next(heads for heads in fewer if heads <= MAX_HEADS and _plain_bytes(head_dim, heads) <= room)
    shared = _plain_bytes(head_dim, heads)
    most = next(blocks for heads_at_most, blocks in BLOCKS_BY_HEADS if heads <= heads_at_most)
    return PlainShape(heads, min(most, (room + RESERVED_BYTES) // (shared + RESERVED_BYTES)), shared)


def _plain_bytes(head_dim: int, heads: int) -> int:
    """``Shared`` of the source, which asserts that this is enough: tile, queries, scores, weights, sums and
    rows."""
    padded, weights = padded_channels(head_dim), -(-heads // 4) * 4
    tile = max(PLAIN_TILE_TOKENS * (padded + 4), 4 * PLAIN_THREADS)
    scores = PLAIN_THREADS // 32 * heads * PLAIN_TILE_TOKENS + PLAIN_TILE_TOKENS * weights
    return 4 * (tile + heads * padded + scores + 2 * heads + weights + 2 * MAX_ROWS) + 16


def plain_defines(variant: Variant, q_dtype: str, softcap: bool, room: int) -> Defines:
    """All macros of the plain kernel where a block gets at most ``room`` bytes of shared memory."""
    shape = plain_shape(variant.head_dim, variant.group_heads, room)
    found = {"HEADS": shape.heads, "BLOCKS": shape.blocks, "SHARED_BYTES": shape.shared_bytes}
    return _call_defines(variant, q_dtype, softcap) | found


@dataclass(frozen=True)
class Launch:
    """A kernel and how it is launched; blocks share heads by parts of ``part_floats``, of one pass each.
    ``follows``: see csrc/follow.cuh."""

    kernel: Kernel
    grid: int
    threads: int
    shared_bytes: int
    passes: int
    part_floats: int
    follows: bool = False


@functools.cache
def _launches(
    variant: Variant, q_dtype: torch.dtype, softcap: bool, has_rows: bool, device_index: int
) -> tuple[Launch, Launch]:
    """For many KV heads and for few, which may be one: neither is first asked for inside a graph's capture,
    whichever batch came before."""
    many = _launch(variant, q_dtype, softcap, has_rows, device_index)
    few = replace(variant, few_heads=True)
    return many, _launch(few, q_dtype, softcap, has_rows, device_index)


def _launch(variant: Variant, q_dtype: torch.dtype, softcap: bool, has_rows: bool, device_index: int) -> Launch:
    capability = torch.cuda.get_device_capability(device_index)
    num_sms = torch.cuda.get_device_properties(device_index).multi_processor_count
    dim, group = variant.head_dim, variant.group_queries
    if is_plain(variant):
        room = shared_room(capability)
        shape = plain_shape(dim, group, room)
        defines = plain_defines(variant, DTYPE_NAMES[q_dtype], softcap, room)
        compiled = kernel("decode_plain", "decode", defines | row_defines(has_rows), device_index)
        grid, passes = num_sms * shape.blocks, -(-group // shape.heads)
        return Launch(compiled, grid, PLAIN_THREADS, shape.shared_bytes, passes, shape.part_floats(dim))
    defines = decode_defines(variant, DTYPE_NAMES[q_dtype], softcap, capability)
    compiled = kernel("decode", "decode", defines | row_defines(has_rows), device_index)
    heads = pass_heads(variant)
    passes, floats = -(-group // heads), heads * (dim + 2)
    return Launch(compiled, num_sms, defines["WARPS"] * 32, defines["SHARED_BYTES"], passes, floats, follows=True)


def workspace_bytes(batch: int, num_kv_heads: int, group_heads: int, head_dim: int, device: torch.device) -> int:
    """Scratch that :func:`launch_decode` needs for calls of at most this batch, whichever kernel serves them;
    zeroed before the first use. Counters are its end, where no smaller batch has its parts."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    shape = plain_shape(head_dim, group_heads, shared_room(torch.cuda.get_device_capability(device)))
    heads = batch * num_kv_heads
    floats = (heads * -(-group_heads // shape.heads) + num_sms * shape.blocks) * shape.part_floats(head_dim)
    if head_dim in WIDE_HEAD_DIMS:
        is_narrow = group_heads <= TILE_HEADS and head_dim in NARROW_HEAD_DIMS
        most = TILE_HEADS if is_narrow else WIDE_HEADS if group_heads <= WIDE_HEADS else 2 * WIDE_HEADS
        floats = max(floats, (heads * -(-group_heads // most) + num_sms) * most * (head_dim + 2))
    return _counter_bytes(heads, group_heads) + 4 * floats


def _counter_bytes(heads: int, group_heads: int) -> int:
    """Counters of so many KV heads: the same bytes for both kernels, of which none makes more passes than
    with 8 query heads each. So one may follow the other."""
    return -(-heads * -(-group_heads // (2 * TILE_HEADS)) * 4 // 256) * 256


def launch_decode(
    q: Tensor, k: Memory, v: Memory, place: Place, transform: PageTransform, s_aux: Tensor, workspace: Tensor,
    scale: float, softcap: float, variant: Variant,
) -> Tensor:  # fmt: skip
    """Like q in shape and dtype: see ``kvcal.kernels.ops.decode``.

    Follows ``append`` on the same stream, or another ``decode`` of the same step: ``lengths`` and ``table``
    were not written since. Sequences beyond ``MAX_ROWS`` take launches of their own, in which a block has to
    know fewer lengths. UsageError for a workspace that is too small.
    """
    batch, num_heads = len(place.lengths), k.ring.shape[1]
    if q.stride(-1) != 1:
        q = q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sink_logits = s_aux.float() if s_aux.numel() else s_aux
    counters = _counter_bytes(batch * num_heads, variant.group_queries)
    every = (q, out, place.lengths, place.table, place.rows)
    memory = (k.sinks, k.ring, v.sinks, v.ring)
    counted = workspace.data_ptr() + workspace.numel() - counters
    launches = _launches(variant, q.dtype, softcap != 0.0, place.rows.numel() > 0, q.get_device())
    launch = launches[batch * num_heads < MANY_HEADS]
    needed = counters + (batch * num_heads * launch.passes + launch.grid) * launch.part_floats * 4
    if workspace.numel() < needed:
        raise UsageError(f"a workspace of {workspace.numel()} bytes, expected at least {needed}")
    for first in range(0, batch, MAX_ROWS):
        of_rows = every if batch <= MAX_ROWS else [part[first : first + MAX_ROWS] for part in every]
        q_rows, out_rows, lengths, table, ring_rows = map(Tensor.data_ptr, of_rows)
        after = 0 if place.rows.numel() else first  # rows of a table count from the first sequence of all
        k_sinks, k_ring, v_sinks, v_ring = (part.data_ptr() + after * part.stride(0) * part.itemsize for part in memory)
        launch.kernel.launch(
            (launch.grid, 1, 1),
            launch.threads,
            launch.shared_bytes,
            q_rows, q.stride(0), q.stride(-2),
            k_sinks, k.sinks.stride(0), k_ring, k.ring.stride(0), k.pages.data_ptr(), k.pages.stride(0),
            v_sinks, v.sinks.stride(0), v_ring, v.ring.stride(0), v.pages.data_ptr(), v.pages.stride(0),
            lengths, ring_rows, min(batch - first, MAX_ROWS), num_heads, table, *table_shape(place.table),
            _pointer(place.k_read_at), place.k_read_at.numel(), _pointer(place.v_read_at), place.v_read_at.numel(),
            *map(_pointer, (transform.rescale, transform.offset, transform.k_signs, transform.v_signs)),
            _pointer(sink_logits),
            workspace.data_ptr(), counted, out_rows, float(scale), float(softcap),
            *q.stride()[1:-2], follows=launch.follows,
        )  # fmt: skip
    return out


def table_shape(table: Tensor) -> tuple[int, int]:
    """Elements from row to row of a table of slots, and the pages it has room for; a sliding window has
    none."""
    return (table.stride(0), table.shape[1]) if table.dim() == 2 else (0, 0)


def _pointer(tensor: Tensor) -> int:
    """0 for what a variant does not have."""
    return tensor.data_ptr() if tensor.numel() else 0
