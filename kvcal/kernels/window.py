"""One decoding step of a sliding-window layer: the operator ``kvcal::append_window``, and what ``decode`` reads then.

A layer with a window of W tokens keeps W - 1 of the past; the token of a step attends to these and to itself. They lie
in a ring, where token number i has slot i modulo the ring's size, and softmax does not ask for their order. A full ring
would lose the oldest of them to the new token before attention has read it. So the token that leaves goes to a place
of its own, which ``decode`` reads as a sink; while the ring has room, the new token itself stands there. Either way
the place and the first ``lengths`` tokens of the ring, or all of it, are the window:

    place: the new token      ring: tokens 0 ... n - 1, then the new one, which is not read twice      (n < ring)
    place: token n - ring     ring: tokens n - ring + 1 ... n                                         (n >= ring)

``decode`` is given the place as the one sink, the ring, and no pages, and never reads beyond what was allocated,
whatever the lengths (``Variant.ring_tokens``). The place is read within the same layer's
step alone, so that all layers of a shape share it.

    k_new, v_new            [B, n, D]        the step's token, any float dtype and strides
    k_leaving, v_leaving    [B, n, 1, D]     cache dtype
    k_ring, v_ring          [B, n, ring, D]  cache dtype, 1 token or more
    lengths                 [B] int32        tokens that every row held before the step
    error                   [1] int32        gets the bit NO_ROOM where a row has ``max_tokens`` already
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcal.kernels.compile import kernel
from kvcal.kernels.pack import loadable
from kvcal.kernels.reference import NO_ROOM

THREADS = 32
WORD_BYTES = 16  # of a load


@torch.library.custom_op("kvcal::append_window", mutates_args=("k_leaving", "k_ring", "v_leaving", "v_ring", "error"))
def append_window(
    k_new: Tensor, v_new: Tensor, k_leaving: Tensor, k_ring: Tensor, v_leaving: Tensor, v_ring: Tensor,
    lengths: Tensor, error: Tensor, max_tokens: int,
) -> None:  # fmt: skip
    """Puts the step's token in the ring, and what ``decode`` would miss in the place."""
    if not k_new.is_cuda:
        every_row, slots = torch.arange(len(lengths)), lengths.long() % k_ring.shape[2]
        is_full = (lengths >= k_ring.shape[2]).view(-1, 1, 1)
        for new, leaving, ring in ((k_new, k_leaving, k_ring), (v_new, v_leaving, v_ring)):
            stored = new.to(ring.dtype)
            leaving[:, :, 0] = torch.where(is_full, ring[every_row, :, slots], stored)
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
        k_leaving.data_ptr(), k_ring.data_ptr(), v_leaving.data_ptr(), v_ring.data_ptr(),
        lengths.data_ptr(), k_ring.shape[2], dim // in_word, max_tokens, error.data_ptr(),
    )  # fmt: skip
