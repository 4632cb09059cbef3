"""The shared quantizer against a Python loop: codes equal exactly, not within a tolerance."""

import oracles
import pytest
import torch

from kvcal.errors import NonFiniteActivations
from kvcal.pages import uniform
from kvcal.pages.layout_protocol import PARAM_DTYPES

TAKEN = ("float16", "bfloat16", "float32")  # e5m2 is for scales that are searched

NUM_BITS = (1, 2, 3, 4, 8)
HALVES = torch.tensor([0.0, 0.5, 1.5, 2.5, 3.5, 14.5, 254.5])


def assert_equals_the_loop(x: torch.Tensor, num_bits: int, group_size: int, param_dtype: str) -> None:
    """x [C]: codes, scale, zero and decoded values of every group equal the oracle's, bit for bit."""
    x = x.float()
    dtype = PARAM_DTYPES[param_dtype]
    codes, scale, zero = uniform.quantize(x, num_bits, group_size, -1, dtype)
    assert (codes.dtype, scale.dtype, zero.dtype) == (torch.uint8, dtype, dtype)
    assert scale.shape == zero.shape == (uniform.num_groups(len(x), group_size),)
    decoded = uniform.dequantize(codes, scale, zero, group_size, -1)
    assert decoded.dtype == torch.float32
    for group, start in enumerate(range(0, len(x), group_size)):
        members = slice(start, start + group_size)
        expected = oracles.quantize_group(x[members].tolist(), num_bits, param_dtype)
        assert (codes[members].tolist(), scale[group].item(), zero[group].item()) == expected
        expected_values = [oracles.dequantize_code(code, *expected[1:]) for code in expected[0]]
        assert decoded[members].tolist() == expected_values


@pytest.mark.parametrize("param_dtype", TAKEN)
@pytest.mark.parametrize("num_bits", NUM_BITS)
def test_codes_equal_the_loop(num_bits, param_dtype):
    generator = torch.Generator().manual_seed(num_bits)
    for length, group_size, spread, offset in [
        (128, 32, 1.0, 0.0),
        (80, 64, 3.0, 100.0),  # the last group is shorter, the offset swamps fp16's and bf16's zero
        (33, 32, 1e-4, -7.0),  # the last group has one member
        (7, 128, 1e3, 0.0),
        (1, 32, 1.0, 0.0),
    ]:
        x = torch.randn(length, generator=generator) * spread + offset
        assert_equals_the_loop(x, num_bits, group_size, param_dtype)


@pytest.mark.parametrize("param_dtype", TAKEN)
@pytest.mark.parametrize("num_bits", NUM_BITS)
def test_codes_equal_the_loop_on_awkward_numbers(num_bits, param_dtype):
    """Random bit patterns: all magnitudes up to 32768 (so that no range overflows), subnormals and both
    zeros."""
    generator = torch.Generator().manual_seed(17)
    x = torch.randint(-(2**31), 2**31, (4000,), generator=generator).to(torch.int32).view(torch.float32)
    x = x[x.abs() <= 32768][:1024]
    x[::97], x[1::97], x[2::97] = 0.0, -0.0, 2.0**-149
    assert_equals_the_loop(x, num_bits, 16, param_dtype)
    few_values = torch.randint(0, 4, (512,), generator=generator) * 0.25 - 0.5  # ties and repeated values
    assert_equals_the_loop(few_values, num_bits, 32, param_dtype)


@pytest.mark.parametrize("num_bits", NUM_BITS)
def test_ties_round_to_even(num_bits):
    levels = 2**num_bits - 1
    ties = HALVES[levels > HALVES]
    x = torch.cat([torch.tensor([0.0, float(levels)]), ties])
    codes, scale, zero = uniform.quantize(x, num_bits, 128, -1, torch.float16)
    assert (scale.item(), zero.item()) == (1.0, 0.0)
    even = [0, 0, 2, 2, 4, 14, 254][: len(ties)]
    assert codes.tolist() == [0, levels, *even]


@pytest.mark.parametrize("param_dtype", TAKEN)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -240.0, 2.0**-24])
def test_constant_groups_are_exact(value, param_dtype):
    x = torch.full((2, 64), value)
    codes, scale, zero = uniform.quantize(x, 2, 32, -1, PARAM_DTYPES[param_dtype])
    assert not codes.any() and not scale.any()
    assert torch.equal(uniform.dequantize(codes, scale, zero, 32, -1), x)


@pytest.mark.parametrize(("x", "num_bits"), [([-70000.0, 0.0], 8), ([70000.0, 70001.0], 2), ([-60000.0, 60000.0], 1)])
def test_a_range_beyond_float16_is_refused_and_fits_bfloat16(x, num_bits):
    with pytest.raises(NonFiniteActivations, match="beyond float16"):
        uniform.quantize(torch.tensor(x), num_bits, 32, -1, torch.float16)
    assert_equals_the_loop(torch.tensor(x), num_bits, 32, "bfloat16")
    assert_equals_the_loop(torch.tensor(x), num_bits, 32, "float32")
