"""Steps of a dynamic cache by the kernels: what these are given follows what the host knows.

Kernels take the lengths of sequences and the slots of their pages on the device. In a static cache both lie
there at fixed addresses. A dynamic cache knows them on the host, and its pools grow: before a step the host
makes room for the pages that the step completes, and sends the slots when they have changed. Lengths go on
by themselves. So a step of many layers costs the host one small addition.
"""

from __future__ import annotations

import torch
from torch import Tensor
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
    the step, ``tables`` int32 [B, pages] of the layers that pack as many tokens at once, ``scratch``. Errors of
    kernels are awaited where a page begins."""

    is_awaited = True

    def __init__(self, batch: int, device: torch.device) -> None:
        self.device = device
        self._begin(batch)

    def _begin(self, batch: int) -> None:
        """Nothing on the device until the first step."""
        self.batch = batch
        self.lengths = torch.empty(0, dtype=torch.int32, device=self.device)
        self.tables: dict[int, Tensor] = {}
        self._scratch: StepScratch | None = None
        self._lengths, self._versions = list[int](), dict[int, int]()
        self._latest: tuple[Rows, int, int] | None = None

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
        return sum(tensor.nbytes for tensor in (self.lengths, *self.tables.values(), *held))

    def pool(self, record: tuple[int, int], fmt: Format) -> GrowingPool:
        return GrowingPool(self.batch, record, self.device)

    def check(self) -> None:
        """Wait for the device. NonFiniteActivations: a page, or a token, could not be stored."""
        if self._scratch is not None:
            require_no_error(self._scratch.error)

    def place(self, rows: Rows, columns: int, tokens: int, pool: GrowingPool, k: Format, v: Format) -> Place:
        """The places of so many tokens after ``columns``; ``pool``: that of a layer in these formats, with room for
        their pages. NonFiniteActivations: what an earlier step packed could not be stored."""
        latest = rows, columns, tokens
        if self._latest != latest:
            if rows.batch != self.batch:
                self._begin(rows.batch)
            self._follow(rows.lengths(columns), tokens)
            self._latest = latest
        scratch, table = self.scratch, self._table(k.stripe_tokens, pool)
        return Place(self.lengths, table, scratch.read_at(k), scratch.read_at(v), scratch.none)

    def _table(self, stripe_tokens: int, pool: GrowingPool) -> Tensor:
        """Of the layers that pack so many tokens at once, whose pools grow alike."""
        if self._versions.get(stripe_tokens) != pool.version:
            require_no_error(self.scratch.error)
            slots = pad_sequence([torch.tensor(row, dtype=torch.int32) for row in pool.table], batch_first=True)
            self.tables[stripe_tokens] = slots.to(self.device)
            self._versions[stripe_tokens] = pool.version
        return self.tables[stripe_tokens]

    def _follow(self, lengths: list[int], tokens: int) -> None:
        moved = {after - before for before, after in zip(self._lengths, lengths, strict=False)}
        if len(moved) == 1:
            self.lengths = self.lengths + moved.pop()
        else:
            self.lengths = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        self._lengths = lengths
        self.scratch.reach(max(lengths) + tokens)
