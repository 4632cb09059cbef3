"""From one stage of a schedule to the next (kvcal.kernels.stages): the operators ``shrink`` and ``slide``.

Three sweeps lead to the layout of stage s + 1, all in place and on the device. Pages that shrink are converted where
they are (``shrink``, once for all regions of the same formats). Then all records slide to the left, to the layout of
stage s with the records of stage s + 1, and from there to the right, to make room for the pages to come (``slide``).
Nothing happens while a stage lasts: a launch returns at once, so that a CUDA graph with all of them may be replayed at
any length. ``stage`` (int64 [1]) is the present one, ``present`` its row of the layout, and ``starts`` (int64 [stages])
are the columns with which each begins.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import torch
from pydantic.dataclasses import dataclass as strict_dataclass
from torch import Tensor

from kvcal.errors import NonFiniteActivations, UsageError
from kvcal.formats import Format, Side
from kvcal.geometry import CacheDtype
from kvcal.kernels.compile import Kernel, kernel
from kvcal.kernels.reference import NON_FINITE
from kvcal.kernels.stages import BITS, HEADS, PAGES, RECORD, SQUEEZED, TRANSFORM, Region, records_at, region_pages
from kvcal.kernels.variants import Defines, page_layout, shrink_defines
from kvcal.quantizers.convert import Transform, convert
from kvcal.quantizers.pages import RAW_BITS, PageLayout
from kvcal.strict import STRICT, dump, parse

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

    def layouts(self) -> tuple[PageLayout, PageLayout]:
        """The records of one page of one head, before and after."""
        narrow = page_layout(self.side, self.format, self.head_dim, self.cache_dtype, self.format.num_bits)
        assert isinstance(narrow, PageLayout)
        return dataclasses.replace(narrow, num_bits=self.wide_bits), narrow

    @functools.cached_property
    def key(self) -> str:
        """Canonical JSON, as a variant's."""
        return json.dumps(dump(self), sort_keys=True, separators=(",", ":"))

    @property
    def defines(self) -> Defines:
        return shrink_defines(self.side, *self.layouts(), self.format.shift) | {
            "HAS_RESCALE": int(self.rescale),
            "HAS_OFFSET": int(self.offset),
            "SINKS": self.format.num_sink_tokens,
            "WINDOW": self.format.recent_window,
            "BUFFER": self.format.buffer_tokens,
        }


@functools.cache
def parse_shrinking(key: str) -> Shrinking:
    return parse(Shrinking, json.loads(key), "what shrinks", UsageError)


def shrinkings(region: Region) -> list[Shrinking]:
    """What the pages of a region go through, in order."""
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


torch.library.define(
    "kvcal::shrink",
    "(Tensor(a!) pages, Tensor stage, Tensor starts, Tensor layout, Tensor columns, Tensor members, Tensor lengths, "
    "int due, Tensor page_at, Tensor transforms, Tensor(b!) error, str shrinking) -> ()",
)
torch.library.define(
    "kvcal::slide",
    "(Tensor(a!) pages, Tensor(b!) stage, Tensor(c!) present, Tensor(d!) tickets, Tensor starts, Tensor layout, "
    "Tensor columns, int batch, int largest) -> ()",
)


def shrink(
    pages: Tensor,
    stage: Tensor,
    starts: Tensor,
    layout: Tensor,
    columns: Tensor,
    members: Tensor,
    lengths: Tensor,
    due: int,
    page_at: Tensor,
    transforms: Tensor,
    error: Tensor,
    shrinking: str,
) -> None:
    """Where ``columns`` (int64, one) ends the present stage: the packed pages of ``members`` (int64 [m], regions) that
    ``shrinking`` is about are converted, each in its place. ``lengths`` int32 [B]: tokens of every row; ``due`` 1 if
    the page that is due with the last of them is packed, else 0. ``transforms``: see Region. ``error``: as for append.
    """
    torch.ops.kvcal.shrink(
        pages, stage, starts, layout, columns, members, lengths, due, page_at, transforms, error, shrinking
    )


def slide(
    pages: Tensor,
    stage: Tensor,
    present: Tensor,
    tickets: Tensor,
    starts: Tensor,
    layout: Tensor,
    columns: Tensor,
    batch: int,
    largest: int,
) -> None:
    """Where ``columns`` ends the present stage: all records to the layout of the next one, which is then the present
    one. ``tickets``: see :func:`new_tickets`; ``largest``: bytes of the largest record of any stage."""
    torch.ops.kvcal.slide(pages, stage, present, tickets, starts, layout, columns, batch, largest)


def new_tickets(device: torch.device) -> Tensor:
    """int64: two counters and a place for each block of ``slide``, as they are between launches."""
    return torch.tensor([0, 0] + [IDLE] * (_num_blocks(device) if device.type == "cuda" else 0), device=device)


def _ends(stage: Tensor, starts: Tensor, columns: Tensor) -> bool:
    following = int(stage) + 1
    return following < len(starts) and int(columns) >= int(starts[following])


@torch.library.impl("kvcal::shrink", "CPU")
def _shrink_cpu(
    pages: Tensor,
    stage: Tensor,
    starts: Tensor,
    layout: Tensor,
    columns: Tensor,
    members: Tensor,
    lengths: Tensor,
    due: int,
    page_at: Tensor,
    transforms: Tensor,
    error: Tensor,
    shrinking: str,
) -> None:
    if not _ends(stage, starts, columns):
        return
    named = parse_shrinking(shrinking)
    wide, narrow = named.layouts()
    for member in members.tolist():
        old, new = layout[int(stage) : int(stage) + 2, member].tolist()
        if (old[BITS], new[BITS]) != (wide.num_bits, narrow.num_bits):
            continue
        heads, transform = old[HEADS], []
        for number, is_given in enumerate((named.rescale, named.offset)):
            start = old[TRANSFORM] + number * heads * named.head_dim
            given = transforms[start : start + heads * named.head_dim]
            transform.append(given.view(heads, 1, named.head_dim) if is_given else None)
        records = region_pages(pages, old, len(lengths))
        for row, held in zip(records, lengths.tolist(), strict=True):
            packed = row[: named.format.num_pages(max(0, held - 1 + due))]
            try:
                packed[..., : narrow.record_bytes] = convert(
                    packed, wide, narrow, named.format.shift, Transform(*transform)
                )
            except NonFiniteActivations:
                error.bitwise_or_(NON_FINITE)


@torch.library.impl("kvcal::slide", "CPU")
def _slide_cpu(
    pages: Tensor,
    stage: Tensor,
    present: Tensor,
    tickets: Tensor,
    starts: Tensor,
    layout: Tensor,
    columns: Tensor,
    batch: int,
    largest: int,
) -> None:
    if not _ends(stage, starts, columns):
        return
    old, new = layout[int(stage) : int(stage) + 2].tolist()
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


@torch.library.impl("kvcal::shrink", "CUDA")
def _shrink_cuda(
    pages: Tensor,
    stage: Tensor,
    starts: Tensor,
    layout: Tensor,
    columns: Tensor,
    members: Tensor,
    lengths: Tensor,
    due: int,
    page_at: Tensor,
    transforms: Tensor,
    error: Tensor,
    shrinking: str,
) -> None:
    compiled, shared = _shrink_kernel(shrinking, pages.get_device())
    compiled.launch(
        (_num_blocks(pages.device), 1, 1), THREADS, shared,
        pages.data_ptr(), stage.data_ptr(), starts.data_ptr(), layout.data_ptr(), *layout.shape[:2],
        columns.data_ptr(), members.data_ptr(), len(members), lengths.data_ptr(), len(lengths), due,
        page_at.data_ptr(), len(page_at), transforms.data_ptr(), error.data_ptr(),
    )  # fmt: skip


@torch.library.impl("kvcal::slide", "CUDA")
def _slide_cuda(
    pages: Tensor,
    stage: Tensor,
    present: Tensor,
    tickets: Tensor,
    starts: Tensor,
    layout: Tensor,
    columns: Tensor,
    batch: int,
    largest: int,
) -> None:
    for sweep in _sweeps(pages.get_device()):
        sweep.launch(
            (len(tickets) - 2, 1, 1), THREADS, largest,
            pages.data_ptr(), stage.data_ptr(), starts.data_ptr(), layout.data_ptr(), present.data_ptr(),
            *layout.shape[:2], columns.data_ptr(), batch, tickets.data_ptr(), tickets.data_ptr() + 16,
        )  # fmt: skip


@functools.cache
def _shrink_kernel(shrinking: str, device_index: int) -> tuple[Kernel, int]:
    """The kernel and its shared memory: the record that it reads."""
    defines = parse_shrinking(shrinking).defines
    return kernel("shrink", "shrink", defines, device_index), defines["FROM_RECORD"]


@functools.cache
def _sweeps(device_index: int) -> tuple[Kernel, Kernel]:
    return kernel("slide", "squeeze", {}, device_index), kernel("slide", "spread", {}, device_index)


def _num_blocks(device: torch.device) -> int:
    return BLOCKS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


@torch.library.register_fake("kvcal::shrink")
def _shrink_fake(*args: Any) -> None:
    pass


@torch.library.register_fake("kvcal::slide")
def _slide_fake(*args: Any) -> None:
    pass
