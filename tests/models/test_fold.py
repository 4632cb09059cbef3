"""Folding λ into weights: the cache holds K / λ and logits stay, in every kind of model, or the fold is refused."""

from __future__ import annotations

import copy
import errno

import pytest
import torch
import transformers as hf
from test_rotary import cohere, phi
from tiny_models import _IDS, _SHAPE, SUPPORTED, TINY_MODELS, _build, batch, built, captured_by, measured
from torch import Tensor
from transformers import PreTrainedModel

from kvcal.errors import ArtifactError, UnsupportedModel, UsageError
from kvcal.geometry import Geometry, ModelIdentity
from kvcal.models.fold import fold, save_folded
from kvcal.models.geometry import attention_layers, geometry_of
from kvcal.models.load import LoadedModel, load
from kvcal.models.rope import rotary_pairs


def phi_with_norm() -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    shape = _SHAPE | {"num_hidden_layers": 1}
    return _build(hf.PhiConfig(**_IDS, **shape, rope_parameters=rope, qk_layernorm=True))


MODELS = TINY_MODELS | {"cohere": cohere, "phi": phi, "phi_with_norm": phi_with_norm}
# One norm weight for all heads: λ must be shared.
SHARED = {"qwen3", "qwen3_moe", "gemma3", "qwen3_next", "phi_with_norm"}
# Norms with weights for every head take a λ of their own for each.
LATENT = {"deepseek_v2", "deepseek_v3", "kimi_linear"}  # without λ
UNFOLDED = {"llama4", "gemma3n", "mistral_all_sliding", "qwen3_moe", "smollm3"} | LATENT  # the first two cannot be
FOLDED = sorted((set(SUPPORTED) | {"cohere", "phi", "phi_with_norm"}) - UNFOLDED)


# Their grouped products take no fp64.
EXPERTS = {"gpt_oss", "qwen3_moe", "qwen3_next"}


def double(name: str) -> tuple[PreTrainedModel, Geometry]:
    model = MODELS[name]().to(torch.float32 if name in EXPERTS else torch.float64)
    return model, geometry_of(model)


def lambdas_for(model: PreTrainedModel, geometry: Geometry, shared: bool, exact: bool = False) -> dict[int, Tensor]:
    """Random λ in 0.3 .. 3, equal on rotary pairs; ``exact``: powers of two."""
    generator = torch.Generator().manual_seed(2)
    pairs, found = rotary_pairs(model, geometry), {}
    for layer in attention_layers(geometry):
        rows = 1 if shared else layer.num_kv_heads
        lambda_ND = torch.empty(rows, layer.k_head_dim, dtype=torch.float32).uniform_(0.3, 3, generator=generator)
        if exact:
            lambda_ND = 2.0 ** torch.randint(-2, 3, lambda_ND.shape, generator=generator).float()
        a, b = pairs[layer.index].unbind(1)
        lambda_ND[:, b] = lambda_ND[:, a]
        found[layer.index] = lambda_ND.expand(layer.num_kv_heads, -1).contiguous()
    return found


def test_queries_of_other_layers_would_meet_folded_keys():
    model, geometry = built("gemma3n"), measured("gemma3n")
    lambdas = lambdas_for(model, geometry, shared=True)
    with pytest.raises(UnsupportedModel, match="layer 2 of gemma3n_text reads another layer's keys"):
        fold(model, lambdas, geometry)


@pytest.mark.parametrize("name", FOLDED)
def test_folded_logits_equal_and_the_cache_holds_k_over_lambda(name):
    """In fp64, but for experts. Norms compute in fp32: a λ that is a power of two keeps their rounding as it is."""
    model, geometry = double(name)
    lambdas = lambdas_for(model, geometry, name in SHARED, exact=True)
    if name in ("gemma3", "qwen3_next"):  # 1 + w must survive the norm's fp32 too
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_((parameter * 256).round() / 256)
    inputs = batch()
    before, logits = captured_by(model, geometry, inputs)
    fold(model, lambdas, geometry)
    after, folded_logits = captured_by(model, geometry, inputs)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(folded_logits[real], logits[real], rtol=1e-9, atol=1e-9)
    for old, new in zip(before, after, strict=True):
        lambda_ND = lambdas[old.layer].double()
        group = old.q_post_BHTD.shape[1] // len(lambda_ND)
        for n in range(len(lambda_ND)):
            for d in range(lambda_ND.shape[1]):
                expected = old.k_post_BNTD[:, n, :, d] / lambda_ND[n, d]
                torch.testing.assert_close(new.k_post_BNTD[:, n, :, d], expected, rtol=1e-7, atol=1e-9)
                for h in range(n * group, (n + 1) * group):
                    expected = old.q_post_BHTD[:, h, :, d] * lambda_ND[n, d]
                    torch.testing.assert_close(new.q_post_BHTD[:, h, :, d], expected, rtol=1e-7, atol=1e-9)
        assert lambda_ND.min() < lambda_ND.max()


@pytest.mark.parametrize("name", ["qwen2", "gpt_neox", "qwen3"])  # a bias, one fused matrix, a norm
def test_any_lambda_keeps_logits_in_fp64(name):
    model, geometry = double(name)
    _, logits = captured_by(model, geometry, batch())
    fold(model, lambdas_for(model, geometry, name in SHARED), geometry)
    _, folded_logits = captured_by(model, geometry, batch())
    torch.testing.assert_close(folded_logits[0], logits[0], rtol=1e-9, atol=1e-9)


def test_some_layers_only():
    model, geometry = double("llama")
    before = copy.deepcopy(model.state_dict())
    lambdas = lambdas_for(model, geometry, shared=False)
    fold(model, {1: lambdas[1]}, geometry)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {f"model.layers.1.self_attn.{side}_proj.weight" for side in "qk"}


def test_lambda_that_rope_would_mix_is_refused():
    model, geometry = double("llama")
    lambdas = lambdas_for(model, geometry, shared=False)
    lambdas[1][0, 3] *= 2
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ArtifactError, match="layer 1 differs between channels 3 and 11"):
        fold(model, lambdas, geometry)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model, geometry = double("smollm3")  # its layer 1 has no RoPE: any λ
    lambda_ND = lambdas_for(model, geometry, shared=False)[1]
    lambda_ND[0, 3] *= 2
    _, logits = captured_by(model, geometry, batch())
    fold(model, {1: lambda_ND}, geometry)
    torch.testing.assert_close(captured_by(model, geometry, batch())[1][0], logits[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("index", "lambda_ND", "reason"),
    [
        (7, torch.ones(1, 16), "has attention layers"),
        (0, torch.ones(2, 16), r"expected \[1, 16\]"),
        (0, torch.zeros(1, 16), "positive"),
        (0, torch.full((1, 16), float("inf")), "positive"),
    ],
)
def test_lambda_that_fits_no_layer_is_refused(index, lambda_ND, reason):
    model, geometry = double("llama")
    with pytest.raises(ArtifactError, match=reason):
        fold(model, {index: lambda_ND}, geometry)


def test_shared_norm_needs_a_shared_lambda():
    config = hf.Qwen3Config(**_IDS, **_SHAPE | {"num_key_value_heads": 2}, head_dim=16)
    model = _build(config)
    lambdas = lambdas_for(model, geometry_of(model), shared=False)
    with pytest.raises(UnsupportedModel, match="one weight for all heads") as error:
        fold(model, lambdas)
    assert "shared_heads" in error.value.hint


def test_fold_that_does_not_do_what_it_should_is_undone():
    """A model that rescales its projected keys in a way that no name tells: the probe notices."""
    model = TINY_MODELS["llama"]()
    geometry = geometry_of(model)
    attention = model.model.layers[2].self_attn
    attention.k_proj.register_forward_hook(lambda module, args, output: output / output.norm(dim=-1, keepdim=True))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsupportedModel, match="keys of layer 2 are not what they should be") as error:
        fold(model, lambdas_for(model, geometry, shared=False), geometry)
    assert "runtime vector" in error.value.hint
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_weights_that_cannot_take_lambda_are_refused():
    model = TINY_MODELS["llama"]()
    geometry = geometry_of(model)
    lambdas = lambdas_for(model, geometry, shared=False)
    model.config.clip_qkv = 8.0
    with pytest.raises(UnsupportedModel, match="clips its projections"):
        fold(model, lambdas, geometry)
    model.config.clip_qkv = None
    layers = model.model.layers
    layers[2].self_attn.k_proj.weight = layers[0].self_attn.k_proj.weight
    with pytest.raises(UnsupportedModel, match="layer 2 of llama shares its weights with layer 0"):
        fold(model, lambdas, geometry)
    per_head = _build(hf.StableLmConfig(**_IDS, **_SHAPE, qk_layernorm=True))
    with pytest.raises(UnsupportedModel, match="StableLmLayerNormPerHead has no weight"):
        fold(per_head, lambdas_for(per_head, geometry_of(per_head), shared=False))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_saved_checkpoint_loads_with_its_tokenizer_and_dtype(tmp_path, tokenizer, stored):
    shape = _SHAPE | {"num_hidden_layers": 2}
    model = _build(hf.LlamaConfig(**_IDS | {"vocab_size": len(tokenizer)}, **shape, tie_word_embeddings=True))
    model.config.dtype = stored
    geometry = geometry_of(model)
    fold(model, lambdas_for(model, geometry, shared=False), geometry)
    kept = copy.deepcopy(model.state_dict())
    loaded = LoadedModel(model, tokenizer, ModelIdentity("tiny", "llama", "c", "w", "t"), geometry, "tiny")
    save_folded(loaded, tmp_path / "folded")
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    again = load(str(tmp_path / "folded"), device="cpu")
    assert again.geometry.cache_dtype == str(stored).removeprefix("torch.") and again.tokenizer is not None
    for name, value in again.model.state_dict().items():
        assert torch.equal(value, kept[name].to(stored).float()), name
    with pytest.raises(UsageError, match="exists already"):
        save_folded(loaded, tmp_path / "folded")


def test_a_checkpoint_that_cannot_be_written_whole_leaves_nothing(tmp_path, tokenizer, monkeypatch):
    """Or the same command would refuse a folder without a tokenizer, or load it."""
    model = _build(hf.LlamaConfig(**_IDS | {"vocab_size": len(tokenizer)}, **_SHAPE | {"num_hidden_layers": 1}))
    identity = ModelIdentity("tiny", "llama", "c", "w", "t")
    loaded = LoadedModel(model, tokenizer, identity, geometry_of(model, "float32"), "tiny")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk, pytest.raises(OSError, match="No space"):
        disk.setattr(type(tokenizer), "save_pretrained", full)
        save_folded(loaded, tmp_path / "models" / "folded")
    assert list((tmp_path / "models").iterdir()) == []
    save_folded(loaded, tmp_path / "models" / "folded")
    assert load(str(tmp_path / "models" / "folded"), device="cpu").tokenizer is not None
