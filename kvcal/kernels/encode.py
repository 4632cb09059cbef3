"""The page of a stored form that a step completes, from 16 bits to its records.

``append`` has packed 128 tokens of some sequences into 16-bit pages. Here they become records, the inverse of
kvcal.kernels.reconstruct: offset and λ applied, or keys turned back to before RoPE; the prediction subtracted; encoded.

    tokens      [slots, n, 128, D] in the cache's dtype, of every head range: together N heads
    records     [slots, r, record_bytes] uint8: on a lattice r = 1, else N
    place       as in kvcal.kernels.ops: page n // 128 of a sequence is complete if token n, the step's, ends it
    prediction  [B, 128, N, D] fp32: of the page that each sequence completes, anything where none is
    error       [1] int32: gets the bit NON_FINITE
    form        the promise of equal bytes everywhere is kvcal.kernels.reconstruct's

Channels with more bits than others are left out: their scores are the page codec's (kvcal.pages.codec).

On CUDA this is ``csrc/encode_page.cu``, which returns at once where nothing is complete; on a CPU, and for what that
does not take (``unencoded``), torch, which encodes one page of every sequence and keeps it where it is complete: the
host is not asked.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from kvcal.kernels.compile import Kernel, kernel
from kvcal.kernels.operands import Place
from kvcal.kernels.page_codec import (
    THREADS,
    PageCoding,
    Reconstruction,
    encoding_defines,
    encoding_shared_bytes,
    encoding_tile_tokens,
    unencoded,
)
from kvcal.kernels.reference import NON_FINITE
from kvcal.pages.hadamard import norm
from kvcal.pages.record_layout import PAGE_TOKENS, noted_in, page_positions
from kvcal.pages.tiered import TieredLayout
from kvcal.pages.transforms import unrotate

BLOCKS_PER_SM = 3  # of the kernel's grid: those that fit


def completed_pages(place: Place) -> tuple[Tensor, Tensor, Tensor]:
    """On the device, of every sequence: the page that the step's token lies in, one of the table's (int64 [B]); its
    slot (int64 [B]); and whether the token completes it, bool [B]. The table has a page at least."""
    page = place.lengths // PAGE_TOKENS
    is_complete = ((place.lengths + 1) % PAGE_TOKENS == 0) & (page < place.table.shape[1])
    page = page.clamp(max=place.table.shape[1] - 1).long()
    return page, place.table.gather(1, page.unsqueeze(1)).squeeze(1).long(), is_complete


def encode_page(
    tokens: Sequence[Tensor], records: Tensor, place: Place, coding: PageCoding, prediction: Tensor, error: Tensor,
    form: Reconstruction,
) -> None:  # fmt: skip
    """See the module's docstring."""
    is_served = records.is_cuda and unencoded(form, num_head_ranges=len(tokens)) is None
    encode = _launch if is_served else _encode_in_torch
    encode(tokens, records, place, coding, prediction, error, form)


def _encode_in_torch(
    tokens: Sequence[Tensor], records: Tensor, place: Place, coding: PageCoding, prediction: Tensor, error: Tensor,
    form: Reconstruction,
) -> None:  # fmt: skip
    layout = form.layout
    assert not isinstance(layout, TieredLayout)
    pages, slots, is_complete = completed_pages(place)
    wanted = is_complete[:, None, None, None]
    # What is not complete may be anything, NaN included.
    x = torch.where(wanted, torch.cat([part[slots] for part in tokens], dim=1), 0)
    positions = page_positions(pages)
    x = unrotate(x, coding.rotary, positions) if form.is_pre else coding.transform(form).apply(x)
    if prediction.numel():
        x = x.float() - torch.where(wanted, prediction.transpose(1, 2), 0)
    with noted_in(error, NON_FINITE):
        encoded = layout.encode_pages(x, {"grid": coding.grid, "signs": coding.signs})
    records[slots] = torch.where(is_complete[:, None, None], encoded, records[slots])


@functools.cache
def _compiled(form: Reconstruction, device_index: int) -> tuple[Kernel, int, int, float]:
    """The kernel, its shared memory, the tiles of a page (of a head, but on a lattice), and the transform's norm."""
    compiled = kernel("encode_page", "encode_page", encoding_defines(form), device_index)
    tiles = PAGE_TOKENS // encoding_tile_tokens(form)
    return compiled, encoding_shared_bytes(form), tiles, norm(form.row_values)


def _launch(
    tokens: Sequence[Tensor], records: Tensor, place: Place, coding: PageCoding, prediction: Tensor, error: Tensor,
    form: Reconstruction,
) -> None:  # fmt: skip
    device_index, rows, first_head = records.get_device(), len(place.lengths), 0
    compiled, shared_bytes, tiles, scale = _compiled(form, device_index)
    processors = torch.cuda.get_device_properties(device_index).multi_processor_count
    for part in tokens:
        wanted = rows * tiles * (1 if form.is_lattice else part.shape[1])
        compiled.launch(
            (min(wanted, BLOCKS_PER_SM * processors), 1, 1),
            THREADS,
            shared_bytes,
            part.data_ptr(), part.stride(0), records.data_ptr(), records.stride(0), prediction.data_ptr(),
            place.lengths.data_ptr(), place.table.data_ptr(), place.table.stride(0), place.table.shape[1],
            *coding.arguments(scale), first_head, part.shape[1], form.num_heads, rows, error.data_ptr(),
        )  # fmt: skip
        first_head += part.shape[1]
