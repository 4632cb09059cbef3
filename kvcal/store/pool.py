"""Pools of the pages of one part of a cache: records in slots, and the slot of every page.

    GrowingPool   as many slots as there are pages: those of sequence 0, of sequence 1, ... A dynamic cache.
    TablePool     slots for ``max_tokens`` in every sequence, named by the cache's table. A static cache.

A part is the keys or the values of a layer (kvcal.store.sinks_ring_pages).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

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
    """See the module's docstring. ``counts``: pages of every sequence; ``records`` uint8 [slots, r,
    record_bytes]: a record for each head, or one for all of them."""

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
    """See the module's docstring. ``table`` int32 [B, pages]: the slot of every page, the same for all
    parts."""

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


Pool = GrowingPool | TablePool
