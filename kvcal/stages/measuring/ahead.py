"""Chunks that are longer than a stripe: attention is given the stripes that come to be read within a chunk twice,
exact and decoded, and a mask that shows each query what it reads.

Of a window of W tokens the stripes that the last query of a chunk reads from pages are packed before its first, as
long as the chunk has no more than W + 16 tokens, less those that wait for their stripe.
"""

from __future__ import annotations

from typing import NamedTuple

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


class Ahead(NamedTuple):
    """Of a chunk of T tokens: tokens ``read`` come to be read from pages within it, which attention is given decoded
    after all exact ones; ``read_by`` [T]: how many tokens each of its queries reads from pages."""

    read: range
    read_by: Tensor

    @classmethod
    def of(cls, fmt: Format, num_tokens: int, num_new: int) -> Ahead:
        """Of so many new tokens after ``num_tokens``."""
        counts = [fmt.tokens_read(n) for n in range(num_tokens, num_tokens + num_new)]
        return cls(range(counts[0], counts[-1]), torch.tensor(counts))

    def mask(self, num_tokens: int, query_BHTD: Tensor, base: str) -> Tensor:
        """[1, 1, T, num_tokens + read]: which of them each query of the last T of ``num_tokens`` attends to, as
        ``base`` takes it: bool of sdpa, added numbers of eager attention."""
        device, count = query_BHTD.device, query_BHTD.shape[2]
        read_by = self.read_by.to(device).unsqueeze(1)
        own, exact = (
            torch.arange(num_tokens - count, num_tokens, device=device).unsqueeze(1),
            torch.arange(num_tokens, device=device),
        )
        decoded = torch.arange(self.read.start, self.read.stop, device=device)
        is_seen = (exact <= own) & ((exact < self.read.start) | (exact >= read_by))
        is_seen = torch.cat([is_seen, decoded < read_by], 1)[None, None]
        if base == "sdpa":
            return is_seen
        lowest = torch.finfo(query_BHTD.dtype).min
        return torch.zeros(is_seen.shape, dtype=query_BHTD.dtype, device=device).masked_fill(~is_seen, lowest)
