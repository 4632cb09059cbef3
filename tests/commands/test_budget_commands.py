"""A budget through the commands: allocate, transform and compile keep within it, or exit with
3."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from cli_cases import Outcome, ran_well, run_kvcal, save_llama
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from kvcal.plan.plan import load_plan

RECIPE = """
data = { source = "tasks", num_samples = 6, seq_len = 256 }
profile = { num_bits = [2, 4], k_axes = ["token"], group_sizes = [64], kl_samples = 0 }
cache = { num_sink_tokens = 2, k_recent_window = 0, v_recent_window = 0 }
allocate = { kv_budget = "1200000B", batch = 8, context = 1024, objective = "sensitivity" }
evaluate = { against = [], tasks = [], data = { source = "tasks", num_samples = 1, seq_len = 200, seed = 1 } }
"""
REPARAM = "[reparam]\nnum_steps = 2\nnum_samples = 2\nseq_len = 256\n"
PREDICTORS = '[predictors]\nkind = "linear"\ndrop = false\n'
WORKLOAD = ("--batch", 8, "--context", 1024, "--set", "allocate.objective=sensitivity")
BUDGET = 1_200_000


class Commands:
    """The commands in one folder, of one model."""

    def __init__(self, model: Path, recipe: Path, folder: Path) -> None:
        self.model, self.recipe, self.folder = model, recipe, folder

    def __call__(self, command: str, *options: object) -> Outcome:
        if command in ("transform", "fit-predictors"):
            options = ("--model", self.model, "--recipe", self.recipe, *options)
        return run_kvcal(command, self.folder, *options)

    def exact_budget(self) -> int:
        """Of which an allocation leaves nothing."""
        split = self("allocate", "--kv-budget", f"{BUDGET}B", *WORKLOAD, "--json").json["split"]
        return split["fixed"] + split["paged"]

    @property
    def plan_bytes(self) -> int:
        return load_plan(self.folder / "plan.safetensors").predicted_bytes


def with_loud_channels(model: Path) -> Path:
    """A pair of key channels of every head 30 times as loud: per token, λ then pays on any text."""
    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("k_proj.weight"):
            weight.unflatten(0, (2, 16))[:, [3, 11]] *= 30
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A folder with a model, a recipe and its profile."""
    folder = tmp_path_factory.mktemp("profiled")
    model = with_loud_channels(save_llama(folder / "tiny", tokenizer, dtype=torch.float32))
    (folder / "small.toml").write_text(RECIPE)
    ran_well("profile", model, "--out", folder / "out", "--recipe", folder / "small.toml")
    return folder


@pytest.fixture
def commands(profiled: Path, tmp_path: Path) -> Commands:
    folder = shutil.copytree(profiled / "out", tmp_path / "out")
    return Commands(profiled / "tiny", Path(shutil.copy(profiled / "small.toml", tmp_path)), folder)


def reserve_of(done: Outcome) -> str:
    found = re.search(r"--reserve (\d+)", " ".join(done.err.split()))
    assert found is not None, done.err
    return found[1]


def test_predictors_within_the_budget(commands: Commands) -> None:
    budget = commands.exact_budget()
    options = ("--kv-budget", f"{budget}B", *WORKLOAD)
    assert commands("allocate", *options).code == 0
    told = commands("transform", "--set", "predictors.drop=false")
    assert told.code == 0 and "bytes beyond the budget; repeat" in " ".join(told.err.split())
    refused = commands("compile")
    assert refused.code == 3 and f"--reserve {reserve_of(refused)}" in " ".join(told.err.split())

    again = commands("allocate", *options, "--reserve", reserve_of(refused))
    assert again.code == 0 and "reserved for transforms" in again.out
    fitted = commands("fit-predictors", "--set", "predictors.drop=false", "--json")
    assert fitted.code == 0, fitted.err
    kept = [finding for finding in fitted.json["predictors"]["findings"] if finding["reason"] is None]
    assert len(kept) == 2
    done = commands("compile", "--json")
    assert done.code == 0, done.err
    plan = load_plan(commands.folder / "plan.safetensors")
    assert plan.layers[1].k_predictor and plan.layers[1].v_predictor
    assert budget - 150_000 < commands.plan_bytes <= budget


def test_lambda_within_the_budget(commands: Commands) -> None:
    budget = commands.exact_budget()
    exact = ("--kv-budget", f"{budget}B", *WORKLOAD)
    assert commands("allocate", *exact).code == 0
    told = commands("transform", "--set", "reparam.num_steps=2", "--samples", 2, "--seq-len", 256)
    assert told.code == 0 and "bytes beyond the budget; repeat" in " ".join(told.err.split())
    refused = commands("compile")
    assert refused.code == 3 and "more than the budget" in " ".join(refused.err.split()), refused.err
    assert reserve_of(refused) == reserve_of(told) == "256" and not (commands.folder / "plan.safetensors").exists()
    assert commands("allocate", *exact, "--reserve", "256").code == 0
    assert commands("transform", "--set", "reparam.num_steps=2", "--samples", 2, "--seq-len", 256).code == 0
    done = commands("compile")
    assert done.code == 0 and commands.plan_bytes <= budget, done.err
    shown = run_kvcal("inspect", commands.folder / "plan.safetensors").out
    assert "none, made stage by stage: profile, allocate, reparam" in shown


@pytest.mark.parametrize("reparam", [True, False])
def test_a_recipe_reserves_what_follows(commands: Commands, reparam: bool) -> None:
    commands.recipe.write_text(RECIPE + (REPARAM if reparam else PREDICTORS))
    done = ran_well("run", commands.recipe, "--model", commands.model, "--out", commands.folder, "--json")
    split, plan = done.json["allocation"]["split"], load_plan(commands.folder / "plan.safetensors")
    tensors = sum(tensor.nbytes for tensor in plan.tensors.values())
    spent = f"transforms take {tensors} of the {split['reserved']} bytes"
    assert "reserved" not in done.err
    again = commands("compile")
    assert (spent in " ".join(again.err.split())) == (tensors < split["reserved"])
    assert 0 < tensors <= split["reserved"] and plan.tensors.keys() and commands.plan_bytes <= BUDGET
    assert split["kind"] == "kv_budget" and split["budget"] == BUDGET


def test_a_budget_that_16_bits_fit_and_a_context_beyond_the_model_are_told(commands: Commands) -> None:
    done = commands("allocate", "--kv-budget", "1" + "0" * 30, *WORKLOAD, "--json")
    assert done.code == 0 and "16 bits fit" in done.err and "nothing to quantize" in done.err
    assert done.json["loss"] == 0 and "positions" not in done.err
    far = commands("allocate", "--bits", 10, "--batch", 1, "--context", 1025, "--set", "allocate.objective=sensitivity")
    assert far.code == 0 and "1025 tokens is beyond the model's 1024 positions" in far.err
    assert "16 bits fit" not in far.err
    assert commands("compile").code == 0
