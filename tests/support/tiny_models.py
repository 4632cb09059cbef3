"""Tiny random models of the families that the adapter must serve or refuse: fp32, seeded, no network.

``TINY_MODELS`` maps a name to a builder; vocabulary 128, hidden 32 to 64, 2 to 4 layers. Head counts cover
GQA ratios 1, 4 and 8. Norm weights and biases are random too, so that forgetting one of them shows.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import TypeVar

import torch
import transformers as hf
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from kvcal.geometry import CacheDtype, Geometry, ModelIdentity
from kvcal.models.load import LoadedModel
from kvcal.models.supported_layers import geometry_of
from kvcal.models.taps import Captured, tap

Model = TypeVar("Model", bound=torch.nn.Module)

VOCAB_SIZE = 128
_IDS = {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 1, "max_position_embeddings": 512,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def perturbed(model: Model, scale: float) -> Model:
    """The model, with noise of ``scale`` on all parameters, so that attention is not uniform."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)
    return model.eval()


def _build(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return perturbed(hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32), 0.1)  # keys of size 1


def _rope(kind: str = "default", base: float = 1e4, **more: float) -> dict:
    return {"rope_type": kind, "rope_theta": base, **more}


_MHA = {"num_key_value_heads": 4}
_WITHOUT_KV_HEADS = {key: value for key, value in _SHAPE.items() if key != "num_key_value_heads"}
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=128)
_HALF = _rope(partial_rotary_factor=0.5)
# Multi-head latent attention: a latent of 32, a rotary key of 8, and heads of 16 + 8 and 24 made of them.
_LATENT = _MHA | {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
# Of each: the class of its configuration without "Config", and what it has besides or instead of _SHAPE.
_CONFIGS: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", {}),
    "llama_mha_yarn": ("Llama", _MHA | {"rope_parameters": _YARN}),
    "mistral_all_sliding": ("Mistral", {"sliding_window": 6}),
    "qwen2": ("Qwen2", {"num_attention_heads": 8}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3_moe": ("Qwen3Moe", _EXPERTS | {"head_dim": 16}),
    "phi3": ("Phi3", {"num_key_value_heads": 2, "num_attention_heads": 8}),
    "gemma3": ("Gemma3Text", {
        "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": _rope(), "full_attention": _rope("linear", 1e6, factor=8.0),
        },
    }),
    "gemma3n": ("Gemma3nText", {  # its last two layers read what the first two have cached
        "num_hidden_layers": 4, "intermediate_size": [96] * 4, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE, "altup_num_inputs": 2, "head_dim": 16, "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention"] * 2, "num_kv_shared_layers": 2, "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 4,
    }),
    "glm4": ("Glm4", {"head_dim": 16, "rope_parameters": _HALF}),
    "olmo2": ("Olmo2", _MHA),
    "gpt_oss": ("GptOss", {
        "num_attention_heads": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 6,
        "rope_parameters": _rope(),
    }),
    "stablelm": ("StableLm", {}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "qwen3_next": ("Qwen3Next", _EXPERTS | {
        "num_hidden_layers": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "head_dim": 16, "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    }),
    # As V2-Lite: queries without a latent of their own, YaRN.
    "deepseek_v2": ("DeepseekV2", _LATENT | _ROUTED | {
        "q_lora_rank": None, "rope_parameters": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    }),
    "deepseek_v3": ("DeepseekV3", _LATENT | _ROUTED | {"q_lora_rank": 16, "n_group": 2, "topk_group": 1}),
    # Latents, and an indexer that chooses the tokens to attend to.
    "glm_moe_dsa": ("GlmMoeDsa", _LATENT | _ROUTED | {
        "index_topk": 4, "index_n_heads": 2, "index_head_dim": 16, "q_lora_rank": 16,
    }),
    # Latent attention besides gated delta rules.
    "kimi_linear": ("KimiLinear", _LATENT | {
        "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 16, "linear_head_dim": 16,
        "linear_num_heads": 2, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }),
    # Three layers that attend in chunks, with a norm after RoPE; then one of full attention, without both.
    "llama4": ("Llama4Text", {
        "num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 64,
        "head_dim": 16, "attention_chunk_size": 8, "use_qk_norm": True,
    }),
    "falcon_h1": ("FalconH1", {
        "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16,
    }),
    # Layers of a state alone, then with a state and the attention block that such layers share.
    "zamba2": ("Zamba2", _MHA | {
        "num_hidden_layers": 4, "mamba_d_state": 8, "n_mamba_heads": 4, "mamba_headdim": 32, "mamba_ngroups": 1,
        "layers_block_type": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1, "use_mem_rope": True, "adapter_rank": 8,
    }),
    "recurrent_gemma": ("RecurrentGemma", {
        "attention_window_size": 6, "lru_width": 64, "w_init_variance_scale": 0.1,
        "block_types": ["recurrent", "recurrent", "attention"],
    }),
}  # fmt: skip


def _of(name: str) -> PreTrainedModel:
    kind, others = _CONFIGS[name]
    return _build(getattr(hf, f"{kind}Config")(**_IDS | _SHAPE | others))


TINY_MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    **{name: partial(_of, name) for name in _CONFIGS},
    "gpt_neox": lambda: _build(hf.GPTNeoXConfig(**_IDS, **_WITHOUT_KV_HEADS)),
    "gpt2": lambda: _build(hf.GPT2Config(**_IDS, n_embd=32, n_layer=2, n_head=4, n_positions=512)),
    "falcon": lambda: _build(
        hf.FalconConfig(**_IDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=False)
    ),
    "bloom": lambda: _build(hf.BloomConfig(**_IDS, hidden_size=32, n_layer=2, n_head=4)),
    "mpt": lambda: _build(hf.MptConfig(**_IDS, d_model=32, n_layers=2, n_heads=4, max_seq_len=512)),
    "bert_decoder_without_mask": lambda: _build(hf.BertConfig(**_IDS, **_WITHOUT_KV_HEADS, is_decoder=False)),
}

# Refused by the geometry or by the taps; test_models_contract.py says why.
UNSUPPORTED = {
    "falcon", "bloom", "mpt", "glm_moe_dsa", "zamba2", "recurrent_gemma", "bert_decoder_without_mask",
}  # fmt: skip
SUPPORTED = sorted(set(TINY_MODELS) - UNSUPPORTED)


@cache
def built(name: str) -> PreTrainedModel:
    return TINY_MODELS[name]()


@cache
def measured(name: str) -> Geometry:
    return geometry_of(built(name))


def as_loaded(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, cache_dtype: CacheDtype | None = None
) -> LoadedModel:
    """The model as ``load`` would give it."""
    identity = ModelIdentity("tiny", model.config.model_type, "a" * 64, "b" * 64, "c" * 64)
    return LoadedModel(model, tokenizer, identity, geometry_of(model, cache_dtype), "tiny")


def batch() -> dict[str, torch.Tensor]:
    """Two sequences of 9, the second left-padded by 3."""
    ids = torch.randint(3, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def captured_by(model: PreTrainedModel, geometry: Geometry, inputs: dict) -> tuple[list[Captured], torch.Tensor]:
    seen: list[Captured] = []
    with torch.no_grad(), tap(model, seen.append, geometry):
        logits = model(**inputs, use_cache=False).logits
    return seen, logits
