"""Pools of the pages of one part of a cache: records in slots, and the slot of every page.

    GrowingPool   as many slots as there are pages: those of sequence 0, of sequence 1, ... A dynamic cache.
    TablePool     slots for ``max_tokens`` in every sequence, named by the cache's table. A static cache.
    RegionPool    a region of the one memory of all layers, whose pages shrink (``PhasedPages``); static too.

A part is the keys or the values of a layer (kvcal.store.sinks_ring_pages). kvcal.kernels.operands says how the memory
of pages that shrink is laid out, and what leads from stage to stage. Every update begins by shrinking pages to the
bits of the columns after it, as in the dynamic cache: there is no room for new pages before. A step does so by itself,
on the device, once for all layers and before the first of them (``advance``). Prompts, and whatever else the host does,
wait for the device (``prepare``).
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvcal.kernels.decode import require_rows
from kvcal.kernels.operands import BITS, RECORD, Region, Stages, layout_table, region_pages, stage_starts
from kvcal.kernels.shrink import Shrinking, new_tickets, shrink, shrinkings, slide
from kvcal.kernels.variants import variant_of
from kvcal.plan.page_format import SIDES, Side
from kvcal.plan.plan import Plan

# (row, first, stop): consecutive pages of a sequence, by their numbers within it.
Span = tuple[int, int, int]


def fixed(tensor: Tensor) -> Tensor:
    """The tensor, known to torch.compile as one whose address stays: CUDA graphs may write to it in place."""
    torch._dynamo.mark_static_address(tensor)
    return tensor


def ordinals_of(spans: Sequence[Span], device: torch.device) -> Tensor:
    """int64 [M]: the number of every page of the spans within its sequence, in their order."""
    return torch.tensor([i for _, first, stop in spans for i in range(first, stop)], dtype=torch.int64, device=device)


class GrowingPool:
    """See the module's docstring. ``counts``: pages of every sequence; ``records`` uint8 [slots, r, record_bytes]: a
    record for each head, or one for all of them."""

    def __init__(self, batch: int, record: tuple[int, int], device: torch.device) -> None:
        self.records = torch.empty(0, *record, dtype=torch.uint8, device=device)
        self.counts = [0] * batch

    @property
    def held(self) -> list[Tensor]:
        """Tensors that count as the plan's bytes."""
        return [self.records]

    def slots(self, spans: Sequence[Span]) -> Tensor:
        """int64 [M]: where these pages lie."""
        first = [0, *itertools.accumulate(self.counts)]
        found = [first[row] + ordinal for row, start, stop in spans for ordinal in range(start, stop)]
        return torch.tensor(found, dtype=torch.int64, device=self.records.device)

    def resize(self, counts: Sequence[int]) -> None:
        """Room for so many pages of every sequence; those that stay keep their contents."""
        if list(counts) == self.counts:
            return
        old = self.records
        self.records = old.new_empty(sum(counts), *old.shape[1:])
        if len(old):
            for before, after in zip(old.split(self.counts), self.records.split(list(counts)), strict=True):
                after[: len(before)] = before[: len(after)]
        self.counts = list(counts)

    def select(self, indices: list[int]) -> None:
        """Keep, repeat or reorder sequences."""
        by_row = self.records.split(self.counts)
        self.records = torch.cat([by_row[index] for index in indices])
        self.counts = [self.counts[index] for index in indices]


class TablePool:
    """See the module's docstring. ``table`` int32 [B, pages]: the slot of every page, the same for all parts."""

    def __init__(self, table: Tensor, record: tuple[int, int]) -> None:
        self.table = table
        self.records = fixed(torch.zeros(table.numel(), *record, dtype=torch.uint8, device=table.device))

    @property
    def held(self) -> list[Tensor]:
        return [self.records]

    def slots(self, spans: Sequence[Span]) -> Tensor:
        rows = [row for row, first, stop in spans for _ in range(first, stop)]
        wanted = torch.tensor(rows, dtype=torch.int64, device=self.table.device)
        return self.table[wanted, ordinals_of(spans, self.table.device)].long()

    def resize(self, counts: Sequence[int]) -> None:
        """All of them have room."""

    def select(self, indices: list[int]) -> None:
        moved = self.records[self.table[indices].long()].clone()
        self.records[self.table.long()] = moved


# A distance in tokens beyond any context.
NO_STAGE = 1 << 30


class PhasedPages:
    """``pages`` uint8: all pages of all rows and layers; its bytes are those of the plan's pages at the token count up
    to ``max_tokens`` at which they are most. ``present`` int64 [regions, 7]: where they are now. ``number``: the region
    of a side of a layer, (layer, side)."""

    def __init__(
        self,
        plan: Plan,
        tensors: Mapping[str, Tensor],
        lengths: Tensor,
        columns: Tensor,
        error: Tensor,
        max_tokens: int,
    ) -> None:
        """``lengths``, ``columns`` and ``error``: the cache's state (kvcal.store.state); ``tensors``: the plan's, on
        their device."""
        self._lengths, self._columns, self._error, self._batch = lengths, columns, error, len(lengths)
        if lengths.is_cuda:
            require_rows(self._batch)
        self.number: dict[tuple[int, Side], int] = {}
        regions, transforms = self._regions(plan, tensors)
        self._starts = stage_starts(regions, max(plan.workload.context, max_tokens))
        table, room = layout_table(regions, self._starts, self._batch, max_tokens)
        self._largest = max(at[RECORD] for rows in table for at in rows)
        self.pages = fixed(torch.zeros(room, dtype=torch.uint8, device=lengths.device))
        self.stage = self._tensor(torch.tensor([0]))
        self.present = self._tensor(torch.tensor(table[0]))
        self._layout = self._tensor(torch.tensor(table))
        self._start_columns = self._tensor(torch.tensor(self._starts))
        self._transforms = self._tensor(transforms)
        self._tickets = fixed(new_tickets(lengths.device))
        self._shrinking = self._shrinkings(regions)

    def _tensor(self, tensor: Tensor) -> Tensor:
        """On the device, where it stays."""
        return fixed(tensor.to(self._lengths.device))

    def _regions(self, plan: Plan, tensors: Mapping[str, Tensor]) -> tuple[list[Region], Tensor]:
        """All regions, keys before values, and the transforms of their pages."""
        regions: list[Region] = []
        transforms, elements = [torch.empty(0, device=self._lengths.device)], 0
        for layer in filter(lambda layer: layer.is_paged, plan.layers):
            variant, heads = variant_of(layer, plan.cache_dtype), layer.attention.num_kv_heads
            for side in SIDES:
                given = (side == "k" and variant.rescale, side == "k" and variant.offset)
                self.number[layer.geometry.index, side] = len(regions)
                shape = (layer.format(side), heads, variant.head_dim, plan.cache_dtype)
                regions.append(Region(side, *shape, *given, elements))
                for name, is_given in zip(("k_rescale", "k_offset"), given, strict=True):
                    if any(given):  # both have their place where one is there
                        found = tensors[f"layers.{layer.geometry.index}.{name}"] if is_given else None
                        blank = torch.zeros(heads, variant.head_dim, device=transforms[0].device)
                        transforms.append((blank if found is None else found).flatten())
                        elements += len(transforms[-1])
        return regions, torch.cat(transforms)

    def _shrinkings(self, regions: list[Region]) -> list[tuple[int, Tensor]]:
        """Groups of regions that shrink alike at any time: a number, and the regions (int64)."""
        members: dict[Shrinking, list[int]] = {}
        for number, region in enumerate(regions):
            for shrinking in shrinkings(region):
                members.setdefault(shrinking, []).append(number)
        return [(shrinking.number, self._tensor(torch.tensor(numbers))) for shrinking, numbers in members.items()]

    @property
    def control_tensors(self) -> list[Tensor]:
        """Tensors that are neither keys nor values."""
        tables = (self.stage, self.present, self._layout, self._start_columns, self._transforms, self._tickets)
        return [*tables, *(members for _, members in self._shrinking)]

    def region(self, number: int) -> Tensor:
        """[B, pages, heads, record]: the pages of a region, where they are now."""
        return region_pages(self.pages, self.present[number].tolist(), self._batch)

    def widths(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """The bits that regions have together, stage by stage, each once."""
        return list(dict.fromkeys(map(tuple, self._layout[:, list(numbers), BITS].tolist())))

    def advance(self) -> None:
        """On to the stage of the columns after a step, before it reads or stores. On a GPU nothing waits."""
        self._advance(self._columns)

    def prepare(self, tokens: int) -> None:
        """On to the stage of the columns after so many more."""
        columns = int(self._columns)
        if not columns:
            self.enter(self._stage_of(tokens))
        for _ in range(self._stage_of(columns + tokens) - int(self.stage)):
            self._advance(self._start_columns.new_tensor([columns + tokens - 1]))

    def tokens_to_next_stage(self) -> int:
        """New tokens, 1 or more, that read pages of the same bits together as one by one."""
        columns = int(self._columns)
        later = [start for start in self._starts if start > columns]
        return max(1, later[0] - 1 - columns) if later else NO_STAGE

    def has_shrunk(self, columns: int) -> bool:
        """Whether pages have fewer bits than those of so many columns."""
        return int(self.stage) > self._stage_of(columns)

    def _stage_of(self, columns: int) -> int:
        return bisect_right(self._starts, columns) - 1

    def enter(self, stage: int) -> None:
        """Into a stage without pages to take along."""
        self.stage.fill_(stage)
        self.present.copy_(self._layout[stage])

    def _advance(self, columns: Tensor) -> None:
        """To the next stage, if it begins with the column after ``columns`` (int64, one), or before."""
        stages = Stages(self.stage, self._start_columns, self._layout, columns)
        for number, members in self._shrinking:
            shrink(self.pages, list(stages), members, self._lengths, self._transforms, self._error, number)
        slide(self.pages, *stages, self.present, self._tickets, self._batch, self._largest)


class RegionPool:
    """The pages of one side of a layer, where they are now."""

    def __init__(self, phases: PhasedPages, layer: int, side: Side) -> None:
        self.phases, self.number = phases, phases.number[layer, side]

    @property
    def num_bits(self) -> int:
        """Bits of the pages. Waits for the device."""
        return int(self.phases.present[self.number, BITS])

    @property
    def records(self) -> Tensor:
        return self._region.flatten(0, 1)

    @property
    def held(self) -> list[Tensor]:
        """The memory of all regions."""
        return [self.phases.pages]

    def slots(self, spans: Sequence[Span]) -> Tensor:
        room = self._region.shape[1]
        found = [row * room + ordinal for row, first, stop in spans for ordinal in range(first, stop)]
        return torch.tensor(found, dtype=torch.int64, device=self.phases.pages.device)

    def resize(self, counts: Sequence[int]) -> None:
        """The stage has room for them (``PhasedPages.prepare``)."""

    def select(self, indices: list[int]) -> None:
        self._region.copy_(self._region[indices])

    @property
    def _region(self) -> Tensor:
        return self.phases.region(self.number)


Pool = GrowingPool | TablePool | RegionPool
