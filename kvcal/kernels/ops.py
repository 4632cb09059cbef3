"""The operators of a step, in torch's namespace ``kvcal``: on CUDA the kernels, elsewhere the reference.

One call serves one layer. Lists of tensors are the groups of kvcal.kernels.operands: ``k`` and ``v``
(Memory), ``place`` (Place), ``queries`` (QueryStatistic), ``transform`` (PageTransform). Beside them:

    k_new, v_new   [B, n, D]     the step's token, any float dtype and strides; stored in the cache's dtype
    q              [B, n G, D]   its queries after RoPE; for the query sum, CUDA rounds them as k_new

Of S tokens that a step verifies (``Variant.query_tokens``), these are [B, S, n, D] and [B, S, n G, D]. All of them are
stored, and the page that they complete is packed; then each attends to the tokens up to its own, as stored by then.

    error          [1] int32     bits that are set, never cleared: 1 when a page cannot be stored (NaN, infinity; its
                                 record is then undefined), 2 when there is no room for it
    s_aux          [n G]         logits of attention sinks without a key (gpt-oss)
    workspace      uint8         scratch of ``decode`` on CUDA: kvcal.kernels.decode says how much. Ends with counters
                                 that are zero between calls: for one number of heads, and any smaller batch
    variants                     what the kernels are compiled for (``Variant.number``): one, or where pages shrink, one
                                 for each pair of bits that keys and values come to have
    present, regions             where pages shrink: ``operands.Regions``; else empty

Mutated arguments are declared, so that torch.compile and CUDA graphs can hold the operators.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcal.kernels import reference
from kvcal.kernels.compile import kernel
from kvcal.kernels.decode import launch_decode
from kvcal.kernels.operands import Memory, PageTransform, Place, QueryStatistic, Regions
from kvcal.kernels.pack import launch_append, launch_pack, launch_unpack, loadable
from kvcal.kernels.reference import NO_ROOM
from kvcal.kernels.variants import VARIANTS
from kvcal.plan.page_format import SIDES


@torch.library.custom_op("kvcal::append", mutates_args=("k", "v", "queries", "error"))
def append(
    k_new: Tensor, v_new: Tensor, q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], queries: Sequence[Tensor],
    place: Sequence[Tensor], transform: Sequence[Tensor], error: Tensor, variants: Sequence[int], present: Tensor,
    regions: Sequence[int],
) -> None:  # fmt: skip
    """Store the step's tokens and count their queries; then pack the page that they complete, if they do."""
    statistic, of_keys = QueryStatistic(*queries), PageTransform(*transform)
    if k_new.is_cuda:
        launch_append(
            k_new, v_new, q, Memory(*k), Memory(*v), statistic, Place(*place), of_keys, error,
            [VARIANTS[number] for number in variants], _regions(present, regions),
        )  # fmt: skip
    else:
        variant, k_held, v_held, where = reference.present_operands(k, v, place, variants, present, regions)
        reference.append(k_new, v_new, q, k_held, v_held, statistic, where, of_keys, error, variant)


@torch.library.custom_op("kvcal::decode", mutates_args=("workspace",))
def decode(
    q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], place: Sequence[Tensor], transform: Sequence[Tensor],
    s_aux: Tensor, workspace: Tensor, scale: float, softcap: float, variants: Sequence[int], present: Tensor,
    regions: Sequence[int],
) -> Tensor:  # fmt: skip
    """Like q in shape and dtype: attention of the step's queries over the ``lengths`` + 1 tokens of every sequence (of
    query s: + 1 + s), after ``append``. ``softcap`` 0 for none."""
    if q.is_cuda:
        return launch_decode(
            q, Memory(*k), Memory(*v), Place(*place), PageTransform(*transform), s_aux, workspace, scale, softcap,
            [VARIANTS[number] for number in variants], _regions(present, regions),
        )  # fmt: skip
    variant, k_held, v_held, where = reference.present_operands(k, v, place, variants, present, regions)
    return reference.decode(q, k_held, v_held, where, PageTransform(*transform), s_aux, scale, softcap, variant)


@decode.register_fake
def _decode_fake(
    q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], place: Sequence[Tensor], transform: Sequence[Tensor],
    s_aux: Tensor, workspace: Tensor, scale: float, softcap: float, variants: Sequence[int], present: Tensor,
    regions: Sequence[int],
) -> Tensor:  # fmt: skip
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@torch.library.custom_op("kvcal::pack", mutates_args=("pages", "error"))
def pack(
    x: Tensor, pages: Tensor, slots: Tensor, first_page: int, query_mean: Tensor, transform: Sequence[Tensor],
    error: Tensor, side: int, variant: int,
) -> None:  # fmt: skip
    """Tokens x [b, n, 128 P, D], P 1 or more, any strides -> pages[slots], int32 [b, P]. They are number ``first_page``
    and on of their sequences. ``query_mean`` [b, n, D] fp32, for query scores. ``side``: its index in SIDES."""
    of_keys, named, mean = PageTransform(*transform), VARIANTS[variant], query_mean if query_mean.numel() else None
    if x.is_cuda:
        launch_pack(x, pages, slots, first_page, query_mean, of_keys, error, SIDES[side], named)
    else:
        reference.pack(x, pages, slots, first_page, mean, of_keys, error, SIDES[side], named)


@torch.library.custom_op("kvcal::unpack", mutates_args=("out",))
def unpack(
    pages: Tensor, slots: Tensor, out: Tensor, transform: Sequence[Tensor], side: int, variant: int
) -> None:  # fmt: skip
    """pages[slots], int32 [b, P] -> out [b, n, 128 P, D], any float dtype, channels side by side."""
    serve = launch_unpack if out.is_cuda else reference.unpack
    serve(pages, slots, out, PageTransform(*transform), SIDES[side], VARIANTS[variant])


def _regions(present: Tensor, regions: Sequence[int]) -> Regions | None:
    return Regions(present, (regions[0], regions[1])) if regions else None


THREADS = 32
WORD_BYTES = 16  # of a load


@torch.library.custom_op("kvcal::append_window", mutates_args=("k_leaving", "k_ring", "v_leaving", "v_ring", "error"))
def append_window(
    k_new: Tensor, v_new: Tensor, k_leaving: Tensor, k_ring: Tensor, v_leaving: Tensor, v_ring: Tensor,
    lengths: Tensor, error: Tensor, max_tokens: int, rows: Tensor | None = None,
) -> None:  # fmt: skip
    """Put the step's token of a sliding-window layer in the ring, and what ``decode`` would miss in the place.

    A layer with a window of W tokens keeps W - 1 of the past; the token of a step attends to these and to itself. They
    lie in a ring, where token number i has slot i modulo the ring's size, and softmax does not ask for their order. A
    full ring would lose the oldest of them to the new token before attention has read it. So the token that leaves goes
    to a place of its own, which ``decode`` reads as a sink; while the ring has room, the new token itself stands there.
    Either way the place and the first ``lengths`` tokens of the ring, or all of it, are the window:

        place: the new token      ring: tokens 0 ... n - 1, then the new one, which is not read twice      (n < ring)
        place: token n - ring     ring: tokens n - ring + 1 ... n                                         (n >= ring)

    ``decode`` is given the place as the one sink, the ring, and no pages, and never reads beyond what was allocated,
    whatever the lengths (``Variant.ring_tokens``). The place is read within the same layer's step alone, so that all
    layers of a shape share it.

        k_new, v_new            [B, n, D]        the step's token, any float dtype and strides
        k_leaving, v_leaving    [R, n, 1, D]     cache dtype; heads side by side, rows maybe further apart
        k_ring, v_ring          [R, n, ring, D]  alike, 1 token or more
        lengths                 [B] int32        tokens that every row held before the step
        rows                    [B] int32        each sequence's row of place and ring; none: in their order
        error                   [1] int32        gets the bit NO_ROOM where a row has ``max_tokens`` already
    """
    if not k_new.is_cuda:
        every_row = torch.arange(len(lengths)) if rows is None else rows.long()
        slots = lengths.long() % k_ring.shape[2]
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
        THREADS,
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
