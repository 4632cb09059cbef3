"""λ through the packed cache: a block run again reads what the cache reads. ``kvcal transform`` in a folder: λ
reaches the plan."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from cli_cases import save_llama
from reparam_cases import DATA, PER_TOKEN, layers_of, outlier_model, run
from tiny_models import as_loaded, built, measured
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typer.testing import CliRunner

from kvcal import PlanCache
from kvcal.commands.stages import transform
from kvcal.errors import ArtifactError
from kvcal.folder import Folder, Job
from kvcal.geometry import ModelIdentity
from kvcal.models.attention import attention_modules
from kvcal.models.load import LoadedModel, load
from kvcal.models.supported_layers import geometry_of
from kvcal.models.taps import rereading
from kvcal.plan.layer import LayerPlan, bare_layers
from kvcal.plan.page_format import RAW
from kvcal.plan.plan import Plan, Workload, load_plan, save_plan
from kvcal.progress import Silent
from kvcal.recipe_files import load_recipe
from kvcal.stages import pipeline
from kvcal.stages.divergence import deviations, feed, unquantized_plan
from kvcal.stages.formats import fix_folder
from kvcal.systems.pm_kvq.lambda_candidates import page_segments, read_back, takes_rescale


@pytest.fixture(scope="module")
def outliers() -> LoadedModel:
    return as_loaded(outlier_model())


def block_outputs(model: PreTrainedModel, plan: Plan, tokens_T: Tensor) -> dict[int, Tensor]:
    """The attention blocks' outputs [1, T, hidden] in order of the modules, through the packed cache."""
    outputs: dict[int, list[Tensor]] = {}
    hooks = [
        module.register_forward_hook(lambda _, args, output, n=n: outputs.setdefault(n, []).append(output[0]))
        for n, module in enumerate(attention_modules(model))
    ]
    for _ in feed(model, PlanCache(plan, model.config), tokens_T[None]):
        pass
    for hook in hooks:
        hook.remove()
    return {number: torch.cat(parts, dim=1) for number, parts in outputs.items()}


# gpt_oss: attention sinks, eager; gemma3: QK-norm, window layers; qwen3_next: gate; stablelm: partial.
@pytest.mark.parametrize("name", ["outliers", "gpt_oss", "gemma3", "qwen3_next", "stablelm"])
def test_rereading_is_what_the_cache_does(name, outliers):
    """The first paged layer's output through the packed cache, with λ and offset, is the block's again."""
    model = outliers.model if name == "outliers" else built(name)
    geometry = outliers.geometry if name == "outliers" else measured(name)
    layer = next(layer for layer in bare_layers(geometry) if layer.is_paged)
    index, heads = layer.geometry.index, layer.attention.num_kv_heads
    layer = replace(layer, k=PER_TOKEN)
    generator = torch.Generator().manual_seed(0)
    lambda_ND = torch.rand(heads, layer.attention.k_head_dim, generator=generator) + 0.5
    offset_ND = torch.randn(heads, layer.attention.k_head_dim, generator=generator)
    layer = replace(layer, k_rescale=True, k_offset=True)
    tensors = {f"layers.{index}.k_rescale": lambda_ND, f"layers.{index}.k_offset": offset_ND}
    layers = tuple(layer if bare.geometry.index == index else bare for bare in bare_layers(geometry))
    identity = ModelIdentity("tiny", geometry.model_type, "c", "w", "t")
    plan = Plan(identity, "float32", layers, Workload(1, 300), {}, tensors)
    tokens_T = DATA.sequences[0]
    found = {}

    def reread_block(captured, reread):
        if captured.layer == index:
            k_read = read_back(layer, "float32", tensors, captured.k_post_BNTD)
            found["read"] = reread(k_read, page_segments(layer, len(tokens_T)))
            found["exact"] = reread(captured.k_post_BNTD, page_segments(layer, len(tokens_T)))

    with rereading(model, reread_block, geometry):
        logits = model(input_ids=tokens_T[None], use_cache=False).logits
    with torch.no_grad():
        torch.testing.assert_close(logits, model(input_ids=tokens_T[None], use_cache=False).logits)
    number = [vars(module)["layer_idx"] for module in attention_modules(model)].index(index)
    expected = block_outputs(model, plan, tokens_T)[number]
    size = float((found["exact"] - expected).abs().max())
    assert size > 1e-2  # quantization shows
    torch.testing.assert_close(found["read"], expected, rtol=0, atol=2e-3 * size)


def test_segments_follow_pages():
    geometry = measured("phi3").layers[0]
    layer = LayerPlan(geometry, PER_TOKEN, RAW)
    assert takes_rescale(layer) and not takes_rescale(replace(layer, k=RAW))
    segments = page_segments(layer, 290)
    assert [(s.start, s.stop, s.is_stored_NT.sum(1).tolist()) for s in segments] == [
        (0, 144, [0, 0]),
        (144, 272, [127, 127]),
        (272, 290, [255, 255]),
    ]
    assert segments[1].is_stored_NT[0].nonzero().flatten().tolist() == list(range(1, 128))


def test_record_makes_a_plan_that_runs(tmp_path, outliers):
    record = run(tmp_path, outliers)
    layers, tensors = record.apply(layers_of(outliers)), record.tensors()
    assert all(layer.k_rescale for layer in layers)
    plan = Plan(outliers.identity, "float32", layers, Workload(1, 300), {}, tensors)
    save_plan(plan, tmp_path / "plan.safetensors")
    assert load_plan(tmp_path / "plan.safetensors").layers == layers
    tokens_T = DATA.sequences[0]
    exact = Plan(outliers.identity, "float32", bare_layers(outliers.geometry), Workload(1, 300), {})
    plain = replace(exact, layers=layers_of(outliers))
    plans = {"exact": exact, "plain": plain, "plan": plan}
    outputs = {name: block_outputs(outliers.model, each, tokens_T)[0] for name, each in plans.items()}
    error = {name: float((outputs[name] - outputs["exact"]).square().sum()) for name in ("plain", "plan")}
    assert error["plan"] < 0.5 * error["plain"]
    other = geometry_of(built("llama"))
    with pytest.raises(ArtifactError, match="whose layers are not the plan's"):
        record.apply(bare_layers(other))
    with pytest.raises(ArtifactError, match="the layer stores them before"):
        record.apply(tuple(replace(layer, k_pages="pre") for layer in layers_of(outliers)))


def test_folded_lambda_is_the_runtime_lambda():
    """Powers of two, so that K / λ has the same bits either way: the folded model with a plain plan says what
    the model with λ in the plan says."""
    model = outlier_model()
    loaded = as_loaded(model)
    lambda_ND = torch.ones(2, 16)
    lambda_ND[:, [5, 13]], lambda_ND[1, [2, 10]] = 4.0, 0.5
    layers = tuple(replace(layer, k_rescale=True) for layer in layers_of(loaded))
    tensors = {f"layers.{i}.k_rescale": lambda_ND for i in range(2)}
    plan = Plan(loaded.identity, "float32", layers, Workload(1, 300), {}, tensors)
    expected = block_outputs(model, plan, DATA.sequences[0])
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.view(2, 16, -1).div_(lambda_ND[:, :, None])
            layer.self_attn.q_proj.weight.view(2, 2, 16, -1).mul_(lambda_ND[:, None, :, None])
    found = block_outputs(model, replace(plan, layers=layers_of(loaded), tensors={}), DATA.sequences[0])
    for number in expected:
        torch.testing.assert_close(found[number], expected[number], rtol=1e-5, atol=1e-6)


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
    app.command()(transform)
    given = [str(folder.path), "--model", str(model), "--recipe", str(recipe), "--device", "cpu", "--json", "--quiet"]
    done = CliRunner().invoke(app, [*given, "--set", "reparam.position_scale=2"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)["reparam"]
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
