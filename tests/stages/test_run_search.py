"""The search through the pipeline on a tiny model: every kind of composition at once, bytes, resuming."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import save_llama
from transformers import PreTrainedTokenizerBase

from kvcal import artifact
from kvcal.data.sequences import TokenDataset
from kvcal.errors import ArtifactError, InfeasibleBudget
from kvcal.models.load import LoadedModel, load
from kvcal.plan.page_format import SIDES
from kvcal.plan.plan import Plan, load_plan, plan_bytes
from kvcal.progress import Silent
from kvcal.recipe import Recipe
from kvcal.recipe_files import load_recipe
from kvcal.run import pipeline
from kvcal.stages import search as run_search
from kvcal.stages.divergence import KLMeter, Text, kl_texts
from kvcal.stages.predictors import stage as fit_predictors
from kvcal.stages.predictors.record import PredictorRecord
from kvcal.stages.predictors.stage import _Fitting, run_fit_predictors
from kvcal.stages.search.record import KIND, SCHEMA
from kvcal.stages.search.record import load as load_search
from kvcal.stages.search.record import save as save_search
from kvcal.stages.verify import verify_plan
from kvcal.tables import search_table

RECIPE = """
[data]
source = "tasks:times"
num_samples = 8
seq_len = 384
[cache]
num_sink_tokens = 2
k_recent_window = 0
v_recent_window = 0
[allocate]
bits = BITS
batch = 4
context = 20000
[reparam]
position_scale = 1.0
num_steps = 2
num_samples = 2
seq_len = 300
[predictors]
kind = "linear"
[search]
keys = [
  { num_bits = 2, axis = "channel", group_size = 128, boost = { score = "query_range", tiers = [
    { num_bits = 4, share = 0.25 },
  ] } },
  { num_bits = 3, axis = "token", group_size = 32, rescale = true },
  { num_bits = 2, axis = "token", lattice_dim = 2, predicted = true },
]
values = [{ num_bits = 2, group_size = 32 }, { num_bits = 2, lattice_dim = 2, predicted = true }, { num_bits = 4 }]
kl_samples = 2
kl_tokens = 384
proxy_plans = 4
refine_rounds = 1
neighbours = 1
[evaluate]
tasks = []
data = { source = "tasks:times", num_samples = 1, seq_len = 300, seed = 1 }
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> LoadedModel:
    folder = save_llama(tmp_path_factory.mktemp("model") / "tiny", tokenizer, dtype=torch.float32)
    return load(str(folder), device="cpu")


class Told(Silent):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def say(self, message: str) -> None:
        self.messages.append(message)


def recipe_of(folder: Path, bits: float) -> Recipe:
    path = folder / "small.toml"
    path.write_text(RECIPE.replace("BITS", str(bits)))
    return load_recipe(str(path))


def test_every_system_in_one_search_and_the_same_after_an_interruption(tmp_path, loaded, monkeypatch):
    recipe = recipe_of(tmp_path, 4.0)
    whole = pipeline.Folder.create(tmp_path / "whole")
    plan = pipeline.build_plan(recipe, loaded, whole, None, Silent())
    report = load_search(whole.search).report
    offered = {option for unit in report.units for option in unit.options}
    assert any("λ" in option for option in offered) and any("predicted" in option for option in offered)
    assert any("query_range" in option for option in offered) and len(report.proxy) == 4
    assert report.searched_kl == min(report.history) and report.num_plans >= 12
    assert report.kl == load_search(whole.search).allocation.loss <= report.searched_kl
    values = sum(2 * layer.attention.num_kv_heads * layer.head_dim("k") for layer in plan.layers) * 4 * 20000
    assert plan.predicted_bytes <= 4.0 * values / 8
    assert load_plan(whole.plan).sha256 == plan.sha256
    verify_plan(plan, loaded, 400, Silent())
    data = plan.provenance["calibration"]
    purposes = {stage: record["purpose"] for stage, record in data.items()}
    assert purposes == {"search.fit_data": "fit", "search.reparam_data": "fit", "search.select_data": "select"}
    assert not set(data["search.select_data"]["sequences"]) & set(data["search.fit_data"]["sequences"])

    measured = KLMeter._measure
    calls = []

    def stops(self, *args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        measured(self, *args)

    cut = pipeline.Folder.create(tmp_path / "cut")
    monkeypatch.setattr(KLMeter, "_measure", stops)
    with pytest.raises(KeyboardInterrupt):
        pipeline.build_plan(recipe, loaded, cut, None, Silent())
    assert (cut.path / "search.partial.safetensors").exists() and not cut.search.exists()
    again = pipeline.build_plan(recipe, loaded, cut, None, Silent())
    assert plan_bytes(again) == plan_bytes(plan)
    assert not list(cut.path.glob("*.partial*"))


def forced_recipe(folder: Path, bits: float) -> Recipe:
    """The only choices are boosted keys by query score and predicted values, which must wait for those keys."""
    path = folder / "forced.toml"
    text = RECIPE.replace("BITS", str(bits))
    start, stop = text.index("values ="), text.index("kl_samples")
    text = (
        text[:start]
        + "values = [{ num_bits = 2, lattice_dim = 2, predicted = true }, { num_bits = 8 }]\n"
        + text[stop:]
    )
    start, stop = text.index("  { num_bits = 3, axis"), text.index("]\nvalues")
    path.write_text(text[:start] + text[stop:])
    return load_recipe(str(path))


def test_predicted_values_beside_keys_chosen_by_queries(tmp_path, loaded):
    folder = pipeline.Folder.create(tmp_path / "out")
    plan = pipeline.build_plan(forced_recipe(tmp_path, 8.0), loaded, folder, None, Silent())
    assert plan.needs_queries
    verify_plan(plan, loaded, 400, Silent())
    costs = [unit.costs for unit in load_search(folder.search).report.units if unit.unit == "layer 1 V"]
    assert len(costs[0]) == 2 and costs[0][0] != costs[0][1]
    assert all(len(layer.formats(side)) == 1 for layer in plan.layers for side in SIDES)


@pytest.mark.parametrize("refit_is_worse", [False, True])
def test_the_plan_that_ships_is_the_better_of_two_measured_ones(tmp_path, loaded, monkeypatch, refit_is_worse):
    """Predictors fitted on the chosen layers are measured, too; their plan ships if, and only if, its KL is less."""
    kl, asked, fitted = KLMeter.kl, [], []

    def skewed(self: KLMeter, plans: Sequence[Plan], what: str) -> list[float]:
        found = kl(self, plans, what)
        if "refitted" in what:
            found = [max(asked[-1][2]) + 1.0] if refit_is_worse else [0.0]
        asked.append((what, list(plans), found))
        return found

    def fit(*args: Any) -> PredictorRecord:
        fitted.append(run_fit_predictors(*args))
        return fitted[-1]

    monkeypatch.setattr(KLMeter, "kl", skewed)
    monkeypatch.setattr(fit_predictors, "run_fit_predictors", fit)
    folder, told = pipeline.Folder.create(tmp_path / "out"), Told()
    plan = pipeline.build_plan(forced_recipe(tmp_path, 5.0), loaded, folder, None, told)
    what, [measured], [refitted_kl] = asked[-1]
    report = load_search(folder.search).report
    assert "refitted" in what and len(fitted) == 2 and report.refitted_kl == refitted_kl
    of_first, of_chosen = ({n: t for n, t in one.tensors().items() if "_predictor." in n} for one in fitted)
    shipped, others = (of_first, of_chosen) if refit_is_worse else (of_chosen, of_first)
    names = [name for name in plan.tensors if "_predictor." in name]
    assert names and all(torch.equal(plan.tensors[name], shipped[name]) for name in names)
    assert not any(torch.equal(plan.tensors[name], others[name]) for name in names if name.endswith("weight"))
    assert report.shipped == ("searched" if refit_is_worse else "refitted")
    assert report.kl == (report.searched_kl if refit_is_worse else 0.0)
    assert any(f"the {report.shipped} plan ships" in message for message in told.messages)
    assert (plan.sha256 == measured.sha256) == (not refit_is_worse)
    title, _, _ = search_table(report)
    assert title.endswith(f"the {report.shipped} one ships") and f"{refitted_kl:.4g} with refitted predictors" in title


def test_a_record_whose_loss_is_not_its_kl_is_refused(tmp_path, loaded):
    folder = pipeline.Folder.create(tmp_path / "out")
    pipeline.build_plan(forced_recipe(tmp_path, 5.0), loaded, folder, None, Silent())
    found = load_search(folder.search)
    wrong = replace(found, allocation=replace(found.allocation, loss=found.report.kl + 1.0))
    save_search(wrong, {}, folder.search)
    with pytest.raises(ArtifactError, match="the allocation's loss is"):
        load_search(folder.search)


def test_texts_of_the_fits_are_not_those_of_the_kl(tmp_path, loaded, monkeypatch):
    seen: dict[str, list[TokenDataset]] = {"fit": [], "kl": []}

    def fit(loaded: LoadedModel, layers: Any, tensors: Any, data: TokenDataset, *args: Any) -> PredictorRecord:
        seen["fit"].append(data)
        return run_fit_predictors(loaded, layers, tensors, data, *args)

    def texts(data: TokenDataset, *args: Any) -> list[Text]:
        seen["kl"].append(data)
        return kl_texts(data, *args)

    monkeypatch.setattr(fit_predictors, "run_fit_predictors", fit)
    monkeypatch.setattr(run_search, "kl_texts", texts)
    folder, told = pipeline.Folder.create(tmp_path / "out"), Told()
    pipeline.build_plan(forced_recipe(tmp_path, 5.0), loaded, folder, None, told)
    [fit_print], [kl_print] = ({data.fingerprint for data in datas} for datas in seen.values())
    inputs = artifact.read(folder.search, KIND, SCHEMA).inputs
    assert (inputs["fit_data.fingerprint"], inputs["select_data.fingerprint"]) == (fit_print, kl_print)
    tokens = [{tuple(t.tolist()) for data in datas for t in data.sequences} for datas in seen.values()]
    assert all(tokens) and not tokens[0] & tokens[1]
    assert any("plans to measure: 1 uniform, 4 with one unit changed, 4 random" in message for message in told.messages)


def test_the_chosen_layers_predictors_go_on_and_the_first_ones_are_not_theirs(tmp_path, loaded, monkeypatch):
    """Interrupted when the chosen layers' predictors are fitted: the first fit, of other layers, starts anew, and would
    even if it found that fit's checkpoint in place of its own."""
    recipe = forced_recipe(tmp_path, 5.0)
    whole, cut = (pipeline.Folder.create(tmp_path / name) for name in ("whole", "cut"))
    pipeline.build_plan(recipe, loaded, whole, None, Silent())
    measure_errors = _Fitting._measure_errors
    fits: list[_Fitting] = []

    def stops(self: _Fitting) -> None:
        fits.append(self)
        if len(fits) == 2:
            raise KeyboardInterrupt
        measure_errors(self)

    monkeypatch.setattr(_Fitting, "_measure_errors", stops)
    with pytest.raises(KeyboardInterrupt):
        pipeline.build_plan(recipe, loaded, cut, None, Silent())
    first, chosen = ([(layer.k, layer.v) for layer in fit.layers] for fit in fits)
    assert first != chosen
    left = cut.path / "search.chosen-predictors.partial.safetensors"
    shutil.copy(left, cut.path / "search.predictors.partial.safetensors")
    told = Told()
    pipeline.build_plan(recipe, loaded, cut, None, told)
    assert any("predictors.partial.safetensors is discarded: fitted.layers" in message for message in told.messages)
    assert cut.search.read_bytes() == whole.search.read_bytes()
    assert [message.split(":")[0] for message in told.messages if "goes on after" in message] == [
        "search.partial.safetensors",
        left.name,
    ]
    assert not list(cut.path.glob("*.partial*")) and not list(cut.path.glob("*predictors*"))


def test_a_budget_below_the_smallest_compositions(tmp_path, loaded):
    with pytest.raises(InfeasibleBudget, match="smallest compositions"):
        pipeline.build_plan(recipe_of(tmp_path, 1.0), loaded, pipeline.Folder.create(tmp_path / "out"), None, Silent())
