"""A randomized Hadamard transform (HIGGS and QuaRot), which makes any row of values nearly Gaussian:

    y = H diag(s) x / sqrt(n),   x = diag(s) H y / sqrt(n),   H = [[1, 1], [1, -1]] (x) ... (x) [[1, 1], [1, -1]]

in blocks of n, the largest power of two that divides the width. Signs s of +1 or -1 come first: without them
a row of equal values would be turned into one spike. The transform is orthonormal, so an error of the rotated
values is an error of the same L2 norm in the values. A width such as 96 has blocks of 32 and is never padded.

The transform is log2(n) rounds of additions and subtractions, neighbours first (distance 1, 2, 4, ...), then
one product with fp32(1 / sqrt(n)): single IEEE operations, the same bits on a CPU and on a GPU. A product
with H would be summed in an order that the device chooses. Left out: dense rotations, and Hadamard matrices
of sizes such as 12 and 20.
"""

from __future__ import annotations

import functools
import hashlib
import math

from kvcal.lazy_torch import Tensor, torch


def block_size(width: int) -> int:
    """The largest power of two that divides ``width`` (1 or more): 1024 -> 1024, 96 -> 32, 20 -> 4, 7 ->
    1."""
    return width & -width


def norm(width: int) -> float:
    """1 / sqrt(n), which makes the transform orthonormal; rounded to fp32 where it is used."""
    return 1.0 / math.sqrt(block_size(width))


@functools.cache
def random_signs(width: int, seed: int) -> Tensor:
    """[width] int8 of +1 and -1 on the CPU, from the bits of a hash: the same on any machine and torch
    version.

    The signs of a smaller width are the first ones of a larger width with the same ``seed``.
    """
    data = hashlib.shake_256(f"kvcal hadamard signs {seed}".encode("ascii")).digest(-(-width // 8))
    bits = [byte >> place & 1 for byte in data for place in range(8)]
    return torch.tensor([1 - 2 * bit for bit in bits[:width]], dtype=torch.int8)


def rotate(x: Tensor, signs: Tensor) -> Tensor:
    """x [..., width], any float dtype; signs [width] int8 on the same device -> [..., width] fp32,
    rotated."""
    return _transformed(x.float() * signs.float())


def rotate_channels(x: Tensor, signs: Tensor) -> Tensor:
    """:func:`rotate` of x fp32 [width, ...], contiguous, which it overwrites; signs broadcast to x."""
    return _in_rounds(x.mul_(signs))


def unrotate(y: Tensor, signs: Tensor) -> Tensor:
    """Inverse of :func:`rotate`, up to fp32 rounding: [..., width] -> [..., width] fp32."""
    return _transformed(y.float()) * signs.float()


def _transformed(x: Tensor) -> Tensor:
    """H x / sqrt(n) of each block of the last dimension, without gradients."""
    # Rows last: each round then adds whole runs of memory, three times faster on a CPU than within rows.
    rows_last = x.detach().reshape(-1, x.shape[-1]).t().clone(memory_format=torch.contiguous_format)
    return _in_rounds(rows_last).t().reshape(x.shape)


def _in_rounds(values: Tensor) -> Tensor:
    """Of channels [width, ...]. Two buffers, one of them ``values``, take turns: on a CPU four times faster than a
    new one for every sum."""
    width, others, distance = len(values), torch.empty_like(values), 1
    while distance < block_size(width):
        pairs, found = (buffer.view(width // (2 * distance), 2, -1) for buffer in (values, others))
        torch.add(pairs[:, 0], pairs[:, 1], out=found[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=found[:, 1])
        values, others = others, values
        distance *= 2
    return values.mul_(values.new_full((), norm(width)))
