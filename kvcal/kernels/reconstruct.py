"""Pages that the attention kernels cannot read, in every step, as 16-bit ones.

A stored form (kvcal.store.dequantize) is one side of N neighbouring heads in one format, whose records are points of
a lattice, residuals of a prediction, or keys before RoPE. What is made of them:

    stored   what the layout decodes, + prediction
    tokens   for ``decode``, 16 bits: keys after RoPE, with λ and offset undone, or values
    kept     for predictors, fp32: keys before RoPE, or values

Pages of sequence b have numbers b P + 0, 1, ... for a table of P. Those of ``numbers`` that are complete behind the
step's token are wanted, others may be left as they are.

    heads       ``HeadPages`` of n of the N heads
    place       as in kvcal.kernels.ops
    prediction  [pages of ``numbers``, 128, N, D] fp32
    kept        [B, P, 128, N, D] fp32: these heads' part is written

On CUDA this is ``csrc/reconstruct.cu``; on a CPU, and for what that does not take (``unserved``), torch. Both give the
same bits: records are encoded against predictions from what is kept, and must be the same bytes everywhere.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from kvcal.kernels.compile import Kernel, kernel
from kvcal.kernels.operands import Place
from kvcal.kernels.page_codec import THREADS, VALUES_AT_ONCE, PageCoding, Reconstruction, unserved
from kvcal.pages.hadamard import norm
from kvcal.pages.record_layout import PAGE_TOKENS, page_positions
from kvcal.pages.transforms import cos_sin, rotate, unrotate

# Of the kernel's grid: some rounds of all that fit, so that blocks of short rows make room.
BLOCKS_PER_SM = 16


def position_turns(rotary: Tensor, num_positions: int) -> Tensor:
    """Cosine and sine of every position and pair, [num_positions, pairs, 2] fp32, by the operations of ``rotate``."""
    return torch.stack(cos_sin(rotary, torch.arange(num_positions, device=rotary.device)), dim=-1)


class HeadPages(NamedTuple):
    """Pages of n heads from the ``first_head``-th of the N on."""

    records: Tensor  # [slots, r, record_bytes] uint8: on a lattice r = 1, of all N heads, else n; slots may lie apart
    tokens: Tensor  # [slots, n, 128, D] in the cache's dtype
    first_head: int


def reconstruct(
    heads: HeadPages, place: Place, coding: PageCoding, prediction: Tensor, kept: Tensor, numbers: range,
    form: Reconstruction,
) -> None:  # fmt: skip
    """See the module's docstring."""
    serve = _launch if heads.records.is_cuda and unserved(form) is None else _reconstruct_in_torch
    serve(heads, place, coding, prediction, kept, numbers, form)


def _reconstruct_in_torch(
    heads: HeadPages, place: Place, coding: PageCoding, prediction: Tensor, kept: Tensor, numbers: range,
    form: Reconstruction,
) -> None:  # fmt: skip
    """All pages, complete or not: the host is not told, and what lies beyond a sequence's own is never read."""
    layout, tokens, num_pages = form.layout, heads.tokens, place.table.shape[1]
    own = slice(heads.first_head, heads.first_head + _num_heads(heads, form))
    transform = coding.transform(form, own)
    step = max(1, VALUES_AT_ONCE // (PAGE_TOKENS * form.num_heads * form.head_dim))
    for start in range(numbers.start, numbers.stop, step):
        part = torch.arange(start, min(start + step, numbers.stop), device=place.table.device)
        slots, ordinals = place.table.flatten()[part].long(), part % num_pages
        values = layout.decode_pages(heads.records[slots], form.num_heads, {"grid": coding.grid, "signs": coding.signs})
        values = values[:, own] if form.is_lattice else values
        if prediction.numel():
            told = prediction[start - numbers.start : start - numbers.start + len(part), :, own]
            values = values.float() + told.transpose(1, 2)
        read = transform.undo(values)
        positions = page_positions(ordinals)
        if kept.numel():
            before = unrotate(read, coding.rotary, positions) if form.num_pairs and not form.is_pre else read
            kept.flatten(0, 1)[part, :, own] = before.float().transpose(1, 2)
        if tokens.numel():
            read = rotate(read, coding.rotary, positions) if form.num_pairs and form.is_pre else read
            tokens[slots] = read.to(tokens.dtype)


def _num_heads(heads: HeadPages, form: Reconstruction) -> int:
    """n: on a lattice, where records are of all heads, that of the tokens, if there are any."""
    if not form.is_lattice:
        return heads.records.shape[1]
    return heads.tokens.shape[1] if heads.tokens.dim() > 1 else form.num_heads


@functools.cache
def _compiled(form: Reconstruction, device_index: int) -> tuple[Kernel, int, int, float]:
    """The kernel, its shared memory, the tiles of a page (of a head, but on a lattice), and the transform's norm."""
    compiled = kernel("reconstruct", "reconstruct", form.defines, device_index)
    return compiled, form.shared_bytes, PAGE_TOKENS // form.tile_tokens, norm(form.row_values)


def _launch(
    heads: HeadPages, place: Place, coding: PageCoding, prediction: Tensor, kept: Tensor, numbers: range,
    form: Reconstruction,
) -> None:  # fmt: skip
    device_index, num_heads = heads.records.get_device(), _num_heads(heads, form)
    compiled, shared_bytes, tiles, scale = _compiled(form, device_index)
    wanted = len(numbers) * tiles * (1 if form.is_lattice else num_heads)
    if not wanted:
        return
    processors = torch.cuda.get_device_properties(device_index).multi_processor_count
    compiled.launch(
        (min(wanted, BLOCKS_PER_SM * processors), 1, 1),
        THREADS,
        shared_bytes,
        heads.records.data_ptr(), heads.records.stride(0), heads.tokens.data_ptr(), heads.tokens.stride(0),
        kept.data_ptr(), prediction.data_ptr(), place.lengths.data_ptr(), place.table.data_ptr(), place.table.stride(0),
        place.table.shape[1], *coding.arguments(scale), heads.first_head, num_heads, form.num_heads, numbers.start,
        numbers.stop,
    )  # fmt: skip
