"""Tiny random models of the families that the adapter must serve or refuse: fp32, seeded, no network.

``TINY_MODELS`` maps a name to a builder; vocabulary 128, hidden 32 to 64, 2 to 4 layers. Head counts cover
GQA ratios 1, 4 and 8. Norm weights and biases are random too, so that forgetting one of them shows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import transformers as hf
from transformers import PreTrainedConfig, PreTrainedModel

from kvcal.geometry import Geometry
from kvcal.models.geometry import geometry_of
from kvcal.models.taps import Captured, tap

VOCAB_SIZE = 128
_IDS = {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _build(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Far from initialisation: keys of size 1, attention that is not uniform.
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def llama() -> PreTrainedModel:
    return _build(hf.LlamaConfig(**_IDS, **_SHAPE))


def llama_mha_yarn() -> PreTrainedModel:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    return _build(hf.LlamaConfig(**_IDS, **_SHAPE | {"num_key_value_heads": 4}, rope_parameters=rope))


def mistral_all_sliding() -> PreTrainedModel:
    return _build(hf.MistralConfig(**_IDS, **_SHAPE, sliding_window=6))


def qwen2() -> PreTrainedModel:
    return _build(hf.Qwen2Config(**_IDS, **_SHAPE | {"num_attention_heads": 8}))


def qwen3() -> PreTrainedModel:
    return _build(hf.Qwen3Config(**_IDS, **_SHAPE, head_dim=32))


def qwen3_moe() -> PreTrainedModel:
    return _build(hf.Qwen3MoeConfig(**_IDS, **_SHAPE, **_EXPERTS, head_dim=16))


def phi3() -> PreTrainedModel:
    return _build(hf.Phi3Config(**_IDS, **_SHAPE | {"num_key_value_heads": 2, "num_attention_heads": 8}))


def gemma3() -> PreTrainedModel:
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    }
    return _build(
        hf.Gemma3TextConfig(
            **_IDS,
            **_SHAPE | {"num_hidden_layers": 4},
            head_dim=16,
            sliding_window=6,
            layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters=rope,
        )
    )


def gemma3n() -> PreTrainedModel:
    """Its last two layers read what the first two have cached."""
    shape = _SHAPE | {"num_hidden_layers": 4, "intermediate_size": [96] * 4}
    extra = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE, "altup_num_inputs": 2}
    return _build(
        hf.Gemma3nTextConfig(
            **_IDS,
            **shape,
            **extra,
            head_dim=16,
            sliding_window=6,
            layer_types=["full_attention", "sliding_attention"] * 2,
            num_kv_shared_layers=2,
            laurel_rank=8,
            activation_sparsity_pattern=[0.0] * 4,
        )
    )


def glm4() -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    return _build(hf.Glm4Config(**_IDS, **_SHAPE, head_dim=16, rope_parameters=rope))


def olmo2() -> PreTrainedModel:
    return _build(hf.Olmo2Config(**_IDS, **_SHAPE | {"num_key_value_heads": 4}))


def gpt_neox() -> PreTrainedModel:
    shape = {key: value for key, value in _SHAPE.items() if key != "num_key_value_heads"}
    return _build(hf.GPTNeoXConfig(**_IDS, **shape))


def gpt2() -> PreTrainedModel:
    return _build(hf.GPT2Config(**_IDS, n_embd=32, n_layer=2, n_head=4, n_positions=512))


def gpt_oss() -> PreTrainedModel:
    return _build(
        hf.GptOssConfig(
            **_IDS,
            **_SHAPE | {"num_attention_heads": 8},
            num_local_experts=4,
            num_experts_per_tok=2,
            head_dim=16,
            sliding_window=6,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )
    )


def stablelm() -> PreTrainedModel:
    return _build(hf.StableLmConfig(**_IDS, **_SHAPE))


def smollm3() -> PreTrainedModel:
    return _build(hf.SmolLM3Config(**_IDS, **_SHAPE, no_rope_layers=[1, 0, 1]))


def qwen3_next() -> PreTrainedModel:
    linear = {
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    layer_types = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    return _build(
        hf.Qwen3NextConfig(
            **_IDS,
            **_SHAPE | {"num_hidden_layers": 4},
            **_EXPERTS,
            **linear,
            head_dim=16,
            shared_expert_intermediate_size=32,
            layer_types=layer_types,
        )
    )


def falcon() -> PreTrainedModel:
    return _build(hf.FalconConfig(**_IDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=False))


def bloom() -> PreTrainedModel:
    return _build(hf.BloomConfig(**_IDS, hidden_size=32, n_layer=2, n_head=4))


def mpt() -> PreTrainedModel:
    return _build(hf.MptConfig(**_IDS, d_model=32, n_layers=2, n_heads=4, max_seq_len=512))


# Multi-head latent attention: a latent of 32, a rotary key of 8, and heads of 16 + 8 and 24 made of them.
_LATENT = _SHAPE | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}


def deepseek_v2() -> PreTrainedModel:
    """As V2-Lite: queries without a latent of their own, YaRN."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    rope |= {"mscale": 0.707, "mscale_all_dim": 0.707}
    return _build(hf.DeepseekV2Config(**_IDS, **_LATENT, **_ROUTED, q_lora_rank=None, rope_parameters=rope))


def deepseek_v3() -> PreTrainedModel:
    return _build(hf.DeepseekV3Config(**_IDS, **_LATENT, **_ROUTED, q_lora_rank=16, n_group=2, topk_group=1))


def glm_moe_dsa() -> PreTrainedModel:
    """GLM-5: latents, and an indexer that chooses the tokens to attend to."""
    indexer = {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16}
    return _build(hf.GlmMoeDsaConfig(**_IDS, **_LATENT, **_ROUTED, **indexer, q_lora_rank=16))


def kimi_linear() -> PreTrainedModel:
    """Latent attention beside gated delta rules."""
    experts = {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 16}
    layer_types = ["linear_attention", "full_attention", "linear_attention"]
    delta = {"linear_head_dim": 16, "linear_num_heads": 2, "layer_types": layer_types}
    return _build(hf.KimiLinearConfig(**_IDS, **_LATENT, **experts, **delta))


def llama4() -> PreTrainedModel:
    """Three layers that attend in chunks, with a norm behind RoPE; then one of full attention, without both."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 64}
    return _build(
        hf.Llama4TextConfig(
            **_IDS,
            **_SHAPE | {"num_hidden_layers": 4},
            **experts,
            head_dim=16,
            attention_chunk_size=8,
            use_qk_norm=True,
        )
    )


def falcon_h1() -> PreTrainedModel:
    mamba = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
    return _build(hf.FalconH1Config(**_IDS, **_SHAPE, **mamba))


def zamba2() -> PreTrainedModel:
    """Layers of a state alone, then with a state and the attention block that such layers share."""
    shape = _SHAPE | {"num_hidden_layers": 4, "num_key_value_heads": 4}
    mamba = {"mamba_d_state": 8, "n_mamba_heads": 4, "mamba_headdim": 32, "mamba_ngroups": 1}
    kinds = ["mamba", "hybrid", "mamba", "hybrid"]
    return _build(
        hf.Zamba2Config(
            **_IDS, **shape, **mamba, layers_block_type=kinds, num_mem_blocks=1, use_mem_rope=True, adapter_rank=8
        )
    )


def recurrent_gemma() -> PreTrainedModel:
    shape = _SHAPE | {"num_hidden_layers": 3, "attention_window_size": 6, "lru_width": 64, "w_init_variance_scale": 0.1}
    return _build(hf.RecurrentGemmaConfig(**_IDS, **shape, block_types=["recurrent", "recurrent", "attention"]))


def bert_decoder_without_mask() -> PreTrainedModel:
    shape = {key: value for key, value in _SHAPE.items() if key != "num_key_value_heads"}
    return _build(hf.BertConfig(**_IDS, **shape, is_decoder=False))


TINY_MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "llama_mha_yarn": llama_mha_yarn,
    "mistral_all_sliding": mistral_all_sliding,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "phi3": phi3,
    "gemma3": gemma3,
    "gemma3n": gemma3n,
    "glm4": glm4,
    "olmo2": olmo2,
    "gpt_neox": gpt_neox,
    "gpt2": gpt2,
    "gpt_oss": gpt_oss,
    "stablelm": stablelm,
    "smollm3": smollm3,
    "qwen3_next": qwen3_next,
    "falcon": falcon,
    "bloom": bloom,
    "mpt": mpt,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "glm_moe_dsa": glm_moe_dsa,
    "kimi_linear": kimi_linear,
    "llama4": llama4,
    "falcon_h1": falcon_h1,
    "zamba2": zamba2,
    "recurrent_gemma": recurrent_gemma,
    "bert_decoder_without_mask": bert_decoder_without_mask,
}

# Refused by the geometry or by the taps; test_models_contract.py says why.
UNSUPPORTED = {
    "falcon",
    "bloom",
    "mpt",
    "glm_moe_dsa",
    "zamba2",
    "recurrent_gemma",
    "bert_decoder_without_mask",
}
SUPPORTED = sorted(set(TINY_MODELS) - UNSUPPORTED)


@cache
def built(name: str) -> PreTrainedModel:
    return TINY_MODELS[name]()


@cache
def measured(name: str) -> Geometry:
    return geometry_of(built(name))


def batch(length: int = 9) -> dict[str, torch.Tensor]:
    """Two sequences, the second left-padded by 3."""
    ids = torch.randint(3, VOCAB_SIZE, (2, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def captured_by(model: PreTrainedModel, geometry: Geometry, inputs: dict) -> tuple[list[Captured], torch.Tensor]:
    seen: list[Captured] = []
    with torch.no_grad(), tap(model, seen.append, geometry):
        logits = model(**inputs, use_cache=False).logits
    return seen, logits
