"""Batches of sequences for a stage that measures a model, padded on the right, the longest sequences first.

Causal layers never read what stands behind a token, so right padding changes no real token, without any mask.
Padding repeats a sequence's last token: it brings no token that the data do not hold.

Batches follow from the data and from the most tokens of a batch alone, never from the memory that is free: other
shapes round differently, and the same run must give the same bytes. When the device runs out of memory, the rest of the
stage goes on with half as many tokens in a batch; the reporter says so.

A process may measure several of its batches together, each in its own shapes: a streamed model loads its layers once
for all of them. Which ones depends on the memory and on the number of processes, the statistics do not. So when the
device runs out of memory, fewer go together before a batch is halved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal.data.sequences import TokenDataset
from kvcal.distributed import size
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


# From batches to the statistics of each.
Measure = Callable[[Sequence[Batch]], Sequence[Mapping[str, Mean]]]


def for_each_batch(
    data: TokenDataset,
    most_tokens: int,
    measure: Measure,
    phase: str,
    checkpoint: Checkpoint,
    reporter: Reporter,
    label: str,
    at_once: int = 1,
) -> int:
    """One pass over the sequences that ``checkpoint`` does not count as done in ``phase``, in batches of at most
    ``most_tokens``, padding included: ``measure`` takes ``at_once`` batches of a process or fewer, and returns their
    statistics, which are merged in the batches' order.

    Returns the most tokens of a batch at the end: fewer than given, if the device ran out of memory.

    Raises:
        UsageError: a single sequence does not fit into the device's memory.
    """
    order = longest_first(data)

    def measure_runs(runs: Sequence[range]) -> Sequence[Mapping[str, Mean]]:
        return _within_memory(measure, [Batch.of(data, [order[position] for position in run]) for run in runs])

    while True:
        runs = _runs([len(data.sequences[number]) for number in order], most_tokens, checkpoint.state.done[phase])
        too_large = checkpoint.run(phase, runs, _looking_ahead(measure_runs, runs, at_once), reporter, label)
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


def _looking_ahead(
    measure_runs: Callable[[Sequence[range]], Sequence[Mapping[str, Mean]]], runs: Sequence[range], at_once: int
) -> Callable[[range], Mapping[str, Mean] | None]:
    """The statistics of a run, measured together with those that this process will be asked for next; with half as many
    from then on where memory does not suffice. None where it does not suffice for the run alone."""
    found: dict[range, Mapping[str, Mean]] = {}

    def measure_run(run: range) -> Mapping[str, Mean] | None:
        nonlocal at_once
        while run not in found:
            mine = runs[runs.index(run) :: size()][:at_once] if run in runs else [run]  # or rank 0 has other runs
            found.update(zip(mine, measure_runs(mine), strict=False))
            if run not in found and len(mine) == 1:
                return None
            at_once = at_once if run in found else len(mine) // 2
        return found.pop(run)

    return measure_run


def _within_memory(measure: Measure, batches: Sequence[Batch]) -> Sequence[Mapping[str, Mean]]:
    """Nothing where memory does not suffice."""
    try:
        return measure(batches)
    except torch.OutOfMemoryError:  # whose traceback holds the batches' tensors until here
        return ()


def require_smaller(most: int, what: str) -> None:
    """UsageError where nothing is left to be halved."""
    if most == 0:
        raise UsageError(
            f"{what} does not fit into the device's memory",
            hint="shorten the sequences (seq_len), or take a larger device",
        )
