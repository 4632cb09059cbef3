"""The columns of a padded batch that hold tokens.

A cache is handed whole columns [B, ..., T, ...]; of a ragged batch some of them are padding, which must enter
no group, no page and no byte count. The prompt's attention mask says which: each row is one contiguous run of
tokens (left or right padding, or both); every column after the prompt holds a token.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcal.errors import UsageError

Interval = tuple[int, int]


@dataclass(frozen=True)
class Block:
    """Consecutive rows with the same padding, treated as one: tokens of the prompt fill columns [start,
    stop)."""

    rows: slice
    start: int
    stop: int


@dataclass(frozen=True)
class Rows:
    """Padding of a batch. ``runs`` holds [start, stop) of the tokens in the prompt's ``width`` columns, one a
    row."""

    runs: tuple[Interval, ...]
    width: int

    @classmethod
    def dense(cls, batch: int) -> Rows:
        return cls(((0, 0),) * batch, 0)

    @classmethod
    def from_mask(cls, attention_mask: Tensor) -> Rows:
        """attention_mask [B, width] of 0 and 1."""
        if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
            found = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else attention_mask
            raise UsageError(f"attention_mask has shape {found}, expected [batch, columns] of 0 and 1")
        runs = []
        for row, mask in enumerate(attention_mask.bool().tolist()):
            start = mask.index(True) if True in mask else 0
            stop = start + sum(mask)
            if not all(mask[start:stop]):
                raise UsageError(
                    f"attention_mask row {row} has holes; expected one run of 1s",
                    hint="pad on the left or on the right",
                )
            runs.append((start, stop))
        return cls(tuple(runs), attention_mask.shape[1])

    @property
    def batch(self) -> int:
        return len(self.runs)

    @functools.cached_property
    def blocks(self) -> list[Block]:
        """Runs of equal rows: one for a batch without padding."""
        blocks, first = [], 0
        for (start, stop), equal in itertools.groupby(self.runs):
            count = len(list(equal))
            blocks.append(Block(slice(first, first + count), start, stop))
            first += count
        return blocks

    def intervals(self, block: Block, begin: int, end: int) -> list[Interval]:
        """Columns of [begin, end) that hold tokens, as at most two intervals."""
        prompt = (max(begin, block.start), min(end, block.stop))
        rest = (max(begin, self.width), end)
        if prompt[1] == rest[0] and prompt[0] < prompt[1] and rest[0] < rest[1]:
            return [(prompt[0], end)]
        return [interval for interval in (prompt, rest) if interval[0] < interval[1]]

    def places(self, block: Block, tokens: range) -> list[Interval]:
        """Columns that hold these tokens of each of the block's rows, as at most two intervals."""
        count = block.stop - block.start  # in the prompt
        prompt = (block.start + tokens.start, block.start + min(tokens.stop, count))
        rest = (self.width + max(tokens.start, count) - count, self.width + tokens.stop - count)
        if prompt[1] == rest[0] and prompt[0] < prompt[1] and rest[0] < rest[1]:
            return [(prompt[0], rest[1])]
        return [interval for interval in (prompt, rest) if interval[0] < interval[1]]

    def num_tokens(self, block: Block, columns: int) -> int:
        """Tokens of each row of the block among the first ``columns`` columns."""
        return sum(stop - start for start, stop in self.intervals(block, 0, columns))

    def lengths(self, columns: int) -> list[int]:
        """Tokens of every row among the first ``columns`` columns."""
        return [min(stop, max(start, columns)) - start + max(0, columns - self.width) for start, stop in self.runs]

    def mask(self, begin: int, count: int, device: torch.device) -> Tensor:
        """bool [B, count]: which of the columns from ``begin`` on hold tokens."""
        columns = torch.arange(begin, begin + count, device=device)
        starts, stops = torch.tensor(self.runs, device=device).unsqueeze(-1).unbind(1)
        return ((columns >= starts) & (columns < stops)) | (columns >= self.width)

    def select(self, indices: list[int]) -> Rows:
        return replace(self, runs=tuple(self.runs[index] for index in indices))


class Padding:
    """The batch's rows, shared by all layers; known once the first layer sees the batch. Of the mask only the
    runs are kept, a pair of numbers a row (``prompt``)."""

    def __init__(self, attention_mask: Tensor | None) -> None:
        self.prompt = None if attention_mask is None else Rows.from_mask(attention_mask)
        self.rows: Rows | None = None

    def resolve(self, batch: int) -> Rows:
        """Rows for ``batch``; a mask of fewer rows is repeated as ``generate`` repeats its inputs for
        beams."""
        if self.rows is None:
            rows = self.prompt or Rows.dense(batch)
            if batch % rows.batch:
                raise UsageError(f"attention_mask has {rows.batch} rows, but the batch has {batch}")
            self.rows = rows.select([row for row in range(rows.batch) for _ in range(batch // rows.batch)])
        if self.rows.batch != batch:
            raise UsageError(
                f"the cache holds {self.rows.batch} sequences and was given {batch}",
                hint="call cache.reset() or build a new PlanCache for another batch",
            )
        return self.rows

    def reset(self) -> None:
        self.rows = None
