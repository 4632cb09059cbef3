"""A few mutations of plans, sealed with a right digest (fuzz_artifacts runs as many as one likes)."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from artifact_subjects import subjects
from fuzz_artifacts import canonical, content_of, fuzz, sealed

from kvcal.artifact import COMMANDS, kind_of
from kvcal.errors import ArtifactError

FILES = 6


def test_mutants_are_refused_or_hold_what_they_say() -> None:
    """Plans come from others; what stages write for each other is held against its digest."""
    for subject in [subject for subject in subjects() if subject.kind == "plan"]:
        counts, bad = fuzz(subject, range(FILES), seed=1)
        assert not bad, bad
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
    again = f"check the path; if it is the right one, delete the file and run the stage that makes it again: {command}"
    assert refused.value.hint == again
