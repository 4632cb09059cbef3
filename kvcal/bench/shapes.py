"""Models to time whole decode steps of: public dimensions, filled with random weights on the GPU itself.

A step's time depends on sizes, not on what the weights are, and a machine without a network has no others. Only models
all of whose layers attend to everything are taken: in others the cache is not what a step's time is about.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvcal.bench.random_plan import uniform_plan
from kvcal.bench.shape import CACHE_DTYPE, Heads, Pair
from kvcal.errors import UnsupportedModel, UsageError
from kvcal.geometry import CACHE_DTYPES, ModelIdentity
from kvcal.plan.plan import Plan

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
    "qwen3-8b": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    },
    "qwen3-4b": {
        "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    },
}  # fmt: skip
NO_DIGEST = "0" * 64  # random weights have no identity to check


def shape_config(shape: str) -> PreTrainedConfig:
    """The configuration of a name in SHAPES, or of a config.json: its path, or its folder's.

    Raises:
        UsageError: neither.
        UnsupportedModel: a layer that does not attend to everything, or heads that differ in size.
    """
    if shape in SHAPES:
        config = AutoConfig.for_model(**SHAPES[shape])
    elif Path(shape).exists():
        try:
            config = AutoConfig.from_pretrained(shape)
        except (OSError, ValueError) as broken:
            raise UsageError(f"--shape {shape}: no configuration of a model: {broken}") from None
        config = config.get_text_config(decoder=True)
    else:
        raise UsageError(
            f"--shape {shape!r} is neither one of {', '.join(SHAPES)} nor a config.json",
            hint="give a name, the path of a config.json, or the folder that holds one",
        )
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    if kinds != {DynamicLayer}:
        others = ", ".join(sorted(kind.__name__ for kind in kinds - {DynamicLayer})) or "no layers"
        raise UnsupportedModel(f"--shape {shape}: its cache has {others}; bench e2e takes full attention alone")
    return config


def heads_of(config: PreTrainedConfig) -> Heads:
    """The heads of every layer."""
    queries, keys = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // queries
    return Heads(keys, head_dim, queries // keys)


def random_model(config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    """A model of this shape with the library's random initialisation, made in bf16 on the device."""
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=CACHE_DTYPES[CACHE_DTYPE], attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def model_plan(name: str, config: PreTrainedConfig, pair: Pair, batch: int, num_tokens: int) -> Plan:
    """Every layer stored as ``pair`` says."""
    identity = ModelIdentity(name, config.model_type, NO_DIGEST, NO_DIGEST, NO_DIGEST)
    return uniform_plan(identity, pair, heads_of(config), config.num_hidden_layers, batch, num_tokens)
