"""A few mutations of every kind of artifact, sealed with a right digest (fuzz_artifacts runs as many as one likes)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from artifact_mutations import content_of, sealed
from artifact_subjects import KINDS, subjects
from fuzz_artifacts import fuzz, outcome
from partial_subjects import run_feedback

from kvcal.errors import ArtifactError
from kvcal.stages import feedback

FILES = 9


@pytest.mark.parametrize("kind", KINDS)
def test_mutants_are_refused_or_hold_what_they_say(kind: str) -> None:
    chosen = [subject for subject in subjects() if subject.kind == kind]
    assert chosen
    for subject in chosen:
        counts, bad = fuzz(subject, FILES, seed=1)
        assert not bad, (subject.name, bad)
        assert sum(counts.values()) == FILES and counts["refused"] > 0


@pytest.mark.parametrize("name", ["num_tokens", "query_since"])
def test_a_prefix_with_more_tokens_than_it_holds_takes_no_memory(name: str, tmp_path: Path) -> None:
    """Found by mutated files: room for 2^33 tokens was made before the file's own were counted."""
    name_of = "values alone, from keys that queries chose"
    [subject] = [one for one in subjects() if (one.kind, one.name) == ("prefix", name_of)]
    subject.write(tmp_path / "file")
    head, tensors = content_of((tmp_path / "file").read_bytes())
    body = dict(head["body"])
    assert body["query_since"]
    body[name] = 2**33 if name == "num_tokens" else dict.fromkeys(body["query_since"], 2**63 - 1)
    (tmp_path / "file").write_bytes(sealed(head | {"body": body}, tensors))
    found, message = outcome(subject, tmp_path / "file")
    assert found == "refused" and name in message


def test_a_hessian_that_is_none_is_an_error_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by mutated files, too: sums that no queries give."""
    hessians = feedback._Calibration.hessians

    def indefinite(self: feedback._Calibration, means: Any) -> dict[Any, torch.Tensor]:
        found = {place: hessian.clone() for place, hessian in hessians(self, means).items()}
        for hessian in found.values():
            hessian[:, 0, 0] -= hessian.diagonal(dim1=1, dim2=2).sum(1) / 2
        return found

    monkeypatch.setattr(feedback._Calibration, "hessians", indefinite)
    with pytest.raises(ArtifactError, match="Hessian of layer 0's k is not positive definite") as error:
        run_feedback(tmp_path / "x.safetensors")
    assert error.value.hint is not None and "x.partial.safetensors" in error.value.hint
