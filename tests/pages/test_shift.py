"""Bit-width shrinking: every code against rational numbers, chains against direct quantization, the ablations against
their definitions in the paper."""

import math
from fractions import Fraction

import pytest
import torch

from kvcal.pages import uniform
from kvcal.pages.shrink import SHIFTS, shift, shift_params, unshift, unshift_params

HALVES = (8, 4, 2, 1)
GROUP = 128


def round_half_up(x: Fraction) -> int:
    return math.floor(x + Fraction(1, 2))


def all_codes(num_bits: int) -> torch.Tensor:
    return torch.arange(2**num_bits, dtype=torch.int32 if num_bits == 16 else torch.uint8)


def exact_codes(values: list[float], num_bits: int) -> list[int]:
    """Codes of one group in rational arithmetic, half up; ``values`` are not all equal."""
    low, high = Fraction(min(values)), Fraction(max(values))
    return [round_half_up((Fraction(x) - low) * (2**num_bits - 1) / (high - low)) for x in values]


def chained(
    x: torch.Tensor, num_bits: int, kind: str = "equivalent"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [C] quantized to 8 bits with fp32 parameters, then shrunk to ``num_bits``: codes, scale, zero."""
    codes, scale, zero = uniform.quantize(x, 8, GROUP, -1, torch.float32)
    bits = 8
    while bits > num_bits:
        codes, (scale, zero) = shift(codes, bits, kind), shift_params(scale, zero, bits, kind)
        bits //= 2
    return codes, scale, zero


@pytest.mark.parametrize("b", HALVES)
def test_equivalent_is_round_half_up_for_every_code(b):
    codes = all_codes(2 * b)
    found = shift(codes, 2 * b)
    assert found.dtype == torch.uint8
    assert found.tolist() == [round_half_up(Fraction(x, 2**b + 1)) for x in range(4**b)]
    assert codes.tolist() == list(range(4**b))  # the input is left alone


@pytest.mark.parametrize("kind", ["modified", "direct"])
@pytest.mark.parametrize("b", HALVES)
def test_the_ablations_drop_the_lower_bits(b, kind):
    assert shift(all_codes(2 * b), 2 * b, kind).tolist() == [x // 2**b for x in range(4**b)]
    differing = sum(x // 2**b != round_half_up(Fraction(x, 2**b + 1)) for x in range(4**b))
    assert (differing > 0) == (b > 1)


@pytest.mark.parametrize("b", HALVES)
def test_parameters_are_the_papers(b):
    """In numbers that fp32 holds exactly."""
    scale, zero = torch.tensor([0.5, 0.0, 2.0**-20]), torch.tensor([-3.0, 1.0, 2.0**-21])
    for kind in ("equivalent", "direct"):
        found = shift_params(scale, zero, 2 * b, kind)
        assert found[0].tolist() == [(2**b + 1) * s for s in scale.tolist()] and torch.equal(found[1], zero)
    wider, moved = shift_params(scale, zero, 2 * b, "modified")
    assert wider.tolist() == [2**b * s for s in scale.tolist()]
    assert moved.tolist() == [z + (2**b - 1) * s / 2 for s, z in zip(scale.tolist(), zero.tolist(), strict=True)]
    assert scale.tolist() == [0.5, 0.0, 2.0**-20]


def test_sixteen_bit_codes_shrink_to_the_codes_of_direct_quantization():
    """16 -> 8 -> 4 -> 2 in rational numbers: rounding step by step is rounding once."""
    x = torch.randn(600, generator=torch.Generator().manual_seed(0)).tolist()
    codes = torch.tensor(exact_codes(x, 16), dtype=torch.int32)
    for b in HALVES:
        codes = shift(codes, 2 * b)
        assert codes.tolist() == exact_codes(x, b)


@pytest.mark.parametrize("num_bits", [4, 2])
def test_the_chain_is_the_quantizer_with_fp32_parameters(num_bits):
    """And codes of ``uniform.quantize``, which rounds ties to even: none differs."""
    x = torch.randn(512 * GROUP, generator=torch.Generator().manual_seed(8))
    codes, scale, zero = chained(x, num_bits)
    direct_codes, direct_scale, direct_zero = uniform.quantize(x, num_bits, GROUP, -1, torch.float32)
    assert torch.equal(codes, direct_codes) and torch.equal(zero, direct_zero)
    assert torch.allclose(scale, direct_scale, rtol=3e-7, atol=0)


def test_constant_groups_stay_exact():
    x = torch.full((GROUP,), 1.7)
    for kind in SHIFTS:
        codes, scale, zero = chained(x, 2, kind)
        assert not codes.any() and torch.equal(uniform.dequantize(codes, scale, zero, GROUP, -1), x)


@pytest.mark.parametrize("kind", SHIFTS)
@pytest.mark.parametrize("b", HALVES)
def test_unshift_is_the_exact_inverse_for_codes(b, kind):
    codes = all_codes(b)
    wider = unshift(codes, 2 * b, kind)
    if kind != "modified":
        assert wider.tolist() == [x * (2**b + 1) for x in range(2**b)]
    assert wider.dtype == (torch.int32 if b == 8 else torch.uint8)
    assert torch.equal(shift(wider, 2 * b, kind), codes)


@pytest.mark.parametrize("b", HALVES)
def test_unshift_gives_back_every_scale_that_was_shrunk(b):
    """Bit for bit what came out of a shift; any other scale within one unit in the last place."""
    scale = (torch.arange(0, 2**23, 13, dtype=torch.int32) + (127 << 23)).view(torch.float32)  # of [1, 2)
    zero = torch.zeros(())

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        narrow, same = unshift_params(x, zero, 2 * b)
        assert torch.equal(same, zero)
        return shift_params(narrow, zero, 2 * b)[0]

    shrunk, _ = shift_params(scale, zero, 2 * b)
    assert torch.equal(there_and_back(shrunk), shrunk)
    assert (there_and_back(scale) - scale).abs().max() <= 2.0**-23


@pytest.mark.parametrize("kind", SHIFTS)
def test_unshift_keeps_the_values_and_shrinks_to_them_again(kind):
    x = torch.randn(GROUP, generator=torch.Generator().manual_seed(3)) * 7 + 2
    codes, scale, zero = narrow = chained(x, 2, kind)
    values = uniform.dequantize(codes, scale, zero, GROUP, -1)
    for bits in (4, 8):
        codes, (scale, zero) = unshift(codes, bits, kind), unshift_params(scale, zero, bits, kind)
        half_step = 0.501 * scale.item() if kind == "modified" else 1e-5
        found = uniform.dequantize(codes, scale, zero, GROUP, -1)
        assert (found - values).abs().max() <= half_step
        values = found
    for bits in (8, 4):
        codes, (scale, zero) = shift(codes, bits, kind), shift_params(scale, zero, bits, kind)
    assert torch.equal(codes, narrow[0]) and torch.equal(scale, narrow[1])
    assert torch.allclose(zero, narrow[2], rtol=1e-6)
