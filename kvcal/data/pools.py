"""Pools of data by purpose: what a plan is fitted on, chosen on and reported on share no text.

Every source is dealt to the pools before any window is cut, item by item: a record, a chat, a generated problem or a
document of a table by a hash of its content, a piece of a text file in turn. So pools stay disjoint whatever the seed,
the process, the number of samples and their length, and two copies of an item lie in one pool.

A text file's pieces go to the pools in turn, from the pool on that the first piece's content names. They are of 1 KiB
at first and double after every round, up to 16 KiB: a file of 60 KiB gives each pool 15, and windows of a large one are
seldom broken.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, Literal, get_args

# fit: profile, λ, predictors. select: a search's candidates, tuning. validate: a final choice. report: evaluation.
Purpose = Literal["fit", "select", "validate", "report"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)

# A piece is cut at a line's end, so that hardly any token straddles two; a line beyond MIN_PIECE_CHARS is cut, too.
MIN_PIECE_CHARS, MAX_PIECE_CHARS = 1 << 10, 1 << 14


def pool_of(content: Any, turn: int = 0) -> Purpose:
    """The pool of an item by its content (JSON), or that of the item ``turn`` places behind it."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).digest()
    return PURPOSES[(digest[0] + turn) % len(PURPOSES)]


def dealt_pieces(lines: Iterator[str]) -> Iterator[tuple[Purpose, str]]:
    """A document's pieces, each with its pool; nothing is read ahead of a piece."""
    first = None
    for turn, text in enumerate(_cut(lines)):
        first = text if first is None else first
        yield pool_of(first, turn), text


def _cut(lines: Iterator[str]) -> Iterator[str]:
    parts: list[str] = []
    num_chars = number = 0
    for line in lines:
        for start in range(0, len(line), MIN_PIECE_CHARS):
            parts.append(line[start : start + MIN_PIECE_CHARS])
            num_chars += len(parts[-1])
            if num_chars >= min(MIN_PIECE_CHARS << min(number // len(PURPOSES), 16), MAX_PIECE_CHARS):
                yield "".join(parts)
                parts, num_chars, number = [], 0, number + 1
    if "".join(parts).strip():
        yield "".join(parts)
