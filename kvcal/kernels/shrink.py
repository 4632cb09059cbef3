"""Pages that shrink, converted where they are: the operator ``kvcal::shrink``, and what its kernel is compiled for.

The first of the sweeps that lead from one stage of a schedule to the next (kvcal.kernels.stages). The bytes are those
of ``kvcal.pages.shrink``; ``csrc/shrink.cu`` says how they are made in place.
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
from kvcal.geometry import CacheDtype
from kvcal.kernels.compile import Kernel, kernel
from kvcal.kernels.macros import AXES, DTYPES, Defines, page_layout, record_defines
from kvcal.kernels.reference import NON_FINITE
from kvcal.kernels.stages import BITS, HEADS, TRANSFORM, Region, Stages, region_pages
from kvcal.pages.layout import RAW_BITS
from kvcal.pages.shrink import SHIFTS, convert
from kvcal.pages.transforms import Transform
from kvcal.pages.uniform import PageLayout
from kvcal.plan.format import SIDES, Format, Side
from kvcal.strict import STRICT, dump, parse

THREADS = 256
BLOCKS_PER_SM = 2


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
        """The macros."""
        found = {
            "SIDE": SIDES.index(self.side),
            "DIM": self.head_dim,
            "AXIS": AXES[self.format.axis],
            "GROUP": self.format.group_size,
            "DTYPE": DTYPES[self.cache_dtype],
            "SHIFT": SHIFTS.index(self.format.shift),
            "HAS_RESCALE": int(self.rescale),
            "HAS_OFFSET": int(self.offset),
            "SINKS": self.format.num_sink_tokens,
            "WINDOW": self.format.recent_window,
            "BUFFER": self.format.buffer_tokens,
        }
        for prefix, layout in zip(("FROM", "TO"), self.layouts(), strict=True):
            found |= {f"{prefix}_{name}": value for name, value in record_defines(layout).items()}
        return found


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


def shrink(
    pages: Tensor,
    stages: Stages,
    members: Tensor,
    lengths: Tensor,
    due: int,
    page_at: Tensor,
    transforms: Tensor,
    error: Tensor,
    shrinking: str,
) -> None:
    """Where the present stage is over: the packed pages, in ``pages`` (uint8, one dimension), of ``members`` (int64
    [m], regions) that ``shrinking``, a key, is about are converted, each in its place.

    ``lengths`` int32 [B]: tokens of every row. ``due``: 1 if the page that is due with the last of them is packed, else
    0. ``page_at`` is one of kvcal.kernels.operands, ``error`` that of kvcal.kernels.ops. ``transforms`` fp32: see
    ``Region``.
    """
    torch.ops.kvcal.shrink(pages, *stages, members, lengths, due, page_at, transforms, error, shrinking)


def num_blocks(device: torch.device) -> int:
    """Blocks that sweep over all records, whatever there is to do."""
    return BLOCKS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


@torch.library.impl("kvcal::shrink", "CPU")
def _shrink_cpu(
    pages: Tensor, stage: Tensor, starts: Tensor, layout: Tensor, columns: Tensor, members: Tensor, lengths: Tensor,
    due: int, page_at: Tensor, transforms: Tensor, error: Tensor, shrinking: str,
) -> None:  # fmt: skip
    stages, named = Stages(stage, starts, layout, columns), parse_shrinking(shrinking)
    if not stages.is_over:
        return
    wide, narrow = named.layouts()
    present, following = stages.present_and_next()
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
            packed = row[: named.format.num_pages(max(0, held - 1 + due))]
            try:
                packed[..., : narrow.record_bytes] = convert(
                    packed, wide, narrow, named.format.shift, Transform(*transform)
                )
            except NonFiniteActivations:
                error.bitwise_or_(NON_FINITE)


@torch.library.impl("kvcal::shrink", "CUDA")
def _shrink_cuda(
    pages: Tensor, stage: Tensor, starts: Tensor, layout: Tensor, columns: Tensor, members: Tensor, lengths: Tensor,
    due: int, page_at: Tensor, transforms: Tensor, error: Tensor, shrinking: str,
) -> None:  # fmt: skip
    compiled, shared = _shrink_kernel(shrinking, pages.get_device())
    compiled.launch(
        (num_blocks(pages.device), 1, 1), THREADS, shared,
        pages.data_ptr(), stage.data_ptr(), starts.data_ptr(), layout.data_ptr(), *layout.shape[:2],
        columns.data_ptr(), members.data_ptr(), len(members), lengths.data_ptr(), len(lengths), due,
        page_at.data_ptr(), len(page_at), transforms.data_ptr(), error.data_ptr(),
    )  # fmt: skip


@functools.cache
def _shrink_kernel(shrinking: str, device_index: int) -> tuple[Kernel, int]:
    """The kernel and its shared memory: the record that it reads."""
    defines = parse_shrinking(shrinking).defines
    return kernel("shrink", "shrink", defines, device_index), defines["FROM_RECORD"]


@torch.library.register_fake("kvcal::shrink")
def _shrink_fake(*args: Any) -> None:
    pass
