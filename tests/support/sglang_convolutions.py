"""Causal convolutions as SGLang's kernels compute them, which are for GPUs alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, query_start_loc: Tensor, cache_indices: Tensor,
    has_initial_state: Tensor, conv_states: Tensor, **more: Any,
) -> Tensor:  # fmt: skip
    """x: [C, T] of all requests in a row; conv_states: [slots, C, width - 1], the newest inputs -> [C, T]."""
    out, bounds = torch.empty_like(x), query_start_loc.tolist()
    for row, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        slot = int(cache_indices[row])
        past = conv_states[slot] if has_initial_state[row] else torch.zeros_like(conv_states[slot])
        inputs = torch.cat([past, x[:, start:stop]], dim=1)
        out[:, start:stop] = torch.conv1d(inputs, weight.unsqueeze(1), bias, groups=len(weight))
        conv_states[slot] = inputs[:, inputs.shape[1] - conv_states.shape[2] :]
    return out


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, *, conv_state_indices: Tensor, **more: Any
) -> Tensor:
    """x: [B, C], a token of each request -> [B, C]."""
    inputs = torch.cat([conv_state[conv_state_indices], x.unsqueeze(2)], dim=2)
    conv_state[conv_state_indices] = inputs[:, :, 1:]
    found = (inputs * weight).sum(2)
    return found if bias is None else found + bias
