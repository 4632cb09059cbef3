"""Operands of the operators, in the groups in which they are handed over: a list of tensors each.

One call serves one head range of one layer: B sequences, n KV heads, G query heads for each, head size D. Absent
operands are empty tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvcal.pages.layout import PAGE_TOKENS
from kvcal.plan.page_format import Side

NOTHING = torch.empty(0)


class Memory(NamedTuple):
    """Where the keys, or the values, of a head range are stored. Heads lie side by side; sequences and slots may be
    further apart than these heads are long. A sliding window has no pages, and one sink (kvcal.kernels.window). Where
    pages shrink, ``pages`` is the memory of all regions, of one dimension (kvcal.kernels.regions)."""

    sinks: Tensor  # [B, n, sinks, D], cache dtype: the first tokens
    ring: Tensor  # [B, n, ring_tokens, D], cache dtype: token t lies at t modulo ring_tokens
    pages: Tensor  # [slots, n, record_bytes] uint8

    def page_in_ring(self, row: int, page: int) -> Tensor:
        """[1, n, 128, D]: the tokens of a page, before the ring loses them. Sinks do not stretch the page's ranges."""
        tokens = torch.arange(PAGE_TOKENS * page, PAGE_TOKENS * (page + 1), device=self.ring.device)
        tokens = tokens.clamp(min=min(self.sinks.shape[2], PAGE_TOKENS * (page + 1) - 1))
        return self.ring[row : row + 1, :, tokens % self.ring.shape[2]]


class Place(NamedTuple):
    """How many tokens each sequence has, and where its pages lie."""

    lengths: Tensor  # [B] int32: tokens before the step
    table: Tensor  # [B, pages] int32: the slot of every page, the same in all layers; one beyond its width has no room
    k_read_at: Tensor  # int32: where the window follows a rule, tokens from which page i of the keys is read, ascending
    v_read_at: Tensor


class QueryStatistic(NamedTuple):
    """What query scores are made from. A prompt that ends between two pages begins the sum anew, so ``since`` is not a
    function of the length."""

    sum: Tensor  # [B, n, D] fp32: |q| since the last page, over the heads of a group
    since: Tensor  # [B, n] int32: tokens that the sequence had when the sum was begun

    def mean(self, rows: slice, num_tokens: int, group_heads: int) -> Tensor:
        """fp32 [b, n, D]: mean |q| of every channel since the last page of ``rows``, of ``num_tokens`` each."""
        counts = (num_tokens - self.since[rows]) * group_heads
        return self.sum[rows] / counts.float().unsqueeze(-1)

    def begin(self, rows: slice, num_tokens: int) -> None:
        """A page was packed: the sum begins anew."""
        self.sum[rows] = 0
        self.since[rows] = num_tokens


class PageTransform(NamedTuple):
    """What pages of keys hold: (K - offset) / rescale; and how codes of both sides are chosen."""

    rescale: Tensor  # [n, D] fp32
    offset: Tensor  # [n, D] fp32
    k_feedback: Tensor = NOTHING  # [n, D (D - 1) / 2] fp16: factors of error feedback (kvcal.pages.feedback)
    v_feedback: Tensor = NOTHING

    @property
    def of_values(self) -> PageTransform:
        """Pages of values hold V."""
        return self._replace(rescale=self.rescale[:0], offset=self.offset[:0])

    def feedback(self, side: Side) -> Tensor | None:
        """The factor of a side's codes; None without feedback."""
        factor = self.k_feedback if side == "k" else self.v_feedback
        return factor if factor.numel() else None


class Regions(NamedTuple):
    """Where pages shrink: ``present`` (int64 [regions, 7], kvcal.kernels.regions) says where the pages of all regions
    lie now; ``of_sides``: which regions are the keys' and the values'."""

    present: Tensor
    of_sides: tuple[int, int]
