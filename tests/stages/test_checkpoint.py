"""Unfinished statistics: saved on every way out, taken up by the same inputs alone, gone when the stage is
done. And batches that are measured together where memory suffices, and alone before they are halved."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from listener import Listener
from predictor_runs import sequences

from kvcal import artifact
from kvcal.errors import UsageError
from kvcal.stages import checkpoint as module
from kvcal.stages.checkpoint import Batch, Checkpoint, Mean, State, for_each_batch

INPUTS = {"data.fingerprint": "f"}
NUMBERS = torch.arange(6) / 3


def run(path: Path, listener: Listener, inputs: dict[str, Any] = INPUTS) -> Mean:
    """The mean of NUMBERS, one by one; a listener that interrupts at its n-th call has let n - 1 be added."""

    def measure(run: range) -> dict[str, Mean]:
        return {"mean": Mean.of(NUMBERS[run.start : run.stop])}

    start = State({"mean": Mean.empty(())}, {"numbers": 0})
    with Checkpoint(path, "sums", inputs, start, listener) as checkpoint:
        checkpoint.run("numbers", [range(n, n + 1) for n in range(6)], measure, "sums")
        return checkpoint.state.means["mean"]


@pytest.fixture
def interrupted(tmp_path: Path) -> Path:
    """The target of a run that was interrupted after three numbers."""
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "sums.safetensors", Listener(4))
    assert [path.name for path in tmp_path.iterdir()] == ["sums.partial.safetensors"]
    return tmp_path / "sums.safetensors"


def test_an_interrupted_run_goes_on_to_the_same_bits(interrupted: Path, tmp_path: Path) -> None:
    listener = Listener()
    found, expected = run(interrupted, listener), run(tmp_path / "whole", Listener())
    assert listener.said == ["sums.partial.safetensors: goes on after 3 numbers"] and len(listener.steps) == 4
    assert torch.equal(found.total, expected.total) and found.count == 6
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["inputs", "damage", "phases", "counts"])
def test_what_is_not_this_run_s_is_discarded(what: str, interrupted: Path) -> None:
    partial, listener = interrupted.with_name("sums.partial.safetensors"), Listener()
    stored = artifact.read(partial, "sums-partial", module.SCHEMA)
    if what == "damage":
        content = bytearray(partial.read_bytes())
        content[-3] ^= 1
        partial.write_bytes(content)
    if what in ("phases", "counts"):
        body = stored.body | {"done": {"others": 3}} if what == "phases" else stored.body | {"counts": {}}
        artifact.write(partial, replace(stored, body=body))
    run(interrupted, listener, {"data.fingerprint": "g"} if what == "inputs" else INPUTS)
    [said] = listener.said
    assert said.startswith("sums.partial.safetensors is discarded: ") and len(listener.steps) == 7
    assert what != "inputs" or 'data.fingerprint is "f", expected "g"' in said


def test_statistics_are_saved_now_and_then_and_on_every_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process has no chance to save: what was saved in time is taken up."""
    monkeypatch.setattr(module, "SAVE_SECONDS", 0.0)
    partial, seen = tmp_path / "sums.partial.safetensors", []

    class Watcher(Listener):
        def __call__(self, done: int, total: int, label: str) -> None:
            seen.append(partial.exists())
            if done == 5:
                raise UsageError("no more")

    with pytest.raises(UsageError):
        run(tmp_path / "sums.safetensors", Watcher())
    assert seen == [False] + 5 * [True] and partial.exists()


def groups_within(room: int, at_once: int, path: Path) -> tuple[list[list[int]], int, list[str]]:
    """Numbers of sequences in the batches of each group that was tried, of 7 sequences of 8 tokens in batches
    of two, on a device with room for so many sequences; the most tokens at the end; and what was said."""
    tried, listener = list[list[int]](), Listener()

    def measure(batches: Sequence[Batch]) -> list[dict[str, Mean]]:
        tried.append([len(batch.numbers) for batch in batches])
        if sum(tried[-1]) > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [{"sum": Mean.of(batch.tokens_BT.double().sum(1) / 3)} for batch in batches]

    data, start = sequences([8] * 7), State({"sum": Mean.empty(())}, {"steps": 0})
    with Checkpoint(path, "sums", {}, start, listener) as checkpoint:
        most = for_each_batch(data, 16, measure, "steps", checkpoint, "sums", at_once)
        mean = checkpoint.state.means["sum"]
    assert mean.count == 7 and float(mean.total) == pytest.approx(sum(int(x.sum()) for x in data.sequences) / 3)
    return tried, most, listener.said


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
