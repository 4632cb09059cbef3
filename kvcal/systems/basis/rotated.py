"""Rotated pages: uniform pages of values that a Hadamard rotation has made nearly Gaussian (QuaRot's
rotation, per head: kvcal.pages.hadamard).

A token of one KV head is rotated (all heads of a side share its signs) and rounded to the cache's dtype, as a
kernel keeps it in 16 bits. Each group of its channels is then rounded to a uniform grid: 2^b levels around 0.
On a Gaussian of the group's root mean square the step that errs least is

    1.596 (1 bit), 0.9957 (2), 0.5860 (3), 0.3352 (4), 0.03076 (8)        (Max 1960, Table II; the last computed anew)

standard deviations. At 2 bits the squared error is then .119 of the variance; Lloyd and Max's levels would
have .1175, HIGGS's lattice of dimension 2 .108. A step, which is the scale of the group, is stored in 8 bits:
the upper half of a float16 (e5m2), whose neighbours differ by an eighth to a quarter. With error feedback,
whose targets are wider than values, a token tries ``CANDIDATES`` neighbouring scales, from ``LOWEST`` times
that step on, in all groups together. It keeps the one whose codes err least, by the costs of the factor.
Codes of 2 bits lie nearer to 0 than what they stand for: a regression on Gaussians has a slope of .915, by a
channel's cost from .86 to .98. Attention's sum over tokens averages errors, and keeps the slope: so values in
a basis are divided by it first. For keys that raised the KL (docs/log.md). The record is that of a uniform
page of codes per token without the zeros, which are -(2^b - 1) / 2 times the scales. An inner product of two
tokens that are rotated alike is the one before: kernels rotate the query, and rotate back what values add up
to. Sinks and recent tokens stay as the model made them. Left out: keys per channel, whose outliers a rotation
would spread over the head.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvcal.geometry import CACHE_DTYPES
from kvcal.lazy_torch import Tensor, torch
from kvcal.pages.error_feedback import blocks, factor_gains, factor_rows, factor_weights, feed_back
from kvcal.pages.hadamard import random_signs, rotate_channels, unrotate
from kvcal.pages.layout_protocol import PAGE_TOKENS, PARAM_DTYPES, double_bits, require_finite, sum_by_halves
from kvcal.pages.uniform import UniformLayout, expand_groups, num_groups
from kvcal.records import TensorSpec

STEPS = {1: 1.5957691, 2: 0.99568666, 3: 0.58601944, 4: 0.33520061, 8: 0.030762384}
# What is left of a Gaussian's variance: the same table, at 8 bits with what scales of 8 bits add.
DISTORTION = {1: 0.3634, 2: 0.1188, 3: 0.03744, 4: 0.01154, 8: 8.65e-05}
SCALE_DTYPE = "float8_e5m2"
LOWEST, CANDIDATES = 1.2, 3  # measured on one model (docs/log.md)
# Of values in a basis: bits that have gains, the slope of a channel of mean cost, and of a factor e of that
# cost.
GAINED_BITS, SLOPE, SLOPE_OF_COST = 2, 0.915, 0.033
LANES = 8  # of a GPU that share a token, whose sums are added to each other last


def gain_spec(num_heads: int, head_dim: int) -> TensorSpec:
    """The stored gains of a layer's values."""
    return TensorSpec("float16", (num_heads, head_dim), 0.25, 4.0)


def value_gains(cost_ND: Tensor) -> Tensor:
    """fp16 [N, D] of channels of a basis whose errors cost so much, fp64: 1 over the slope of their codes at
    2 bits."""
    logs = cost_ND.clamp_min(torch.finfo(cost_ND.dtype).tiny).log()
    slope_ND = SLOPE + SLOPE_OF_COST * (logs - logs.mean(1, keepdim=True))
    return slope_ND.clamp(0.25, 1.0).reciprocal().half()


@dataclass(frozen=True)
class RotatedLayout(UniformLayout):
    """Shape of a page's record: that of uniform codes per token, without zeros."""

    has_zeros: ClassVar[bool] = False

    @property
    def levels(self) -> int:
        """The largest code."""
        return 2**self.num_bits - 1

    def macros(self, has_feedback: bool = False) -> dict[str, int]:
        step = double_bits(STEPS[self.num_bits] * (LOWEST if has_feedback else 1.0))
        return super().macros() | {"ROTATED": 1, "STEP": step, "CANDIDATES": CANDIDATES}

    def plan_tensors(self, prefix: str) -> dict[str, tuple[str, TensorSpec]]:
        return {"signs": (f"{prefix}_signs", TensorSpec("int8", (self.head_dim,), -1, 1))}

    def make_tensor(self, operand: str, seed: int) -> Tensor:
        return random_signs(self.head_dim, seed)

    def encode_pages(self, x: Tensor, operands: Mapping[str, Tensor]) -> Tensor:
        return self.encode_tokens(x, operands, 0)

    def encode_tokens(self, x: Tensor, operands: Mapping[str, Tensor], first: int) -> Tensor:
        factor = operands.get("feedback")
        channels = x.float().flatten(0, -2).t().clone(memory_format=torch.contiguous_format)  # the fastest on a CPU
        channels = channels.unflatten(1, x[(None,) * (4 - x.ndim)].shape[:-1]).transpose(1, 2).contiguous()
        if factor is not None and (gain := factor_gains(factor, self.head_dim)).numel():
            channels.mul_(_channels_first(gain.unsqueeze(1)))
        rotated = rotate_channels(channels, _channels_first(operands["signs"]).float())
        rotated = rotated.to(CACHE_DTYPES[self.cache_dtype]).float()
        scale_bits = self._scale_bits(rotated, has_feedback=factor is not None)
        if factor is None:
            step, start = self._grid(scale_bits)
            steps = (rotated - start) / torch.where(step == 0, torch.inf, step)
            codes = steps.round_().clamp_(0.0, float(self.levels)).to(torch.uint8)
        else:
            codes, scale_bits = self._searched(rotated, scale_bits, factor)
        records = self._records(_channels_last(codes), _channels_last(scale_bits.to(torch.uint8)), first)
        return records.view(*x.shape[:-2], records.shape[-1])

    def token_bytes(self, first: int, stop: int) -> Tensor:
        return _token_bytes(self, first, stop)

    def _records(self, codes: Tensor, scale_bits: Tensor, first: int) -> Tensor:
        """Records of codes [..., T, D] and scales [..., T, num_groups], both uint8, of the tokens from ``first``
        on; 0 besides."""
        around = (0, 0, first, PAGE_TOKENS - first - codes.shape[-2])
        codes, scale_bits = (torch.nn.functional.pad(x, around) for x in (codes, scale_bits))
        scale = scale_bits.view(PARAM_DTYPES[SCALE_DTYPE])
        return self.pack(self._turned(codes), self._turned(scale), scale)

    def decode_pages(self, records: Tensor, num_heads: int, operands: Mapping[str, Tensor]) -> Tensor:
        return unrotate(self.decode(records), operands["signs"])

    def _searched(self, rotated: Tensor, lowest: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """Codes uint8, and bits of scales, of the candidates from ``lowest`` on that cost least; channels, or groups,
        first."""
        own, least = rotated.flatten(2), lowest.flatten(2)
        codes, bits = torch.empty_like(own, dtype=torch.uint8), torch.empty_like(least)
        weights = factor_weights(factor, self.head_dim).t().unsqueeze(2)
        more = torch.arange(CANDIDATES, device=lowest.device, dtype=lowest.dtype).view(-1, 1)
        levels = rotated.new_full((1, 1, 1), self.levels)
        for heads, tokens in blocks(own.shape[1], own.shape[2], own.device, CANDIDATES):
            first, rows = least[:, heads, tokens], factor_rows(factor[heads], self.head_dim)
            step, start = (part.flatten(2) for part in self._grid(first.unsqueeze(2) + more))
            every = own[:, heads, tokens].unsqueeze(2).expand(-1, -1, CANDIDATES, -1).flatten(2)
            found, targets = feed_back(every, step, start, levels, rows)
            squares = targets.sub_((found * step).add_(start)).square_().mul_(weights[:, heads])
            lanes = _padded(squares, -self.head_dim % LANES).unflatten(0, (-1, LANES)).unbind()
            # NaN of an infinite scale.
            cost = sum_by_halves(sum(lanes[1:], lanes[0]), 0).nan_to_num_(torch.inf, torch.inf)
            chosen = cost.unflatten(1, (CANDIDATES, -1)).argmin(1)
            best, *others = found.unflatten(2, (CANDIDATES, -1)).unbind(2)
            for candidate, other in enumerate(others, 1):
                best = torch.where(chosen == candidate, other, best)
            codes[:, heads, tokens], bits[:, heads, tokens] = best, first + chosen
        return codes.view(rotated.shape), bits.view(lowest.shape)

    def _grid(self, scale_bits: Tensor) -> tuple[Tensor, Tensor]:
        """Steps and first levels of every channel, or of all alike, fp32, of bits of scales [num_groups, ...]."""
        scale = (scale_bits << 8).to(torch.int16).view(torch.float16)
        is_alike = len(scale) == 1
        step = scale.float() if is_alike else expand_groups(scale, self.group_size, 0, self.head_dim)
        return step, self._zero(step)

    def _scale_bits(self, rotated: Tensor, has_feedback: bool) -> Tensor:
        """rotated fp32 [D, ...] -> int32 [num_groups, ...]: e5m2 of the scales, to nearest; with feedback of the
        lowest candidates, rounded down. Squares of fp32 numbers are exact in fp64."""
        groups, size = num_groups(self.head_dim, self.group_size), min(self.group_size, self.head_dim)
        squares = _padded(rotated.double().square_(), groups * size - self.head_dim).unflatten(0, (groups, size))
        missing = (1 << (size - 1).bit_length()) - size
        counts = (self.head_dim - size * torch.arange(groups, device=rotated.device)).clamp_(max=size)
        sums = sum_by_halves(_padded(squares.transpose(0, 1), missing), 0)
        rms = (sums / counts.view(-1, *[1] * (sums.ndim - 1))).sqrt_()
        step = STEPS[self.num_bits] * (LOWEST if has_feedback else 1.0)
        half = (rms * step).float().half()
        reason = f"a group of {size} values holds NaN, infinity, or has a norm beyond float16"
        require_finite(half.float(), f"keys or values cannot be quantized: {reason}", hint="check the model's outputs")
        return (half.view(torch.int16).int() + (0 if has_feedback else 0x80)) >> 8


def _channels_first(x: Tensor) -> Tensor:
    """x, which broadcasts to [M, n, T, D] -> [D, n, M, T]."""
    return x[(None,) * (4 - x.ndim)].permute(3, 1, 0, 2)


def _channels_last(x: Tensor) -> Tensor:
    """Inverse of :func:`_channels_first`."""
    return x.permute(2, 1, 3, 0)


def _padded(x: Tensor, more: int) -> Tensor:
    """x with so many zeros more in its first dimension."""
    return torch.cat([x, x.new_zeros(more, *x.shape[1:])]) if more else x


@functools.cache
def _token_bytes(layout: RotatedLayout, first: int, stop: int) -> Tensor:
    """As ``token_bytes``: what a record of the largest codes and scales has there."""
    count, groups = stop - first, num_groups(layout.head_dim, layout.group_size)
    codes = torch.full((count, layout.head_dim), layout.levels, dtype=torch.uint8)
    return layout._records(codes, torch.full((count, groups), 255, dtype=torch.uint8), first) != 0
