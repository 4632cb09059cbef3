"""Bit-width shrinking: every code against rational numbers, and chains against direct quantization."""

import math
from fractions import Fraction

import pytest
import torch

from kvcal.pages import uniform
from kvcal.systems.pm_kvq.shrink import shift, shift_scale, unshift, unshift_scale

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


def chained(x: torch.Tensor, num_bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [C] quantized to 8 bits with fp32 parameters, then shrunk to ``num_bits``: codes, scale, zero."""
    codes, scale, zero = uniform.quantize(x, 8, GROUP, -1, torch.float32)
    bits = 8
    while bits > num_bits:
        codes, scale = shift(codes, bits), shift_scale(scale, bits)
        bits //= 2
    return codes, scale, zero


@pytest.mark.parametrize("b", HALVES)
def test_equivalent_is_round_half_up_for_every_code(b):
    codes = all_codes(2 * b)
    found = shift(codes, 2 * b)
    assert found.dtype == torch.uint8
    divisor = 2**b + 1
    assert found.tolist() == [(2 * x + divisor) // (2 * divisor) for x in range(4**b)]
    assert codes.tolist() == list(range(4**b))  # the input is left alone


@pytest.mark.parametrize("b", HALVES)
def test_scales_are_the_papers(b):
    """In numbers that fp32 holds exactly."""
    scale = torch.tensor([0.5, 0.0, 2.0**-20])
    assert shift_scale(scale, 2 * b).tolist() == [(2**b + 1) * s for s in scale.tolist()]
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
    codes, scale, zero = chained(x, 2)
    assert not codes.any() and torch.equal(uniform.dequantize(codes, scale, zero, GROUP, -1), x)


@pytest.mark.parametrize("b", HALVES)
def test_unshift_is_the_exact_inverse_for_codes(b):
    codes = all_codes(b)
    wider = unshift(codes, 2 * b)
    assert wider.tolist() == [x * (2**b + 1) for x in range(2**b)]
    assert wider.dtype == (torch.int32 if b == 8 else torch.uint8)
    assert torch.equal(shift(wider, 2 * b), codes)


@pytest.mark.parametrize("b", HALVES)
def test_unshift_gives_back_every_scale_that_was_shrunk(b):
    """Bit for bit what came out of a shift; any other scale within one unit in the last place."""
    scale = (torch.arange(0, 2**23, 13, dtype=torch.int32) + (127 << 23)).view(torch.float32)  # of [1, 2)

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        return shift_scale(unshift_scale(x, 2 * b), 2 * b)

    shrunk = shift_scale(scale, 2 * b)
    assert torch.equal(there_and_back(shrunk), shrunk)
    assert (there_and_back(scale) - scale).abs().max() <= 2.0**-23


def test_unshift_keeps_the_values_and_shrinks_to_them_again():
    x = torch.randn(GROUP, generator=torch.Generator().manual_seed(3)) * 7 + 2
    narrow, narrow_scale, zero = chained(x, 2)
    codes, scale, values = narrow, narrow_scale, uniform.dequantize(narrow, narrow_scale, zero, GROUP, -1)
    for bits in (4, 8):
        codes, scale = unshift(codes, bits), unshift_scale(scale, bits)
        assert (uniform.dequantize(codes, scale, zero, GROUP, -1) - values).abs().max() <= 2e-5
    for bits in (8, 4):
        codes, scale = shift(codes, bits), shift_scale(scale, bits)
    assert torch.equal(codes, narrow) and torch.equal(scale, narrow_scale)
