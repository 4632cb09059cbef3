"""Pages that the attention kernels cannot read, in every step: the operator ``kvcal::reconstruct``.

A stored form (kvcal.store.stored_form) is one side of N neighbouring heads in one format, whose records are points of
a lattice, residuals of a prediction, or keys before RoPE. What is made of them:

    stored   what the layout decodes, + prediction
    tokens   for ``decode``, 16 bits: keys after RoPE, with λ and offset undone, or values
    kept     for predictors, fp32: keys before RoPE, or values

Arguments come in the groups of kvcal.kernels.form_operands, and beside them:

    prediction  [stop - start, 128, N, D] fp32: of ``pages``
    kept        [B, pages, 128, N, D] fp32: these heads' part is written
    form        the key of a ``Reconstruction``

Of ``pages``, those that rows of ``lengths`` tokens hold are wanted, others may be left as they are; where there are no
``lengths``, all of them. Rows and pages of records go by strides. What there is not is an empty tensor.

On CUDA this is ``csrc/reconstruct.cu``; on a CPU, and for what that does not take (``unserved``), torch. Both give the
same bits: records are encoded against predictions from what is kept, and must be the same bytes everywhere.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from kvcal.kernels.compile import Kernel, kernel
from kvcal.kernels.form_operands import (
    HELD_PAGES,
    NUMBERED_PAGES,
    PAGE_CODING,
    HeadPages,
    HeldPages,
    NumberedPages,
    PageCoding,
)
from kvcal.kernels.operands import grouped
from kvcal.kernels.reconstruction import THREADS, Reconstruction, parse_reconstruction, unserved
from kvcal.pages.hadamard import norm
from kvcal.pages.layout import PAGE_TOKENS, page_positions
from kvcal.pages.transforms import cos_sin, rotate, unrotate

# Of the kernel's grid: some rounds of all that fit, so that blocks of short rows make room.
BLOCKS_PER_SM = 16

torch.library.define(
    "kvcal::reconstruct",
    f"(Tensor records, Tensor(a!) tokens, int first_head, {HELD_PAGES}, {PAGE_CODING}, {NUMBERED_PAGES}, "
    "Tensor prediction, Tensor(b!) kept, str form) -> ()",
)


def reconstruct(
    heads: HeadPages,
    held: HeldPages,
    coding: PageCoding,
    pages: NumberedPages,
    prediction: Tensor,
    kept: Tensor,
    form: str,
) -> None:
    """See the module's docstring."""
    torch.ops.kvcal.reconstruct(*heads, *held, *coding, *pages, prediction, kept, form)


def position_turns(rotary: Tensor, num_positions: int) -> Tensor:
    """Cosine and sine of every position and pair, [num_positions, pairs, 2] fp32, by the operations of ``rotate``."""
    return torch.stack(cos_sin(rotary, torch.arange(num_positions, device=rotary.device)), dim=-1)


@torch.library.impl("kvcal::reconstruct", "CPU")
def _reconstruct_cpu(*flat: Any) -> None:
    _reconstruct_in_torch(*_groups(*flat))


@torch.library.impl("kvcal::reconstruct", "CUDA")
def _reconstruct_cuda(*flat: Any) -> None:
    given = _groups(*flat)
    if unserved(given[-1]) is None:
        _launch(*given)
    else:
        _reconstruct_in_torch(*given)


def _groups(*flat: Any) -> tuple[Any, ...]:
    """The arguments in their groups, with the form that the key names."""
    *groups, key = grouped(flat, HeadPages, HeldPages, PageCoding, NumberedPages)
    return *groups, parse_reconstruction(key)


@torch.library.register_fake("kvcal::reconstruct")
def _reconstruct_fake(*args: Any) -> None:
    pass


def _reconstruct_in_torch(
    heads: HeadPages,
    held: HeldPages,
    coding: PageCoding,
    pages: NumberedPages,
    prediction: Tensor,
    kept: Tensor,
    form: Reconstruction,
) -> None:
    """All pages, whatever rows hold: the host is not told, and what lies beyond a row's own is never read."""
    layout, tokens = form.layout, heads.tokens
    own = slice(heads.first_head, heads.first_head + _num_heads(heads, form))
    transform = coding.transform(form, own)
    for part in pages.parts(form.num_heads * form.head_dim):
        places = part.places(heads.records.device)
        records = heads.records[places]
        values = layout.decode_pages(records, form.num_heads, {"grid": coding.grid, "signs": coding.signs})
        values = values[:, own] if form.is_lattice else values
        if prediction.numel():
            told = prediction[part.start - pages.start : part.stop - pages.start, :, own]
            values = values.float() + told.transpose(1, 2)
        met = transform.undo(values)
        if form.num_pairs:
            positions = page_positions(form.format.num_sink_tokens, places[1])
        if kept.numel():
            before = unrotate(met, coding.rotary, positions) if form.num_pairs and not form.is_pre else met
            kept[..., own, :][places] = before.float().transpose(1, 2)
        if tokens.numel():
            met = rotate(met, coding.rotary, positions) if form.num_pairs and form.is_pre else met
            tokens[places] = met.to(tokens.dtype)


def _num_heads(heads: HeadPages, form: Reconstruction) -> int:
    """n: on a lattice, where records are of all heads, that of the tokens, if there are any."""
    if not form.is_lattice:
        return heads.records.shape[2]
    return heads.tokens.shape[2] if heads.tokens.dim() > 1 else form.num_heads


@functools.cache
def _compiled(form: str, device_index: int) -> tuple[Kernel, int, int, float]:
    """The kernel, its shared memory, the tiles of a page (of a head, but on a lattice), and the transform's norm."""
    named = parse_reconstruction(form)
    compiled = kernel("reconstruct", "reconstruct", named.defines, device_index)
    return compiled, named.shared_bytes, PAGE_TOKENS // named.tile_tokens, norm(named.row_values)


def _launch(
    heads: HeadPages,
    held: HeldPages,
    coding: PageCoding,
    pages: NumberedPages,
    prediction: Tensor,
    kept: Tensor,
    form: Reconstruction,
) -> None:
    device_index, num_heads = heads.records.get_device(), _num_heads(heads, form)
    compiled, shared_bytes, tiles, scale = _compiled(form.key, device_index)
    wanted = (pages.stop - pages.start) * tiles * (1 if form.is_lattice else num_heads)
    if not wanted:
        return
    processors = torch.cuda.get_device_properties(device_index).multi_processor_count
    compiled.launch(
        (min(wanted, BLOCKS_PER_SM * processors), 1, 1),
        THREADS,
        shared_bytes,
        heads.records.data_ptr(),
        *heads.records.stride()[:2],
        heads.tokens.data_ptr(),
        kept.data_ptr(),
        prediction.data_ptr(),
        held.lengths.data_ptr(),
        held.page_at.data_ptr(),
        held.page_at.numel(),
        coding.grid.data_ptr(),
        coding.signs.data_ptr(),
        scale,
        coding.rescale.data_ptr(),
        coding.offset.data_ptr(),
        coding.rotary.data_ptr(),
        coding.turns.data_ptr(),
        heads.first_head,
        num_heads,
        form.num_heads,
        heads.records.shape[1],
        *pages,
    )
