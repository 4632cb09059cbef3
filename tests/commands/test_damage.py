"""A plan that destroys a model: it is measured, named, refused with exit code 7, and let through on demand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cli_cases import ran_well, run_kvcal

from kvcal.models.load import LoadedModel, load
from kvcal.plan.page_format import Format
from kvcal.plan.plan import (
    Plan,
    Workload,
    damage_path,
    is_destroyed,
    load_damage,
    require_undamaged,
    save_damage,
    save_plan,
)
from kvcal.progress import SILENT
from kvcal.recipe_files import load_recipe
from kvcal.run.formats import formats_plan
from kvcal.stages.damage import measure_damage
from kvcal.stages.divergence import unquantized_plan

MODEL = "reasoner-10m"
COARSE = Format(1, "token", 64, 0)  # 1 bit for the keys of a token: outliers take the scale


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(MODEL)


def with_keys(loaded: LoadedModel, index: int, fmt: Format) -> Plan:
    """16 bits but for the keys of one layer."""
    plan = unquantized_plan(loaded.identity, loaded.geometry)
    layers = [replace(layer, k=(fmt,)) if layer.geometry.index == index else layer for layer in plan.layers]
    return replace(plan, layers=tuple(layers), workload=Workload(2, 1024))


@pytest.fixture(scope="module")
def destroyed(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A plan that destroys the model by one layer's keys, and that layer's index."""
    index = loaded.geometry.layers[1].index
    path = tmp_path_factory.mktemp("destroyed") / "plan.safetensors"
    save_plan(with_keys(loaded, index, COARSE), path)
    return path, index


def test_limits() -> None:
    assert is_destroyed(0.51, 1.0) and is_destroyed(0.2, 0.7)
    assert not is_destroyed(0.5, 0.9) and not is_destroyed(0.05, 0.5)  # flat distributions flip for nothing


def test_a_good_plan_passes_and_is_measured_once(loaded: LoadedModel, tmp_path: Path) -> None:
    plan = formats_plan(load_recipe("kivi-4"), loaded, Workload(2, 1024))
    path = tmp_path / "plan.safetensors"
    damage = measure_damage(plan, loaded, (), SILENT, path)
    assert damage is not None and 0 < damage.kl < 0.01 and damage.top1 > 0.95 and damage.num_tokens > 50
    assert damage.worst == () and not damage.is_destroyed
    assert load_damage(path, plan) == damage and load_damage(path, with_keys(loaded, 0, COARSE)) is None
    kept = replace(damage, kl=0.25)  # the file is what is taken the next time
    save_damage(kept, path)
    assert measure_damage(plan, loaded, (), SILENT, path) == kept
    require_undamaged(damage, is_allowed=False)


def test_a_destroyed_plan_names_the_layer_and_side(destroyed: tuple[Path, int], tmp_path: Path) -> None:
    path, index = destroyed
    done = run_kvcal("verify", path, "--model", MODEL)
    assert done.code == 7 and "the plan destroys the model" in done.err and f"layer {index} K" in done.err
    assert "--allow-damage" in done.err
    allowed = ran_well("verify", path, "--model", MODEL, "--allow-damage", "--json")
    assert "warning: the plan destroys the model" in allowed.err
    (check,) = [check for check in allowed.json if check["name"] == "damage"]
    assert f"layer {index} K" in check["detail"] and not damage_path(path).exists()


def test_an_evaluation_refuses_it_after_its_table(destroyed: tuple[Path, int], tmp_path: Path) -> None:
    path, index = destroyed
    arguments = ("eval", path, "--model", MODEL, "--out", tmp_path, "--tasks", "", "--samples", 1, "--seq-len", 400)
    arguments += ("--json",)
    done = run_kvcal(*arguments)
    assert done.code == 7 and done.json["damage"]["worst"][0]["layer"] == index
    assert done.json["damage"]["worst"][0]["side"] == "k" and done.json["damage"]["kl"] > 0.5
    assert ran_well(*arguments, "--allow-damage").json["damage"] == done.json["damage"]
