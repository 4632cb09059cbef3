"""The adapter's contract over every tiny model: taps equal what is cached and change nothing, or refuse."""

import sys
import weakref
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from tiny_models import SUPPORTED, TINY_MODELS, as_loaded, batch, built, captured_by, measured
from transformers import DynamicCache

from kvcal import PlanCache
from kvcal.cache.attached import attached_for
from kvcal.errors import WITHOUT_CALIBRATION, UnsupportedModel, UsageError
from kvcal.geometry import AttentionGeometry, ExpandedHeads, Geometry, StateGeometry
from kvcal.models.attention import _LISTENING, given_cache, with_cache
from kvcal.models.projections import kv_projections
from kvcal.models.supported_layers import RecordingCache, attention_layers, geometry_of
from kvcal.models.taps import Captured, check_taps, tap
from kvcal.plan.plan import Workload
from kvcal.recipe_files import load_recipe
from kvcal.stages.formats import formats_plan

# name -> (who refuses, a part of the reason)
REFUSED = {
    "falcon": (tap, "FalconForCausalLM bypasses transformers' AttentionInterface (FalconAttention)"),
    "bloom": (tap, "BloomForCausalLM bypasses"),
    "mpt": (tap, "MptForCausalLM bypasses"),
    "glm_moe_dsa": (geometry_of, "layer 0 of glm_moe_dsa caches the keys of a sparse-attention indexer besides"),
    "zamba2": (kv_projections, "Zamba2ForCausalLM: several layers call the same attention module"),
    "recurrent_gemma": (geometry_of, "RecurrentGemmaForCausalLM keeps a state in model.layers.0"),
    "bert_decoder_without_mask": (geometry_of, "BertLMHeadModel is not causal"),
}
# Of latent attention: channels of the latent and of the rotary key, and the heads made of them.
LATENT = (32, 8, ExpandedHeads(24, 24))
# (query heads, KV heads, head dim or LATENT, window of each layer; None: full; "state": no attention)
SHAPES = {
    "llama": (4, 1, 16, [None] * 3), "llama_mha_yarn": (4, 4, 16, [None] * 3),
    "mistral_all_sliding": (4, 1, 16, [6] * 3), "qwen2": (8, 1, 8, [None] * 3), "qwen3": (4, 1, 32, [None] * 3),
    "qwen3_moe": (4, 1, 16, [None] * 3), "phi3": (8, 2, 8, [None] * 3), "gemma3": (4, 1, 16, [6, 6, None, 6]),
    "gemma3n": (4, 1, 16, [None, 6]), "glm4": (4, 1, 16, [None] * 3), "olmo2": (4, 4, 16, [None] * 3),
    "gpt_neox": (4, 4, 16, [None] * 3), "gpt2": (4, 4, 8, [None] * 2), "gpt_oss": (8, 1, 16, [6, None, 6]),
    "stablelm": (4, 1, 16, [None] * 3), "smollm3": (4, 1, 16, [None] * 3),
    "qwen3_next": (4, 1, 16, ["state", None, "state", None]), "llama4": (4, 1, 16, [8, 8, 8, None]),
    "deepseek_v2": (4, 1, LATENT, [None] * 3), "deepseek_v3": (4, 1, LATENT, [None] * 3),
    "kimi_linear": (4, 1, LATENT, ["state", None, "state"]), "falcon_h1": (4, 1, 16, [None] * 3),
}  # fmt: skip
# Bytes of the state besides keys and values: fp32, 4 heads of 16 with 8 numbers each, and 4 taps of a
# convolution over their channels and twice 8.
BESIDE = {"falcon_h1": 4 * (4 * 16 * 8 + 4 * (4 * 16 + 2 * 8))}
# Of docs/models.md: families whose keys before RoPE are not known, and layers that do not turn.
WITHOUT_K_PRE = {"llama4"}  # its keys are normalised after RoPE
WITHOUT_ROPE = {"gpt2": {0, 1}, "smollm3": {1}, "llama4": {3}}
LATENTS = {name for name, (_, _, dims, _) in SHAPES.items() if dims == LATENT}


class Nudging(DynamicCache):
    """Adds ``step`` to one coordinate of the values of one layer."""

    def __init__(self, config, layer: int, coordinate: tuple[int, ...], step: float) -> None:
        super().__init__(config=config)
        self.change = layer, coordinate, step

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        layer, coordinate, step = self.change
        if layer_idx == layer:
            value_states = value_states.clone()
            value_states[coordinate] += step
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def test_every_model_is_either_supported_or_refused():
    assert set(SHAPES) == set(SUPPORTED) == set(TINY_MODELS) - set(REFUSED)
    ratios = {heads // kv_heads for heads, kv_heads, _, _ in SHAPES.values()}
    assert {1, 4, 8} <= ratios


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refusal_says_why(name):
    refuse, reason = REFUSED[name]
    model = built(name)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel) as error:
        if refuse is geometry_of:
            geometry_of(model)
        elif refuse is kv_projections:
            kv_projections(model, measured(name))
        else:
            with tap(model, lambda captured: None, measured(name)):
                pytest.fail("the tap was entered")
    assert reason in error.value.message
    assert error.value.exit_code == 4
    assert error.value.hint == WITHOUT_CALIBRATION or refuse is geometry_of
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("name", sorted(name for name, (refuse, _) in REFUSED.items() if refuse is not geometry_of))
def test_formats_serve_what_cannot_be_calibrated(name):
    """As the hint says."""
    model = built(name)
    plan = formats_plan(load_recipe("kivi-2"), as_loaded(model), Workload(1, 512))
    cache = PlanCache(plan, model.config)
    with torch.no_grad(), attached_for(model, plan):
        model(input_ids=torch.arange(300)[None] % 60, past_key_values=cache)
        model(input_ids=torch.tensor([[5]]), past_key_values=cache)
    assert cache.nbytes == plan.nbytes([301]) < plan.unquantized().nbytes([301])


@pytest.mark.parametrize("name", SUPPORTED)
def test_geometry(name):
    num_query_heads, num_kv_heads, head_dim, windows = SHAPES[name]
    geometry = measured(name)
    assert geometry.cache_dtype == "float32"
    assert [layer.index for layer in geometry.layers] == list(range(len(windows)))
    for layer, window in zip(geometry.layers, windows, strict=True):
        if window == "state":
            assert isinstance(layer, StateGeometry)
        else:
            k_dim, v_dim, expanded = head_dim if name in LATENTS else (head_dim, head_dim, None)
            shape = (num_query_heads, num_kv_heads, k_dim, v_dim, window, expanded, BESIDE.get(name, 0))
            expected = AttentionGeometry(layer.index, *shape)
            assert layer == expected


def test_state_bytes_are_those_of_the_official_cache():
    model = built("qwen3_next")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.tensor([[5]]), past_key_values=cache, use_cache=True)
    # 4 value heads with a 16 x 16 state; 4 taps of a convolution over 2 x 2 x 16 + 4 x 16 channels; fp32.
    assert cache.layers[0].recurrent_states[0].nbytes + cache.layers[0].conv_states[0].nbytes == 6144
    assert 4 * (4 * 16 * 16 + 4 * (2 * 2 * 16 + 4 * 16)) == 6144
    states = [layer for layer in measured("qwen3_next").layers if isinstance(layer, StateGeometry)]
    assert [state.bytes_per_sequence for state in states] == [6144, 6144]


@pytest.mark.parametrize("name", SUPPORTED)
def test_taps_are_bitwise_what_the_model_caches(name):
    model, geometry, inputs = built(name), measured(name), batch()
    check_taps(model, geometry)
    cache = RecordingCache(model.config)
    with torch.no_grad():
        model(**inputs, past_key_values=cache, use_cache=True)
    seen, _ = captured_by(model, geometry, inputs)
    layers = attention_layers(geometry)
    assert [captured.layer for captured in seen] == [layer.index for layer in layers] == sorted(cache.new_kv)
    for captured, layer in zip(seen, layers, strict=True):
        [(keys, values)] = cache.new_kv[captured.layer]
        assert torch.equal(captured.k_post_BNTD, keys)
        assert torch.equal(captured.v_BNTD, values)
        assert captured.q_post_BHTD.shape == (2, layer.num_query_heads, 9, layer.attended[1])


IMPLEMENTATIONS = [
    (name, implementation)
    for name in SUPPORTED
    for implementation in ("sdpa", "eager")
    if (name, implementation) != ("gpt_oss", "sdpa")  # attention sinks: transformers offers no sdpa for it
]


@pytest.mark.parametrize(("name", "implementation"), IMPLEMENTATIONS)
def test_taps_change_no_logits_and_leave_no_trace(name, implementation):
    model, geometry, inputs = built(name), measured(name), batch()
    initial = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    source = sys.modules[type(model).__module__]
    namespace = dict(vars(source))
    with torch.no_grad():
        expected = model(**inputs, use_cache=False).logits
        alone = model(input_ids=inputs["input_ids"][1:, 3:], use_cache=False).logits
    seen, logits = captured_by(model, geometry, inputs)
    assert len(seen) == len(attention_layers(geometry))
    assert torch.equal(logits, expected)
    # The mask is honoured: the padded row equals the same sequence alone, where positions are relative. The
    # learned positions of GPT-2 count the padding too.
    if name != "gpt2":
        torch.testing.assert_close(logits[1, 3:], alone[0], atol=2e-4, rtol=2e-4)
    assert model.config._attn_implementation == implementation
    assert dict(vars(source)) == namespace
    assert not _LISTENING
    assert not model._forward_hooks and not model._forward_pre_hooks
    with torch.no_grad():
        assert torch.equal(model(**inputs, use_cache=False).logits, expected)
    model.set_attn_implementation(initial)


@pytest.mark.parametrize("name", sorted(LATENTS))
def test_a_latent_is_normed_and_its_rotary_key_turned_by_hand(name):
    """From the projection's output: the norm of the first 32 channels, and RoPE of the last 8, in interleaved
    pairs; Kimi's do not turn."""
    model, geometry, inputs = built(name), measured(name), batch()
    attention = model.model.layers[1].self_attn
    outputs, tables = [], []
    hooks = [
        attention.kv_a_proj_with_mqa.register_forward_hook(lambda module, args, output: outputs.append(output)),
        attention.register_forward_pre_hook(
            lambda module, args, kwargs: tables.append(kwargs.get("position_embeddings")), with_kwargs=True
        ),
    ]
    seen, _ = captured_by(model, geometry, inputs)
    for hook in hooks:
        hook.remove()
    captured = next(one for one in seen if one.layer == 1)
    latent, rotary = outputs[0].split([32, 8], dim=-1)
    normed = latent * torch.rsqrt(latent.pow(2).mean(-1, keepdim=True) + attention.kv_a_layernorm.variance_epsilon)
    torch.testing.assert_close(captured.k_post_BNTD[:, 0], normed * attention.kv_a_layernorm.weight)
    assert captured.k_pre_BNTD is captured.k_post_BNTD and captured.rotation is None
    if name == "kimi_linear":
        turned = rotary
    elif name == "deepseek_v2":  # a table of complex numbers, pairs stay where they are
        pairs = torch.view_as_complex(rotary.unflatten(-1, (4, 2)).contiguous()) * tables[0]
        turned = torch.view_as_real(pairs).flatten(-2)
    else:  # pairs come apart: their first channels, then their second ones
        (cos, sin), a, b = (table[..., :4] for table in tables[0]), rotary[..., ::2], rotary[..., 1::2]
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    torch.testing.assert_close(captured.v_BNTD[:, 0], turned)


def test_k_pre_is_k_post_without_rope_and_none_after_a_norm():
    for captured in captured_by(built("gpt2"), measured("gpt2"), batch())[0]:
        assert captured.k_pre_BNTD is captured.k_post_BNTD
    for captured in captured_by(built("llama4"), measured("llama4"), batch())[0]:
        assert captured.k_pre_BNTD is (captured.k_post_BNTD if captured.layer == 3 else None)


@pytest.mark.parametrize("name", SUPPORTED)
def test_gradients_reach_the_observed_tensors(name):
    """The gradient that a hook on V hears is the loss's: compare one coordinate with a finite difference. It
    is taken where the cache is given V, before latents are expanded."""
    model, geometry, inputs = built(name), measured(name), batch()
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    gradients: dict[int, torch.Tensor] = {}

    def hear(captured: Captured) -> None:
        captured.v_BNTD.register_hook(lambda gradient: gradients.update({captured.layer: gradient.clone()}))
        captured.k_post_BNTD.register_hook(lambda gradient: None)
        captured.q_post_BHTD.register_hook(lambda gradient: None)

    with torch.enable_grad(), tap(model, hear, geometry):
        model(**inputs, labels=labels, use_cache=False).loss.backward()
    model.zero_grad(set_to_none=True)
    assert sorted(gradients) == [layer.index for layer in attention_layers(geometry)]

    last = max(gradients)
    coordinate = tuple(int(i) for i in torch.unravel_index(gradients[last].abs().argmax(), gradients[last].shape))
    losses = []
    for step in (-1e-2, 1e-2):
        cache = Nudging(model.config, last, coordinate, step)
        with torch.no_grad():
            losses.append(model(**inputs, labels=labels, past_key_values=cache, use_cache=True).loss.double())
    slope = float(losses[1] - losses[0]) / 2e-2
    assert slope == pytest.approx(float(gradients[last][coordinate]), rel=0.05, abs=2e-5)


def test_nothing_is_kept_between_layers():
    """When a layer is observed, the tensors of the layer before are gone (no gradient, no cache)."""
    model, geometry = built("llama"), measured("llama")
    alive: list[int] = []
    references: list[weakref.ref] = []

    def look(captured: Captured) -> None:
        alive.append(sum(reference() is not None for reference in references))
        references[:] = [weakref.ref(captured.k_pre_BNTD), weakref.ref(captured.v_BNTD)]

    with torch.no_grad(), tap(model, look, geometry):
        model(**batch(), use_cache=False)
    assert alive == [0, 0, 0]


def test_observer_error_restores_everything():
    model = built("llama")
    source = sys.modules[type(model).__module__]
    rotary = source.apply_rotary_pos_emb

    fail = Mock(side_effect=ArithmeticError("observer"))
    with pytest.raises(ArithmeticError), tap(model, fail, measured("llama")):
        assert source.apply_rotary_pos_emb is not rotary
        model(**batch(), use_cache=False)
    assert source.apply_rotary_pos_emb is rotary
    assert model.config._attn_implementation == "sdpa"
    assert not _LISTENING and not model._forward_hooks


def test_wrong_use_is_refused():
    model, geometry = built("llama"), measured("llama")
    with tap(model, lambda captured: None, geometry):
        with pytest.raises(UsageError, match="use_cache=False"):
            model(**batch())
        with pytest.raises(UsageError, match="tapped already"), tap(model, lambda captured: None, geometry):
            pass
        model(**batch(), use_cache=False)


@pytest.mark.parametrize(
    ("keep", "reason"),
    [(slice(0, 2), "attends more often than its 2 caching layers"), (slice(0, 9), "3 of 4 attention layers")],
)
def test_layer_count_mismatch_is_refused(keep: slice, reason: str):
    model, geometry = built("llama"), measured("llama")
    layers = (*geometry.layers, AttentionGeometry(3, 4, 1, 16, 16))[keep]
    wrong = Geometry(geometry.model_type, geometry.cache_dtype, layers)
    with pytest.raises(UnsupportedModel, match=reason), tap(model, lambda captured: None, wrong):
        model(**batch(), use_cache=False)


def test_two_models_of_one_family_do_not_hear_each_other():
    first, second = built("llama"), TINY_MODELS["llama"]()
    heard: dict[str, int] = {"first": 0, "second": 0}

    def count(name: str) -> Callable[[Captured], None]:
        return lambda captured: heard.update({name: heard[name] + 1})

    geometry = measured("llama")
    with tap(first, count("first"), geometry), tap(second, count("second"), geometry):
        first(**batch(), use_cache=False)
        assert heard == {"first": 3, "second": 0}
        second(**batch(), use_cache=False)
    assert heard == {"first": 3, "second": 3}


def test_self_check_finds_a_model_that_caches_something_else(monkeypatch):
    model, geometry = built("llama"), measured("llama")
    original = type(model.model.layers[0].self_attn).forward

    def forward(self, *args, **kwargs):
        if (cache := given_cache(kwargs)) is not None:
            inner = cache.update
            doubling = type("Doubling", (), {"update": lambda _, k, v, i, **others: inner(2 * k, v, i)})()
            kwargs |= with_cache(self, doubling)
        return original(self, *args, **kwargs)

    forward.__wrapped__ = original
    monkeypatch.setattr(type(model.model.layers[0].self_attn), "forward", forward)
    with pytest.raises(UnsupportedModel, match="layer 0 of llama caches other tensors"):
        check_taps(model, geometry)
