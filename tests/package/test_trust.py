"""Short versions of the scripts whose counts docs/measurements.md states: threads, soaks, and mutated files
(which fuzz_artifacts seals with a right digest)."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import soak_caches
import threaded_requests
from artifact_subjects import RECORDS, plans
from fuzz_artifacts import canonical, content_of, fuzz, sealed

from kvcal.artifact import COMMANDS, kind_of
from kvcal.errors import ArtifactError, NonFiniteActivations


@pytest.mark.parametrize("kind", threaded_requests.KINDS)
def test_threaded_requests_are_those_alone(kind: str) -> None:
    assert threaded_requests.compare(kind, 3, 3, seed=0) == {"served": 3, "differ": 0}


@pytest.mark.parametrize("kind", soak_caches.KINDS)
def test_soaked_caches_keep_their_bytes_and_rows(kind: str) -> None:
    counts = soak_caches.soak(kind, 1900, seed=0)
    assert counts["tokens"] >= 1900 and counts["rounds"] > 1 and counts["wrong"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", soak_caches.KINDS)
def test_soaked_caches_on_a_gpu(kind: str) -> None:
    counts = soak_caches.soak(kind, 6_000, seed=0, device="cuda")
    assert counts["tokens"] >= 6_000 and counts["wrong"] == 0


def test_a_soak_finds_wrong_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_caches.PlanCache, "nbytes", property(lambda cache: 1))
    assert soak_caches.soak("ragged", 300, seed=0)["wrong"] > 0


def test_a_soak_finds_what_is_read_and_was_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The poison comes late, over tokens that are read again."""
    fed = soak_caches.feed

    def late(model, cache, ids, cuts=(), mask=None):
        logits = fed(model, cache, ids, cuts, mask)
        if cache.static is not None:
            soak_caches.poison(cache)
        return logits

    monkeypatch.setattr(soak_caches, "feed", late)
    with pytest.raises(NonFiniteActivations):
        soak_caches.soak("ragged, static", 300, seed=0)


FILES = 6


def test_mutants_are_refused_or_hold_what_they_say() -> None:
    """Plans come from others; what stages write for each other is held against its digest."""
    for name, plan in plans().items():
        counts, bad = fuzz(name, plan, range(FILES), seed=1)
        assert not bad, bad
        assert sum(counts.values()) == FILES and counts["refused"] > 0


@pytest.mark.parametrize("kind", RECORDS)
def test_a_file_of_another_build_is_refused_with_the_command_that_makes_it(kind: str, tmp_path: Path) -> None:
    (made, module), path = RECORDS[kind], tmp_path / "file"
    load = partial(module.load, kind=kind) if kind == "feedback" else module.load
    module.save(made(), {}, path)
    load(path)
    command, content = COMMANDS[str(kind_of(path))], content_of(path.read_bytes())
    body = json.loads(content.body) | {"a_key_of_another_build": 1}
    path.write_bytes(sealed(replace(content, body=canonical(body))))
    with pytest.raises(ArtifactError, match="a_key_of_another_build") as refused:
        load(path)
    assert refused.value.hint == f"delete the file and run the stage that makes it again: {command}"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="truncated") as refused:
        load(path)
    again = f"check the path; if it is the right one, delete the file and run the stage that makes it again: {command}"
    assert refused.value.hint == again
