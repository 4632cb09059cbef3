"""A few mutations of every kind of artifact, sealed with a right digest (fuzz_artifacts runs as many as one likes)."""

from __future__ import annotations

import pytest
from artifact_subjects import KINDS, subjects
from fuzz_artifacts import fuzz

FILES = 9


@pytest.mark.parametrize("kind", KINDS)
def test_mutants_are_refused_or_hold_what_they_say(kind: str) -> None:
    chosen = [subject for subject in subjects() if subject.kind == kind]
    assert chosen
    for subject in chosen:
        counts, bad = fuzz(subject, FILES, seed=1)
        assert not bad, (subject.name, bad)
        assert sum(counts.values()) == FILES and counts["refused"] > 0
