"""``kvcal inspect --why``: what each option of a layer costs, after a profile and a search; and what is
refused."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_cases import RECIPE, ran_well, run_kvcal, save_llama
from transformers import PreTrainedTokenizerBase

from kvcal.errors import ArtifactError
from kvcal.folder import Folder
from kvcal.plan.page_format import RAW
from kvcal.plan.plan import Workload, load_plan
from kvcal.stages.allocate.stage import allocation_of
from kvcal.stages.profile.record import load as load_profile
from kvcal.stages.search import load as load_search

SIZES = ("--batch", 2, "--context", 4096)
SEARCH = """[search]
kl_samples = 2
kl_tokens = 256
systems = ["{}"]
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A model of two layers, and plans of it: plans/a by a profile, searched/ by a search."""
    folder = tmp_path_factory.mktemp("why")
    model = save_llama(folder / "model", tokenizer)
    (folder / "small.toml").write_text(RECIPE.replace("batch = 2\n", 'batch = 2\nobjective = "sensitivity"\n'))
    search = SEARCH.format(folder / "small.toml")
    (folder / "searched.toml").write_text(RECIPE.replace('same_bytes_as = "kivi-2"', "bits = 5.0") + search)
    small = ("--recipe", folder / "small.toml", "--out", folder / "plans", "--name", "a", "--bits", 4.5)
    ran_well("plan", model, *small, *SIZES, "--quiet", "-o", folder / "elsewhere.safetensors")
    ran_well("search", folder / "searched.toml", "--model", model, "--out", folder / "searched", *SIZES, "--quiet")
    return folder


def why(plan: Path, layer: int) -> dict[str, Any]:
    return ran_well("inspect", plan, "--why", layer, "--json").json


def test_options_of_a_profile_have_its_figures(made: Path) -> None:
    path = made / "plans" / "a" / "plan.safetensors"
    plan, profile = load_plan(path), load_profile(made / "plans" / "profile.safetensors")
    for layer in plan.layers:
        index, geometry, found = layer.geometry.index, layer.attention, why(path, layer.geometry.index)
        assert found["measure"] == "sensitivity loss"
        for side, dim in (("k", geometry.k_head_dim), ("v", geometry.v_head_dim)):
            options = [option for option in found["options"] if option["place"] == f"layer {index} {side.upper()}"]
            losses = profile.losses("sensitivity", index, side)
            costs = {profile.setup.cache.format(side, *one): sum(loss) for one, loss in losses.items()} | {RAW: 0.0}
            assert [option["option"] for option in options] == [fmt.label for fmt in costs]
            sizes = [f.nbytes(side, geometry.num_kv_heads, dim, plan.cache_dtype, plan.workload.lengths) for f in costs]
            assert [option["nbytes"] for option in options] == sizes
            for measure in ("loss", "sensitivity"):
                assert [option[measure] for option in options] == pytest.approx(list(costs.values()))
            chosen = [option["option"] for option in options if option["is_chosen"]]
            assert chosen == [layer.format(side).label]
    shown = ran_well("inspect", path, "--why", 1).out
    assert "layer 1 V" in shown and "layer 0" not in shown and "(chosen)" in shown


def test_options_of_a_search_are_those_of_the_system_that_ships(made: Path) -> None:
    folder = Folder(made / "searched")
    assert load_search(folder.search).report.shipped == "small"
    for layer in (0, 1):
        assert why(folder.plan, layer) == why(folder.path / "systems" / "small" / "plan.safetensors", layer)
    assert "(chosen)" in ran_well("inspect", folder.plan, "--why", 0).out


def test_a_plan_that_was_written_elsewhere_keeps_its_reasons(made: Path, tmp_path: Path) -> None:
    """Also when it is moved: the file has them itself, and is the same plan, of little more bytes."""
    here, moved = made / "plans" / "a" / "plan.safetensors", tmp_path / "moved.safetensors"
    shutil.copy(made / "elsewhere.safetensors", moved)
    assert load_plan(moved) == load_plan(here) and load_plan(moved).sha256 == load_plan(here).sha256
    for layer in (0, 1):
        ours, theirs = why(moved, layer), why(here, layer)
        for one, other in zip(ours["options"], theirs["options"], strict=True):
            assert one | {"loss": 0, "sensitivity": 0, "kl": 0} == other | {"loss": 0, "sensitivity": 0, "kl": 0}
            numbers = [key for key in ("loss", "sensitivity", "kl") if other[key] is not None]
            assert [one[key] for key in numbers] == pytest.approx([other[key] for key in numbers], rel=1e-5)
    assert "layer 1 V" in (shown := ran_well("inspect", moved, "--why", 1).out) and "(chosen)" in shown
    assert run_kvcal("inspect", moved, "--why", 7).code == 2
    ran_well("compile", here.parent, "-o", tmp_path / "compiled.safetensors")
    assert (tmp_path / "compiled.safetensors").read_bytes() == moved.read_bytes()
    assert 0 < moved.stat().st_size - here.stat().st_size < 100 * (len(ours["options"]) + 1) * 2


def test_without_its_artifacts_a_plan_has_no_reasons(made: Path, tmp_path: Path) -> None:
    path = made / "plans" / "a" / "plan.safetensors"
    done = run_kvcal("inspect", path, "--why", 7)
    assert done.code == 2 and "layer 7: nothing was chosen there" in done.err
    assert "layers with options: 0, 1" in done.err
    shutil.copy(path, tmp_path / "plan.safetensors")
    done = run_kvcal("inspect", tmp_path / "plan.safetensors", "--why", 0)
    assert done.code == 5 and "allocation.safetensors is missing" in done.err
    assert "write the plan again with -o of `kvcal plan` or `compile`" in done.err
    shutil.copy(path.with_name("allocation.safetensors"), tmp_path)
    done = run_kvcal("inspect", tmp_path / "plan.safetensors", "--why", 0)
    assert done.code == 5 and "profile.safetensors is missing" in done.err
    (tmp_path / "profile.safetensors").write_bytes(b"another")
    done = run_kvcal("inspect", tmp_path / "plan.safetensors", "--why", 0)
    assert done.code == 5 and "profile.safetensors is not the one that the plan was made from" in done.err
    shutil.copy(made / "searched" / "plan.safetensors", tmp_path)
    done = run_kvcal("inspect", tmp_path / "plan.safetensors", "--why", 0)
    assert done.code == 5 and "allocation.safetensors is of another plan" in done.err
    plan = load_plan(path)
    for other in (replace(plan, workload=Workload(1, 4096)), replace(plan, model=replace(plan.model, id="other"))):
        with pytest.raises(ArtifactError, match="is of another plan"):
            allocation_of(other, Folder(path.parent))


def test_fixed_formats_have_no_reason(made: Path, tmp_path: Path) -> None:
    few = ("--set", "evaluate.tasks=[]", "--set", "evaluate.against=[]", "--samples", 1, "--seq-len", 200)
    ran_well("run", "kivi-2", "--model", made / "model", "--out", tmp_path, *few)
    done = run_kvcal("inspect", tmp_path / "plan.safetensors", "--why", 0)
    assert done.code == 5 and "nothing was chosen: the recipe fixes the formats" in done.err
    assert (tmp_path / "report.html").is_file()
