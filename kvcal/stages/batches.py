"""Batches of sequences for a stage that measures a model, padded on the right, the longest sequences first.

Causal layers never read what stands behind a token, so right padding changes no real token, without any mask.
Padding repeats a sequence's last token: it brings no token that the data do not hold.

Batches follow from the data and from the most tokens of a batch alone, never from the memory that is free: other
shapes round differently, and the same run must give the same bytes. When the device runs out of memory, the rest of the
stage goes on with half as many tokens in a batch; the reporter says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal.data.sequences import TokenDataset
from kvcal.errors import UsageError
from kvcal.progress import Reporter
from kvcal.stages.checkpoint import Checkpoint, Mean


@dataclass(frozen=True, eq=False)
class Batch:
    """B sequences of at most T tokens. ``numbers``: theirs in the data; ``tokens_BT`` int64; ``loss_mask_BT`` bool,
    False in the padding; ``lengths``: without the padding."""

    numbers: tuple[int, ...]
    tokens_BT: Tensor
    loss_mask_BT: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, data: TokenDataset, numbers: Sequence[int]) -> Batch:
        """The sequences of these numbers."""
        lengths = [len(data.sequences[number]) for number in numbers]
        tokens_BT = torch.empty(len(lengths), max(lengths), dtype=torch.int64)
        loss_mask_BT = torch.zeros(tokens_BT.shape, dtype=torch.bool)
        for row, (number, length) in enumerate(zip(numbers, lengths, strict=True)):
            tokens_BT[row, :length], tokens_BT[row, length:] = data.sequences[number], data.sequences[number][-1]
            loss_mask_BT[row, :length] = data.loss_masks[number]
        return cls(tuple(numbers), tokens_BT, loss_mask_BT, tuple(lengths))

    @property
    def num_tokens(self) -> int:
        """Without the padding."""
        return sum(self.lengths)


def longest_first(data: TokenDataset) -> list[int]:
    """Numbers of the sequences: batches waste little padding, and the first one takes the most memory."""
    return sorted(range(len(data.sequences)), key=lambda number: -len(data.sequences[number]))


def for_each_batch(
    data: TokenDataset,
    most_tokens: int,
    measure: Callable[[Batch], Mapping[str, Mean]],
    phase: str,
    checkpoint: Checkpoint,
    reporter: Reporter,
    label: str,
) -> int:
    """One pass over the sequences that ``checkpoint`` does not count as done in ``phase``, in batches of at most
    ``most_tokens``, padding included: ``measure`` returns a batch's statistics, which are merged in the batches' order.

    Returns the most tokens of a batch at the end: fewer than given, if the device ran out of memory.

    Raises:
        UsageError: a single sequence does not fit into the device's memory.
    """
    order = longest_first(data)

    def measure_run(run: range) -> Mapping[str, Mean] | None:
        return _within_memory(measure, Batch.of(data, [order[position] for position in run]))

    while True:
        runs = _runs([len(data.sequences[number]) for number in order], most_tokens, checkpoint.state.done[phase])
        too_large = checkpoint.run(phase, runs, measure_run, reporter, label)
        if too_large is None:
            return most_tokens
        width = len(data.sequences[order[too_large.start]])
        most_tokens = len(too_large) // 2 * width
        require_smaller(most_tokens, f"one sequence of {width} tokens")
        reporter.say(f"{label}: out of memory, goes on with at most {most_tokens} tokens in a batch")


def _runs(widths: Sequence[int], most_tokens: int, first: int) -> list[range]:
    """The positions from ``first`` on, of sequences of ``widths`` tokens, descending, in batches."""
    runs = []
    while first < len(widths):
        stop = min(len(widths), first + max(1, most_tokens // widths[first]))
        runs.append(range(first, stop))
        first = stop
    return runs


def _within_memory(measure: Callable[[Batch], Mapping[str, Mean]], batch: Batch) -> Mapping[str, Mean] | None:
    try:
        return measure(batch)
    except torch.OutOfMemoryError:  # whose traceback holds the batch's tensors until here
        return None


def require_smaller(most: int, what: str) -> None:
    """UsageError where nothing is left to be halved."""
    if most == 0:
        raise UsageError(
            f"{what} does not fit into the device's memory",
            hint="shorten the sequences (seq_len), or take a larger device",
        )
