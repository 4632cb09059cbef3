"""Rotated pages against loops in fp64: what a record stands for, and the grid that a token's norm gives."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvcal.pages.error_feedback import feedback_factor, feedback_operand
from kvcal.pages.hadamard import block_size, random_signs, rotate, unrotate
from kvcal.plan.page_format import Format
from kvcal.strict import dump
from kvcal.systems.basis import rotated as pages
from kvcal.systems.basis.hessians import rotated as rotated_hessian
from kvcal.systems.basis.rotated import SCALE_DTYPE, STEPS, RotatedLayout

SIZES = [("k", 2, 128, 128), ("v", 3, 32, 96), ("k", 4, 64, 80), ("v", 1, 128, 24), ("k", 8, 128, 8)]


def matrix(width: int, signs: Tensor) -> Tensor:
    """H diag(s) / sqrt(n) [D, D] fp64: (-1) to the number of ones that row and column have in common."""
    block = block_size(width)
    common = torch.arange(block)[:, None] & torch.arange(block)
    ones = sum(common >> bit & 1 for bit in range(block.bit_length()))
    return torch.block_diag(*[(-1.0) ** ones.double()] * (width // block)) * signs / math.sqrt(block)


def tokens(head_dim: int) -> Tensor:
    """[2, 128, D] in bf16 with an outlier channel."""
    x = torch.randn(2, 128, head_dim, generator=torch.Generator().manual_seed(head_dim))
    x[..., 1] *= 20
    return x.bfloat16()


SCALES = sorted((1 + mantissa / 4) * 2.0**exponent for mantissa in range(4) for exponent in range(-14, 16))


def nearest(scale: float) -> float:
    """Of the normal numbers of e5m2."""
    return min(SCALES, key=lambda stored: abs(stored - scale))


@pytest.mark.parametrize(("side", "num_bits", "group_size", "head_dim"), SIZES)
def test_a_page_holds_the_nearest_points_of_the_grid_of_every_norm(
    side: str, num_bits: int, group_size: int, head_dim: int
) -> None:
    layout = RotatedLayout(side, num_bits, "token", group_size, head_dim, SCALE_DTYPE, "bfloat16")
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
            scale = nearest(float((STEPS[num_bits] * group.square().mean().sqrt()).half()))
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
        ({"axis": "channel"}, "rotated pages take fewer than 16 bits and axis 'token', found 'channel'"),
        ({"param_dtype": "float32"}, "scales of rotated pages have 8 bits"),
        ({"quantizer": "lattice"}, "quantizer = 'lattice', expected one of"),
    ],
)
def test_knobs_of_other_quantizers_are_refused(changes: dict, message: str) -> None:
    assert "quantizer" not in dump(Format(2)) and dump(Format(2, quantizer="rotated"))["quantizer"] == "rotated"
    with pytest.raises(ValueError, match=message):
        Format(**{"num_bits": 2, "quantizer": "rotated", **changes})


@pytest.mark.parametrize("head_dim", [64, 128])
def test_gains_make_up_for_what_codes_of_two_bits_lose(head_dim: int) -> None:
    """The slope of what is read on what was stored, of channels by cost, as in real bases."""
    generator = torch.Generator().manual_seed(head_dim)
    cost = torch.randn(2, head_dim, generator=generator, dtype=torch.float64).exp().sort(1).values
    signs = random_signs(head_dim, 1)
    factor, _ = feedback_factor(rotated_hessian(torch.diag_embed(cost), signs), 0.01)
    x = torch.randn(24, 2, 128, head_dim, generator=generator) * cost.float().pow(1 / 14).unsqueeze(1)
    layout = RotatedLayout("v", 2, "token", 128, head_dim, SCALE_DTYPE, "bfloat16")

    def slopes(has_gain: bool) -> Tensor:
        tensors = {"v_feedback": factor} | ({"v_gain": pages.value_gains(cost)} if has_gain else {})
        operands = {"signs": signs, "feedback": feedback_operand(tensors, "v")}
        read = layout.decode_pages(layout.encode_pages(x, operands), 2, operands)
        return ((x * read).sum((0, 2)) / x.square().sum((0, 2))).unflatten(1, (4, -1)).mean(2)

    without, with_gain = slopes(has_gain=False), slopes(has_gain=True)
    assert without[:, 0].max() < 0.9 and without[:, 3].min() > 0.93
    assert (with_gain - 1).abs().max() < 0.015, with_gain


def test_gains_do_not_depend_on_the_unit_of_costs() -> None:
    cost = torch.rand(3, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.01
    gains = pages.value_gains(cost)
    assert torch.equal(pages.value_gains(1e6 * cost), gains) and gains.dtype == torch.float16
    assert (pages.value_gains(torch.ones(1, 8).double()) == torch.tensor(1 / pages.SLOPE).half()).all()


def test_a_scale_next_to_the_largest_is_not_searched_beyond_it() -> None:
    """Of the candidates, 57,344 is e5m2's last number; the next ones are infinity and NaN."""
    layout, signs = RotatedLayout("v", 2, "token", 64, 64, SCALE_DTYPE, "float32"), random_signs(64, 0)
    x = torch.randn(1, 128, 64, generator=torch.Generator().manual_seed(0))
    x *= 49_000 / x.square().mean(-1, keepdim=True).sqrt()
    factor, _ = feedback_factor(torch.eye(64, dtype=torch.float64)[None], 0.0)
    operands = {"signs": signs, "feedback": factor}
    read = layout.decode_pages(layout.encode_pages(x, operands), 1, operands)
    assert float((read - x).norm() / x.norm()) < 0.45


WIDTHS = (1, 20, 64, 96, 128, 1024)


def rows_of(width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[3, 5, width] with one large channel and one constant row."""
    x = torch.randn(3, 5, width, generator=torch.Generator().manual_seed(width))
    x[..., width // 2] *= 50.0
    x[1, 2] = 0.25
    return x.to(dtype)


@pytest.mark.parametrize(("width", "block"), [(1, 1), (20, 4), (96, 32), (1024, 1024), (7, 1), (80, 16), (1536, 512)])
def test_block_is_the_largest_power_of_two_that_divides_the_width(width, block):
    assert block_size(width) == block


@pytest.mark.parametrize("width", WIDTHS)
def test_rotation_equals_the_explicit_matrix(width):
    x, signs = rows_of(width), random_signs(width, seed=3)
    explicit = matrix(width, signs)
    tolerance = {"rtol": 0.0, "atol": 1e-6 * math.log2(2 * width) * x.abs().max().item()}
    rotated = rotate(x, signs)
    assert (rotated.dtype, rotated.shape) == (torch.float32, x.shape)
    torch.testing.assert_close(rotated.double(), x.double() @ explicit.T, **tolerance)
    before = x.clone()
    torch.testing.assert_close(unrotate(x, signs).double(), x.double() @ explicit, **tolerance)
    for rows in (x, x[:1]):  # a single row is laid out as it is turned
        assert torch.equal(unrotate(rows, signs), unrotate(x, signs)[: len(rows)])
    assert torch.equal(x, before)


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
