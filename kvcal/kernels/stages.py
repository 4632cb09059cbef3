"""Pages that shrink on a schedule, in memory of a fixed size: how it is laid out in every stage.

A *region* is one side of one head range of a layer. All regions share one memory, because the layers of a plan do not
shrink together: while one has 16-bit pages, they live in the room that others gave back. (With memory for its own
widest moment each, many layers would take up to 1.4 times the budget that their schedule was made for.) A *stage* lasts
from one token count at which some pages shrink to the next. Within a stage the regions lie one behind the other, each
[B, pages, heads, record] with room for the stage's last token count: together, what the plan says for that count.

The layout is a table int64 [stages, regions, 7] of ``FIELDS`` (``Region`` in csrc/stage.cuh). kvcal.kernels.shrink
leads from one stage to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal.formats import Format, Side
from kvcal.geometry import CacheDtype
from kvcal.kernels.variants import page_layout

FIELDS = ("bits", "base", "pages", "heads", "record", "squeezed", "transform")
BITS, BASE, PAGES, HEADS, RECORD, SQUEEZED, TRANSFORM = range(len(FIELDS))


@dataclass(frozen=True)
class Region:
    """Pages of ``num_heads`` heads. Those of fewer than 16 bits hold (K - offset) / rescale where that is given;
    ``transform``: the element at which the pool's transforms hold rescale [heads, D], and then offset alike."""

    side: Side
    format: Format
    num_heads: int
    head_dim: int
    cache_dtype: CacheDtype
    rescale: bool
    offset: bool
    transform: int

    def record_bytes(self, num_bits: int) -> int:
        return page_layout(self.side, self.format, self.head_dim, self.cache_dtype, num_bits).record_bytes


def stage_starts(regions: Sequence[Region], last_columns: int) -> list[int]:
    """Columns with which every stage begins, up to ``last_columns``: 0, and all counts at which pages shrink."""
    counts = {count for region in regions for count in region.format.shrink_at}
    return [0, *sorted(count for count in counts if 0 < count <= last_columns)]


def layout_table(
    regions: Sequence[Region], starts: Sequence[int], batch: int, max_tokens: int
) -> tuple[list[list[list[int]]], int]:
    """The layout of every stage for ``batch`` rows of at most ``max_tokens`` tokens, and the bytes of the memory: those
    of all pages where they are most, at the last token count of some stage."""
    table, room = [], 0
    before = [0] * len(regions)  # room of a row in the stage before, in pages
    for start, end in zip(starts, [*(count - 1 for count in starts[1:]), max_tokens], strict=True):
        rows, base, squeezed = [], 0, 0
        for number, region in enumerate(regions):
            bits, pages = region.format.bits_at(start), region.format.num_pages(min(end, max_tokens))
            record, heads = region.record_bytes(bits), region.num_heads
            rows.append([bits, base, pages, heads, record, squeezed, region.transform])
            base += batch * pages * heads * record
            squeezed += batch * before[number] * heads * record
            before[number] = pages
        table.append(rows)
        room = max(room, base)
    return table, room


def region_pages(pages: Tensor, region: Sequence[int], batch: int) -> Tensor:
    """[B, pages, heads, record]: a region of the memory ``pages`` (uint8, one dimension), by its row of the layout."""
    return records_at(pages, region[BASE], batch, region[PAGES], region[HEADS], region[RECORD])


def records_at(pages: Tensor, base: int, *shape: int) -> Tensor:
    """That shape of the bytes from ``base`` on."""
    count = torch.Size(shape).numel()
    return pages[base : base + count].view(shape)
