"""Bit-width shrinking: every code against rational numbers, chains against direct quantization, the ablations against
their definitions in the paper."""

from __future__ import annotations

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


def squared_error(x: torch.Tensor, num_bits: int, kind: str) -> float:
    codes, scale, zero = chained(x, num_bits, kind)
    return (uniform.dequantize(codes, scale, zero, GROUP, -1) - x).double().square().mean().item()


@pytest.mark.parametrize("b", HALVES)
def test_equivalent_is_round_half_up_for_every_code(b):
    codes = all_codes(2 * b)
    found = shift(codes, 2 * b)
    assert found.dtype == torch.uint8
    assert found.tolist() == [round_half_up(Fraction(x, 2**b + 1)) for x in range(4**b)]
    assert codes.tolist() == list(range(4**b))  # the input is left alone


@pytest.mark.parametrize("b", HALVES[1:])
def test_equivalent_is_dequantize_then_quantize(b):
    """The paper's claim in rationals: value x S + Z quantized to b bits over the same range, for every code."""
    step, zero = Fraction(3, 7), Fraction(-5, 3)
    values = [x * step + zero for x in range(4**b)]
    wider_step = (values[-1] - values[0]) / (2**b - 1)
    assert wider_step == (2**b + 1) * step
    assert shift(all_codes(2 * b), 2 * b).tolist() == [round_half_up((x - zero) / wider_step) for x in values]


@pytest.mark.parametrize("kind", ["modified", "direct"])
@pytest.mark.parametrize("b", HALVES)
def test_the_ablations_drop_the_lower_bits(b, kind):
    assert shift(all_codes(2 * b), 2 * b, kind).tolist() == [x // 2**b for x in range(4**b)]
    differing = sum(x // 2**b != round_half_up(Fraction(x, 2**b + 1)) for x in range(4**b))
    assert (differing > 0) == (b > 1)


def test_four_to_two_bits_is_the_bit_logic_of_the_kernel():
    """y1 = b3, y0 = (not b3 and (b2 or b1 b0)) or (b3 and b2 and (b1 or b0)), on planes of bits."""
    b0, b1, b2, b3 = ([bool(x >> bit & 1) for x in range(16)] for bit in range(4))
    logic = []
    for x in range(16):
        y0 = (not b3[x] and (b2[x] or (b1[x] and b0[x]))) or (b3[x] and b2[x] and (b1[x] or b0[x]))
        logic.append(2 * b3[x] + y0)
    assert shift(all_codes(4), 4).tolist() == logic
    assert shift(all_codes(4), 4, "direct").tolist() != logic  # keeping the upper plane alone is not it


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


@pytest.mark.parametrize("b", HALVES)
def test_modified_decodes_to_the_mean_of_the_merged_codes(b):
    step, zero = torch.tensor(1.0), torch.tensor(0.0)
    wider, moved = shift_params(step, zero, 2 * b, "modified")
    decoded = shift(all_codes(2 * b), 2 * b, "modified") * wider + moved
    expected = all_codes(2 * b).float().unflatten(0, (2**b, 2**b)).mean(1).repeat_interleave(2**b)
    assert torch.equal(decoded, expected)


@pytest.mark.parametrize("kind", ["equivalent", "direct"])
def test_the_range_is_kept_except_by_modified(kind):
    x = torch.randn(GROUP, generator=torch.Generator().manual_seed(4))
    for num_bits in (4, 2):
        codes, scale, zero = chained(x, num_bits, kind)
        ends = uniform.dequantize(torch.tensor([0, 2**num_bits - 1]), scale, zero, GROUP, -1)
        assert torch.allclose(ends, torch.stack([x.min(), x.max()]), rtol=1e-5)
        assert codes[x.argmin()] == 0 and codes[x.argmax()] == 2**num_bits - 1
        _, scale, zero = chained(x, num_bits, "modified")
        inner = uniform.dequantize(torch.tensor([0, 2**num_bits - 1]), scale, zero, GROUP, -1)
        half_step = 0.5 * (x.max() - x.min()) / 2**num_bits
        assert torch.allclose(inner, ends + torch.stack([half_step, -half_step]), rtol=1e-2)


def test_sixteen_bit_codes_shrink_to_the_codes_of_direct_quantization():
    """16 -> 8 -> 4 -> 2 in rational numbers: rounding step by step is rounding once."""
    x = torch.randn(600, generator=torch.Generator().manual_seed(0)).tolist()
    codes = torch.tensor(exact_codes(x, 16), dtype=torch.int32)
    for b in HALVES:
        codes = shift(codes, 2 * b)
        assert codes.tolist() == exact_codes(x, b)


def test_ties_of_few_bits_are_ties_of_many():
    """Values exactly between two codes: the one place where half up and half even part. The chain rounds them up."""
    x = [Fraction(n, 2 * 85 * 257) for n in range(0, 2 * 85 * 257 * 3 + 1, 257)]  # 0 ... 3, thresholds included
    codes = torch.tensor([round_half_up(v * 65535 / 3) for v in x], dtype=torch.int32)
    assert sum(v % 1 == Fraction(1, 2) for v in x) == 3
    for b in HALVES:
        codes = shift(codes, 2 * b)
        assert codes.tolist() == [round_half_up(v * (2**b - 1) / 3) for v in x]


def test_the_chain_with_fp32_parameters_loses_no_code():
    """Half a million values, quantized to 8 bits with fp32 parameters and shrunk: the codes are those of direct
    quantization with exact scales, except where a value is within fp32 rounding of a threshold."""
    x = torch.randn(4096 * GROUP, generator=torch.Generator().manual_seed(1))
    groups = x.double().unflatten(0, (-1, GROUP))
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    for num_bits in (8, 4, 2):
        steps = (groups - low) * (2**num_bits - 1) / (high - low)
        unsure = ((steps % 1) - 0.5).abs() <= 2.0**-21 * (2**num_bits - 1)
        differs = chained(x, num_bits)[0] != steps.add(0.5).floor().flatten()
        assert not differs[~unsure.flatten()].any()
        assert unsure.float().mean() < 2e-3 and differs.float().mean() < 1e-4


@pytest.mark.parametrize("num_bits", [4, 2])
def test_the_chain_is_the_quantizer_with_fp32_parameters(num_bits):
    """And codes of ``uniform.quantize``, which rounds ties to even: none of half a million differs."""
    x = torch.randn(4096 * GROUP, generator=torch.Generator().manual_seed(8))
    codes, scale, zero = chained(x, num_bits)
    direct_codes, direct_scale, direct_zero = uniform.quantize(x, num_bits, GROUP, -1, torch.float32)
    assert torch.equal(codes, direct_codes) and torch.equal(zero, direct_zero)
    assert torch.allclose(scale, direct_scale, rtol=3e-7, atol=0)


@pytest.mark.parametrize("num_bits", [4, 2])
def test_bf16_values_differ_at_ties_only(num_bits):
    """Values of 8 bits of significand often lie exactly between two codes: there half up and half even part."""
    x = torch.randn(1024 * GROUP, generator=torch.Generator().manual_seed(9)).bfloat16().float()
    codes, direct = chained(x, num_bits)[0], uniform.quantize(x, num_bits, GROUP, -1, torch.float32)[0]
    groups = x.double().unflatten(0, (-1, GROUP))
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    steps = ((groups - low) * (2**num_bits - 1) / (high - low)).flatten()
    differs = codes != direct
    assert 0 < differs.float().mean() < 5e-3
    assert (((steps[differs] % 1) - 0.5).abs() < 1e-5).all()


def test_rounded_parameters_would_lose_codes():
    """Why formats that shrink store fp32: with bf16 scales and zeros the ratio of the scales is not exact."""
    x = torch.randn(512 * GROUP, generator=torch.Generator().manual_seed(2))
    eight, *_ = uniform.quantize(x, 8, GROUP, -1, torch.bfloat16)
    four, *_ = uniform.quantize(x, 4, GROUP, -1, torch.bfloat16)
    assert (shift(eight, 8) != four).float().mean() > 5e-3


@pytest.mark.parametrize("num_bits", [4, 2])
def test_squared_errors_of_the_three_kinds(num_bits):
    """Direct is the worst everywhere. Modified, with its finer steps, beats equivalent on symmetric groups, and loses
    at 2 bits on one-sided ones, where many values lie at an end."""
    normal = torch.randn(256 * GROUP, generator=torch.Generator().manual_seed(5))
    uniform_noise = torch.rand(256 * GROUP, generator=torch.Generator().manual_seed(6))
    for x in (normal, normal.exp(), uniform_noise):
        errors = {kind: squared_error(x, num_bits, kind) for kind in SHIFTS}
        assert errors["direct"] > 1.2 * errors["equivalent"]
    assert squared_error(normal, num_bits, "modified") < squared_error(normal, num_bits, "equivalent")
    one_sided = [squared_error(normal.exp(), num_bits, kind) for kind in ("equivalent", "modified")]
    assert (one_sided[0] < 0.8 * one_sided[1]) == (num_bits == 2)


@pytest.mark.parametrize("num_bits", [4, 2])
def test_only_equivalent_keeps_both_the_ends_and_the_spread(num_bits):
    """Modified moves the largest value of a group by half a step, direct pushes values outwards."""
    x = torch.randn(256, GROUP, generator=torch.Generator().manual_seed(7))
    top, centred = x.argmax(1, keepdim=True), x - (x.amin(1, keepdim=True) + x.amax(1, keepdim=True)) / 2
    ends, slope = {}, {}
    for kind in SHIFTS:
        error = uniform.dequantize(*chained(x.flatten(), num_bits, kind), GROUP, -1).view_as(x) - x
        ends[kind] = (error.gather(1, top).abs().mean() / (x.amax() - x.amin())).item()
        slope[kind] = ((error * centred).sum() / centred.square().sum()).item()
    assert ends["equivalent"] < 1e-6 and ends["direct"] < 1e-6 and ends["modified"] > 0.2 / 2**num_bits
    assert slope["direct"] > max(abs(slope["equivalent"]), abs(slope["modified"])) + 0.25 / 2**num_bits


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
    """All significands: bit for bit what came out of a shift; any other scale within one unit in the last place."""
    scale = (torch.arange(2**23, dtype=torch.int32) + (127 << 23)).view(torch.float32)  # all of [1, 2)
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


@pytest.mark.parametrize("from_bits", [1, 3, 6, 32])
def test_other_widths_are_refused(from_bits):
    codes, one = torch.zeros(4, dtype=torch.uint8), torch.ones(1)
    with pytest.raises(ValueError, match="expected one of"):
        shift(codes, from_bits)
    with pytest.raises(ValueError, match="expected one of"):
        shift_params(one, one, from_bits)
    with pytest.raises(ValueError, match="expected one of"):
        unshift(codes, from_bits)
    with pytest.raises(ValueError, match="expected one of"):
        unshift_params(one, one, from_bits)
