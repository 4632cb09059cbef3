"""``kvcal reparam`` in a folder: λ reaches the plan; the recipes that use it can be read."""

import json
from pathlib import Path

import pytest
import torch
import typer
from cli_cases import save_llama
from transformers import PreTrainedTokenizerBase
from typer.testing import CliRunner

from kvcal import PlanCache
from kvcal.commands.stages import reparam
from kvcal.folder import Folder, Job
from kvcal.models.load import LoadedModel, load
from kvcal.plan.plan import Plan, Workload, load_plan
from kvcal.progress import Silent
from kvcal.recipe_files import load_recipe
from kvcal.stages import pipeline
from kvcal.stages.divergence import deviations, unquantized_plan
from kvcal.stages.formats import fix_folder

RECIPE = """
[data]
source = "tasks"
[formats]
k = { num_bits = 2, axis = "token", num_sink_tokens = 1, recent_window = 0 }
v = { num_bits = 16 }
[reparam]
num_steps = 4
num_samples = 2
seq_len = 300
"""


@pytest.fixture
def model(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A checkpoint in fp32 with one loud rotary pair in every layer's keys."""
    folder = save_llama(tmp_path / "tiny", tokenizer, dtype=torch.float32)
    loaded = load(str(folder), device="cpu")
    with torch.no_grad():
        for layer, geometry in zip(loaded.model.model.layers, loaded.geometry.layers, strict=True):
            dim = geometry.k_head_dim
            for channel in (1, 1 + dim // 2):
                layer.self_attn.k_proj.weight.view(geometry.num_kv_heads, dim, -1)[:, channel] *= 20
                layer.self_attn.q_proj.weight.view(geometry.num_query_heads, dim, -1)[:, channel] /= 20
    loaded.model.save_pretrained(folder)
    return folder


def kl(loaded: LoadedModel, plan: Plan) -> float:
    tokens = torch.randint(3, 100, (1, 300), generator=torch.Generator().manual_seed(0))
    reference = unquantized_plan(loaded.identity, loaded.geometry)
    return float(deviations(loaded.model, reference, [plan], tokens, torch.arange(300)[None] > 200).kl_Pn.mean())


def test_from_the_command_to_plans(tmp_path, model):
    recipe = tmp_path / "small.toml"
    recipe.write_text(RECIPE)
    folder = Folder.create(tmp_path / "out")
    loaded = load(str(model), device="cpu")
    fix_folder(Job(load_recipe(str(recipe)), loaded, folder, Silent(), Workload(1, 512)))
    plain = pipeline.compile_folder(folder, tmp_path / "plain.safetensors")

    app = typer.Typer()
    app.command()(reparam)
    given = [str(folder.path), "--model", str(model), "--recipe", str(recipe), "--device", "cpu", "--json", "--quiet"]
    done = CliRunner().invoke(app, [*given, "--set", "reparam.position_scale=2"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["position_scale"] == 2.0
    assert [layer["index"] for layer in result["layers"]] == [0, 1]
    assert all(layer["alpha"] > 0 and layer["error"] == min(layer["errors"]) for layer in result["layers"])
    table = CliRunner().invoke(app, [*given[:-2], "--set", "reparam.position_scale=2"])
    assert "error without" in table.stdout and "reparam.safetensors is current" in table.output

    plan = pipeline.compile_folder(folder)
    assert all(layer.k_rescale for layer in load_plan(folder.plan).layers)
    assert kl(loaded, plan) < 0.5 * kl(loaded, plain)
    PlanCache(plan, loaded.model.config)

    assert "calibration" not in plain.provenance
    assert plan.provenance["calibration"]["reparam"]["purpose"] == "fit"
