"""Pools of the pages of one part of a cache: records in slots, and the slot of every page.

    GrowingPool   as many slots as there are pages, in the order in which these come. A dynamic cache.
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
    """See the module's docstring. ``table``: the slot of every page of every sequence; ``records`` uint8
    [slots, r, record_bytes]: a record for each head, or one for all of them; ``version``: another one whenever
    the table changes."""

    def __init__(self, batch: int, record: tuple[int, int], device: torch.device) -> None:
        self.records, self.version = torch.empty(0, *record, dtype=torch.uint8, device=device), 0
        self.table: list[list[int]] = [[] for _ in range(batch)]

    @property
    def counts(self) -> list[int]:
        """Pages of every sequence."""
        return [len(row) for row in self.table]

    @property
    def held(self) -> list[Tensor]:
        """Tensors that count as the plan's bytes."""
        return [self.records]

    def slots(self, spans: Sequence[Span]) -> Tensor:
        """int64 [M]: where these pages lie."""
        found = [slot for row, start, stop in spans for slot in self.table[row][start:stop]]
        return torch.tensor(found, dtype=torch.int64, device=self.records.device)

    def resize(self, counts: Sequence[int]) -> None:
        """Room for so many pages of every sequence; those that stay keep their contents."""
        if any(count < len(row) for count, row in zip(counts, self.table, strict=True)):
            self._keep([row[:count] for row, count in zip(self.table, counts, strict=True)])
        stop = held = len(self.records)
        for row, count in zip(self.table, counts, strict=True):
            new = max(0, count - len(row))
            row += range(stop, stop + new)
            stop += new
        if stop > held:
            old = self.records
            with torch.inference_mode(False):  # or nothing could be written to them outside of inference mode
                self.records = old.new_empty(stop, *old.shape[1:])
            self.records[:held] = old
            self.version += 1

    def select(self, indices: list[int]) -> None:
        """Keep, repeat or reorder sequences."""
        self._keep([self.table[index] for index in indices])

    def _keep(self, table: list[list[int]]) -> None:
        """The pages in these slots alone, sequence after sequence."""
        kept = torch.tensor([slot for row in table for slot in row], dtype=torch.int64, device=self.records.device)
        with torch.inference_mode(False):
            self.records = self.records[kept]
        places = itertools.count()
        self.table, self.version = [[next(places) for _ in row] for row in table], self.version + 1


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
