"""A checkpoint that holds other statistics than its stage declares is discarded, whatever its digest says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from partial_subjects import STAGES, use_partial, write_partial
from torch import Tensor

from kvcal import artifact
from kvcal.errors import ArtifactError

Tensors = dict[str, Tensor]


def first(names: dict) -> str:
    return min(names)


def put(values: dict, value: object) -> None:
    values[first(values)] = value


SPOILED: dict[str, Callable[[dict, Tensors], object]] = {
    "missing key 'counts'": lambda body, tensors: body.pop("counts"),
    "unknown key 'more'": lambda body, tensors: body.update(more=1),
    "counts": lambda body, tensors: body["counts"].popitem(),
    "done.* = '3'": lambda body, tensors: put(body["done"], "3"),
    "done.* = -1": lambda body, tensors: put(body["done"], -1),
    "counts.* = 0, expected": lambda body, tensors: put(body["counts"], 0),
    "counts.* = 1e": lambda body, tensors: put(body["counts"], 1e30),
    "phases": lambda body, tensors: body["done"].update(more=1),
    "counts .* are not the stage's": lambda body, tensors: tensors.pop(first(tensors)),
    "int64 ": lambda body, tensors: put(tensors, tensors[first(tensors)].long()),
    r", expected .* \[": lambda body, tensors: put(tensors, tensors[first(tensors)][None]),
    "holds values from": lambda body, tensors: tensors[first(tensors)].fill_(1e38),
}
STRANGER = "expected|missing tensor|unknown tensor|no plan's sha256|plans after"


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("partial")
    paths = {name: folder / name for name in STAGES}
    for name, path in paths.items():
        write_partial(name, path)
    return paths


def spoiled(name: str, sound: Path, target: Path, change: Callable[[dict, Tensors], object]) -> Path:
    stored = artifact.read(sound, f"{name}-partial", 1)
    tensors = dict(stored.tensors)
    change(stored.body, tensors)
    artifact.write(target, replace(stored, tensors=tensors))
    return target


@pytest.mark.parametrize("name", STAGES)
def test_content_that_is_not_declared(name: str, sound: dict[str, Path], tmp_path: Path) -> None:
    use_partial(name, sound[name])
    for message, change in SPOILED.items():
        path = spoiled(name, sound[name], tmp_path / "x", change)
        with pytest.raises(ArtifactError, match=f"is discarded: .*{message}"):
            use_partial(name, path)


@pytest.mark.parametrize("name", STAGES)
def test_another_statistic_and_more_steps_than_there_are(name: str, sound: dict[str, Path], tmp_path: Path) -> None:
    def rename(body: dict, tensors: Tensors) -> None:
        old = first(tensors)
        body["counts"][old + "x"], tensors[old + "x"] = body["counts"].pop(old), tensors.pop(old)

    def more_steps(body: dict, tensors: Tensors) -> None:
        put(body["done"], 10**6)

    for change in (rename, more_steps):
        path = spoiled(name, sound[name], tmp_path / "x", change)
        with pytest.raises(ArtifactError, match=f"is discarded: .*({STRANGER})"):
            use_partial(name, path)


def test_what_a_stage_measured_counts_as_often_as_it_was_measured(sound: dict[str, Path], tmp_path: Path) -> None:
    """A sequence less than the sums are of: it would be added twice."""

    def a_step_less(body: dict, tensors: Tensors) -> None:
        body["done"]["gradient samples"] -= 1

    path = spoiled("profile", sound["profile"], tmp_path / "x", a_step_less)
    with pytest.raises(ArtifactError, match="counts.* = 3, expected 2"):
        use_partial("profile", path)
