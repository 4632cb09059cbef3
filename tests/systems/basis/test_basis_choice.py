"""Bits that are chosen for pages in a basis: the basis first, then KL at 2 bits alone, then the budget."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli_cases import ran_well, save_llama
from transformers import PreTrainedTokenizerBase

from kvcal.errors import UsageError
from kvcal.folder import Folder, profile_data, profile_spec
from kvcal.models.load import LoadedModel, load
from kvcal.plan.page_format import SIDES
from kvcal.plan.plan import load_plan
from kvcal.recipe import Recipe
from kvcal.recipe_files import load_recipe, with_knobs
from kvcal.stages.pipeline import build_plan, compile_folder
from kvcal.stages.profile import record as profile_record
from kvcal.systems.basis.rotated import DISTORTION, SCALE_DTYPE, RotatedLayout
from kvcal.systems.basis.stage import calibration_spec


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> LoadedModel:
    folder = save_llama(tmp_path_factory.mktemp("basis") / "tiny", tokenizer, num_layers=3, head_dim=64)
    return load(str(folder), dtype="float32", device="cpu")


def short(bits: float, **knobs: object) -> Recipe:
    texts = {"data.source": "tasks", "data.num_samples": 4, "data.seq_len": 400, "data.min_len": 0}
    texts |= {"profile.kl_samples": 2, "profile.kl_tokens": 400}
    texts |= {"basis.num_samples": 2, "basis.seq_len": 400, "allocate.bits": bits, **knobs}
    return with_knobs(load_recipe("default"), texts)


def test_bits_follow_from_kl_at_2_bits_within_the_budget(model: LoadedModel, tmp_path: Path) -> None:
    alone = {"allocate.fixed_widths": False}
    plan = build_plan(model, Folder.create(tmp_path), short(3.0, **alone))
    assert plan.bits_per_value() <= 3.0
    assert not (tmp_path / "centre.safetensors").exists()  # a basis has one of its own
    profile = profile_record.load(tmp_path / "profile.safetensors")
    names = {f"{side}.{index}" for side in SIDES for index in (*range(3), "all")}
    assert set(profile.means) == {f"{kind}.{name}" for kind in ("kl", "kl_of_texts") for name in names}
    for side in SIDES:
        kl = profile.kl(1, side)
        two, three = profile.means[f"kl.{side}.all"].result().tolist()  # of all layers together
        law = DISTORTION[3] / DISTORTION[2]
        assert kl[0] > 0 and kl[1] / kl[0] == pytest.approx(min(max(three / two, law / 2), 2 * law))
    with pytest.raises(UsageError, match="without gradients"):
        profile.losses("sensitivity", 0, "k")
    for layer in plan.layers:
        assert {layer.k.quantizer, layer.v.quantizer} <= {"rotated", "uniform"}
        assert layer.k_basis == layer.k_feedback == (layer.k.quantizer == "rotated")
        assert layer.v_basis == layer.v_feedback == (layer.v.quantizer == "rotated")
    # The basis serves other budgets, with the folder's other artifacts, and a compilation by itself.
    told = (tmp_path / "basis.safetensors").stat().st_mtime_ns
    more = build_plan(model, Folder.create(tmp_path), short(4.0, **alone))
    assert (tmp_path / "basis.safetensors").stat().st_mtime_ns == told
    assert 3.0 < more.bits_per_value() <= 4.0 and load_plan(tmp_path / "plan.safetensors").sha256 == more.sha256
    alone = compile_folder(Folder(tmp_path), tmp_path / "other.safetensors")
    assert alone.layers == more.layers
    assert all(torch.equal(tensor, more.tensors[name]) for name, tensor in alone.tensors.items())


def test_the_table_of_distortions_is_that_of_the_grid() -> None:
    generator, signs = torch.Generator().manual_seed(0), torch.ones(128).to(torch.int8)
    norms = 2 ** torch.rand(
        128, 1, 128, 1, generator=generator
    )  # of which a scale of 8 bits meets some better than others
    x = torch.randn(128, 1, 128, 128, generator=generator) * norms
    for bits, share in DISTORTION.items():
        layout = RotatedLayout("k", bits, "token", 128, 128, SCALE_DTYPE, "float32")
        found = layout.decode_pages(layout.encode_pages(x, {"signs": signs}), 1, {"signs": signs})
        assert float(((found - x) / norms).square().mean()) == pytest.approx(share, rel=0.04), bits


def test_recipes_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(UsageError, match=r"expected \['rotated'\]"):
        short(3.0, **{"profile.quantizers": ["uniform"]})
    with pytest.raises(UsageError, match="nothing measures it; expected 'kl'"):
        short(3.0, **{"allocate.objective": "combined"})


def test_a_cpu_reads_less_text_unless_asked(model: LoadedModel) -> None:
    recipe = load_recipe("default")
    assert profile_spec(recipe.profile, model).kl_samples == 2 < recipe.profile.kl_samples
    assert profile_data(recipe, model).seq_len == 512 < recipe.data.seq_len
    assert calibration_spec(recipe, model).num_samples == 6
    thorough = replace(recipe, profile=replace(recipe.profile, kl_measured="all"))
    assert profile_spec(thorough.profile, model) == thorough.profile
    fitted = calibration_spec(thorough, model)  # no longer than the model's context
    assert (fitted.num_samples, fitted.seq_len) == (16, 1024)


def test_a_plan_in_one_command_and_another_budget_by_hand(model: LoadedModel, tmp_path: Path) -> None:
    """`kvcal plan` with report and options; `allocate` takes the objective that was measured."""
    short_texts = [f"--set={name}" for name in ("profile.kl_samples=1", "profile.kl_tokens=320", "basis.num_samples=2")]
    out, sizes = tmp_path / "out", ("--bits", "3", "--batch", "8", "--context", "8192")
    ran_well("plan", model.source, *sizes, "--out", out, "--name", "three", "--data", "tasks", *short_texts)
    why = ran_well("inspect", out / "three" / "plan.safetensors", "--why", 0, "--json").json
    assert "rotated" in (out / "three" / "report.html").read_text() and why
    widths = why["fixed_widths"]
    assert widths["shipped"] in {one["name"] for one in widths["plans"]} and len(widths["plans"]) > 1
    shown = ran_well("inspect", out / "three" / "plan.safetensors", "--why", 0).out
    assert f"{widths['shipped']} (ships)" in shown and "The plan that ships (" in " ".join(shown.split())
    assert "first plan's" in shown and widths["plans"][0].get("ratio") is None
    assert why["ships"] == widths["shipped"]
    ran_well("allocate", out, "--bits", "4", "--name", "four", "--batch", "8", "--context", "8192")
    ran_well("compile", out / "four", "-o", out / "four" / "plan.safetensors")
    plan = load_plan(out / "four" / "plan.safetensors")
    assert plan.bits_per_value() <= 4 and any(layer.k_basis for layer in plan.layers)
