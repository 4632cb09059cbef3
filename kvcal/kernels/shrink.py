"""The operators that lead from one stage of a schedule to the next, in three sweeps (kvcal.kernels.operands).

``kvcal::shrink`` converts pages where they are: the bytes are those of ``kvcal.pages.shrink``; ``csrc/shrink.cu`` says
how they are made in place. ``kvcal::slide`` then moves all records to the layout of the next stage, once to the left
and once to the right (``csrc/slide.cu``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from pydantic.dataclasses import dataclass as strict_dataclass
from torch import Tensor

from kvcal.errors import NonFiniteActivations
from kvcal.geometry import CacheDtype
from kvcal.kernels.compile import Kernel, kernel
from kvcal.kernels.operands import (
    BITS,
    HEADS,
    PAGES,
    RECORD,
    SQUEEZED,
    TRANSFORM,
    Region,
    Stages,
    records_at,
    region_pages,
)
from kvcal.kernels.reference import NON_FINITE
from kvcal.kernels.variants import AXES, DTYPES, Defines, Numbering
from kvcal.pages.layout_protocol import RAW_BITS
from kvcal.pages.rescale_and_rope import Transform
from kvcal.pages.shrink import convert
from kvcal.pages.uniform import UniformLayout
from kvcal.plan.page_format import SIDES, Format, Side, num_pages
from kvcal.strict import STRICT

THREADS = 256
BLOCKS_PER_SM = 2
IDLE = -1  # of a block that reads nothing: NOT_READING in csrc/slide.cu


@strict_dataclass(frozen=True, config=STRICT)
class Shrinking:
    """One specialisation of ``csrc/shrink.cu``: pages of ``wide_bits`` become pages of ``format.num_bits``."""

    side: Side
    format: Format
    head_dim: int
    cache_dtype: CacheDtype
    wide_bits: int
    rescale: bool
    offset: bool

    def layouts(self) -> tuple[UniformLayout, UniformLayout]:
        """The records of one page of one head, before and after."""
        narrow = self.format.layout(self.side, 1, self.head_dim, self.cache_dtype, self.format.num_bits)
        assert isinstance(narrow, UniformLayout)
        return dataclasses.replace(narrow, num_bits=self.wide_bits), narrow

    @property
    def number(self) -> int:
        return SHRINKINGS.number(self)

    @property
    def defines(self) -> Defines:
        found = {
            "SIDE": SIDES.index(self.side),
            "DIM": self.head_dim,
            "AXIS": AXES[self.format.axis],
            "GROUP": self.format.group_size,
            "DTYPE": DTYPES[self.cache_dtype],
            "HAS_RESCALE": int(self.rescale),
            "HAS_OFFSET": int(self.offset),
        }
        for prefix, layout in zip(("FROM", "TO"), self.layouts(), strict=True):
            found |= {f"{prefix}_{name}": value for name, value in layout.macros().items()}
        return found


SHRINKINGS: Numbering[Shrinking] = Numbering()


def shrinkings(region: Region) -> list[Shrinking]:
    """The conversions that the pages of a region go through, in order."""
    found, wide = [], region.format.bits_at(0)
    for count in region.format.shrink_at:
        narrow = region.format.bits_at(count)
        if narrow < wide:
            after = dataclasses.replace(region.format, num_bits=narrow, shrink_at=())  # type: ignore[arg-type]
            is_plain = wide == RAW_BITS  # what is narrower was transformed before
            transform = (region.rescale and is_plain, region.offset and is_plain)
            found.append(Shrinking(region.side, after, region.head_dim, region.cache_dtype, wide, *transform))
        wide = narrow
    return found


@torch.library.custom_op("kvcal::shrink", mutates_args=("pages", "error"))
def shrink(
    pages: Tensor, stages: Sequence[Tensor], members: Tensor, lengths: Tensor, transforms: Tensor, error: Tensor,
    shrinking: int,
) -> None:  # fmt: skip
    """Where the present stage is over: the packed pages, in ``pages`` (uint8, one dimension), of ``members`` (int64
    [m], regions) that ``shrinking``, a number, is about are converted, each in its place.

    ``stages``: of kvcal.kernels.operands. ``lengths`` int32 [B]: tokens of every sequence. ``transforms`` fp32: see
    ``Region``. ``error`` is that of kvcal.kernels.ops.
    """
    now, named = Stages(*stages), SHRINKINGS[shrinking]
    if pages.is_cuda:
        compiled, shared = _shrink_kernel(named, pages.get_device())
        compiled.launch(
            (num_blocks(pages.device), 1, 1), THREADS, shared,
            pages.data_ptr(), now.stage.data_ptr(), now.starts.data_ptr(), now.layout.data_ptr(), *now.layout.shape[:2],
            now.columns.data_ptr(), members.data_ptr(), len(members), lengths.data_ptr(), len(lengths),
            transforms.data_ptr(), error.data_ptr(),
        )  # fmt: skip
        return
    if not now.is_over:
        return
    wide, narrow = named.layouts()
    present, following = now.present_and_next()
    for member in members.tolist():
        old, new = present[member], following[member]
        if (old[BITS], new[BITS]) != (wide.num_bits, narrow.num_bits):
            continue
        heads, transform = old[HEADS], []
        for number, is_given in enumerate((named.rescale, named.offset)):
            start = old[TRANSFORM] + number * heads * named.head_dim
            given = transforms[start : start + heads * named.head_dim]
            transform.append(given.view(heads, 1, named.head_dim) if is_given else None)
        records = region_pages(pages, old, len(lengths))
        for row, held in zip(records, lengths.tolist(), strict=True):
            packed = row[: num_pages(held)]
            try:
                packed[..., : narrow.record_bytes] = convert(packed, wide, narrow, Transform(*transform))
            except NonFiniteActivations:
                error.bitwise_or_(NON_FINITE)


@functools.cache
def _shrink_kernel(shrinking: Shrinking, device_index: int) -> tuple[Kernel, int]:
    """The kernel and its shared memory: the record that it reads."""
    defines = shrinking.defines
    return kernel("shrink", "shrink", defines, device_index), defines["FROM_RECORD"]


def num_blocks(device: torch.device) -> int:
    """Blocks that sweep over all records, whatever there is to do."""
    return BLOCKS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


@torch.library.custom_op("kvcal::slide", mutates_args=("pages", "stage", "present", "tickets"))
def slide(
    pages: Tensor, stage: Tensor, starts: Tensor, layout: Tensor, columns: Tensor, present: Tensor, tickets: Tensor,
    batch: int, largest: int,
) -> None:  # fmt: skip
    """Where the present stage is over: all records of ``pages`` (uint8, one dimension) to the layout of the next one,
    which is then the present one.

    ``stage`` ... ``columns``: ``Stages``. ``present`` int64 [regions, 7]: the present row of the layout. ``tickets``:
    see :func:`new_tickets`. ``largest``: bytes of the largest record of any stage.
    """
    if pages.is_cuda:
        for sweep in _sweeps(pages.get_device()):
            sweep.launch(
                (len(tickets) - 2, 1, 1), THREADS, largest,
                pages.data_ptr(), stage.data_ptr(), starts.data_ptr(), layout.data_ptr(), present.data_ptr(),
                *layout.shape[:2], columns.data_ptr(), batch, tickets.data_ptr(), tickets.data_ptr() + 16,
            )  # fmt: skip
        return
    stages = Stages(stage, starts, layout, columns)
    if not stages.is_over:
        return
    old, new = stages.present_and_next()
    squeezed = [
        records_at(pages, to[SQUEEZED], batch, at[PAGES], to[HEADS], to[RECORD])
        for at, to in zip(old, new, strict=True)
    ]
    for at, records in zip(old, squeezed, strict=True):
        records.copy_(region_pages(pages, at, batch)[..., : records.shape[-1]].clone())
    for to, records in reversed(list(zip(new, squeezed, strict=True))):
        region_pages(pages, to, batch)[:, : records.shape[1]] = records.clone()
    stage.add_(1)
    present.copy_(layout[int(stage)])


def new_tickets(device: torch.device) -> Tensor:
    """int64: two counters and a place for each block of ``slide``, as they are between launches."""
    return torch.tensor([0, 0] + [IDLE] * (num_blocks(device) if device.type == "cuda" else 0), device=device)


@functools.cache
def _sweeps(device_index: int) -> tuple[Kernel, Kernel]:
    return kernel("slide", "squeeze", {}, device_index), kernel("slide", "spread", {}, device_index)
