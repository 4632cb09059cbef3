"""Rotary position embedding from a plan's own table: turns keys to their positions, and back.

The table [pairs, 4] in fp64 says, for every rotated pair of channels (a, b), the angle per position and the amplitude
(RoPE variants such as YaRN scale cos and sin):

    k_post_a = amplitude (k_pre_a cos - k_pre_b sin),   k_post_b = amplitude (k_pre_b cos + k_pre_a sin)

Channels in no pair are not rotated. Angles are fp64 and cos, sin fp32, so that a position of a million still has its
angle to 1e-9. Whether a model's own cos and sin (fp32 angles) differ by 1e-6 does not matter: what is turned back is
turned forth again by the same table.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, table: Tensor, positions_T: Tensor) -> Tensor:
    """x [..., T, D] before RoPE -> after RoPE at positions_T [T] or [..., T] (int64), fp32."""
    a, b, cos, sin, amplitude = _terms(table, positions_T)
    out = x.float().clone()
    first, second = out[..., a], out[..., b]
    out[..., a] = (first * cos - second * sin) * amplitude
    out[..., b] = (second * cos + first * sin) * amplitude
    return out


def unrotate(x: Tensor, table: Tensor, positions_T: Tensor) -> Tensor:
    """Inverse of :func:`rotate`, to the rounding of fp32."""
    a, b, cos, sin, amplitude = _terms(table, positions_T)
    out = x.float().clone()
    first, second = out[..., a], out[..., b]
    out[..., a] = (first * cos + second * sin) / amplitude
    out[..., b] = (second * cos - first * sin) / amplitude
    return out


def cos_sin(table: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the table's pairs at positions_T [..., T] (int64): [..., T, pairs] fp32."""
    angles = positions_T.to(torch.float64).unsqueeze(-1) * table[:, 2]
    return angles.cos().float(), angles.sin().float()


def _terms(table: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Channels a and b; cos and sin [..., T, pairs]; amplitude [pairs]."""
    a, b = table[:, 0].long(), table[:, 1].long()
    return a, b, *cos_sin(table, positions_T), table[:, 3].float()
