"""Chunks that are longer than a stripe: attention is given the stripes that come to be read within a chunk twice,
exact and decoded, and a mask that shows each query what it reads.

Of a window of W tokens the stripes that the last query of a chunk reads from pages are packed before its first, as
long as the chunk has no more than W + 16 tokens, less those that wait for their stripe.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import RAW, Format


def stripes_of(plan: LayerPlan) -> Format | None:
    """The format by which a layer comes to read stripes, of both sides at once (one may have 16 bits); None where it
    reads pages, or its sides come to read other ones."""
    formats = [fmt for fmt in plan.formats if fmt != RAW]
    alike = {(fmt.stripe_tokens, fmt.recent_window) for fmt in formats}
    return formats[0] if len(alike) == 1 and formats[0].stripe_tokens < PAGE_TOKENS else None


def tokens_ahead(fmt: Format, num_tokens: int) -> int:
    """New tokens after ``num_tokens``, of which what the last one reads from pages is there before the first."""
    return fmt.recent_window + fmt.tokens_packed(num_tokens) + fmt.stripe_tokens - num_tokens


class Ahead:
    """Of a chunk of so many new tokens after ``num_tokens``: tokens ``read`` come to be read from pages within it,
    which attention is given decoded after all exact ones."""

    def __init__(self, fmt: Format, num_tokens: int, num_new: int) -> None:
        self.num_tokens = num_tokens
        # How many tokens each query reads from pages.
        self._read_by = [fmt.tokens_read(n) for n in range(num_tokens, num_tokens + num_new)]
        self.read = range(self._read_by[0], self._read_by[-1])
        self._masks: dict[object, Tensor] = {}

    def mask(self, query_BHTD: Tensor, base: str) -> Tensor:
        """[1, 1, T, num_tokens + T + read]: which of them each query of the T new ones attends to, as ``base`` takes
        it, as numbers that are added to logits. Made once for all layers."""
        key = base, query_BHTD.dtype, query_BHTD.device
        if key not in self._masks:
            self._masks[key] = self._mask(*key)
        return self._masks[key]

    def _mask(self, base: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        read_by, stop = torch.tensor(self._read_by, device=device).unsqueeze(1), self.num_tokens + len(self._read_by)
        exact = torch.arange(stop, device=device)
        own, decoded = exact[self.num_tokens :].unsqueeze(1), exact[self.read.start : self.read.stop]
        is_seen = (exact <= own) & ((exact < self.read.start) | (exact >= read_by))
        is_seen = torch.cat([is_seen, decoded < read_by], 1)[None, None]
        hidden = -torch.inf if base == "sdpa" else torch.finfo(dtype).min
        return torch.zeros(is_seen.shape, dtype=dtype, device=device).masked_fill(~is_seen, hidden)


@functools.lru_cache(maxsize=4)
def ahead_of(fmt: Format, num_tokens: int, num_new: int) -> Ahead:
    """The one of all layers of a format, of a chunk."""
    return Ahead(fmt, num_tokens, num_new)
