"""The page of a stored form that is due in a step: the operator ``kvcal::encode_due``.

``append`` has moved 128 tokens of some rows from the buffer into 16-bit pages. Here they become records, the inverse of
``kvcal::reconstruct``: offset and λ applied, or keys turned back to before RoPE; the prediction subtracted; encoded.

    tokens      [B, pages, n, 128, D] in the cache's dtype, of every head range: together N heads
    records     [B, pages, r, record_bytes] uint8: on a lattice r = 1, else N
    held        the last of ``lengths`` tokens may have made a page due
    coding      what records are made with
    prediction  [B, 128, N, D] fp32: of the page that is due in each row, anything where none is
    error       [1] int32: gets the bit NON_FINITE

``held`` and ``coding`` are groups of kvcal.kernels.form_operands; ``form``, and the promise of equal bytes everywhere,
are those of kvcal.kernels.reconstruct. Channels with more bits than others are left out: their scores are the page
codec's (kvcal.pages.codec).

On CUDA this is ``csrc/encode_due.cu``, which returns at once where nothing is due; on a CPU, and for what that does not
take (``unencoded``), torch, which encodes one page of every row and keeps it where it is due: the host is not asked.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvcal.kernels.compile import Kernel, kernel
from kvcal.kernels.encoding import encoding_defines, encoding_shared_bytes, encoding_tile_tokens, unencoded
from kvcal.kernels.form_operands import HELD_PAGES, PAGE_CODING, HeldPages, PageCoding
from kvcal.kernels.operands import grouped
from kvcal.kernels.reconstruction import THREADS, Reconstruction, parse_reconstruction
from kvcal.kernels.reference import NON_FINITE
from kvcal.pages.hadamard import norm
from kvcal.pages.layout import PAGE_TOKENS, noted_in, page_positions
from kvcal.pages.tiered import TieredLayout
from kvcal.pages.transforms import unrotate
from kvcal.plan.format import Format

BLOCKS_PER_SM = 3  # of the kernel's grid: those that fit

torch.library.define(
    "kvcal::encode_due",
    f"(Tensor[] tokens, Tensor(a!) records, {HELD_PAGES}, {PAGE_CODING}, Tensor prediction, Tensor(b!) error, "
    "str form) -> ()",
)


def encode_due(
    tokens: Sequence[Tensor],
    records: Tensor,
    held: HeldPages,
    coding: PageCoding,
    prediction: Tensor,
    error: Tensor,
    form: str,
) -> None:
    """See the module's docstring."""
    torch.ops.kvcal.encode_due(tokens, records, *held, *coding, prediction, error, form)


def due_pages(fmt: Format, held: HeldPages, max_pages: int) -> tuple[Tensor, Tensor]:
    """On the device: the page that a row's last token may have made due, int64 [B], one of ``max_pages`` (1 or more),
    and whether it did, bool [B]."""
    packed = _num_pages(fmt, held._replace(lengths=(held.lengths - 1).clamp(min=0)))
    is_due = (_num_pages(fmt, held) > packed) & (packed < max_pages)
    return packed.clamp(max=max_pages - 1).long(), is_due


def _num_pages(fmt: Format, held: HeldPages) -> Tensor:
    """``Format.num_pages`` of every row, int32 [B]."""
    if fmt.window_rule is not None:
        return torch.searchsorted(held.page_at, held.lengths, right=True)
    return (held.lengths - fmt.num_sink_tokens - fmt.recent_window).clamp(min=0) // PAGE_TOKENS


@torch.library.impl("kvcal::encode_due", "CPU")
def _encode_due_cpu(*flat: Any) -> None:
    _encode_in_torch(*_groups(*flat))


@torch.library.impl("kvcal::encode_due", "CUDA")
def _encode_due_cuda(tokens: Sequence[Tensor], *flat: Any) -> None:
    given = _groups(tokens, *flat)
    if unencoded(given[-1], num_head_ranges=len(tokens)) is None:
        _launch(*given)
    else:
        _encode_in_torch(*given)


def _groups(tokens: Sequence[Tensor], records: Tensor, *flat: Any) -> tuple[Any, ...]:
    """The arguments in their groups, with the form that the key names."""
    *groups, key = grouped(flat, HeldPages, PageCoding)
    return tokens, records, *groups, parse_reconstruction(key)


@torch.library.register_fake("kvcal::encode_due")
def _encode_due_fake(*args: Any) -> None:
    pass


def _encode_in_torch(
    tokens: Sequence[Tensor],
    records: Tensor,
    held: HeldPages,
    coding: PageCoding,
    prediction: Tensor,
    error: Tensor,
    form: Reconstruction,
) -> None:
    layout = form.layout
    assert not isinstance(layout, TieredLayout)
    pages, is_due = due_pages(form.format, held, records.shape[1])
    places = torch.arange(len(pages), device=pages.device), pages
    wanted = is_due[:, None, None, None]
    # What is not due may be anything, NaN included.
    x = torch.where(wanted, torch.cat([part[places] for part in tokens], dim=1), 0)
    if form.is_pre:
        x = unrotate(x, coding.rotary, page_positions(form.format.num_sink_tokens, pages))
    else:
        x = coding.transform(form).apply(x)
    if prediction.numel():
        x = x.float() - torch.where(wanted, prediction.transpose(1, 2), 0)
    with noted_in(error, NON_FINITE):
        found = layout.encode_pages(x, {"grid": coding.grid, "signs": coding.signs})
    records[places] = torch.where(is_due[:, None, None], found, records[places])


@functools.cache
def _compiled(form: str, device_index: int) -> tuple[Kernel, int, int, float]:
    """The kernel, its shared memory, the tiles of a page (of a head, but on a lattice), and the transform's norm."""
    named = parse_reconstruction(form)
    compiled = kernel("encode_due", "encode_due", encoding_defines(named), device_index)
    tiles = PAGE_TOKENS // encoding_tile_tokens(named)
    return compiled, encoding_shared_bytes(named), tiles, norm(named.row_values)


def _launch(
    tokens: Sequence[Tensor],
    records: Tensor,
    held: HeldPages,
    coding: PageCoding,
    prediction: Tensor,
    error: Tensor,
    form: Reconstruction,
) -> None:
    device_index, rows, first_head = records.get_device(), len(held.lengths), 0
    compiled, shared_bytes, tiles, scale = _compiled(form.key, device_index)
    processors = torch.cuda.get_device_properties(device_index).multi_processor_count
    for part in tokens:
        wanted = rows * tiles * (1 if form.is_lattice else part.shape[2])
        compiled.launch(
            (min(wanted, BLOCKS_PER_SM * processors), 1, 1),
            THREADS,
            shared_bytes,
            part.data_ptr(),
            records.data_ptr(),
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
            first_head,
            part.shape[2],
            form.num_heads,
            rows,
            records.shape[1],
            error.data_ptr(),
        )
        first_head += part.shape[2]
