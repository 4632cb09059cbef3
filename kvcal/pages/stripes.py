"""Stripes: parts of pages that are packed as soon as their tokens are there.

Where tokens share no scale, a page need not be complete to be packed: each stripe of 16 or 32 tokens has whole
bytes of its record. The stripe that begins a page sets the rest of the record to 0. So no byte is read that was not
written, and a page whose stripes have all been packed has the bytes that it has when it is packed at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvcal.pages.layout_protocol import PAGE_TOKENS


class Piece(NamedTuple):
    """Consecutive tokens that lie alike in their pages: ``tokens``, of those that are stored; ``pages``, of those
    that these lie in; ``first``: the number of their first token in each page."""

    tokens: slice
    pages: slice
    first: int


def pieces(begin: int, num_tokens: int) -> Iterator[Piece]:
    """Of so many tokens, the first of which is number ``begin`` of its page: a part of a page, whole pages, a part of
    a page, as far as there are any."""
    stop, at = begin + num_tokens, begin
    while at < stop:
        page, first = divmod(at, PAGE_TOKENS)
        whole = (stop - at) // PAGE_TOKENS * PAGE_TOKENS if first == 0 else 0
        end = at + whole if whole else min(stop, PAGE_TOKENS * (page + 1))
        yield Piece(slice(at - begin, end - begin), slice(page, -(-end // PAGE_TOKENS)), first)
        at = end
