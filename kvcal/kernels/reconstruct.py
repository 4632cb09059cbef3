"""Pages that the attention kernels cannot read, in every step: the operator ``kvcal::reconstruct``.

A stored form (kvcal.runtime.stored_form) is one side of N neighbouring heads in one format, whose records are points of
a lattice, residuals of a prediction, or keys before RoPE. What is made of them:

    stored   what the layout decodes, + prediction
    tokens   for ``decode``, 16 bits: keys after RoPE, with λ and offset undone, or values
    kept     for predictors, fp32: keys before RoPE, or values

    records     [B, pages, r, record_bytes] uint8: on a lattice r = 1, of all N heads, else n; rows and pages by strides
    tokens      [B, pages, n, 128, D] in the cache's dtype: heads ``first_head`` to ``first_head`` + n - 1 of the N
    kept        [B, pages, 128, N, D] fp32; of these heads, too
    prediction  [stop - start, 128, N, D] fp32
    lengths     [B] int32: the pages that rows of so many tokens hold are wanted, others may be left as they are; empty:
                all of them
    page_at     as in kvcal.kernels.ops
    grid        [points, d] fp32, signs [N D] int8: of a lattice
    rescale, offset  [N, D] fp32
    rotary      [pairs, 4] fp64, and turns [positions, pairs, 2] fp32 of ``position_turns``, for the kernel alone

What there is not is an empty tensor. Pages have numbers 0, 1, ... in the rows from ``first_row`` on, ``num_pages`` of
each from ``first_page`` on; ``start`` to ``stop`` - 1 are wanted. ``form`` is the key of a ``Reconstruction``.

On CUDA this is ``csrc/reconstruct.cu``; on a CPU, and for what that does not take (``unserved``), torch. Both give the
same bits: records are encoded against predictions from what is kept, and must be the same bytes everywhere.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from kvcal.kernels.compile import Kernel, kernel
from kvcal.kernels.reconstruction import THREADS, Reconstruction, parse_reconstruction, unserved
from kvcal.quantizers.convert import Transform
from kvcal.quantizers.lattice import LatticeLayout
from kvcal.quantizers.pages import PAGE_TOKENS
from kvcal.transforms.hadamard import norm
from kvcal.transforms.rotation import cos_sin, rotate, unrotate

# Values that the reference reconstructs at once: every temporary in fp32 is 32 MB then.
VALUES_AT_ONCE = 2**23
# Of the kernel's grid: some rounds of all that fit, so that blocks of short rows make room.
BLOCKS_PER_SM = 16

torch.library.define(
    "kvcal::reconstruct",
    "(Tensor records, Tensor(a!) tokens, Tensor(b!) kept, Tensor prediction, Tensor lengths, Tensor page_at, "
    "Tensor grid, Tensor signs, Tensor rescale, Tensor offset, Tensor rotary, Tensor turns, int first_head, "
    "int first_row, int first_page, int num_pages, int start, int stop, str form) -> ()",
)


def reconstruct(
    records: Tensor,
    tokens: Tensor,
    kept: Tensor,
    prediction: Tensor,
    lengths: Tensor,
    page_at: Tensor,
    grid: Tensor,
    signs: Tensor,
    rescale: Tensor,
    offset: Tensor,
    rotary: Tensor,
    turns: Tensor,
    first_head: int,
    first_row: int,
    first_page: int,
    num_pages: int,
    start: int,
    stop: int,
    form: str,
) -> None:
    """See the module's docstring."""
    torch.ops.kvcal.reconstruct(
        records, tokens, kept, prediction, lengths, page_at, grid, signs, rescale, offset, rotary, turns, first_head,
        first_row, first_page, num_pages, start, stop, form,
    )  # fmt: skip


def position_turns(rotary: Tensor, num_positions: int) -> Tensor:
    """Cosine and sine of every position and pair, [num_positions, pairs, 2] fp32, by the operations of ``rotate``."""
    return torch.stack(cos_sin(rotary, torch.arange(num_positions, device=rotary.device)), dim=-1)


@torch.library.impl("kvcal::reconstruct", "CPU")
def _reconstruct_cpu(*args: Any) -> None:
    given = [*args[:-1], parse_reconstruction(args[-1])]
    _reconstruct_in_torch(*given)


@torch.library.impl("kvcal::reconstruct", "CUDA")
def _reconstruct_cuda(*args: Any) -> None:
    given = [*args[:-1], parse_reconstruction(args[-1])]
    if unserved(given[-1]) is None:
        _launch(*given)
    else:
        _reconstruct_in_torch(*given)


@torch.library.register_fake("kvcal::reconstruct")
def _reconstruct_fake(*args: Any) -> None:
    pass


def _reconstruct_in_torch(
    records: Tensor,
    tokens: Tensor,
    kept: Tensor,
    prediction: Tensor,
    lengths: Tensor,
    page_at: Tensor,
    grid: Tensor,
    signs: Tensor,
    rescale: Tensor,
    offset: Tensor,
    rotary: Tensor,
    turns: Tensor,
    first_head: int,
    first_row: int,
    first_page: int,
    num_pages: int,
    start: int,
    stop: int,
    form: Reconstruction,
) -> None:
    """All pages, whatever rows hold: the host is not told, and what lies beyond a row's own is never read."""
    layout, heads = form.layout, slice(first_head, first_head + _own_heads(records, tokens, form))
    transform = Transform(
        rescale[heads].unsqueeze(-2) if form.rescale else None, offset[heads].unsqueeze(-2) if form.offset else None
    )
    step = max(1, VALUES_AT_ONCE // (form.num_heads * PAGE_TOKENS * form.head_dim))
    for first in range(start, stop, step):
        number = torch.arange(first, min(first + step, stop), device=records.device)
        places = first_row + number // num_pages, first_page + number % num_pages
        if isinstance(layout, LatticeLayout):
            values = layout.decode(records[places].squeeze(1), grid, signs)
            values = values.unflatten(-1, (form.num_heads, form.head_dim)).transpose(1, 2)[:, heads]
        else:
            values = layout.decode(records[places])
        if prediction.numel():
            told = prediction[first - start : first - start + len(number), :, heads]
            values = values.float() + told.transpose(1, 2)
        met = transform.undo(values)
        if form.num_pairs:
            within = torch.arange(PAGE_TOKENS, device=records.device)
            positions = (form.format.num_sink_tokens + PAGE_TOKENS * places[1])[:, None, None] + within
        if kept.numel():
            before = unrotate(met, rotary, positions) if form.num_pairs and not form.is_pre else met
            kept[..., heads, :][places] = before.float().transpose(1, 2)
        if tokens.numel():
            met = rotate(met, rotary, positions) if form.num_pairs and form.is_pre else met
            tokens[places] = met.to(tokens.dtype)


def _own_heads(records: Tensor, tokens: Tensor, form: Reconstruction) -> int:
    """n: on a lattice, where records are of all heads, that of the tokens, if there are any."""
    if not form.is_lattice:
        return records.shape[2]
    return tokens.shape[2] if tokens.dim() > 1 else form.num_heads


@functools.cache
def _compiled(form: str, device_index: int) -> tuple[Kernel, int, int, float]:
    """The kernel, its shared memory, the tiles of a page (of a head, but on a lattice), and the transform's norm."""
    named = parse_reconstruction(form)
    compiled = kernel("reconstruct", "reconstruct", named.defines, device_index)
    return compiled, named.shared_bytes, PAGE_TOKENS // named.tile_tokens, norm(named.row_values)


def _launch(
    records: Tensor,
    tokens: Tensor,
    kept: Tensor,
    prediction: Tensor,
    lengths: Tensor,
    page_at: Tensor,
    grid: Tensor,
    signs: Tensor,
    rescale: Tensor,
    offset: Tensor,
    rotary: Tensor,
    turns: Tensor,
    first_head: int,
    first_row: int,
    first_page: int,
    num_pages: int,
    start: int,
    stop: int,
    form: Reconstruction,
) -> None:
    device_index, heads = records.get_device(), _own_heads(records, tokens, form)
    compiled, shared_bytes, tiles, scale = _compiled(form.key, device_index)
    wanted = (stop - start) * tiles * (1 if form.is_lattice else heads)
    if not wanted:
        return
    processors = torch.cuda.get_device_properties(device_index).multi_processor_count
    compiled.launch(
        (min(wanted, BLOCKS_PER_SM * processors), 1, 1),
        THREADS,
        shared_bytes,
        records.data_ptr(),
        *records.stride()[:2],
        tokens.data_ptr(),
        kept.data_ptr(),
        prediction.data_ptr(),
        lengths.data_ptr(),
        page_at.data_ptr(),
        page_at.numel(),
        grid.data_ptr(),
        signs.data_ptr(),
        scale,
        rescale.data_ptr(),
        offset.data_ptr(),
        rotary.data_ptr(),
        turns.data_ptr(),
        first_head,
        heads,
        form.num_heads,
        records.shape[1],
        first_row,
        first_page,
        num_pages,
        start,
        stop,
    )
