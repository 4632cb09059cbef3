"""Bytes of the states that a model keeps besides keys and values, as vLLM holds them, from its config.json.

A layer's state has the last inputs of a convolution, and but for short convolutions a recurrent state. Further
tokens of a step add an input each. Ranks of tensor parallelism share the channels.

    gated delta net   queries, keys and values before the convolution; a matrix [value, key] of each value head
                      (Qwen3-Next, Qwen3.5, OLMo hybrid)
    Mamba-2           values, and the B and C of each group of heads before the convolution; a matrix [value, state] of
                      each head (Granite-4, Falcon-H1, Nemotron-H, Zamba2). Ranks hold whole groups
    Mamba-1           values before the convolution; a vector [state] of each channel (Jamba)
    short convolution inputs alone (LFM2)

The plug-in asks vLLM itself, whose answer tests compare with this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvcal.errors import UnsupportedModel, UsageError
from kvcal.geometry import CacheDtype
from kvcal.stored_tensor import ITEM_BYTES


class State(NamedTuple):
    """Of one layer, on all ranks: ``channels`` of the convolution, besides ``group_channels`` of each of
    ``groups``, of its last ``inputs``; ``grows``: whether each further
    token of a step adds an input; ``recurrent`` values."""

    channels: int
    inputs: int
    recurrent: int = 0
    groups: int = 0
    group_channels: int = 0
    grows: bool = True


def _gated_delta_net(of: Mapping[str, Any]) -> State:
    keys = of["linear_num_key_heads"] * of["linear_key_head_dim"]
    values = of["linear_num_value_heads"] * of["linear_value_head_dim"]
    return State(2 * keys + values, of["linear_conv_kernel_dim"] - 1, values * of["linear_key_head_dim"])


def _mamba_2(channels: int, heads: int, head_dim: int, groups: int, state: int, kernel: int) -> State:
    return State(channels, kernel - 1, heads * head_dim * state, groups, 2 * state)


def _granite(of: Mapping[str, Any]) -> State:
    heads = of["mamba_n_heads"], of["mamba_d_head"], of["mamba_n_groups"]
    channels = of.get("mamba_d_ssm") or int(of["mamba_expand"] * of["hidden_size"])  # the first of Falcon-H1 alone
    return _mamba_2(channels, *heads, of["mamba_d_state"], of["mamba_d_conv"])


def _nemotron(of: Mapping[str, Any]) -> State:
    heads = of["mamba_num_heads"], of["mamba_head_dim"]
    return _mamba_2(heads[0] * heads[1], *heads, of["n_groups"], of["ssm_state_size"], of["conv_kernel"])


def _zamba(of: Mapping[str, Any]) -> State:
    heads = of["n_mamba_heads"], of["mamba_headdim"], of["mamba_ngroups"]
    return _mamba_2(of["mamba_expand"] * of["hidden_size"], *heads, of["mamba_d_state"], of["mamba_d_conv"])


def _mamba_1(of: Mapping[str, Any]) -> State:
    channels = of["mamba_expand"] * of["hidden_size"]
    return State(channels, of["mamba_d_conv"] - 1, channels * of["mamba_d_state"], grows=False)


def _short_convolution(of: Mapping[str, Any]) -> State:
    return State(of.get("conv_dim") or of["hidden_size"], of["conv_L_cache"] - 1)


FAMILIES: dict[str, Callable[[Mapping[str, Any]], State]] = {
    "falcon_h1": _granite,
    "granitemoehybrid": _granite,
    "jamba": _mamba_1,
    "lfm2": _short_convolution,
    "lfm2_moe": _short_convolution,
    "nemotron_h": _nemotron,
    "olmo_hybrid": _gated_delta_net,
    "qwen3_5_moe_text": _gated_delta_net,
    "qwen3_5_text": _gated_delta_net,
    "qwen3_next": _gated_delta_net,
    "zamba2": _zamba,
}
# Keys of config.json that tell the recurrent state's dtype, and Nemotron-H's where none does; otherwise it is
# the model's.
DTYPE_KEYS, NEMOTRON_DTYPE = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"), "float32"


def state_bytes(
    config: Mapping[str, Any],
    num_ranks: int,
    step_tokens: int,
    cache_dtype: CacheDtype,
    state_dtype: CacheDtype | None = None,
) -> int:
    """Bytes of a layer's state on each of ``num_ranks``, by the content of a model's config.json.
    ``state_dtype``: of the recurrent state, where vLLM's --mamba-ssm-cache-dtype states it.

    Raises:
        UnsupportedModel: of this family they are not known, or ranks cannot share them.
        UsageError: the configuration lacks a key.
    """
    text = config.get("text_config") or config
    family = text.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedModel(
            f"how vLLM holds states of models of the type {family!r} is not known; known: {', '.join(FAMILIES)}"
        )
    try:
        state = FAMILIES[family](text)
    except KeyError as missing:
        raise UsageError(f"config.json lacks the key {missing}, which tells the size of a state") from None
    groups = state.groups if state.groups % num_ranks == 0 else num_ranks
    channels = state.channels + groups * state.group_channels
    if channels % num_ranks or state.recurrent % num_ranks:
        raise UnsupportedModel(f"{num_ranks} ranks cannot share a state of {channels} channels equally")
    inputs = state.inputs + (step_tokens - 1) * state.grows
    stated = next((text[key] for key in DTYPE_KEYS if text.get(key)), None)
    dtype = state_dtype or stated or (NEMOTRON_DTYPE if family == "nemotron_h" else cache_dtype)
    conv, recurrent = channels // num_ranks * inputs, state.recurrent // num_ranks
    return conv * ITEM_BYTES[cache_dtype] + recurrent * ITEM_BYTES[dtype]
