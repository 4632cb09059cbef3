"""The shared asymmetric uniform quantizer (PM-KVQ Eq. 1-2, KIVI, KVmix, Kitty all use it).

    z = min,  s = (max - min) / (2^b - 1),  q = clamp(round_half_even((x - z) / s), 0, 2^b - 1),  x' = q s + z

The codes are computed against the *stored* scale and zero (rounded to ``param_dtype``), so that decoding picks
the nearest representable value; a constant group, or one whose stored scale underflows to 0, gives q = 0 and
x' = z. All arithmetic is fp32, one IEEE operation at a time: another device gets the same codes bit for bit.
NaN and infinity are refused, never stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcal.pages.finite import require_finite


def num_groups(length: int, group_size: int) -> int:
    """Groups that cover ``length`` values; the last one may be shorter."""
    return -(-length // group_size)


def quantize(
    x: Tensor, num_bits: int, group_size: int, dim: int, param_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize groups of ``group_size`` consecutive values along ``dim`` (negative).

    Args:
        x: [..., C, ...] with C at ``dim``, any float dtype; converted to fp32.
    Returns:
        codes, uint8, shaped like x; scale and zero in ``param_dtype`` with num_groups(C) at ``dim``.
    Raises:
        NonFiniteActivations: a group's scale or zero is not finite in ``param_dtype``.
    """
    length = x.shape[dim]
    full = length // group_size * group_size
    sizes = [(0, full, group_size)] if full else []
    if full < length:
        sizes.append((full, length - full, length - full))
    parts = [
        _quantize_equal(x.narrow(dim, start, count).unflatten(dim, (-1, size)), num_bits, dim, param_dtype)
        for start, count, size in sizes
    ]
    if len(parts) == 1:
        return parts[0]
    codes, scale, zero = (torch.cat(tensors, dim=dim) for tensors in zip(*parts, strict=True))
    return codes, scale, zero


def _quantize_equal(
    grouped: Tensor, num_bits: int, dim: int, param_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """grouped [..., G, g, ...], the pair (G, g) standing where ``dim`` of the result is."""
    inner = dim  # counted from the end, unflattening leaves the group's members at the same negative index
    grouped = grouped.float()
    # On the device, not a Python number: CUDA divides by a number as a product with its rounded reciprocal, and the
    # codes would differ from a CPU's.
    levels = grouped.new_full((), 2**num_bits - 1)
    minimum, maximum = torch.aminmax(grouped, dim=inner, keepdim=True)
    minimum, maximum = minimum + 0.0, maximum + 0.0  # which of -0 and 0 is the smaller differs between devices
    zero = minimum.to(param_dtype)
    scale = ((maximum - minimum) / levels).to(param_dtype)
    require_finite(
        scale.sum(dtype=torch.float64) + zero.sum(dtype=torch.float64),
        f"keys or values cannot be quantized: a group of {grouped.shape[inner]} values holds NaN, infinity, "
        f"or a range beyond {str(param_dtype).removeprefix('torch.')}",
        hint="check the model's outputs; a range too large for float16 fits with param_dtype = 'bfloat16'",
    )
    step = scale.float()
    steps = (grouped - zero.float()) / torch.where(step == 0, torch.inf, step)
    codes = steps.round_().clamp_(0.0, 2.0**num_bits - 1).to(torch.uint8)
    return codes.flatten(dim - 1, dim), scale.squeeze(inner), zero.squeeze(inner)


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor, group_size: int, dim: int) -> Tensor:
    """Inverse of :func:`quantize`: codes of any numeric dtype, scale and zero with num_groups at ``dim`` -> fp32.

    x' = (q s) + z with both roundings: a fused multiply-add would differ between devices.
    """
    length = codes.shape[dim]
    scale, zero = scale.float(), zero.float()
    if length % group_size:
        group_of = torch.arange(length, device=codes.device) // group_size
        return codes.float().mul_(scale.index_select(dim, group_of)).add_(zero.index_select(dim, group_of))
    values = codes.unflatten(dim, (-1, group_size)).float()
    return values.mul_(scale.unsqueeze(dim)).add_(zero.unsqueeze(dim)).flatten(dim - 1, dim)
