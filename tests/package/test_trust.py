"""Short versions of the scripts whose counts docs/measurements.md states: kills, threads, soaks. Mutated files are in
test_fuzz_artifacts."""

from __future__ import annotations

from pathlib import Path

import kill_commands
import pytest
import soak_caches
import threaded_requests

from kvcal.__main__ import PANELS
from kvcal.errors import NonFiniteActivations

READERS = {"size", "recipes", "models", "doctor", "inspect", "explain", "diff", "verify", "generate"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> kill_commands.Finished:
    return kill_commands.Finished(tmp_path_factory.mktemp("killed"))


@pytest.mark.parametrize("name", ["plan", "tune"])
def test_a_killed_command_ends_with_the_same_bytes(finished: kill_commands.Finished, name: str) -> None:
    finished.make(name)
    counts = kill_commands.kill_and_compare(name, finished, 1, seed=0)
    assert counts["kills"] >= 1 and counts["finished"] > 0 and counts["differ"] == 0


def test_kills_are_found_to_differ_if_they_do(
    finished: kill_commands.Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts can fail."""
    finished.make("plan")
    written = iter(range(100))

    def other_bytes(name: str, place: Path, out: Path, seconds: float | None) -> bool:
        (out / "a.safetensors").write_bytes(bytes([next(written)]))
        return seconds is not None

    monkeypatch.setattr(kill_commands, "killed", other_bytes)
    counts = kill_commands.kill_and_compare("plan", finished, 3, seed=0)
    assert counts["differ"] == counts["finished"] > 0


def test_every_command_that_writes_is_killed() -> None:
    """But for those that need a hub, a GPU, or another program's file."""
    written = {
        name
        for panel, commands in PANELS.items()
        for name in commands
        if panel not in ("GPU", "Serving engines") and name not in READERS | {"push", "import-kvtuner"}
    }
    assert {line.text.split()[0] for line in kill_commands.LINES.values()} == written


@pytest.mark.parametrize("kind", threaded_requests.KINDS)
def test_threaded_requests_are_those_alone(kind: str) -> None:
    assert threaded_requests.compare(kind, 6, 3, seed=0) == {"served": 6, "differ": 0}


@pytest.mark.parametrize("kind", soak_caches.KINDS)
def test_soaked_caches_keep_their_bytes_and_rows(kind: str) -> None:
    counts = soak_caches.soak(kind, 2500, seed=0)
    assert counts["tokens"] >= 2500 and counts["rounds"] > 1 and counts["wrong"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", soak_caches.KINDS)
def test_soaked_caches_on_a_gpu(kind: str) -> None:
    counts = soak_caches.soak(kind, 20_000, seed=0, device="cuda")
    assert counts["tokens"] >= 20_000 and counts["wrong"] == 0


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
