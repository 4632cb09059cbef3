"""The search through the pipeline on a tiny model: every kind of composition at once, bytes, resuming."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from cli_cases import save_llama
from transformers import PreTrainedTokenizerBase

from kvcal import pipeline
from kvcal.errors import InfeasibleBudget
from kvcal.formats import SIDES
from kvcal.models.load import LoadedModel, load
from kvcal.plan import load_plan, plan_bytes
from kvcal.progress import Silent
from kvcal.recipe import Recipe, load_recipe
from kvcal.stages.fit_predictors import _Fitting
from kvcal.stages.kl_meter import KLMeter
from kvcal.stages.run_search import load as load_search
from kvcal.stages.verify import verify_plan

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
    assert report.kl == min(report.history) and report.num_plans >= 14
    values = sum(2 * layer.attention.num_kv_heads * layer.head_dim("k") for layer in plan.layers) * 4 * 20000
    assert plan.predicted_bytes <= 4.0 * values / 8
    assert load_plan(whole.plan).sha256 == plan.sha256
    verify_plan(plan, loaded, 400, Silent())
    data = plan.provenance["calibration"]
    purposes = {stage: record["purpose"] for stage, record in data.items()}
    assert purposes == {"search": "fit", "search.reparam_data": "fit", "search.texts": "select"}
    assert not set(data["search.texts"]["sequences"]) & set(data["search"]["sequences"])

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
    plan = pipeline.build_plan(forced_recipe(tmp_path, 6.0), loaded, folder, None, Silent())
    assert plan.needs_queries
    verify_plan(plan, loaded, 400, Silent())
    costs = [unit.costs for unit in load_search(folder.search).report.units if unit.unit == "layer 1 V"]
    assert len(costs[0]) == 2 and costs[0][0] != costs[0][1]
    assert all(len(layer.formats(side)) == 1 for layer in plan.layers for side in SIDES)


class Told(Silent):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def say(self, message: str) -> None:
        self.messages.append(message)


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
