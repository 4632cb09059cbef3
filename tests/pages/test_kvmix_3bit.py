"""KVmix's own 3-bit layout against Python integers, and what it costs beside the two planes."""

from __future__ import annotations

import kvmix_3bit
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


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
