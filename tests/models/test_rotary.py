"""Rotary maps: what they say turns the model's own pre-RoPE keys into its post-RoPE keys, at any position."""

import math

import pytest
import torch
import transformers as hf
from tiny_models import _IDS, _SHAPE, TINY_MODELS, VOCAB_SIZE, _build, batch, built, measured
from torch import Tensor
from transformers import PreTrainedModel

from kvcal.errors import UnsupportedModel
from kvcal.models.rope import RotaryMap, inputs_at, rotary_maps, rotary_pairs
from kvcal.models.supported_layers import geometry_of
from kvcal.models.taps import Captured, tap
from kvcal.pages.rescale_and_rope import rotate


def llama_with(**rope) -> PreTrainedModel:
    return _build(hf.LlamaConfig(**_IDS, **_SHAPE | {"num_hidden_layers": 1}, rope_parameters=rope))


def llama3() -> PreTrainedModel:
    return llama_with(
        rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )  # fmt: skip


def linear() -> PreTrainedModel:
    return llama_with(rope_type="linear", rope_theta=1e4, factor=4.0)


def cohere() -> PreTrainedModel:
    return _build(hf.CohereConfig(**_IDS, **_SHAPE | {"num_hidden_layers": 1}, use_qk_norm=True))


def phi() -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    return _build(hf.PhiConfig(**_IDS, **_SHAPE | {"num_hidden_layers": 1}, rope_parameters=rope))


def dynamic() -> PreTrainedModel:
    return llama_with(rope_type="dynamic", rope_theta=1e4, factor=2.0, original_max_position_embeddings=512)


def longrope() -> PreTrainedModel:
    shape = _SHAPE | {"num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2}
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128, **factors}
    return _build(hf.Phi3Config(**_IDS, **shape, original_max_position_embeddings=128, rope_parameters=rope))


MORE = {"llama3": llama3, "linear": linear, "cohere": cohere, "phi": phi}
# Of every way to rotate one: halves, YaRN, QK-norm, two bases, neighbours, slices, fused, some layers
# without, none.
FAMILIES = ("llama_mha_yarn", "qwen3", "gemma3", "glm4", "gpt_neox", "phi3", "gpt_oss", "smollm3", "qwen3_next", "gpt2")
POSITIONS = (0, 1, 2, 77, 300, 511)


def captured_at(model: PreTrainedModel, positions: tuple[int, ...]) -> list[Captured]:
    seen: list[Captured] = []
    tokens_BT = torch.arange(3, 3 + len(positions))[None]
    with torch.no_grad(), tap(model, seen.append):
        model(**inputs_at(model, tokens_BT, torch.tensor(positions)), use_cache=False)
    return seen


def turned(found: RotaryMap, k_pre_BNTD: Tensor, positions: tuple[int, ...]) -> Tensor:
    """The definition, pair by pair and token by token, in fp64."""
    k_post = k_pre_BNTD.double().clone()
    for (a, b), frequency in zip(found.pairs.tolist(), found.frequency.tolist(), strict=True):
        for t, position in enumerate(positions):
            cos, sin = math.cos(position * frequency), math.sin(position * frequency)
            x, y = k_pre_BNTD[:, :, t, a].double(), k_pre_BNTD[:, :, t, b].double()
            k_post[:, :, t, a] = found.amplitude * (x * cos - y * sin)
            k_post[:, :, t, b] = found.amplitude * (y * cos + x * sin)
    return k_post


@pytest.mark.parametrize("name", [*FAMILIES, *MORE])
def test_maps_turn_the_models_keys(name):
    model = MORE[name]() if name in MORE else built(name)
    geometry = geometry_of(model) if name in MORE else measured(name)
    maps, pairs = rotary_maps(model, geometry), rotary_pairs(model, geometry)
    for captured in captured_at(model, POSITIONS):
        found = maps[captured.layer]
        expected = turned(found, captured.k_pre_BNTD, POSITIONS)
        torch.testing.assert_close(captured.k_post_BNTD.double(), expected, rtol=0, atol=2e-4)
        table = found.tensor()
        assert table.dtype == torch.float64 and table.shape == (len(found.pairs), 4)
        by_plan = rotate(captured.k_pre_BNTD, table, torch.tensor(POSITIONS))
        torch.testing.assert_close(by_plan.double(), expected, rtol=0, atol=1e-5)
        assert found.pairs.sort(1).values.tolist() == pairs[captured.layer].tolist()
    assert maps.keys() == pairs.keys()


def frequencies(dim: int, theta: float) -> Tensor:
    return torch.tensor([theta ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)


def halves(dim: int) -> list[list[int]]:
    return [[i, i + dim // 2] for i in range(dim // 2)]


def neighbours(dim: int) -> list[list[int]]:
    return [[2 * i, 2 * i + 1] for i in range(dim // 2)]


# name -> (pairs, frequencies by the paper's formula); partial rotary turns the first channels only.
EXPECTED = {
    "llama": (halves(16), frequencies(16, 1e4)), "qwen3": (halves(32), frequencies(32, 1e4)),
    "stablelm": (halves(4), frequencies(4, 1e4)), "gpt_neox": (halves(4), frequencies(4, 1e4)),
    "phi": (halves(8), frequencies(8, 1e4)), "glm4": (neighbours(8), frequencies(8, 1e4)),
    "cohere": (neighbours(16), frequencies(16, 5e5)), "linear": (halves(16), frequencies(16, 1e4) / 4),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_pairs_and_frequencies(name):
    model = MORE[name]() if name in MORE else built(name)
    found = rotary_maps(model, geometry_of(model))[0]
    pairs, expected = EXPECTED[name]
    assert found.pairs.tolist() == pairs
    torch.testing.assert_close(found.frequency, expected, rtol=1e-6, atol=0)
    assert found.amplitude == 1.0


def test_two_frequencies_scaling_and_no_rope():
    gemma3 = rotary_maps(built("gemma3"), measured("gemma3"))
    torch.testing.assert_close(gemma3[0].frequency, frequencies(16, 1e4), rtol=1e-6, atol=0)
    torch.testing.assert_close(gemma3[2].frequency, frequencies(16, 1e6) / 8, rtol=1e-6, atol=0)
    smollm3 = rotary_maps(built("smollm3"), measured("smollm3"))
    assert [len(smollm3[i].pairs) for i in range(3)] == [8, 0, 8]
    assert all(not len(found.pairs) for found in rotary_maps(built("gpt2"), measured("gpt2")).values())
    yarn = rotary_maps(built("llama_mha_yarn"), measured("llama_mha_yarn"))[0]
    assert yarn.amplitude == pytest.approx(0.1 * math.log(4.0) + 1, rel=1e-6)


def test_half_precision_model_takes_the_frequencies_of_its_buffer(monkeypatch):
    model = TINY_MODELS["llama"]().bfloat16()
    for module in model.modules():
        if "Rotary" in type(module).__name__:
            module.inv_freq = built("llama").model.rotary_emb.inv_freq.clone()  # as loading in bf16 leaves it
    geometry = geometry_of(model)
    found = rotary_maps(model, geometry)[0]
    torch.testing.assert_close(found.frequency, frequencies(16, 1e4), rtol=1e-6, atol=0)
    monkeypatch.setattr(model, "named_buffers", lambda: iter(()))
    with pytest.raises(UnsupportedModel, match="not position x a frequency of its inv_freq buffers"):
        rotary_maps(model, geometry)


@pytest.mark.parametrize("build", [dynamic, longrope])
def test_frequencies_that_change_with_the_length_are_refused(build):
    """The pairs are known all the same, and the probe leaves the model as it was."""
    model = build()
    geometry = geometry_of(model)
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
    with pytest.raises(UnsupportedModel, match="not position x a frequency"):
        rotary_maps(model, geometry)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, before)
    dim = geometry.layers[0].k_head_dim
    assert rotary_pairs(model, geometry)[0].tolist() == halves(dim)


def test_unobservable_and_multimodal_rotations_are_refused(monkeypatch):
    with pytest.raises(UnsupportedModel, match="layer 0 of llama4_text changes its keys after RoPE"):
        rotary_maps(built("llama4"), measured("llama4"))
    model = TINY_MODELS["llama"]()
    model.config.rope_parameters = model.config.rope_parameters | {"mrope_section": [2, 3, 3]}
    with pytest.raises(UnsupportedModel, match="three positions"):
        rotary_maps(model, measured("llama"))


@pytest.mark.parametrize("kind", ["mixing", "scaling"])
def test_what_is_no_rotation_is_refused(kind, monkeypatch):
    namespace = hf.models.llama.modeling_llama.__dict__
    rotary = namespace["apply_rotary_pos_emb"]

    def mixing(q, k, cos, sin, unsqueeze_dim=1):
        q, k = rotary(q, k, cos, sin, unsqueeze_dim)
        return q, k + k.roll(1, -1)

    def scaling(q, k, cos, sin, unsqueeze_dim=1):
        q, k = rotary(q, k, cos, sin, unsqueeze_dim)
        return q, k * (1 + torch.arange(k.shape[2]).view(1, 1, -1, 1))

    monkeypatch.setitem(namespace, "apply_rotary_pos_emb", {"mixing": mixing, "scaling": scaling}[kind])
    model = TINY_MODELS["llama"]()
    reason = {"mixing": "not a rotation of pairs", "scaling": "scales keys by"}[kind]
    with pytest.raises(UnsupportedModel, match=reason):
        rotary_maps(model, measured("llama"))
    assert namespace["apply_rotary_pos_emb"] in (mixing, scaling)  # restored to what it was before the probe


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt_oss", "stablelm"])
def test_explicit_positions_are_not_read_as_packed_sequences(name):
    """At positions 0, 1, 2, ... logits are the plain ones; and at strided positions later tokens still see
    earlier ones, which they would not without the mask."""
    model, ids = built(name), batch()["input_ids"]
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits
        same = model(**inputs_at(model, ids, torch.arange(ids.shape[1])), use_cache=False).logits
        strided = inputs_at(model, ids, 4 * torch.arange(ids.shape[1]))
        first = model(**strided, use_cache=False).logits
        changed = dict(strided, input_ids=torch.cat([(ids[:, :1] + 1) % VOCAB_SIZE, ids[:, 1:]], dim=1))
        second = model(**changed, use_cache=False).logits
        packed = model(input_ids=ids, position_ids=strided["position_ids"], use_cache=False).logits
    torch.testing.assert_close(same, plain, rtol=1e-5, atol=1e-5)
    assert (first - second)[:, 1:].abs().amax(-1).min() > 1e-4
    if name != "gpt_oss":  # which looks at the mask only
        assert (packed - first)[:, 1:].abs().max() > 1e-3
