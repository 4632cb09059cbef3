"""A Triton kernel for the errors of candidates with uniform groups: keys or values and their gradients are read once
for all bits, and nothing as large as they are is written.

In torch each candidate takes ten passes over fp32 copies; for the default 45 candidates of an 8B's layer that is as
much memory traffic as its forward and backward take together. The arithmetic is ``pages.uniform``'s, operation by
operation: IEEE division, no fused multiply-add, rounding half to even. Only sums are in another order: over at most 128
channels in fp32, everything else in fp64, without atomics, so that the same input gives the same bits.

Triton comes with torch for CUDA. Left out: groups of tokens that are no power of two, which torch computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

CHANNELS_AT_ONCE, TOKENS_AT_ONCE = 64, 64


@cache
def is_installed() -> bool:
    """Whether Triton is."""
    return find_spec("triton") is not None


def is_fused(x: Tensor, axis: str, group_size: int) -> bool:
    """Whether ``fused_errors`` takes such groups on the device of ``x``; without it torch gives the same result."""
    is_power = group_size & (group_size - 1) == 0
    return x.is_cuda and is_installed() and (is_power or axis == "token")


def fused_errors(
    x_BNTD: Tensor,
    g_BNTD: Tensor,
    lengths_B: Tensor,
    all_bits: Sequence[int],
    axis: str,
    group_size: int,
    num_sink_tokens: int,
    cache_dtype: torch.dtype,
    param_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """(Eq. 5 [B, N, C] fp64, squared errors [B, C] fp64) for C = len(all_bits) and groups of ``group_size`` along
    ``axis``, behind the sinks and before the padding.

    Args:
        x_BNTD, g_BNTD: keys or values, and their gradients, any float dtype and strides.
        lengths_B: int64.
    """
    B, N, T, D = x_BNTD.shape
    if axis == "channel":
        tokens, span, channels, dim = group_size, CHANNELS_AT_ONCE, CHANNELS_AT_ONCE, 0
    else:
        tokens, span, channels, dim = TOKENS_AT_ONCE, group_size, 1 << (group_size - 1).bit_length(), 1
    grid = (-(-(T - num_sink_tokens) // tokens), -(-D // span), B * N)
    sums = x_BNTD.new_empty(B, N, grid[0] * grid[1], len(all_bits), 2, dtype=torch.float64)
    triton_type = _triton_types()
    _kernel()[grid](
        x_BNTD,
        g_BNTD,
        lengths_B,
        _levels(tuple(all_bits), x_BNTD.device),
        sums,
        N,
        D,
        num_sink_tokens,
        *x_BNTD.stride(),
        *g_BNTD.stride(),
        NUM_BITS=len(all_bits),
        TOKENS=tokens,
        SPAN=span,
        CHANNELS=channels,
        DIM=dim,
        CACHE=triton_type[cache_dtype],
        PARAM=triton_type[param_dtype],
        enable_fp_fusion=False,
    )
    sums_BNC2 = sums.sum(2)
    return sums_BNC2[..., 0], sums_BNC2[..., 1].sum(1)


@cache
def _levels(all_bits: tuple[int, ...], device: torch.device) -> Tensor:
    """The largest code of each number of bits, fp32."""
    return torch.tensor([2.0**bits - 1 for bits in all_bits], device=device)


@cache
def _triton_types() -> dict[torch.dtype, Any]:
    import triton.language as tl

    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@cache
def _kernel() -> Any:
    """The kernel: one program a tile of TOKENS x SPAN values of one head, which holds whole groups along DIM."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        g_ptr,
        lengths_ptr,
        levels_ptr,
        sums_ptr,
        N,
        D,
        num_sinks,
        x_b,
        x_n,
        x_t,
        x_d,
        g_b,
        g_n,
        g_t,
        g_d,
        NUM_BITS: tl.constexpr,
        TOKENS: tl.constexpr,
        SPAN: tl.constexpr,
        CHANNELS: tl.constexpr,
        DIM: tl.constexpr,
        CACHE: tl.constexpr,
        PARAM: tl.constexpr,
    ):
        b = (tl.program_id(2) // N).to(tl.int64)
        n = (tl.program_id(2) % N).to(tl.int64)
        t = (num_sinks + tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
        d = (tl.program_id(1) * SPAN + tl.arange(0, CHANNELS)).to(tl.int64)[None, :]
        is_real = (t < tl.load(lengths_ptr + b)) & (d < D) & (tl.arange(0, CHANNELS) < SPAN)[None, :]
        x = tl.load(x_ptr + b * x_b + n * x_n + t * x_t + d * x_d, mask=is_real, other=0.0).to(CACHE).to(tl.float32)
        weight = tl.abs(tl.load(g_ptr + b * g_b + n * g_n + t * g_t + d * g_d, mask=is_real, other=0.0).to(tl.float32))
        infinite = tl.full((TOKENS, CHANNELS), float("inf"), tl.float32)
        low = tl.min(tl.where(is_real, x, infinite), axis=DIM, keep_dims=True)
        high = tl.max(tl.where(is_real, x, -infinite), axis=DIM, keep_dims=True)
        zero = low.to(PARAM).to(tl.float32)
        offset = x - zero
        tile = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(1) + tl.program_id(1)
        out_ptr = sums_ptr + tile.to(tl.int64) * NUM_BITS * 2
        for index in range(NUM_BITS):
            levels = tl.load(levels_ptr + index)
            step = tl.div_rn(high - low, tl.zeros_like(low) + levels).to(PARAM).to(tl.float32)
            divisor = tl.where(step == 0.0, float("inf"), step)
            code = tl.div_rn(offset, tl.broadcast_to(divisor, (TOKENS, CHANNELS)))
            code = tl.minimum(tl.maximum(code, 0.0), levels)
            code = (code + 8388608.0) - 8388608.0  # 2^23: to the nearest integer, half to even
            error = tl.where(is_real, tl.abs(code * step + zero - x), 0.0)
            weighted = tl.sum(tl.sum(error * weight, axis=1).to(tl.float64), axis=0)
            squared = tl.sum(tl.sum(error * error, axis=1).to(tl.float64), axis=0)
            tl.store(out_ptr + index * 2, weighted)
            tl.store(out_ptr + index * 2 + 1, squared)

    return kernel
