"""What kvcal compare is made of: which plans it builds, shares by hand, times of artifacts."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compare_cases import BASELINE_NAMES, BUDGETED, FIXED, write_recipes

from kvcal.errors import UsageError
from kvcal.recipe import AllocateSpec
from kvcal.recipe_files import load_recipe
from kvcal.stages import compare as stage_times
from kvcal.stages.compare.record import Point, Share, points_of, share_recovered


@pytest.fixture
def recipes(tmp_path: Path) -> tuple[str, str]:
    return write_recipes(tmp_path)


# Which plans.


def test_points(recipes: tuple[str, str]) -> None:
    points = points_of([*recipes, "kivi-4"], [3, 2.25])
    assert [point.name for point in points] == [*BASELINE_NAMES, "small @ 2.25", "small @ 3", "fixed"]
    assert [point.is_baseline for point in points] == [True] * 3 + [False] * 3
    assert len({point.folder for point in points}) == len(points)
    small = load_recipe(recipes[0])
    assert small.allocate is not None and small.allocate.same_bytes_as == "kivi-2"
    for point, bits in zip(points[3:5], (2.25, 3), strict=True):
        spec = point.recipe.allocate
        assert spec == AllocateSpec(bits=bits, batch=2, context=512, objective="sensitivity") and point.bits == bits
        assert replace(point.recipe, allocate=small.allocate) == small


def test_without_bits_a_recipe_keeps_its_budget(recipes: tuple[str, str]) -> None:
    assert points_of(recipes, ())[3:] == tuple(Point(r.name, r, None, False) for r in map(load_recipe, recipes))


@pytest.mark.parametrize(
    ("names", "bits", "says"),
    [
        (["small", "no-such-recipe"], [], "no-such-recipe"),
        ([], [], "no recipe to compare"),
        (["kivi-2"], [], "no recipe to compare"),
        (["small", "small"], [], "two recipes are named 'small'"),
        (["small", "copy"], [], "'small' and 'copy' are the same recipe"),
        (["twin"], [], "'kivi-4' and 'twin' are the same recipe"),
        (["other/kivi-2"], [], "two recipes are named 'kivi-2'"),
        (["a b", "a,b"], [], "punctuation"),
        (["small"], [0.05], "out of range"),
        (["small"], [16.5], "out of range"),
        (["small"], [-1], "out of range"),
        (["small"], [math.nan], "out of range"),
        (["small"], [2.5, 3, 2.5], "2.5 is given twice"),
        (["fixed"], [2.5], r"none of \['fixed'\] has \[allocate\]"),
    ],
)
def test_bad_input(recipes: tuple[str, str], tmp_path: Path, names: list[str], bits: list[float], says: str) -> None:
    (tmp_path / "other").mkdir()
    contents = {"copy": BUDGETED, "other/kivi-2": FIXED, "twin": (Path("recipes") / "kivi-4.toml").read_text()}
    contents |= {"a b": BUDGETED, "a,b": FIXED}
    for name, content in contents.items():
        (tmp_path / f"{name}.toml").write_text(content)
    paths = [str(path) if (path := tmp_path / f"{name}.toml").exists() else name for name in names]
    with pytest.raises(UsageError, match=says):
        points_of(paths, bits)


# Shares.


def test_share_by_hand() -> None:
    """KIVI-2 loses 0.5 of 0.1 + 0.5, the plan 0.2 of it: 60 % recovered."""
    share = share_recovered((0.3, 0.03), (0.6, 0.04), (0.1, 0.01))
    assert share is not None and share.value == pytest.approx(0.6, abs=1e-15)
    by_hand = math.sqrt(0.03**2 + (0.4 * 0.04) ** 2 + (0.6 * 0.01) ** 2) / 0.5
    assert share.se == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("p", [0.7, 0.6, 0.3, 0.1, 0.05])
def test_error_of_a_share_is_the_delta_method_s(p: float) -> None:
    """Against numerical derivatives; and with a covariance c between any two losses the exact variance is smaller by
    2 c (1 - R + R^2) / (a - r)^2."""
    losses, errors = torch.tensor([p, 0.6, 0.1], dtype=torch.float64), (0.03, 0.04, 0.02)

    def ratio(at: torch.Tensor) -> float:
        return float((at[1] - at[0]) / (at[1] - at[2]))

    steps = torch.eye(3, dtype=torch.float64) * 1e-6
    gradient = torch.tensor([(ratio(losses + h) - ratio(losses - h)) / 2e-6 for h in steps], dtype=torch.float64)
    share = share_recovered(*((float(v), e) for v, e in zip(losses, errors, strict=True)))
    assert share is not None and share.se is not None
    assert share.value == pytest.approx(ratio(losses), abs=1e-12)
    covariance = torch.diag(torch.tensor(errors, dtype=torch.float64) ** 2)
    assert share.se**2 == pytest.approx(float(gradient @ covariance @ gradient), rel=1e-8)
    c, r = 1e-4, share.value
    exact = float(gradient @ (covariance + c * (1 - torch.eye(3, dtype=torch.float64))) @ gradient)
    assert share.se**2 - exact == pytest.approx(2 * c * (1 - r + r * r) / 0.25, rel=1e-7) and exact < share.se**2


def test_no_share_where_the_worst_loses_nothing_beyond_its_error() -> None:
    plan, raw = (0.2, 0.01), (0.1, 0.03)
    assert share_recovered(plan, (0.149, 0.04), raw) is None  # 0.049 of 0.05
    assert share_recovered(plan, (0.151, 0.04), raw) is not None
    assert share_recovered(plan, (0.1, None), (0.1, None)) is None
    assert share_recovered((0.25, 0.01), (0.5, None), (0.0, None)) == Share(0.5, None)


# Times of artifacts.


def test_stage_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(name: str, content: bytes, at: float) -> None:
        (tmp_path / name).write_bytes(content)
        os.utime(tmp_path / name, (at, at))

    seconds: dict[str, float] = {}
    write("old.safetensors", b"old", 50.0)
    write("changed.safetensors", b"before", 51.0)
    monkeypatch.setattr(stage_times.time, "time", lambda: 100.0)
    with stage_times.timed(tmp_path, seconds):
        write("zero.safetensors", b"a", 99.998)  # a coarse clock
        write("plan.safetensors", b"c", 112.5)
        write("changed.safetensors", b"after", 102.0)
        write("x.partial.safetensors", b"d", 103.0)
        write("notes.json", b"{}", 103.0)
    found = stage_times.artifacts(tmp_path)
    assert list(found) == ["old.safetensors", "zero.safetensors", "changed.safetensors", "plan.safetensors"]
    assert [seconds.get(digest) for digest in found.values()] == [None, 0.0, 2.0, 10.5]
    assert stage_times.total(found, seconds) is None
    del found["old.safetensors"]
    assert stage_times.total(found, seconds) == 12.5


def test_what_was_made_before_an_error_has_its_time(tmp_path: Path) -> None:
    seconds: dict[str, float] = {}
    with pytest.raises(KeyboardInterrupt), stage_times.timed(tmp_path, seconds):
        (tmp_path / "a.safetensors").write_bytes(b"a")
        raise KeyboardInterrupt
    assert len(seconds) == 1
