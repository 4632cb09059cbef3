"""The operators of a step, in torch's namespace ``kvcal``: on CUDA the kernels, elsewhere the reference.

One call serves one layer. Lists of tensors are the groups of kvcal.kernels.operands: ``k`` and ``v``
(Memory), ``place`` (Place), ``queries`` (QueryStatistic), ``transform`` (PageTransform), ``k_basis`` and
``v_basis`` (``Basis.operands``). Besides them:

    k_new, v_new   [B, n, D]     the step's token, any float dtype and strides; stored in the cache's dtype
    q              [B, n G, D]   its queries after RoPE; for the query sum, CUDA rounds them as k_new

Of S tokens that a step verifies (``Variant.query_tokens``), these are [B, S, n, D] and [B, S, n G, D]. All of
them are stored, and the stripe or page that they complete is packed; then each attends to the tokens up to its own, as
stored by then.

    error          [1] int32     bits that are set, never cleared: 1 when a page cannot be stored (NaN, infinity; its
                                 record is then undefined), 2 when there is no room for it
    s_aux          [n G]         logits of attention sinks without a key (gpt-oss)
    workspace      uint8         scratch of ``decode`` on CUDA: kvcal.kernels.decode says how much. Ends with counters
                                 that are zero between calls: for one number of heads, and any smaller batch
    variant                      what the kernels are compiled for (``Variant.number``)

Mutated arguments are declared, so that torch.compile and CUDA graphs can hold the operators.

A launch is paid for every layer and step where no graph replays it, so nothing but pointers, strides and
sizes is computed there; which kernel serves a variant on a device is looked up. What the kernels get is said
in ``csrc``. Tensors in another dtype than the cache's (a model that computes in fp32), or in strides that a
16-byte load does not take, are copied before.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels import reference
from kvcal.kernels.basis import launch_enter, launch_leave
from kvcal.kernels.compile import Kernel, kernel
from kvcal.kernels.decode import launch_decode, shared_room, table_shape
from kvcal.kernels.operands import DTYPE_NAMES, Memory, PageTransform, Place, QueryStatistic, loadable, ring_slot
from kvcal.kernels.packing import PackShape, append_defines, append_shape, pack_defines, pack_shape
from kvcal.kernels.reference import NO_ROOM
from kvcal.kernels.variants import DTYPES, VARIANTS, Variant
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.page_format import SIDES, Side
from kvcal.systems.basis.basis import Basis


@torch.library.custom_op("kvcal::enter", mutates_args=("error",))
def enter(
    k_new: Tensor, v_new: Tensor, q: Tensor, k_basis: Sequence[Tensor], v_basis: Sequence[Tensor], error: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Keys and values [B, n, D] or [B, S, n, D], in the cache's dtype, in their bases; and queries of any
    float dtype as they read such keys, in fp32. Empty tensors stand for what does not enter, and give empty
    ones. ``error`` gets a bit where float16 cannot hold a number."""
    serve = launch_enter if error.is_cuda else reference.enter
    return serve(k_new, v_new, q, k_basis, v_basis, error)


@enter.register_fake
def _enter_fake(
    k_new: Tensor, v_new: Tensor, q: Tensor, k_basis: Sequence[Tensor], v_basis: Sequence[Tensor], error: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    keys, values = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k_new, v_new))
    return keys, values, torch.empty(q.shape, dtype=torch.float32, device=q.device)


@torch.library.custom_op("kvcal::leave", mutates_args=())
def leave(y: Tensor, basis: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """y [B, n G, D] or [B, S, n G, D], of any float dtype, in a basis of n KV heads -> out of it, in
    ``dtype``."""
    if y.is_cuda:
        return launch_leave(y, basis, dtype)
    return Basis(*basis).leave(y).to(dtype).contiguous()


@leave.register_fake
def _leave_fake(y: Tensor, basis: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.empty(y.shape, dtype=dtype, device=y.device)


@torch.library.custom_op("kvcal::append", mutates_args=("k", "v", "queries", "error"))
def append(
    k_new: Tensor, v_new: Tensor, q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], queries: Sequence[Tensor],
    place: Sequence[Tensor], transform: Sequence[Tensor], error: Tensor, variant: int,
) -> None:  # fmt: skip
    """Store the step's tokens and count their queries; then pack the stripe, or page, that they complete, if
    they do."""
    serve = launch_append if k_new.is_cuda else reference.append
    serve(
        k_new, v_new, q, Memory(*k), Memory(*v), QueryStatistic(*queries), Place(*place), PageTransform(*transform),
        error, VARIANTS[variant],
    )  # fmt: skip


@torch.library.custom_op("kvcal::decode", mutates_args=("workspace",))
def decode(
    q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], place: Sequence[Tensor], transform: Sequence[Tensor],
    s_aux: Tensor, workspace: Tensor, scale: float, softcap: float, variant: int,
) -> Tensor:  # fmt: skip
    """Like q in shape and dtype: attention of the step's queries over the ``lengths`` + 1 tokens of every
    sequence (of query s: + 1 + s), after ``append``. ``softcap`` 0 for none."""
    operands = (q, Memory(*k), Memory(*v), Place(*place), PageTransform(*transform), s_aux)
    if q.is_cuda:
        return launch_decode(*operands, workspace, scale, softcap, VARIANTS[variant])
    return reference.decode(*operands, scale, softcap, VARIANTS[variant])


@decode.register_fake
def _decode_fake(
    q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], place: Sequence[Tensor], transform: Sequence[Tensor],
    s_aux: Tensor, workspace: Tensor, scale: float, softcap: float, variant: int,
) -> Tensor:  # fmt: skip
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@torch.library.custom_op("kvcal::pack", mutates_args=("pages", "error"))
def pack(
    x: Tensor, pages: Tensor, slots: Tensor, begin: int, query_mean: Tensor, transform: Sequence[Tensor],
    error: Tensor, side: int, variant: int,
) -> None:  # fmt: skip
    """Tokens x [b, n, T, D], one stripe or more, any strides -> pages[slots], int32 [b, P], of which they fill
    the tokens from ``begin`` of the first one on; a page that they begin and do not fill is 0 besides.
    ``query_mean`` [b, n, D] fp32, for query scores. ``side``: its index in SIDES."""
    named, of_keys = VARIANTS[variant], PageTransform(*transform)
    if not x.is_cuda:
        mean = query_mean if query_mean.numel() else None
        reference.pack(x, pages, slots, begin, mean, of_keys, error, SIDES[side], named)
        return
    launch_pack(x, pages, slots, begin, query_mean, of_keys, error, SIDES[side], named)


@torch.library.custom_op("kvcal::unpack", mutates_args=("out",))
def unpack(
    pages: Tensor, slots: Tensor, out: Tensor, transform: Sequence[Tensor], side: int, variant: int
) -> None:  # fmt: skip
    """pages[slots], int32 [b, P] -> out [b, n, 128 P, D], any float dtype, channels side by side."""
    named, of_keys = VARIANTS[variant], PageTransform(*transform)
    if not out.is_cuda:
        reference.unpack(pages, slots, out, of_keys, SIDES[side], named)
        return
    launch_unpack(pages, slots, out, of_keys, SIDES[side], named)


WINDOW_THREADS = 32
WORD_BYTES = 16  # of a load


@torch.library.custom_op("kvcal::append_window", mutates_args=("k_leaving", "k_ring", "v_leaving", "v_ring", "error"))
def append_window(
    k_new: Tensor, v_new: Tensor, k_leaving: Tensor, k_ring: Tensor, v_leaving: Tensor, v_ring: Tensor,
    lengths: Tensor, error: Tensor, max_tokens: int, rows: Tensor | None = None,
) -> None:  # fmt: skip
    """Put the step's token of a sliding-window layer in the ring, and what ``decode`` would miss in the
    place.

    A layer with a window of W tokens keeps W - 1 of the past; the token of a step attends to these and to
    itself. They lie in a ring, where token number i has slot i modulo the ring's size, and softmax does not
    ask for their order. A full ring would lose the oldest of them to the new token before attention has read
    it. So the token that leaves goes to a place of its own, which ``decode`` reads as a sink; while the ring
    has room, the new token itself stands there. Either way the place and the first ``lengths`` tokens of the
    ring, or all of it, are the window:

        place: the new token      ring: tokens 0 ... n - 1, then the new one, which is not read twice      (n < ring)
        place: token n - ring     ring: tokens n - ring + 1 ... n                                         (n >= ring)

    ``decode`` is given the place as the one sink, the ring, and no pages, and never reads beyond what was
    allocated, whatever the lengths (``Variant.ring_tokens``). The place is read within the same layer's step
    alone, so that all layers of a shape share it.

        k_new, v_new            [B, n, D]        the step's token, any float dtype and strides
        k_leaving, v_leaving    [R, n, 1, D]     cache dtype; heads side by side, rows maybe further apart
        k_ring, v_ring          [R, n, ring, D]  alike, 1 token or more
        lengths                 [B] int32        tokens that every row held before the step
        rows                    [B] int32        each sequence's row of place and ring; none: in their order
        error                   [1] int32        gets the bit NO_ROOM where a row has ``max_tokens`` already
    """
    if not k_new.is_cuda:
        every_row = torch.arange(len(lengths)) if rows is None else rows.long()
        slots = ring_slot(lengths.long(), k_ring)
        is_full = (lengths >= k_ring.shape[2]).view(-1, 1, 1)
        for new, leaving, ring in ((k_new, k_leaving, k_ring), (v_new, v_leaving, v_ring)):
            stored = new.to(ring.dtype)
            leaving[every_row, :, 0] = torch.where(is_full, ring[every_row, :, slots], stored)
            ring[every_row, :, slots] = stored
        if bool((lengths >= max_tokens).any()):
            error.bitwise_or_(NO_ROOM)
        return
    k_new, v_new = loadable(k_new, k_ring.dtype), loadable(v_new, v_ring.dtype)
    batch, heads, dim = k_new.shape
    in_word = WORD_BYTES // k_ring.itemsize
    kernel("window", "append_window", {}, k_new.get_device()).launch(
        (heads, batch, 2),
        WINDOW_THREADS,
        0,
        k_new.data_ptr(), k_new.stride(0) // in_word, k_new.stride(1) // in_word,
        v_new.data_ptr(), v_new.stride(0) // in_word, v_new.stride(1) // in_word,
        *(
            number
            for held in (k_leaving, k_ring, v_leaving, v_ring)
            for number in (held.data_ptr(), held.stride(0) // in_word)
        ),
        lengths.data_ptr(), 0 if rows is None else rows.data_ptr(), k_ring.shape[2], dim // in_word, max_tokens,
        error.data_ptr(),
    )  # fmt: skip


UNPACK_THREADS = 256


@functools.cache
def _append_kernel(variant: Variant, has_rows: bool, device_index: int) -> tuple[Kernel, PackShape, int]:
    """With the number of SMs."""
    room = shared_room(torch.cuda.get_device_capability(device_index))
    compiled = kernel("pack", "append", append_defines(variant, has_rows, room), device_index)
    num_sms = torch.cuda.get_device_properties(device_index).multi_processor_count
    return compiled, append_shape(variant, room), num_sms


@functools.cache
def _side_kernel(entry: str, side: Side, variant: Variant, device_index: int) -> tuple[Kernel, PackShape]:
    """``pack`` or ``unpack`` of one side."""
    room = shared_room(torch.cuda.get_device_capability(device_index))
    return kernel("pack", entry, pack_defines(variant, side, room), device_index), pack_shape(variant, side, room)


def launch_pack(
    x: Tensor, pages: Tensor, slots: Tensor, begin: int, query_mean: Tensor, transform: PageTransform, error: Tensor,
    side: Side, variant: Variant,
) -> None:  # fmt: skip
    """As ``ops.pack``."""
    x, query_mean = loadable(x, CACHE_DTYPES[variant.cache_dtype]), query_mean.contiguous()
    batch, heads, tokens = x.shape[:3]
    end = begin + tokens
    if end % PAGE_TOKENS and (slots.shape[1] > 1 or begin == 0):  # the last page is begun, and not filled
        pages[slots[:, -1].long()] = 0
    compiled, shape = _side_kernel("pack", side, variant, x.get_device())
    compiled.launch(
        (slots.shape[1] * shape.blocks_of_page, heads, batch), shape.threads, shape.shared_bytes,
        x.data_ptr(), *x.stride()[:3], pages.data_ptr(), pages.stride(0), slots.data_ptr(), slots.stride(0),
        *map(Tensor.data_ptr, transform), query_mean.data_ptr(), error.data_ptr(), begin, end,
    )  # fmt: skip


def launch_unpack(
    pages: Tensor, slots: Tensor, out: Tensor, transform: PageTransform, side: Side, variant: Variant
) -> None:
    """As ``ops.unpack``."""
    batch, heads, tokens = out.shape[:3]
    compiled, _ = _side_kernel("unpack", side, variant, pages.get_device())
    compiled.launch(
        (tokens // PAGE_TOKENS, heads, batch), UNPACK_THREADS, 0,
        pages.data_ptr(), pages.stride(0), slots.data_ptr(), slots.stride(0),
        out.data_ptr(), DTYPES[DTYPE_NAMES[out.dtype]], *out.stride()[:3], *map(Tensor.data_ptr, transform[:2]),
        transform.signs(side).data_ptr(),
    )  # fmt: skip


def launch_append(
    k_new: Tensor, v_new: Tensor, q: Tensor, k: Memory, v: Memory, queries: QueryStatistic, place: Place,
    transform: PageTransform, error: Tensor, variant: Variant,
) -> None:  # fmt: skip
    """As ``ops.append``."""
    dtype = k.ring.dtype
    k_new, v_new = loadable(k_new, dtype), loadable(v_new, dtype)
    of_queries: tuple[int, ...] = (0, 0, 0, 0, 0, 0, 0)
    if queries.sum.numel():
        q = loadable(q, dtype)
        of_queries = (
            q.data_ptr(), *q.stride()[:2], queries.sum.data_ptr(), queries.sum.stride(0), queries.since.data_ptr(),
            queries.since.stride(0),
        )  # fmt: skip
    batch, heads = k_new.shape[0], k_new.shape[-2]
    compiled, shape, num_sms = _append_kernel(variant, place.rows.numel() > 0, k_new.get_device())
    compiled.launch(
        (shape.append_blocks(len(SIDES) * batch * heads, num_sms), 1, 1),
        shape.threads,
        shape.shared_bytes,
        k_new.data_ptr(), k_new.stride(0), k_new.stride(-2), v_new.data_ptr(), v_new.stride(0), v_new.stride(-2),
        *of_queries,
        *(number for tensor in (*k, *v) for number in (tensor.data_ptr(), tensor.stride(0))),
        place.lengths.data_ptr(), place.rows.data_ptr(), place.table.data_ptr(), *table_shape(place.table),
        *map(Tensor.data_ptr, transform), error.data_ptr(), heads, batch,
        *k_new.stride()[1:-2], *v_new.stride()[1:-2], follows=True,
    )  # fmt: skip
