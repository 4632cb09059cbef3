"""Operands of the operators, in the groups in which they are handed over: a list of tensors each.

One call serves one layer: B sequences, n KV heads, G query heads for each, head size D. Absent
operands are empty tensors.

Pages that shrink on a schedule lie in memory of a fixed size, which is laid out anew in every stage. A *region* is one
side of a layer. All regions share one memory, because the layers of a plan do not shrink together:
while one has 16-bit pages, they live in the room that others gave back. (With memory for its own widest moment each,
many layers would take up to 1.4 times the budget that their schedule was made for.) A *stage* lasts from one token
count at which some pages shrink to the next. Within a stage the regions lie one after the other, each [B, pages,
heads, record] with room for the stage's last token count: together, what the plan says for that count.

The layout is a table int64 [stages, regions, 7] of ``FIELDS`` (``Region`` in csrc/stage.cuh). Three sweeps lead to the
next stage, all in place and on the device. Pages that shrink are converted where they are (kvcal.kernels.shrink, once
for all regions of the same formats). Then all records slide to the left, to the layout of the present stage with the
records of the next one, and from there to the right, to make room for the pages to come (kvcal.kernels.shrink). Nothing
happens while a stage lasts: a launch returns at once, so that a CUDA graph with all of them may be replayed at any
length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES, CacheDtype
from kvcal.kernels.variants import Variant
from kvcal.pages.error_feedback import feedback_operand
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.page_format import Format, Side, num_pages

DTYPE_NAMES = {dtype: name for name, dtype in CACHE_DTYPES.items()}
NOTHING = torch.empty(0)


class Memory(NamedTuple):
    """Memory of the keys, or the values, of a layer. Heads lie side by side; rows and slots may be further apart than
    these heads are long. There are R rows: one a sequence in their order, unless ``Place.rows`` names each
    sequence's own. A sliding window has no pages, and one sink (kvcal.kernels.ops). Where pages shrink, ``pages`` is
    the memory of all regions, of one dimension."""

    sinks: Tensor  # [R, n, sinks, D], cache dtype: the first tokens
    ring: Tensor  # [R, n, ring_tokens, D], cache dtype: token t lies at t modulo ring_tokens
    pages: Tensor  # [slots, n, record_bytes] uint8

    def page_in_ring(self, row: int, page: int) -> Tensor:
        """[1, n, 128, D]: the tokens of a page, before the ring loses them. Sinks do not stretch the page's ranges."""
        tokens = torch.arange(PAGE_TOKENS * page, PAGE_TOKENS * (page + 1), device=self.ring.device)
        tokens = tokens.clamp(min=min(self.sinks.shape[2], PAGE_TOKENS * (page + 1) - 1))
        return self.ring[row : row + 1, :, tokens % self.ring.shape[2]]


class Place(NamedTuple):
    """The number of tokens of each sequence, and the places of its pages."""

    lengths: Tensor  # [B] int32: tokens before the step
    table: Tensor  # [B, pages] int32: the slot of every page, the same in all layers; one beyond its width has no room
    k_read_at: Tensor  # int32: where the window follows a rule, tokens from which page i of the keys is read, ascending
    v_read_at: Tensor
    rows: Tensor = NOTHING  # [B] int32: each sequence's row of sinks, ring and query statistic; empty: in their order

    def row(self, sequence: int) -> int:
        """The row of a sequence in sinks, ring and query statistic. Waits for the device."""
        return int(self.rows[sequence]) if self.rows.numel() else sequence


class QueryStatistic(NamedTuple):
    """The statistic of query scores. A prompt that ends between two pages begins the sum anew, so ``since`` is not a
    function of the length."""

    sum: Tensor  # [R, n, D] fp32: |q| since the last page, over the heads of a group
    since: Tensor  # [R, n] int32: tokens that the sequence had when the sum was begun

    def mean(self, rows: slice, num_tokens: int, group_heads: int) -> Tensor:
        """fp32 [b, n, D]: mean |q| of every channel since the last page of ``rows``, of ``num_tokens`` each."""
        counts = (num_tokens - self.since[rows]) * group_heads
        return self.sum[rows] / counts.float().unsqueeze(-1)

    def begin(self, rows: slice, num_tokens: int) -> None:
        """A page was packed: the sum begins anew."""
        self.sum[rows] = 0
        self.since[rows] = num_tokens


class PageTransform(NamedTuple):
    """The transform of pages of keys, which hold (K - offset) / rescale, and how codes of both sides are chosen: with
    error feedback, of rotated tokens."""

    rescale: Tensor  # [n, D] fp32
    offset: Tensor  # [n, D] fp32
    k_feedback: Tensor = NOTHING  # [n, D (D + 1) / 2] fp16: factors of error feedback (kvcal.pages.error_feedback)
    v_feedback: Tensor = NOTHING  # with gains [n, D (D + 3) / 2]: these last
    k_signs: Tensor = NOTHING  # [D] int8: of rotated pages (kvcal.pages.rotated)
    v_signs: Tensor = NOTHING

    @classmethod
    def of_variant(cls, variant: Variant, tensors: Mapping[str, Tensor], nothing: Tensor) -> PageTransform:
        """Of the tensors of a variant's heads, by the last part of their names in the plan (kvcal.plan.tensors)."""
        has_scale = {"k_rescale": variant.rescale, "k_offset": variant.offset}
        scales = (tensors[name] if is_given else nothing for name, is_given in has_scale.items())
        has_factor = {"k": variant.k_feedback, "v": variant.v_feedback}
        factors = (feedback_operand(tensors, side) if is_given else nothing for side, is_given in has_factor.items())
        return cls(*scales, *factors, *(tensors.get(name, nothing) for name in ("k_signs", "v_signs")))

    @property
    def of_values(self) -> PageTransform:
        """Pages of values hold V."""
        return self._replace(rescale=self.rescale[:0], offset=self.offset[:0])

    def feedback(self, side: Side) -> Tensor | None:
        """The factor of a side's codes; None without feedback."""
        factor = self.k_feedback if side == "k" else self.v_feedback
        return factor if factor.numel() else None

    def signs(self, side: Side) -> Tensor:
        """The signs of a side's rotated pages; empty where they are not rotated."""
        return self.k_signs if side == "k" else self.v_signs


class Regions(NamedTuple):
    """Where pages shrink: ``present`` (int64 [regions, 7], ``FIELDS``) says where the pages of all regions
    lie now; ``of_sides``: which regions are the keys' and the values'."""

    present: Tensor
    of_sides: tuple[int, int]


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
        return self.format.layout(self.side, 1, self.head_dim, self.cache_dtype, num_bits).record_bytes


class Stages(NamedTuple):
    """The state of a memory of pages, as the operators ``shrink`` and ``slide`` take it: a run of their arguments."""

    stage: Tensor  # int64 [1]: the present one
    starts: Tensor  # int64 [stages]: the columns with which each begins
    layout: Tensor  # int64 [stages, regions, 7]
    columns: Tensor  # int64, one: those that were fed

    @property
    def is_over(self) -> bool:
        """Whether the next column ends the present stage: an update begins by shrinking. Waits for the device."""
        following = int(self.stage) + 1
        return following < len(self.starts) and int(self.columns) + 1 >= int(self.starts[following])

    def present_and_next(self) -> tuple[list[list[int]], list[list[int]]]:
        """The layouts of the present stage and of the one after it, region by region. Waits for the device."""
        present, following = self.layout[int(self.stage) : int(self.stage) + 2].tolist()
        return present, following


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
            bits, pages = region.format.bits_at(start), num_pages(min(end, max_tokens))
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
