"""A *part*: one layer's keys, or values, as sinks, a ring of recent tokens, and packed pages.

Page p of a sequence holds its tokens 128 p ... 128 p + 127, and is packed by the call that completes it, or
stripe by stripe (``Format.stripe_tokens``) by the calls that complete these. Besides the pages lie the first
tokens (sinks) and, in the ring, the last ones, at 16 bits; what is read prefers them. Page 0 holds the sinks,
too, but they do not stretch its ranges: they are packed as copies of the first token after them.

Who owns the memory says where things lie: which rows of sinks and ring are a call's sequences (a *row map*),
and which slots hold their pages (a *slot map*). Engines have rings and blocks of requests, windows have no
pages, caches go through ``PagedTensor`` (kvcal.store.paged_tensor). Steps by the kernels (kvcal.store.step)
write the same memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvcal.kernels.operands import ring_slot
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.page_format import Format

# Stores tokens [b, n, T, D] as they are held, whole stripes, of which the first has this number in its sequence.
Pack = Callable[[Tensor, int], None]


def row_map(rows: slice, device: torch.device) -> Tensor:
    """int64: consecutive rows."""
    return torch.arange(rows.start, rows.stop, device=device)


class Part:
    """See the module's docstring: sinks [R, n, sinks, D] and ring [R, n, ring_tokens, D]. Calls are
    for b sequences with equal numbers of tokens, whose rows ``rows`` int64 [b] names; x and out are tokens
    [b, n, T, D]."""

    def __init__(self, sinks: Tensor, ring: Tensor, fmt: Format) -> None:
        self.sinks, self.ring, self.format = sinks, ring, fmt

    def newest(self, rows: Tensor, first: int, stop: int) -> Tensor:
        """[b, n, T, D]: a copy of the tokens ``first`` ... ``stop`` - 1, which the ring has."""
        slots = ring_slot(torch.arange(first, stop, device=self.ring.device), self.ring)
        return self.ring[rows.unsqueeze(1), :, slots].transpose(1, 2)

    def put(self, rows: Tensor, numbers: Tensor, x: Tensor) -> None:
        """Put the tokens x, ``numbers`` [T] or [b, T] of their sequences, into the ring."""
        self.ring[rows.unsqueeze(1), :, ring_slot(numbers, self.ring)] = x.transpose(1, 2)

    def put_last(self, rows: Tensor, total: int, x: Tensor) -> None:
        """Put the last of x, as many as it has room for, into the ring; they end with token ``total`` - 1."""
        last = x[:, :, -self.ring.shape[2] :]
        self.put(rows, torch.arange(total - last.shape[2], total, device=x.device), self.entered(last))

    def write(
        self, rows: Tensor, num_tokens: int, x: Tensor, pack: Pack, pages_at_once: int, is_entered: bool = False
    ) -> None:
        """Store x after ``num_tokens``: sinks, the stripes that they complete, and the last ones in the ring.
        ``pages_at_once``: of all sequences, which bounds the scratch. ``is_entered``: x is as it is held."""
        total, fmt = num_tokens + x.shape[2], self.format
        at_once = PAGE_TOKENS * max(1, pages_at_once // len(rows))
        enter: Callable[[Tensor], Tensor] = _held if is_entered else self.entered
        if x.shape[2] <= at_once:
            x, enter = enter(x), _held
        sinks = x[:, :, : fmt.sinks_left(num_tokens)]
        if sinks.shape[2]:
            self.sinks[rows, :, num_tokens : num_tokens + sinks.shape[2]] = enter(sinks)
        begin, stop = fmt.tokens_packed(num_tokens), fmt.tokens_packed(total)
        held = self.newest(rows, begin, num_tokens) if begin < stop else x
        for start in (begin, *range(begin - begin % PAGE_TOKENS + at_once, stop, at_once)) if begin < stop else ():
            a, b = start - begin, min(start - start % PAGE_TOKENS + at_once, stop) - begin
            tokens = enter(x[:, :, max(0, a - held.shape[2]) : max(0, b - held.shape[2])])
            if a < held.shape[2]:
                tokens = torch.cat([held[:, :, a:b], tokens], dim=2)
            tokens = fmt.packed(tokens, start)
            pack(tokens, start)
        last = x[:, :, -self.ring.shape[2] :]
        self.put(rows, torch.arange(total - last.shape[2], total, device=x.device), enter(last))

    def entered(self, x: Tensor) -> Tensor:
        """New tokens as they are held."""
        return x.to(self.ring.dtype)

    def put_sinks(self, rows: Tensor, first: int, out: Tensor) -> None:
        """Over the tokens of out, which begin with token ``first``."""
        sinks = self.sinks[:, :, first : first + out.shape[2]]
        if sinks.shape[2]:
            out[:, :, : sinks.shape[2]] = sinks.index_select(0, rows)


def _held(x: Tensor) -> Tensor:
    return x
