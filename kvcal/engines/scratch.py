"""Places of a step's sequences, and scratch: shared by all layers of a rank in an engine, and counted by no
plan."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from kvcal.engines.prefill import TILE_TOKENS, Flash, torch_flash
from kvcal.geometry import AttentionGeometry
from kvcal.plan.page_format import Side
from kvcal.store.step import StepScratch

# Of a chunk's output, at most: turned queries and as they attend, the sum, a part, and its product.
FLOATS_OF_A_VALUE = 4


class Decodes(NamedTuple):
    """Sequences that get one token each, or several, all int32 on the device. Rows of length 0
    whose blocks and rings nobody else has may fill a batch up."""

    lengths: Tensor  # [B]: tokens of each sequence before the step
    table: Tensor  # [B, pages], channels side by side: the block of every page, the first token's own included
    rings: Tensor  # [B]: each sequence's ring


class Decoded(NamedTuple):
    """The first ``requests`` of a batch, its decodes, of ``tokens`` each. ``taken`` int64 [requests, tokens]:
    their rows of the batch's queries; ``kept`` int64 [rows]: the number of the token, in a row, that each of
    these rows is. Both None where no request is filled up.

    Where any request has several, those with fewer than the most are filled up with their last token, so that
    one kernel is compiled for all such steps. The ring takes these tokens back, as it does rejected ones:
    the next step's lengths say how many of its tokens a request has, on the device.
    """

    requests: int
    tokens: int = 1
    taken: Tensor | None = None
    kept: Tensor | None = None

    @classmethod
    def of_counts(cls, counts: Tensor, most: int, device: torch.device) -> Decoded:
        """Of requests with so many new tokens each, int32 [requests] on the host, at most ``most``."""
        tokens = most if bool((counts > 1).any()) else 1
        if bool((counts == tokens).all()):
            return cls(len(counts), tokens)
        number, counts = torch.arange(tokens), counts.long().unsqueeze(1)
        taken = counts.cumsum(0) - counts + number.minimum(counts - 1)
        kept = (number < counts).flatten().nonzero().flatten()
        return cls(len(counts), tokens, taken.to(device, non_blocking=True), kept.to(device, non_blocking=True))

    def of_rows(self, x: Tensor) -> Tensor:
        """Rows x [rows, n, D] of a batch: [requests, n, D], or of several tokens [requests, tokens, n, D]."""
        if self.tokens == 1:
            return x[: self.requests]
        return (
            x[: self.requests * self.tokens].unflatten(0, (self.requests, -1)) if self.taken is None else x[self.taken]
        )

    def to_rows(self, attended: Tensor, output: Tensor) -> None:
        """The other way round, into the first rows of output [rows, H, D]."""
        rows = attended.flatten(0, -3)
        rows = rows if self.kept is None else rows[self.kept]
        output[: len(rows)] = rows


class Chunk(NamedTuple):
    """New tokens of one sequence after the ``num_past`` that are stored."""

    num_past: int
    table: Tensor  # [pages] int32 on the device: the block of every page, those of the new tokens included
    ring: Tensor  # [1] int32 on the device

    @property
    def rows(self) -> Tensor:
        """[1] int64: its row in rings."""
        return self.ring.long()

    def slots(self, pages: range) -> Tensor:
        """[1, pages] int32: the blocks of these pages."""
        return self.table[pages.start : pages.stop].unsqueeze(0)


class Tail(NamedTuple):
    """Keys and values [N, ..., D] of a chunk's past from token ``first`` on, in the queries' dtype: those
    that the ring had before the chunk was stored, and maybe some of pages before them."""

    first: int
    keys: Tensor
    values: Tensor


class Stored(NamedTuple):
    """A chunk's new tokens as they attend, in the queries' dtype: ``queries`` [T, H, D], ``keys`` and ``values``
    [T, N, D], in the layer's bases; and the ``tail`` of its past."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    tail: Tail


class Scratch(StepScratch):
    """Scratch that all layers of a rank share. ``flash``: what attends to parts of a prompt on CUDA, in 16
    bits."""

    def __init__(self, max_rows: int, max_tokens: int, device: torch.device, flash: Flash = torch_flash) -> None:
        super().__init__(max_rows, max_tokens, device)
        self.flash = flash
        self._past: dict[tuple[Side, int, int, torch.dtype], Tensor] = {}
        self._seen = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        self._reported = 0

    def report_errors(self, logger: logging.Logger) -> None:
        """Log pages that could not be stored, once a kind. On CUDA nothing waits, and an error is seen a step
        later."""
        if self.device.type != "cuda":
            self._seen.copy_(self.error)
        found = int(self._seen)
        self._seen.copy_(self.error, non_blocking=True)
        if found & ~self._reported:
            self._reported |= found
            logger.error("keys or values cannot be quantized: a page holds NaN, infinity, or has no room (%d)", found)

    def warm_up(self, geometry: AttentionGeometry, num_tokens: int) -> None:
        """Allocate for a moment what attention of a chunk of so many tokens takes besides its result."""
        values = num_tokens * geometry.num_query_heads * geometry.k_head_dim
        torch.empty(FLOATS_OF_A_VALUE * values, dtype=torch.float32, device=self.device)

    def past(self, side: Side, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
        """[N, TILE_TOKENS, D], or fewer where no sequence has so many: room for a tile of decoded pages."""
        key = (side, num_kv_heads, head_dim, dtype)
        if key not in self._past:
            tokens = min(TILE_TOKENS, self.max_tokens)
            self._past[key] = torch.empty(num_kv_heads, tokens, head_dim, dtype=dtype, device=self.device)
        return self._past[key]
