"""KVmix's own 3-bit layout against Python integers, and what it costs beside the two planes."""

from __future__ import annotations

import math

import kvmix_3bit
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcal.errors import NonFiniteActivations
from kvcal.pages import uniform
from kvcal.pages.record_layout import PAGE_TOKENS
from kvcal.pages.uniform import PageLayout


def word_by_hand(codes: list[int]) -> int:
    """Eleven codes or fewer as one signed 32-bit number: bits in a string, highest first."""
    slots = codes + [0] * (11 - len(codes))
    bits = format(min(slots[10], 3), "02b") + "".join(format(code, "03b") for code in reversed(slots[:10]))
    assert len(bits) == 32
    unsigned = int(bits, 2)
    return unsigned - 2**32 if bits[0] == "1" else unsigned


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=40))
def test_words_are_those_of_bit_strings_and_only_eleventh_codes_saturate(codes: list[int]) -> None:
    words = kvmix_3bit.pack(torch.tensor(codes, dtype=torch.uint8))
    assert words.dtype == torch.int32
    assert words.tolist() == [word_by_hand(codes[start : start + 11]) for start in range(0, len(codes), 11)]
    kept = [min(code, 3) if place % 11 == 10 else code for place, code in enumerate(codes)]
    assert kvmix_3bit.unpack(words, len(codes)).tolist() == kept


def test_an_eleventh_code_is_clamped_and_never_wraps() -> None:
    """Modulo 4, code 4 would read back as the smallest value of the group."""
    for code in range(8):
        codes = torch.full((11,), 7, dtype=torch.uint8)
        codes[10] = code
        back = kvmix_3bit.unpack(kvmix_3bit.pack(codes), 11)
        assert back.tolist() == [7] * 10 + [min(code, 3)]


def test_leading_dimensions_are_kept() -> None:
    codes = torch.randint(0, 8, (2, 3, 25), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    words = kvmix_3bit.pack(codes)
    assert words.shape == (2, 3, 3)
    for b in range(2):
        for n in range(3):
            assert words[b, n].tolist() == kvmix_3bit.pack(codes[b, n]).tolist()


def decoded_by_hand(row: list[float], group_size: int, param_dtype: str) -> list[float]:
    """One number at a time: 3-bit codes against the stored scale and zero, every eleventh of a group at most 3."""
    out: list[float] = []
    for start in range(0, len(row), group_size):
        codes, scale, zero = oracles.quantize_group(row[start : start + group_size], 3, param_dtype)
        kept = [min(code, 3) if place % 11 == 10 else code for place, code in enumerate(codes)]
        out += [oracles.dequantize_code(code, scale, zero) for code in kept]
    return out


@pytest.mark.parametrize("param_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("length", "group_size"), [(33, 11), (64, 32), (70, 32), (40, 128), (24, 22), (9, 4)])
def test_values_read_back_as_scalar_arithmetic_says(length: int, group_size: int, param_dtype: str) -> None:
    """Whole groups, a shorter last group, a group longer than the row, groups shorter than a word."""
    x = torch.randn(3, length, generator=torch.Generator().manual_seed(length)) * 4
    x[1] = 0.7  # constant: no error at all but that of the stored zero
    dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}[param_dtype]
    packed = kvmix_3bit.encode(x, group_size, dtype)
    expected = [decoded_by_hand(row, group_size, param_dtype) for row in x.tolist()]
    assert kvmix_3bit.decode(packed, length, group_size).tolist() == expected
    assert packed.nbytes == 3 * kvmix_3bit.nbytes(length, group_size, dtype)


def test_all_in_bits_are_5_point_8_with_the_papers_groups() -> None:
    """One word, scale and zero for 11 values; 2.91 code bits never come alone."""
    half = torch.float16
    assert kvmix_3bit.bits_per_value(kvmix_3bit.GROUP_SIZE, half) == pytest.approx(64 / 11)
    assert round(kvmix_3bit.bits_per_value(11, half), 1) == 5.8
    assert kvmix_3bit.bits_per_value(32, half) == 4.0
    assert kvmix_3bit.bits_per_value(128, half) == 3.25
    assert kvmix_3bit.bits_per_value(11, torch.float32) == pytest.approx(96 / 11)
    for group_size in range(1, 200):
        by_hand = (32 * math.ceil(group_size / 11) + 32) / group_size
        assert kvmix_3bit.bits_per_value(group_size, half) == pytest.approx(by_hand)


def mean_squares(x: Tensor, group_size: int) -> tuple[float, float]:
    """Mean squared error of (this layout, 3 exact bits) in the same groups, relative to the variance."""
    packed = kvmix_3bit.encode(x, group_size, torch.float16)
    own = kvmix_3bit.decode(packed, x.shape[-1], group_size)
    exact = uniform.dequantize(*uniform.quantize(x, 3, group_size, -1, torch.float16), group_size, -1)
    return tuple(float(((y - x) ** 2).mean() / x.var()) for y in (own, exact))  # type: ignore[return-value]


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_two_planes_take_the_same_bytes_and_lose_less(group_size: int) -> None:
    """A page of 128 tokens of 128 channels, V per token. The same bytes to the bit, and 2.7 times the error."""
    x = torch.randn(PAGE_TOKENS, 128, generator=torch.Generator().manual_seed(1))
    planes = PageLayout("v", 3, "token", group_size, 128, "float16", "bfloat16")
    words = kvmix_3bit.encode(x, group_size, torch.float16)
    assert planes.record_bytes == words.nbytes == 16 * 128 * kvmix_3bit.bits_per_value(group_size, torch.float16)
    lost = float(((planes.decode(planes.encode(x)) - x) ** 2).mean())
    lost_in_words = float(((kvmix_3bit.decode(words, 128, group_size) - x) ** 2).mean())
    assert lost_in_words > 2.5 * lost


def test_the_papers_groups_of_11_lose_to_planes_that_take_fewer_bytes() -> None:
    """5.8 bits a value buy 4 bits in planes with groups of 32 (5.0 bits): a thirteenth of the error."""
    x = torch.randn(PAGE_TOKENS, 128, generator=torch.Generator().manual_seed(2))
    words = kvmix_3bit.encode(x, 11, torch.float16)
    planes = PageLayout("v", 4, "token", 32, 128, "float16", "bfloat16")
    assert planes.record_bytes < words.nbytes
    lost = float(((planes.decode(planes.encode(x)) - x) ** 2).mean())
    assert float(((kvmix_3bit.decode(words, 128, 11) - x) ** 2).mean()) > 10.0 * lost


def test_the_whole_difference_lies_in_the_eleventh_values() -> None:
    x = torch.randn(64, 33, generator=torch.Generator().manual_seed(3))
    own, exact = mean_squares(x, 33)
    assert own > exact
    packed = kvmix_3bit.encode(x, 33, torch.float16)
    back = kvmix_3bit.decode(packed, 33, 33)
    plain = uniform.dequantize(*uniform.quantize(x, 3, 33, -1, torch.float16), 33, -1)
    differs = (back != plain).any(0)
    assert differs.nonzero().flatten().tolist() == [10, 21, 32]
    # Saturated, not wrapped: what is lost is always lost downwards.
    assert (back <= plain).all()


def test_values_that_are_not_finite_are_refused() -> None:
    x = torch.ones(22)
    x[3] = math.nan
    with pytest.raises(NonFiniteActivations):
        kvmix_3bit.encode(x, 11, torch.float16)
