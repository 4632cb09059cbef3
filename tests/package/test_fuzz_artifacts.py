"""A few mutations of every kind of artifact, sealed with a right digest (fuzz_artifacts runs as many as one likes)."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fuzz_artifacts
import pytest
import shards
import torch
from artifact_mutations import canonical, content_of, sealed
from artifact_subjects import KINDS, subjects
from cli_cases import Outcome
from fuzz_artifacts import fuzz, left, outcome_of_command
from partial_subjects import run_feedback
from shards import Lost, Shard, Work

from kvcal.artifact import COMMANDS, kind_of
from kvcal.errors import ArtifactError
from kvcal.stages import feedback

FILES = 9


@pytest.mark.parametrize("kind", KINDS)
def test_mutants_are_refused_or_hold_what_they_say(kind: str) -> None:
    chosen = [subject for subject in subjects() if subject.kind == kind]
    assert chosen
    for subject in chosen:
        counts, bad = fuzz(subject, range(FILES), seed=1)
        assert not bad, (subject.name, bad)
        assert sum(counts.values()) == FILES and counts["refused"] > 0


@pytest.mark.parametrize("kind", ["profile", "allocation", "reparam", "predictors", "feedback"])
def test_a_file_of_another_build_is_refused_with_the_command_that_makes_it(kind: str, tmp_path: Path) -> None:
    subject, path = next(one for one in subjects() if one.kind == kind), tmp_path / "file"
    subject.write(path)
    command, content = COMMANDS[str(kind_of(path))], content_of(path.read_bytes())
    body = json.loads(content.body) | {"a_key_of_another_build": 1}
    path.write_bytes(sealed(replace(content, body=canonical(body))))
    with pytest.raises(ArtifactError, match="a_key_of_another_build") as refused:
        subject.use(path)
    assert refused.value.hint == f"delete the file and run the stage that makes it again: {command}"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="truncated") as refused:
        subject.use(path)
    assert (
        refused.value.hint
        == f"check the path; if it is the right one, delete the file and run the stage that makes it again: {command}"
    )


def test_a_hessian_that_is_none_is_an_error_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by mutated files, too: sums that no queries give."""
    made = feedback._Calibration.hessian

    def indefinite(self: feedback._Calibration, place: Any, means: Any) -> tuple[torch.Tensor, Any]:
        hessian, basis = made(self, place, means)
        hessian = hessian.clone()
        hessian[:, 0, 0] -= hessian.diagonal(dim1=1, dim2=2).sum(1) / 2
        return hessian, basis

    monkeypatch.setattr(feedback._Calibration, "hessian", indefinite)
    with pytest.raises(ArtifactError, match="Hessian of layer 0's k is not positive definite") as error:
        run_feedback(tmp_path / "x.safetensors")
    assert error.value.hint is not None and "x.partial.safetensors" in error.value.hint


def counting(killed_at: int, hangs_at: int) -> Work:
    """A worker's function that adds up a shard's steps, but dies at one and stays at another."""

    def work(shard: Shard, tell: Callable[[int], None]) -> int:
        for step in range(shard.first, shard.last):
            tell(step)
            if step == killed_at:
                os.kill(os.getpid(), signal.SIGSEGV)
            if step == hangs_at:
                time.sleep(60)
        return sum(range(shard.first, shard.last))

    return work


def test_a_step_that_kills_its_process_is_lost_alone() -> None:
    given = [Shard("a", 0, 10), Shard("a", 10, 20), Shard("a", 20, 30)]
    found = list(shards.run(given, functools.partial(counting, 13, 25), 2, seconds=100, patience=3))
    lost = {shard.first: result.why for shard, result in found if isinstance(result, Lost)}
    assert lost == {13: "crash", 25: "hang"}
    assert sum(result for _, result in found if isinstance(result, int)) == sum(range(30)) - 13 - 25
    assert list(left([shard for shard, _ in found], Shard("a", 0, 30))) == []


def test_recorded_files_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Shard("a", 0, 10)
    done = [Shard("a", 2, 4), Shard("b", 0, 9), Shard("a", 7, 12)]
    assert list(left(done, whole)) == [Shard("a", 0, 2), Shard("a", 4, 7)]
    made: list[Shard] = []

    def here(wanted: list[Shard], start: Callable[[], Work], *_: object) -> Iterator[tuple[Shard, object]]:
        made.extend(wanted)
        return ((shard, start()(shard, lambda step: None)) for shard in wanted)

    monkeypatch.setattr(shards, "run", here)
    record = tmp_path / "counts.jsonl"
    arguments = ["fuzz", "--kind", "evaluation", "--command-every", "0", "--record", str(record)]
    for count, first in ((3, 0), (3, None), (5, 3)):
        made.clear()
        monkeypatch.setattr("sys.argv", [*arguments, "--count", str(count)])
        assert fuzz_artifacts.main() == 0
        assert made == ([] if first is None else [Shard("evaluation", first, count)])
    assert [sum(json.loads(line)["counts"].values()) for line in record.read_text().splitlines()] == [3, 2]


@pytest.mark.parametrize(
    ("known", "code", "err", "found"),
    [
        ("accepted", 0, "", "accepted"),
        ("accepted", 5, "error: corrupt", "command"),
        ("refused", 5, "error: corrupt", "refused"),
        ("refused", 1, "Traceback", "command"),
        ("refused", -11, "", "command"),
    ],
)
def test_an_exit_code_that_the_file_does_not_deserve_is_found(
    known: str, code: int, err: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("{}")
    monkeypatch.setattr(fuzz_artifacts, "kvcal_process", lambda *words: Outcome(code, "", err))
    assert outcome_of_command("evaluation", tmp_path / "file", known)[0] == found
