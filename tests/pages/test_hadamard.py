"""The randomized Hadamard transform: against an explicit matrix in fp64, its inverse, and signs that never change."""

from __future__ import annotations

import math

import pytest
import torch

from kvcal.pages.rotated import block_size, random_signs, rotate, unrotate

WIDTHS = (1, 20, 64, 96, 128, 1024)
BLOCKS = (1, 4, 64, 32, 128, 1024)


def rows_of(width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[3, 5, width] with one large channel and one constant row."""
    x = torch.randn(3, 5, width, generator=torch.Generator().manual_seed(width))
    x[..., width // 2] *= 50.0
    x[1, 2] = 0.25
    return x.to(dtype)


def matrix_of(width: int, signs: list[int]) -> torch.Tensor:
    """[width, width] fp64, entry by entry: (-1)^(number of ones that i and j share) s_j / sqrt(n) within a block."""
    n = max(2**k for k in range(11) if width % 2**k == 0)
    matrix = torch.zeros(width, width, dtype=torch.float64)
    for start in range(0, width, n):
        for i in range(n):
            row = [(-1) ** (i & j).bit_count() * signs[start + j] / math.sqrt(n) for j in range(n)]
            matrix[start + i, start : start + n] = torch.tensor(row, dtype=torch.float64)
    return matrix


@pytest.mark.parametrize(("width", "block"), [*zip(WIDTHS, BLOCKS, strict=True), (7, 1), (80, 16), (1536, 512)])
def test_block_is_the_largest_power_of_two_that_divides_the_width(width, block):
    assert block_size(width) == block


@pytest.mark.parametrize("width", WIDTHS)
def test_rotation_equals_the_explicit_matrix(width):
    x, signs = rows_of(width), random_signs(width, seed=3)
    matrix = matrix_of(width, signs.tolist())
    tolerance = {"rtol": 0.0, "atol": 1e-6 * math.log2(2 * width) * x.abs().max().item()}
    rotated = rotate(x, signs)
    assert (rotated.dtype, rotated.shape) == (torch.float32, x.shape)
    torch.testing.assert_close(rotated.double(), x.double() @ matrix.T, **tolerance)
    torch.testing.assert_close(unrotate(x, signs).double(), x.double() @ matrix, **tolerance)


@pytest.mark.parametrize("width", [20, 128])
def test_single_rows_and_strided_inputs_have_the_same_bits(width):
    x, signs = rows_of(width), random_signs(width, seed=1)
    rotated = rotate(x, signs)
    for row in range(3):
        assert torch.equal(rotate(x[row, 4], signs), rotated[row, 4])
    assert torch.equal(rotate(x.transpose(0, 1), signs), rotated.transpose(0, 1))
    assert torch.equal(rotate(x.repeat_interleave(2, -1)[..., ::2], signs), rotated)
    assert rotate(x[:0], signs).shape == (0, 5, width)


def test_signs_are_fixed_for_ever():
    signs = random_signs(32, seed=0)
    assert (signs.dtype, signs.shape) == (torch.int8, (32,))
    assert "".join("+" if sign == 1 else "-" for sign in signs.tolist()) == "-+---+-++--++-++++------+--+-+-+"
    assert torch.equal(random_signs(1000, seed=0)[:32], signs)


@pytest.mark.gpu
@pytest.mark.parametrize("width", WIDTHS)
def test_a_gpu_gives_the_same_bits(width):
    x, signs = rows_of(width, torch.bfloat16), random_signs(width, seed=3)
    assert torch.equal(rotate(x.cuda(), signs.cuda()).cpu(), rotate(x, signs))
    assert torch.equal(unrotate(x.cuda(), signs.cuda()).cpu(), unrotate(x, signs))
