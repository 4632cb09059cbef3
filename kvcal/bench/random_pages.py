"""Pages of random codes with sane parameters, straight in their records: what attention reads is never zeros.

A kernel that runs on zeros draws less power and clocks higher, and one that runs on random bytes for scales meets NaN.
So codes are random bytes, and scales and zeros are spread around values that keep what is decoded in about -0.1 to
0.05, at every bit width; tokens that are not quantized scatter as much. Where a record keeps its fields is asked of the
same layouts that pack real pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels.macros import side_defines
from kvcal.pages.lattice import LatticeLayout
from kvcal.pages.layout import PAGE_TOKENS, PARAM_DTYPES, RAW_BITS
from kvcal.pages.tiered import NO_SLOT
from kvcal.plan.format import Format, Side

# The largest code times the scale, and the zero; each is multiplied by 0.5 to 1.5 at random.
CODE_RANGE, ZERO = 0.15, -0.1
# Standard deviation of tokens in 16 bits, and of what a lattice decodes to.
SPREAD = 0.05
# Filled at once, so that what is drawn does not count beside the caches of a full device.
PART_BYTES = 16 << 20


def fill_pages(
    pages: Tensor,
    side: Side,
    fmt: Format,
    head_dim: int,
    cache_dtype: str,
    generator: torch.Generator | None = None,
) -> None:
    """Overwrite pages [B, ..., record_bytes] uint8, contiguous, in place."""
    rows = max(1, PART_BYTES // max(1, pages[:1].nbytes))
    for part in pages.split(rows):
        _fill(part, side, fmt, head_dim, cache_dtype, generator)


def fill_lattice(records: Tensor, layout: LatticeLayout, generator: torch.Generator | None = None) -> None:
    """The same for a lattice's records [B, ..., record_bytes] uint8, contiguous."""
    for part in records.split(max(1, PART_BYTES // max(1, records[:1].nbytes))):
        part.random_(0, 256, generator=generator)
        scales = torch.empty(*part.shape[:-1], layout.num_groups * PAGE_TOKENS, device=part.device)
        scales.uniform_(0.5, 1.5, generator=generator).mul_(SPREAD)
        _write(part, sum(layout.plane_sizes), scales.to(PARAM_DTYPES[layout.param_dtype]))


def _fill(
    pages: Tensor,
    side: Side,
    fmt: Format,
    head_dim: int,
    cache_dtype: str,
    generator: torch.Generator | None,
) -> None:
    dtype = CACHE_DTYPES[cache_dtype]
    if fmt.num_bits == RAW_BITS:
        pages.view(dtype).normal_(std=SPREAD, generator=generator)
        return
    pages.random_(0, 256, generator=generator)
    defines = side_defines(side, fmt, head_dim, cache_dtype, fmt.num_bits)
    found = {name.partition("_")[2]: value for name, value in defines.items()}
    params = (found["ZERO"] - found["SCALE"]) // PARAM_DTYPES[fmt.param_dtype].itemsize
    for offset, middle in ((found["SCALE"], CODE_RANGE / (2**fmt.num_bits - 1)), (found["ZERO"], ZERO)):
        values = torch.empty(*pages.shape[:-1], params, device=pages.device)
        values.uniform_(0.5, 1.5, generator=generator).mul_(middle)
        _write(pages, offset, values.to(PARAM_DTYPES[fmt.param_dtype]))
    if found["TIERS"]:
        _write(pages, found["INDEX"], _slots(pages, head_dim, found["SLOTS"], generator))
        if found["RAW_SLOTS"]:
            raw = torch.empty(*pages.shape[:-1], found["RAW_SLOTS"] * PAGE_TOKENS, device=pages.device, dtype=dtype)
            _write(pages, found["RAW"], raw.normal_(std=SPREAD, generator=generator))


def _slots(pages: Tensor, head_dim: int, num_slots: int, generator: torch.Generator | None) -> Tensor:
    """The slot of every channel [..., head_dim] uint8: as many random channels as there are slots, each once."""
    scores = torch.rand(*pages.shape[:-1], head_dim, device=pages.device, generator=generator)
    place = scores.argsort(-1)
    return torch.where(place < num_slots, place, NO_SLOT).to(torch.uint8)


def _write(pages: Tensor, offset: int, values: Tensor) -> None:
    """Put values [..., n] of any dtype into the records from byte ``offset`` on."""
    packed = values.view(torch.uint8)
    pages[..., offset : offset + packed.shape[-1]] = packed
