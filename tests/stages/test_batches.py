"""Batches that are measured together where memory suffices, and alone before they are halved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from predictor_runs import sequences

from kvcal.errors import UsageError
from kvcal.progress import Silent
from kvcal.stages.batches import Batch, for_each_batch
from kvcal.stages.checkpoint import Checkpoint, Mean, State, Statistic


def groups_within(room: int, at_once: int, path: Path) -> tuple[list[list[int]], int, list[str]]:
    """Numbers of sequences in the batches of each group that was tried, of 7 sequences of 8 tokens in batches of two,
    on a device with room for so many sequences; the most tokens at the end; and what was said."""
    tried, said = list[list[int]](), list[str]()

    class Listener(Silent):
        def say(self, message: str) -> None:
            said.append(message)

    def measure(batches: Sequence[Batch]) -> list[dict[str, Mean]]:
        tried.append([len(batch.numbers) for batch in batches])
        if sum(tried[-1]) > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [{"sum": Mean.of(batch.tokens_BT.double().sum(1) / 3)} for batch in batches]

    data, start = sequences([8] * 7), State({"sum": Mean.empty(())}, {"steps": 0})
    with Checkpoint(path, "sums", {}, start, lambda *_: {"sum": Statistic.of(())}, Listener()) as checkpoint:
        most = for_each_batch(data, 16, measure, "steps", checkpoint, Listener(), "sums", at_once)
        mean = checkpoint.state.means["sum"]
    assert mean.count == 7 and float(mean.total) == pytest.approx(sum(int(x.sum()) for x in data.sequences) / 3)
    return tried, most, said


def test_fewer_batches_together_before_a_batch_is_halved(tmp_path: Path) -> None:
    """The bytes of a profile depend on the batches, and not on those that go together."""
    assert groups_within(99, 4, tmp_path / "all") == ([[2, 2, 2, 1]], 16, [])
    assert groups_within(4, 4, tmp_path / "two") == ([[2, 2, 2, 1], [2, 2], [2, 1]], 16, [])
    assert groups_within(2, 4, tmp_path / "one") == ([[2, 2, 2, 1], [2, 2], [2], [2], [2], [1]], 16, [])
    assert groups_within(2, 3, tmp_path / "odd") == ([[2, 2, 2], [2], [2], [2], [1]], 16, [])


def test_a_batch_that_is_too_large_alone_is_halved(tmp_path: Path) -> None:
    tried, most, said = groups_within(1, 2, tmp_path / "halved")
    assert tried[:2] == [[2, 2], [2]] and tried[2:4] == [[1, 1], [1]] and most == 8
    assert said == ["sums: out of memory, goes on with at most 8 tokens in a batch"]
    with pytest.raises(UsageError, match="one sequence of 8 tokens does not fit"):
        groups_within(0, 2, tmp_path / "none")
