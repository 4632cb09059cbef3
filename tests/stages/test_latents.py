"""Multi-head latent attention through the stages: sensitivities, budgets, refusals, and plans from end to
end.

The models are transformers' own modules, tiny, with random weights: a latent of 32 and a rotary key of 8 in
each layer.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cache_cases import model_plan
from cli_cases import RECIPE, ran_well, run_kvcal, save_family
from listener import Listener
from profile_cases import FEW, Watched, data_of, measure, reference_errors, sample_of
from tiny_models import TINY_MODELS, as_loaded, built, measured
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedTokenizerBase

from kvcal import PlanCache, load_plan
from kvcal.engines.support import require_served
from kvcal.errors import UnsupportedModel
from kvcal.plan.layer import LayerPlan, bare_layers, in_formats
from kvcal.plan.plan import RAW, Boost, Format, Plan, Tier, Workload
from kvcal.plan.tensors import layout_tensors
from kvcal.recipe import AllocateSpec, CacheSpec, ProfileSpec
from kvcal.stages.allocate.stage import allocate
from kvcal.stages.divergence import deviations, unquantized_plan
from kvcal.stages.evaluate.stage import load_evaluation
from kvcal.stages.profile import record as profile_record
from kvcal.stages.profile import stage as profile_stage
from kvcal.stages.profile.observers import GradientPass
from kvcal.stages.transform import reserved_bytes
from kvcal.store.workspace import step_workspace
from kvcal.systems.aqua_kv.recipe import PredictorSpec
from kvcal.systems.aqua_kv.record import find_targets
from kvcal.systems.aqua_kv.transform import Predictor
from kvcal.systems.basis import fit as basis
from kvcal.systems.basis.recipe import FeedbackSpec
from kvcal.systems.pm_kvq import reparam as reparam_stage
from kvcal.systems.pm_kvq.recipe import ReparamSpec

TWO_BITS = Format(2, "channel", 32)
QUERY_SCORE = Format(2, "channel", 32, boost=Boost("query_range", (Tier(4, 0.25),)))
SPEC = ProfileSpec(num_bits=(2, 4, 8), group_sizes=(32,), kl_num_bits=(2, 4, 8), kl_samples=1, kl_tokens=220)
CACHE = CacheSpec(num_sink_tokens=2, k_recent_window=8, v_recent_window=8)
WORKLOAD = {"batch": 2, "context": 640}


@pytest.fixture(scope="module")
def measured_profile(tmp_path_factory: pytest.TempPathFactory) -> profile_record.Profile:
    loaded, path = as_loaded(built("deepseek_v3")), tmp_path_factory.mktemp("latents") / "profile.safetensors"
    return profile_stage.run_profile(loaded, data_of(240, 200), SPEC, CACHE, {}, path, Listener())


def layers_in(name: str, latent: Format, rotary: Format = RAW) -> tuple[LayerPlan, ...]:
    return tuple(
        in_formats(layer, latent, latent, rotary) if layer.is_paged else layer for layer in bare_layers(measured(name))
    )


def test_the_sensitivity_is_of_what_is_cached() -> None:
    """The gradients of latents and rotary keys, as the official cache is given them; norms of their
    projection's rows, the norms' and the rotation's own included."""
    tokens_T, mask_T = sample_of(4 + 128 + 20)
    model = TINY_MODELS["deepseek_v3"]()
    found = measure(GradientPass(model, measured("deepseek_v3"), FEW, CacheSpec()), 0, tokens_T, mask_T)
    cache = Watched(model.config)
    logits_TV = model(input_ids=tokens_T.unsqueeze(0), past_key_values=cache, use_cache=True).logits[0]
    torch.nn.functional.cross_entropy(logits_TV[:-1], tokens_T[1:], reduction="none")[mask_T[1:]].mean().backward()
    for number, layer in enumerate(model.model.layers):
        gradient = layer.self_attn.kv_a_proj_with_mqa.weight.grad
        for side, rows in (("k", gradient[:32]), ("v", gradient[32:])):
            expected = reference_errors(cache, number, number, FEW[side], side)
            torch.testing.assert_close(found.errors[number, side].weighted_BNC, expected, rtol=2e-3, atol=0)
            assert found.weight_grad_norms[number, side] == pytest.approx(float(rows.norm()), rel=1e-3)


def test_more_bits_are_nearer_to_16() -> None:
    """Latents of 1 to 8 bits, then rotary keys: KL falls with bits, and is 0 at 16."""
    name = "deepseek_v2"
    loaded, cache_dtype = as_loaded(built(name)), measured(name).cache_dtype
    reference = unquantized_plan(loaded.identity, loaded.geometry)
    tokens_BT, mask_BT = (x.unsqueeze(0) for x in sample_of(300))
    latents = [layers_in(name, Format(bits, "channel", 32)) for bits in (1, 2, 4, 8)]
    rotary = [layers_in(name, RAW, Format(bits, "token", 32)) for bits in (1, 2, 4, 8)]
    others = [layers_in(name, Format(4, quantizer="rotated", group_size=32)), layers_in(name, RAW)]
    plans = [
        Plan(loaded.identity, cache_dtype, layers, Workload(1, 300), {}, tensors=layout_tensors(layers))
        for layers in (*latents, *rotary, *others)
    ]
    *kl, rotated, raw = deviations(loaded.model, reference, plans, tokens_BT, mask_BT).kl_Pn.mean(1).tolist()
    for falling in (kl[:4], kl[4:]):
        assert all(math.isfinite(value) and value > 0 for value in falling)
        assert falling == sorted(falling, reverse=True) and falling[0] > 20 * falling[-1]
    assert 0 < rotated < kl[0] and raw == 0


def test_rotary_keys_stay_at_16_bits_unless_they_are_asked_for(measured_profile: profile_record.Profile) -> None:
    found = {}
    for rotary in (False, True):
        spec = AllocateSpec(kv_budget="330KB", **WORKLOAD, granularity="block", objective="sensitivity", rotary=rotary)
        found[rotary] = allocate(measured_profile, spec, {})
        taken = sum(layer.nbytes("float32", (640, 640), 640) for layer in found[rotary].layers)
        assert found[rotary].split.paged == taken <= 330_000
    assert all(layer.v == RAW and layer.k.num_bits < 16 for layer in found[False].layers)
    assert any(layer.v.num_bits < 16 for layer in found[True].layers)
    assert found[True].loss < found[False].loss


TRANSFORMS = {
    "λ": {"k_rescale": True},
    "offset": {"k_offset": True},
    "before RoPE": {"k_pages": "pre"},
    "keys": {"k_pages": "pre", "k_predictor": Predictor("linear", 0)},
    "values": {"v_predictor": Predictor("linear", 0)},
    "feedback": {"k_feedback": True},
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_heads_are_refused(transform: str) -> None:
    layer = layers_in("deepseek_v3", TWO_BITS, Format(4, "token", 32))[1]
    with pytest.raises(ValueError, match="layer 1 caches latents: latents take no transforms"):
        replace(layer, **TRANSFORMS[transform])


def test_scores_by_queries_are_refused_and_others_are_not() -> None:
    layer = bare_layers(measured("deepseek_v3"))[0]
    with pytest.raises(UnsupportedModel, match="take no score by queries, which meet the keys of heads") as caught:
        in_formats(layer, QUERY_SCORE, TWO_BITS)
    assert "magnitude, variance or range" in str(caught.value.hint)
    with pytest.raises(ValueError, match="layer 0 caches latents: they take no score by queries"):
        LayerPlan(layer.geometry, QUERY_SCORE, RAW)
    kitty = replace(QUERY_SCORE, boost=Boost("magnitude", (Tier(4, 0.25),)))
    assert in_formats(layer, kitty, TWO_BITS, k_pages="pre") == LayerPlan(layer.geometry, kitty, RAW)


def test_stages_of_transforms_say_that_latents_have_none(tmp_path: Path) -> None:
    """Nothing is fitted, nothing is reserved, and the plan stays as it was."""
    loaded, layers = as_loaded(built("deepseek_v3")), layers_in("deepseek_v3", Format(2, "token", 32))
    data, listener = data_of(200), Listener()
    found = reparam_stage.run_reparam(loaded, layers, data, ReparamSpec(), {}, tmp_path / "r", listener)
    assert found.layers == () and found.apply(layers) == layers
    fed = basis.run_basis(loaded, layers, {}, data, FeedbackSpec(), {}, tmp_path / "f", listener)
    assert fed.sides == () and fed.apply(layers) == layers
    for stage in ("reparam", "feedback"):
        assert f"{stage}: latents take no transforms" in "\n".join(listener.said)
    targets = find_targets(layers, PredictorSpec(), "float32")
    assert all(target.shape is None for target in targets)
    assert {"caches latents" in str(target.reason) for target in targets[2::2]} == {True}
    assert reserved_bytes(loaded.geometry, CACHE, {"reparam": ReparamSpec(), "feedback": FeedbackSpec()}) == 0


def test_what_has_kernels_for_heads_refuses_latents() -> None:
    model, plan = built("deepseek_v3"), model_plan(built("deepseek_v3"), TWO_BITS)
    for is_cuda in (False, True):
        with pytest.raises(UnsupportedModel, match="cannot serve this plan: layers 0, 1, 2: latents"):
            require_served(plan, is_cuda)
    with pytest.raises(UnsupportedModel, match="static cache cannot hold layer 0: latents") as caught:
        PlanCache(plan, model.config, max_tokens=64)
    assert "without max_tokens" in str(caught.value.hint)


def test_a_step_has_room_for_the_expanded_heads() -> None:
    """Measured: what the projection and ``expand_kv`` allocate for each token, in one layer."""
    model, layers = built("deepseek_v3"), layers_in("deepseek_v3", TWO_BITS)
    attention = model.model.layers[0].self_attn
    projected = []
    hook = attention.kv_b_proj.register_forward_hook(lambda module, args, output: projected.append(output))
    with torch.no_grad():
        keys, _ = attention.expand_kv(torch.randn(1, 1, 50, 32), torch.randn(1, 1, 50, 8))
    hook.remove()
    expanded = (projected[0].nbytes + keys.nbytes) / 50
    latent = 4 * (32 + 8)
    assert step_workspace(layers, "float32", 2, 512).unpacked == 2 * 512 * (latent + expanded)


def test_from_a_model_to_text(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Profile, allocate, compile, evaluate, verify, inspect, generate, size."""
    model = save_family(tmp_path / "model", tokenizer, "deepseek_v2", 512)
    out, recipe = tmp_path / "out", tmp_path / "tiny.toml"
    recipe.write_text(RECIPE.replace('same_bytes_as = "kivi-2"', 'kv_budget = "290KB"'))
    ran_well("run", recipe, "--model", model, "--out", out, "--json", "-q")
    plan = load_plan(out / "plan.safetensors")
    assert all(layer.attention.is_latent and layer.k.num_bits < 16 and layer.v == RAW for layer in plan.layers)
    rows = {row.name: row for row in load_evaluation(out / "evaluation.json").rows}
    assert rows["tiny"].text.kl > 0 and rows["16-bit"].text.kl < 1e-6

    verified = ran_well("inspect", out / "plan.safetensors", "--model", model)
    assert "allocated = predicted" in verified.out
    inspected = ran_well("inspect", out / "plan.safetensors")
    assert "latent attention: K is the latent, V the rotary key" in inspected.out
    command = ("generate", "--plan", out / "plan.safetensors", "--model", model, "--prompt", "the beginning " * 70)
    told = run_kvcal(*command, "--max-new-tokens", 8, "--json").json
    assert told["cache_bytes"] == plan.nbytes([told["cached_tokens"]]) and told["cached_tokens"] > 128

    sized = run_kvcal("size", model, "--batch", 1, "--context", 256, "--json").json
    whole = unquantized_plan(plan.model, plan.geometry)
    assert sized["rows"][0]["cache_bytes"] == whole.nbytes([256])
    cache = DynamicCache(config=AutoModelForCausalLM.from_pretrained(model).config)
    AutoModelForCausalLM.from_pretrained(model)(input_ids=torch.ones(1, 256, dtype=torch.int64), past_key_values=cache)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == whole.raw_nbytes([256]) == 256 * 3 * (32 + 8) * 4


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "kimi_linear"])
def test_latents_on_a_gpu(name: str) -> None:
    """The torch path: bytes and pages as on a CPU, text of a 16-bit plan as with transformers' own cache."""
    model = TINY_MODELS[name]().to("cuda")
    ids = torch.randint(3, 100, (2, 200), generator=torch.Generator().manual_seed(0)).to("cuda")
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    raw = PlanCache(model_plan(built(name)), model.config)
    found = model.generate(ids, past_key_values=raw, **options)
    assert torch.equal(found, model.generate(ids, past_key_values=DynamicCache(config=model.config), **options))
    plan = model_plan(built(name), TWO_BITS)
    caches = {device: PlanCache(plan, model.config) for device in ("cpu", "cuda")}
    latent, rotary = torch.randn(2, 1, 300, 32), torch.randn(2, 1, 300, 8)
    (paged,) = [layer.geometry.index for layer in plan.layers if layer.is_paged][:1]
    read = {}
    for device, cache in caches.items():
        layer = cache.layers[paged]
        layer.update(latent.to(device), rotary.to(device))
        read[device] = layer.update(latent[:, :, :1].to(device), rotary[:, :, :1].to(device))[0].cpu()
    torch.testing.assert_close(read["cuda"], read["cpu"], rtol=1e-6, atol=1e-6)
    quantized = PlanCache(plan, model.config)
    model.generate(ids, past_key_values=quantized, **options)
    assert quantized.nbytes == plan.nbytes([219, 219])
