"""What the operators for stored forms are given, in groups: runs of the arguments that torch.library wants flat, as in
kvcal.kernels.operands.

One call serves one side of N neighbouring heads of one layer. What there is not is an empty tensor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvcal.kernels.reconstruction import Reconstruction
from kvcal.pages.layout import PAGE_TOKENS
from kvcal.pages.transforms import Transform

# Values that torch reconstructs, predicts or encodes at once: every temporary in fp32 is 32 MB then.
VALUES_AT_ONCE = 2**23

HELD_PAGES = "Tensor lengths, Tensor page_at"
PAGE_CODING = "Tensor grid, Tensor signs, Tensor rescale, Tensor offset, Tensor rotary, Tensor turns"
NUMBERED_PAGES = "int first_row, int first_page, int num_pages, int start, int stop"


class HeldPages(NamedTuple):
    """What says which pages rows hold."""

    lengths: Tensor  # [B] int32: tokens that the row held before the step
    page_at: Tensor  # int32 [1 or more], as in PageCounts


class PageCoding(NamedTuple):
    """What values become records with, and records values."""

    grid: Tensor  # [points, d] fp32, of a lattice
    signs: Tensor  # [N D] int8, of a lattice
    rescale: Tensor  # [N, D] fp32: pages of keys hold (K - offset) / rescale, where the form says so
    offset: Tensor  # [N, D] fp32
    rotary: Tensor  # [pairs, 4] fp64: the table of kvcal.pages.transforms
    turns: Tensor  # [positions, pairs, 2] fp32, of kvcal.kernels.reconstruct.position_turns: for kernels alone

    def transform(self, form: Reconstruction, heads: slice = slice(None)) -> Transform:
        """Of these heads' pages [..., n, 128, D]."""
        return Transform(
            self.rescale[heads].unsqueeze(-2) if form.rescale else None,
            self.offset[heads].unsqueeze(-2) if form.offset else None,
        )


class NumberedPages(NamedTuple):
    """``num_pages`` pages of each row from ``first_row`` on, a row's from its page ``first_page`` on, have numbers
    0, 1, ..., row by row. These are number ``start`` to ``stop`` - 1."""

    first_row: int
    first_page: int
    num_pages: int
    start: int
    stop: int

    @staticmethod
    def of(rows: slice, pages: range) -> NumberedPages:
        """All of these pages of all of these rows."""
        return NumberedPages(rows.start, pages.start, len(pages), 0, (rows.stop - rows.start) * len(pages))

    def parts(self, width: int) -> list[NumberedPages]:
        """As many at a time as ``VALUES_AT_ONCE`` allows, one at least; their tokens have ``width`` values each."""
        step = max(1, VALUES_AT_ONCE // (PAGE_TOKENS * width))
        starts = range(self.start, self.stop, step)
        return [self._replace(start=start, stop=min(start + step, self.stop)) for start in starts]

    def places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Rows, and ordinals within them, int64 [stop - start] each: an index of the first two dimensions of
        [B, pages, ...]. Nothing is copied from the host."""
        number = torch.arange(self.start, self.stop, device=device)
        return self.first_row + number // self.num_pages, self.first_page + number % self.num_pages


class HeadPages(NamedTuple):
    """Pages of one head range: n of the N heads, from the ``first_head``-th of them on."""

    records: Tensor  # [B, pages, r, record_bytes] uint8: on a lattice r = 1, of all N heads, else n
    tokens: Tensor  # [B, pages, n, 128, D] in the cache's dtype, what ``decode`` reads
    first_head: int
