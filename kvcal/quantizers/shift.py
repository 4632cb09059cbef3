"""Codes of 2b bits become codes of b bits without the values they came from: PM-KVQ's bit-width shrinking, b = 8, 4, 2.

    equivalent   X_b = ((2^2b - 2^b + 1) (X_2b + 2^(b-1))) >> 3b,   S_b = (2^b + 1) S_2b,   Z_b = Z_2b        (Eq. 3)
    modified     X_b = X_2b >> b,   S_b = 2^b S_2b,        Z_b = Z_2b + (S_b - S_2b) / 2                  (Sec. 4.4.1)
    direct       X_b = X_2b >> b,   S_b = (2^b + 1) S_2b,  Z_b = Z_2b                                     (Sec. 4.4.1)

The equivalent shift is round-half-up(X_2b / (2^b + 1)) in integers. The rounding thresholds of b bits are thresholds of
2b bits too, so rounding twice is rounding once: codes that were shrunk step by step are those of quantizing the values
directly (ties aside), as long as the scales keep their exact ratio. fp32 parameters do that, fp16 and bf16 ones do not:
formats that shrink store fp32. The other two are the paper's ablations. Modified maps the codes that share their upper
bits to their mean: its steps are finer, and both ends of the range, the outliers, move inwards by half of one. Direct
drops the lower bits and keeps the range, which pushes values from the middle towards the ends, by over half a step.

Left out: the shift 16 -> 8 exists for any caller, but the runtime stores 16-bit pages in the model's dtype, which loses
nothing at the same size, and quantizes them (``uniform``) where the paper shifts its 65,536 levels. Added: b = 1, for
which the same formulas hold (there, direct gives the codes of equivalent).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Shift = Literal["equivalent", "modified", "direct"]
SHIFTS: tuple[Shift, ...] = ("equivalent", "modified", "direct")
WIDER_BITS = (16, 8, 4, 2)


def shift(codes: Tensor, from_bits: int, kind: Shift = "equivalent") -> Tensor:
    """Codes of ``from_bits`` (16, 8, 4 or 2) bits, of any integer dtype -> uint8 codes of half as many bits.

    Raises:
        ValueError: another ``from_bits``.
    """
    b = _half(from_bits)
    if kind != "equivalent":
        return (codes >> b).to(torch.uint8)
    # The product stays below 2^16 for b = 4 and passes 2^31 for b = 8.
    wide = codes.to(torch.int64 if b == 8 else torch.int32)
    return wide.add(1 << (b - 1)).mul_((1 << 2 * b) - (1 << b) + 1).bitwise_right_shift_(3 * b).to(torch.uint8)


def shift_params(scale: Tensor, zero: Tensor, from_bits: int, kind: Shift = "equivalent") -> tuple[Tensor, Tensor]:
    """Scale and zero, fp32, of codes that :func:`shift` halves from ``from_bits`` -> those of the result.

    Raises:
        ValueError: another ``from_bits`` than 16, 8, 4 or 2.
    """
    b = _half(from_bits)
    if kind != "modified":
        return scale * (2.0**b + 1.0), zero
    wider = scale * 2.0**b
    return wider, zero + (wider - scale) * 0.5


def unshift(codes: Tensor, to_bits: int, kind: Shift = "equivalent") -> Tensor:
    """Codes of half of ``to_bits`` (16, 8, 4 or 2) bits -> codes of ``to_bits`` bits that stand for the same values
    (modified: for values half a step of the wider codes above), uint8 (16 bits: int32). :func:`shift` of the same kind
    takes them back to ``codes`` exactly.

    Raises:
        ValueError: another ``to_bits``.
    """
    b = _half(to_bits)
    wide = codes.to(torch.int32 if b == 8 else torch.uint8)
    return (wide << b) + (1 << (b - 1)) if kind == "modified" else wide * ((1 << b) + 1)


def unshift_params(scale: Tensor, zero: Tensor, to_bits: int, kind: Shift = "equivalent") -> tuple[Tensor, Tensor]:
    """Scale and zero, fp32, for the codes of :func:`unshift`. The shift of them gives ``scale`` back: bit for bit where
    it came out of :func:`shift_params`, else within one unit in the last place (15 % of all fp32 numbers are 5 times no
    other), subnormal numbers aside; and ``zero`` up to rounding (modified), or untouched.

    Raises:
        ValueError: another ``to_bits`` than 16, 8, 4 or 2.
    """
    b = _half(to_bits)
    if kind != "modified":
        divisor = scale.new_full((), (1 << b) + 1)  # on the device: CUDA multiplies by 1 / a Python number
        return scale / divisor, zero
    narrower = scale * 2.0**-b
    return narrower, zero - (scale - narrower) * 0.5


def _half(num_bits: int) -> int:
    if num_bits not in WIDER_BITS:
        raise ValueError(f"codes of {num_bits} bits have no half, expected one of {WIDER_BITS}")
    return num_bits // 2
