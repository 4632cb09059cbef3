"""Rotated pages against loops in fp64: what a record stands for, and the grid that a token's norm gives."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvcal.pages.rotated import STEPS, RotatedLayout, block_size, random_signs
from kvcal.plan.page_format import Format
from kvcal.strict import dump

SIZES = [("k", 2, 128, 128), ("v", 3, 32, 96), ("k", 4, 64, 80), ("v", 1, 128, 24), ("k", 8, 128, 8)]


def matrix(width: int, signs: Tensor) -> Tensor:
    """H diag(s) / sqrt(n) [D, D] fp64: (-1) to the number of ones that row and column have in common."""
    block, out = block_size(width), torch.zeros(width, width, dtype=torch.float64)
    for row in range(width):
        for column in range(row // block * block, row // block * block + block):
            common = (row % block & column % block).bit_count()
            out[row, column] = (-1) ** common * int(signs[column]) / math.sqrt(block)
    return out


def tokens(head_dim: int) -> Tensor:
    """[2, 128, D] in bf16 with an outlier channel."""
    x = torch.randn(2, 128, head_dim, generator=torch.Generator().manual_seed(head_dim))
    x[..., 1] *= 20
    return x.bfloat16()


@pytest.mark.parametrize(("side", "num_bits", "group_size", "head_dim"), SIZES)
def test_a_page_holds_the_nearest_points_of_the_grid_of_every_norm(
    side: str, num_bits: int, group_size: int, head_dim: int
) -> None:
    layout = RotatedLayout(side, num_bits, "token", group_size, head_dim, "float16", "bfloat16")
    signs, x = random_signs(head_dim, 3), tokens(head_dim)
    records = layout.encode_pages(x, {"signs": signs})
    found = layout.decode_pages(records, 2, {"signs": signs})
    turn = matrix(head_dim, signs)
    middle = (2**num_bits - 1) / 2
    for head, token in ((0, 0), (1, 77), (0, 127)):
        rotated = (turn @ x[head, token].double()).bfloat16().double()
        kept = torch.zeros(head_dim, dtype=torch.float64)
        for start in range(0, head_dim, group_size):
            group = rotated[start : start + group_size]
            scale = float((STEPS[num_bits] * group.square().mean().sqrt()).half())
            zero = -middle * scale
            for channel, value in enumerate(group.tolist(), start):
                code = min(max(round((value - zero) / scale), 0), 2**num_bits - 1)
                kept[channel] = code * scale + zero
        # A value between two codes may be rounded otherwise in fp32: one step in one channel at most.
        difference = (turn.T @ kept - found[head, token].double()).norm()
        assert difference < 1e-5 * x[head, token].double().norm(), (head, token)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_bits": 16}, "quantizer = 'rotated' does not go with num_bits = 16"),
        ({"lattice_dim": 2}, "quantizer = 'rotated' does not go with lattice_dim"),
        ({"shrink_at": (300,), "param_dtype": "float32"}, "quantizer = 'rotated' does not go with shrink_at"),
        ({"quantizer": "lattice"}, "quantizer = 'lattice', expected one of"),
    ],
)
def test_knobs_of_other_quantizers_are_refused(changes: dict, message: str) -> None:
    assert "quantizer" not in dump(Format(2)) and dump(Format(2, quantizer="rotated"))["quantizer"] == "rotated"
    with pytest.raises(ValueError, match=message):
        Format(**{"num_bits": 2, "quantizer": "rotated", **changes})
