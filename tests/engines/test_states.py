"""Bytes of a layer's state by hand. `make engines` compares them with vLLM's own answers."""

from typing import Any

import pytest
from hybrid_shapes import SHAPES

from kvcal.engines.states import FAMILIES, state_bytes
from kvcal.errors import UnsupportedModel

CONFIGS: dict[str, dict[str, Any]] = {name: shape.config for name, shape in SHAPES.items()}
CONFIGS["zamba2"] = {
    "model_type": "zamba2", "n_mamba_heads": 4, "mamba_headdim": 32, "mamba_ngroups": 2, "mamba_expand": 2,
    "hidden_size": 64, "mamba_d_state": 16, "mamba_d_conv": 4,
}  # fmt: skip
CONFIGS["narrow"] = CONFIGS["lfm2-2.6b"] | {"conv_dim": 512}
CONFIGS["wide"] = {"model_type": "lfm2_moe", "hidden_size": 2048, "conv_L_cache": 4}


@pytest.mark.parametrize(
    ("name", "ranks", "drafts", "nbytes"),
    [
        # Inputs of the convolution, with one for each draft, and the recurrent state, of 2 bytes a value.
        ("qwen3-next", 1, 0, (2 * 2048 + 4096) * 3 * 2 + 32 * 128 * 128 * 2),
        ("qwen3-next", 2, 3, (2 * 1024 + 2048) * (3 + 3) * 2 + 16 * 128 * 128 * 2),
        ("qwen3.5-27b", 1, 0, (2 * 2048 + 6144) * 3 * 2 + 48 * 128 * 128 * 4),  # it says float32
        ("nemotron-h-8b", 4, 0, (128 * 64 // 4 + 2 * 2 * 128) * 3 * 2 + 32 * 64 * 128 * 2),  # two groups on a rank
        ("granite-4-h-small", 1, 2, (8192 + 2 * 128) * (3 + 2) * 2 + 128 * 64 * 128 * 2),
        ("granite-4-h-small", 4, 0, (2048 + 2 * 128) * 3 * 2 + 32 * 64 * 128 * 2),  # each holds the one group
        ("falcon-h1-7b", 1, 0, (3072 + 2 * 256) * 3 * 2 + 24 * 128 * 256 * 2),
        ("jamba-mini", 1, 3, 8192 * 3 * 2 + 8192 * 16 * 2),  # drafts add nothing
        ("lfm2-2.6b", 2, 3, 1024 * (2 + 3) * 2),
        ("narrow", 1, 0, 512 * 2 * 2),
        ("wide", 1, 0, 2048 * 3 * 2),
        ("zamba2", 1, 0, (128 + 2 * 2 * 16) * 3 * 2 + 4 * 32 * 16 * 2),
    ],
)
def test_a_state_takes_the_bytes_of_its_parts(name: str, ranks: int, drafts: int, nbytes: int) -> None:
    config = CONFIGS[name]
    assert state_bytes(config, ranks, 1 + drafts, "bfloat16") == nbytes
    assert state_bytes({"model_type": "of images", "text_config": config}, ranks, 1 + drafts, "bfloat16") == nbytes


def test_the_recurrent_state_has_the_dtype_that_is_asked_for_or_the_familys() -> None:
    own = CONFIGS["qwen3.5-27b"]
    assert state_bytes(own, 1, 1, "bfloat16", "bfloat16") == (2 * 2048 + 6144) * 3 * 2 + 48 * 128 * 128 * 2
    silent = {key: value for key, value in CONFIGS["nemotron-h-8b"].items() if key != "mamba_ssm_cache_dtype"}
    assert state_bytes(silent, 1, 1, "bfloat16") == (128 * 64 + 2 * 8 * 128) * 3 * 2 + 128 * 64 * 128 * 4


def test_families_that_share_a_state() -> None:
    for name, other in (("qwen3_next", "olmo_hybrid"), ("qwen3_next", "qwen3_5_moe_text"), ("lfm2", "lfm2_moe")):
        assert FAMILIES[name] is FAMILIES[other]


def test_ranks_share_the_recurrent_state_equally_too() -> None:
    """Three heads' worth of a convolution's channels, and one head's state."""
    alone = CONFIGS["qwen3-next"] | {"linear_num_key_heads": 1, "linear_num_value_heads": 1}
    with pytest.raises(UnsupportedModel, match="3 ranks cannot share a state of 384 channels equally"):
        state_bytes(alone, 3, 1, "bfloat16")
