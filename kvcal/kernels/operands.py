"""Operands of the operators, in the groups in which they are handed over: a list of tensors each.

One call serves one layer: B sequences, n KV heads, G query heads for each, head size D. Absent
operands are empty tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels.variants import Variant
from kvcal.pages.error_feedback import feedback_operand
from kvcal.plan.page_format import Side

DTYPE_NAMES = {dtype: name for name, dtype in CACHE_DTYPES.items()}
NOTHING = torch.empty(0)


Number = TypeVar("Number", int, Tensor)


def ring_slot(number: Number, ring: Tensor) -> Number:
    """The slot of token ``number`` of a sequence in ring [..., ring_tokens, D]."""
    return number % ring.shape[-2]


class Memory(NamedTuple):
    """Memory of the keys, or the values, of a layer. Heads lie side by side; rows and slots may be further
    apart than these heads are long. There are R rows: one a sequence in their order, unless ``Place.rows``
    names each sequence's own. A sliding window has no pages, and one sink (kvcal.kernels.ops)."""

    sinks: Tensor  # [R, n, sinks, D], cache dtype: the first tokens
    ring: Tensor  # [R, n, ring_tokens, D], cache dtype: the newest tokens (ring_slot)
    pages: Tensor  # [slots, n, record_bytes] uint8

    def stripe_in_ring(self, row: int, first: int, stop: int) -> Tensor:
        """[1, n, stop - first, D]: the tokens of a stripe, before the ring loses them. Sinks do not stretch the
        ranges of their page."""
        tokens = torch.arange(first, stop, device=self.ring.device).clamp(min=min(self.sinks.shape[2], stop - 1))
        return self.ring[row : row + 1, :, ring_slot(tokens, self.ring)]


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
    """The statistic of query scores. A prompt that ends between two pages begins the sum anew, so ``since``
    is not a function of the length."""

    sum: Tensor  # [R, n, D] fp32: |q| since the last page, over the heads of a group
    since: Tensor  # [R, n] int32: tokens that the sequence had when the sum was begun

    def mean(self, rows: slice, num_tokens: int, group_heads: int) -> Tensor:
        """fp32 [b, n, D]: mean |q| of every channel since the last page of ``rows``, of ``num_tokens``
        each."""
        counts = (num_tokens - self.since[rows]) * group_heads
        return self.sum[rows] / counts.float().unsqueeze(-1)

    def begin(self, rows: slice, num_tokens: int) -> None:
        """A page was packed: the sum begins anew."""
        self.sum[rows] = 0
        self.since[rows] = num_tokens


class PageTransform(NamedTuple):
    """The transform of pages of keys, which hold (K - offset) / rescale, and how codes of both sides are
    chosen: with error feedback, of rotated tokens."""

    rescale: Tensor  # [n, D] fp32
    offset: Tensor  # [n, D] fp32
    k_feedback: Tensor = NOTHING  # [n, D (D + 1) / 2] fp16: factors of error feedback (kvcal.pages.error_feedback)
    v_feedback: Tensor = NOTHING  # with gains [n, D (D + 3) / 2]: these last
    k_signs: Tensor = NOTHING  # [D] int8: of rotated pages (kvcal.systems.basis.rotated)
    v_signs: Tensor = NOTHING

    @classmethod
    def of_variant(cls, variant: Variant, tensors: Mapping[str, Tensor], nothing: Tensor) -> PageTransform:
        """Of the tensors of a variant's heads, by the last part of their names in the plan
        (kvcal.plan.tensors)."""
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


def loadable(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in ``dtype``, as the kernels load it: channels side by side, everything else at multiples of 16
    bytes."""
    x = x.to(dtype)
    *outer, channel = x.stride()
    aligned = x.data_ptr() % 16 == 0 and math.gcd(*outer) % 8 == 0
    return x if aligned and (not x.numel() or channel == 1) else x.clone(memory_format=torch.contiguous_format)
