"""Launching ``csrc/decode.cu``, or ``csrc/decode_plain.cu`` for what it does not take: macros, shared memory, grid and
workspace.

The grid is fixed: as many blocks as the GPU runs at a time. Work is dealt to them on the device from the lengths there,
so a launch depends on nothing that changes from step to step, and may be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal.errors import UsageError
from kvcal.kernels.choice import FOLDED_HEAD_DIMS, is_plain
from kvcal.kernels.compile import Kernel, kernel
from kvcal.kernels.decode_plain import MAX_ROWS, plain_defines, plain_shape
from kvcal.kernels.decode_plain import THREADS as PLAIN_THREADS
from kvcal.kernels.macros import DTYPE_NAMES, DTYPES, Defines
from kvcal.kernels.operands import PageCounts, PageTransform, StoredSide
from kvcal.kernels.variants import Variant
from kvcal.pages.layout import RAW_BITS
from kvcal.pages.tiered import TieredLayout
from kvcal.plan.format import SIDES

TILE_HEADS = 4  # query heads of a tile of the tensor core; a pass over the cache serves one or two tiles
SWAP_BYTES = 644 * 4
MAX_WARPS = 12  # 168 registers a thread
MAX_RAW_WARPS = 16  # values of 16 bits are read without a copy on its way: only more warps hide memory
SCHEDULERS = 4  # of an SM: warps come in multiples
# Shared memory of a block at most, in KiB, by compute capability.
SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
OTHER_SHARED_KIB = 99


def shared_room(capability: tuple[int, int]) -> int:
    """Bytes of shared memory that a block gets at most."""
    return 1024 * SHARED_KIB.get(capability, OTHER_SHARED_KIB)


def block_shape(variant: Variant, capability: tuple[int, int]) -> tuple[int, int]:
    """(warps, dynamic shared memory) of a block, of which an SM runs one: ``Shared`` in the source, which asserts that
    this is enough.

    Raises:
        UsageError: not even one warp fits.
    """
    dim, layout = variant.head_dim, variant.layout("k")
    boosted = layout.num_slots if isinstance(layout, TieredLayout) else 0
    is_packed = variant.num_bits("v") != RAW_BITS
    records = [0 if variant.num_bits(side) == RAW_BITS else variant.layout(side).record_bytes for side in SIDES]
    heads = pass_heads(variant.group_heads)
    tiles = heads // TILE_HEADS
    parts = 2 if variant.rescale and variant.k.axis == "token" else 1  # of the query (QUERY_PARTS)
    shared = ((16 + 8 * parts) * tiles + 32) * dim + 11 * heads * 4 + 2 * MAX_ROWS * 4 + 64 + 128
    slots = max(sum(-(-record // 128) * 128 for record in records) if is_packed else 0, heads * dim * 4)
    each = slots + tiles * SWAP_BYTES + 2 * heads * 4 + 4 * boosted
    room = shared_room(capability)
    warps = min(MAX_WARPS if is_packed else MAX_RAW_WARPS, (room - shared) // each)
    warps -= warps % SCHEDULERS if warps > SCHEDULERS else 0
    if warps < 1:
        raise UsageError(
            f"pages of {max(records)} bytes need {shared + each} bytes of shared memory, more than the {room} of a GPU "
            f"of compute capability {capability[0]}.{capability[1]}",
            hint="take fewer bits, or the dynamic PlanCache",
        )
    return warps, shared + warps * each


def pass_heads(group_heads: int) -> int:
    """Query heads of a group that one pass over the cache serves."""
    return TILE_HEADS if group_heads <= TILE_HEADS else 2 * TILE_HEADS


def decode_defines(
    variant: Variant, q_dtype: str, softcap: bool, capability: tuple[int, int], is_staged: bool = False
) -> Defines:
    """All macros of the kernel for a GPU of this compute capability. ``is_staged``: see csrc/stage.cuh."""
    warps, shared = block_shape(variant, capability)
    rules = (variant.k.window_rule, variant.v.window_rule)
    return variant.defines | {
        "Q_DTYPE": DTYPES[q_dtype],
        "HAS_SOFTCAP": int(softcap),
        "HAS_WINDOW_RULE": int(any(rule is not None for rule in rules)),
        "WARPS": warps,
        "SHARED_BYTES": shared,
        **({"STAGED": 1} if is_staged else {}),
    }


@dataclass(frozen=True)
class Launch:
    """A kernel and how it is launched; blocks share heads by parts of ``part_floats``, of one pass each. ``follows``:
    see csrc/follow.cuh."""

    kernel: Kernel
    grid: int
    threads: int
    shared_bytes: int
    passes: int
    part_floats: int
    follows: bool = False


@functools.cache
def _launch(variant: Variant, q_dtype: torch.dtype, softcap: bool, is_staged: bool, device_index: int) -> Launch:
    capability = torch.cuda.get_device_capability(device_index)
    num_sms = torch.cuda.get_device_properties(device_index).multi_processor_count
    if is_plain(variant):
        room = shared_room(capability)
        shape = plain_shape(variant.head_dim, variant.group_heads, room)
        found = plain_defines(variant, DTYPE_NAMES[q_dtype], softcap, room) | ({"STAGED": 1} if is_staged else {})
        compiled = kernel("decode_plain", "decode", found, device_index)
        passes, floats = -(-variant.group_heads // shape.heads), shape.part_floats(variant.head_dim)
        return Launch(compiled, num_sms * shape.blocks, PLAIN_THREADS, shape.shared_bytes, passes, floats)
    found = decode_defines(variant, DTYPE_NAMES[q_dtype], softcap, capability, is_staged)
    compiled = kernel("decode", "decode", found, device_index)
    heads = pass_heads(variant.group_heads)
    passes, floats = -(-variant.group_heads // heads), heads * (variant.head_dim + 2)
    return Launch(compiled, num_sms, found["WARPS"] * 32, found["SHARED_BYTES"], passes, floats, follows=True)


def launch_of(variant: Variant, q_dtype: torch.dtype, device_index: int) -> Launch:
    """How ``decode`` of a variant is launched on a GPU, without softcap: for whoever reports it."""
    return _launch(variant, q_dtype, False, False, device_index)


def workspace_bytes(batch: int, num_kv_heads: int, group_heads: int, head_dim: int, device: torch.device) -> int:
    """Scratch that :func:`launch_decode` needs for calls of at most this size, whichever kernel serves them; zeroed
    before the first use."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    shape = plain_shape(head_dim, group_heads, shared_room(torch.cuda.get_device_capability(device)))
    heads = batch * num_kv_heads
    floats = (heads * -(-group_heads // shape.heads) + num_sms * shape.blocks) * shape.part_floats(head_dim)
    if head_dim in FOLDED_HEAD_DIMS:
        per_pass = pass_heads(group_heads)
        floats = max(floats, (heads * -(-group_heads // per_pass) + num_sms) * per_pass * (head_dim + 2))
    return _counter_bytes(heads, group_heads) + 4 * floats


def _counter_bytes(heads: int, group_heads: int) -> int:
    """Counters of so many KV heads: the same bytes for both kernels, of which none makes more passes than with 8 query
    heads each. So one may follow the other."""
    return -(-heads * -(-group_heads // (2 * TILE_HEADS)) * 4 // 256) * 256


def launch_decode(
    q: Tensor,
    k: StoredSide,
    v: StoredSide,
    counts: PageCounts,
    transform: PageTransform,
    s_aux: Tensor,
    workspace: Tensor,
    scale: float,
    softcap: float,
    variant: Variant,
    regions: tuple[int, ...] = (),
    out: Tensor | None = None,
) -> Tensor:
    """[B, n G, D] in q's dtype: see ``kvcal.kernels.ops.decode``.

    Follows ``append`` on the same stream, or another ``decode`` of the same step: ``lengths`` was not written since.

    ``regions``: addresses of the two regions, of keys and of values, that say where in ``k.pages`` and ``v.pages``, the
    memory of all pages, theirs lie (kvcal.kernels.stages); unless they have the variant's bits, nothing is written to
    ``out``, a contiguous tensor.

    Rows beyond ``MAX_ROWS`` take launches of their own, in which a block has to know fewer lengths.

    Raises:
        UsageError: a workspace that is too small; more rows than that whose pages lie in regions.
    """
    batch, num_heads = k.buffer.shape[:2]
    if regions:
        require_rows(batch)
    launch = _launch(variant, q.dtype, softcap != 0.0, bool(regions), q.get_device())
    counters = _counter_bytes(batch * num_heads, variant.group_heads)
    needed = counters + (batch * num_heads * launch.passes + launch.grid) * launch.part_floats * 4
    if workspace.numel() < needed:
        raise UsageError(f"a workspace of {workspace.numel()} bytes, expected at least {needed}")
    if q.stride(-1) != 1:
        q = q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    sinks_logits = s_aux.float() if s_aux.numel() else s_aux
    every = (q, out, counts.lengths, *k, *v)
    for first in range(0, batch, MAX_ROWS):
        of_rows = every if batch <= MAX_ROWS else [part[first : first + MAX_ROWS] for part in every]
        q_rows, out_rows, lengths, *stored = map(Tensor.data_ptr, of_rows)
        launch.kernel.launch(
            (launch.grid, 1, 1),
            launch.threads,
            launch.shared_bytes,
            q_rows, q.stride(0), q.stride(1),
            *stored,
            lengths, min(batch - first, MAX_ROWS), num_heads, k.pages.shape[1], v.pages.shape[1],
            _pointer(counts.k_page_at), counts.k_page_at.numel(), _pointer(counts.v_page_at), counts.v_page_at.numel(),
            *map(_pointer, (*transform, sinks_logits)),
            workspace.data_ptr() + counters, workspace.data_ptr(), out_rows, float(scale), float(softcap),
            *regions, follows=launch.follows,
        )  # fmt: skip
    return out


def require_rows(batch: int) -> None:
    """UsageError for more rows than one launch takes, where their pages lie in regions."""
    if batch > MAX_ROWS:
        raise UsageError(
            f"{batch} sequences in a batch of a plan whose pages shrink, expected at most {MAX_ROWS}",
            hint="split the batch",
        )


def _pointer(tensor: Tensor) -> int:
    """0 for what a variant does not have."""
    return tensor.data_ptr() if tensor.numel() else 0
