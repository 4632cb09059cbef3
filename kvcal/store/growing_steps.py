"""Steps of a dynamic cache by the kernels: what these are given follows what the host knows.

Kernels take the lengths of sequences and the slots of their pages on the device. In a static cache both lie
there at fixed addresses. A dynamic cache knows them on the host, and its pools grow: before a step the host
makes room for the pages that the step completes, and sends the slots when they have changed. Lengths go on
by themselves. So a step of many layers costs the host one small addition.
"""

from __future__ import annotations

import torch
from torch.nn.utils.rnn import pad_sequence

from kvcal.kernels.operands import Place
from kvcal.plan.page_format import Format
from kvcal.store.padding import Rows
from kvcal.store.pool import GrowingPool
from kvcal.store.step import StepScratch, require_no_error

# Tokens of a sequence that window rules are worked out for at first.
FIRST_TOKENS = 4096


class GrowingSteps:
    """See the module's docstring. For all layers of a dynamic cache on one device: ``lengths`` int32 [B] before
    the step, ``table`` int32 [B, pages], ``scratch``. Errors of kernels are awaited where pages are packed."""

    is_awaited = True

    def __init__(self, batch: int, device: torch.device) -> None:
        self.device = device
        self._begin(batch)

    def _begin(self, batch: int) -> None:
        """Nothing on the device until the first step."""
        self.batch = batch
        self.lengths = self.table = torch.empty(0, dtype=torch.int32, device=self.device)
        self._scratch: StepScratch | None = None
        self._lengths, self._version = list[int](), -1
        self._latest: tuple[Rows, int, int, int] | None = None

    @property
    def scratch(self) -> StepScratch:
        if self._scratch is None:
            with torch.inference_mode(False):  # as the memory of a part
                self._scratch = StepScratch(self.batch, FIRST_TOKENS, self.device)
        return self._scratch

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        held = () if self._scratch is None else self._scratch.tensors
        return sum(tensor.nbytes for tensor in (self.lengths, self.table, *held))

    def pool(self, record: tuple[int, int]) -> GrowingPool:
        return GrowingPool(self.batch, record, self.device)

    def check(self) -> None:
        """Wait for the device. NonFiniteActivations: a page, or a token, could not be stored."""
        if self._scratch is not None:
            require_no_error(self._scratch.error)

    def place(self, rows: Rows, columns: int, tokens: int, pool: GrowingPool, k: Format, v: Format) -> Place:
        """The places of so many tokens after ``columns``; ``pool``: any of the layers', with room for their pages.
        NonFiniteActivations: a page that an earlier step completed could not be stored."""
        latest = rows, columns, tokens, pool.version
        if self._latest != latest:
            if rows.batch != self.batch:
                self._begin(rows.batch)
            self._follow(rows.lengths(columns), tokens, pool)
            self._latest = latest
        scratch = self.scratch
        return Place(self.lengths, self.table, scratch.read_at(k), scratch.read_at(v), scratch.none)

    def _follow(self, lengths: list[int], tokens: int, pool: GrowingPool) -> None:
        moved = {after - before for before, after in zip(self._lengths, lengths, strict=False)}
        if len(moved) == 1:
            self.lengths = self.lengths + moved.pop()
        else:
            self.lengths = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        self._lengths = lengths
        if self._version != pool.version:
            require_no_error(self.scratch.error)
            slots = pad_sequence([torch.tensor(row, dtype=torch.int32) for row in pool.table], batch_first=True)
            self.table, self._version = slots.to(self.device), pool.version
        self.scratch.reach(max(lengths) + tokens)
