"""Transforms of pages [..., n, 128, D] around their quantizer; ``undo(apply(x))`` is x to the rounding of
fp32.

    Transform    keys after RoPE -> (K - offset) / λ                                   (PM-KVQ Eq. 9)
    BeforeRope   keys after RoPE -> before                                             (AQUA-KV, section 3.1)

RoPE comes from a plan's own table [pairs, 4] in fp64: for every rotated pair of channels (a, b) the angle per
position and the amplitude (RoPE variants such as YaRN scale cos and sin):

    k_post_a = amplitude (k_pre_a cos - k_pre_b sin),   k_post_b = amplitude (k_pre_b cos + k_pre_a sin)

Channels in no pair are not rotated. Angles are fp64 and cos, sin fp32, so that a position of a million still
has its angle to 1e-9. Whether a model's own cos and sin (fp32 angles) differ by 1e-6 does not matter: what is
turned back is turned forth again by the same table. The Hadamard rotation is in ``rotated``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvcal.lazy_torch import Tensor, torch
from kvcal.records import TensorSpec

LARGEST_AMPLITUDE = 2.0**8


@dataclass(frozen=True)
class Transform:
    """Codes stand for (x - offset) / rescale, fp32 [n, 1, D] of n heads each; None for none. Without both,
    pages stay themselves, in their own dtype; else they are fp32."""

    rescale: Tensor | None = None
    offset: Tensor | None = None

    def apply(self, x: Tensor) -> Tensor:
        if self.offset is not None:
            x = x.float() - self.offset
        return x if self.rescale is None else x.float() / self.rescale

    def undo(self, x: Tensor) -> Tensor:
        if self.rescale is not None:
            x = x * self.rescale
        return x if self.offset is None else x + self.offset


@dataclass(frozen=True, eq=False)
class BeforeRope:
    """Keys before RoPE, fp32, by ``table``; ``positions`` int64 [M, 1, 128]."""

    table: Tensor
    positions: Tensor

    def apply(self, x: Tensor) -> Tensor:
        return unrotate(x, self.table, self.positions)

    def undo(self, x: Tensor) -> Tensor:
        return rotate(x, self.table, self.positions)


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


def _terms(table: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Channels a and b; cos and sin [..., T, pairs]; amplitude [pairs]."""
    a, b = table[:, 0].long(), table[:, 1].long()
    angles = positions_T.to(torch.float64).unsqueeze(-1) * table[:, 2]
    return a, b, angles.cos().float(), angles.sin().float(), table[:, 3].float()


def rotary_spec(head_dim: int) -> TensorSpec:
    """The stored table of RoPE."""
    last = float(head_dim - 1)
    low, high = (0.0, 0.0, 0.0, 1 / LARGEST_AMPLITUDE), (last, last, math.pi, LARGEST_AMPLITUDE)
    return TensorSpec("float64", (None, 4), low, high)
