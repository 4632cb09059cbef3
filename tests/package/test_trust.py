"""Short versions of the scripts whose counts docs/measurements.md states: threads, soaks. Mutated files are in
test_fuzz_artifacts."""

import pytest
import soak_caches
import threaded_requests

from kvcal.errors import NonFiniteActivations


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
