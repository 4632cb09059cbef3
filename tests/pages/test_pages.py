"""The page record: bytes against the oracle's and against golden ones, exact sizes, and what reading gives back."""

import hashlib
import itertools
import json
from pathlib import Path

import oracles
import pytest
import torch

from kvcal.pages.record_layout import PAGE_TOKENS
from kvcal.pages.uniform import UniformLayout

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "pages.json").read_text())
SIDE_AXES = [("k", "channel"), ("k", "token"), ("v", "token")]
DIMS = (16, 20, 64, 80, 96, 128, 256)


def layout_of(side, num_bits, axis, group_size, dim, param_dtype="float16", cache_dtype="bfloat16") -> UniformLayout:
    return UniformLayout(side, num_bits, axis, group_size, dim, param_dtype, cache_dtype)


def random_page(dim: int, seed: int = 0) -> torch.Tensor:
    """[128, dim] bf16 values, with an outlier channel, a constant channel and a constant token."""
    page = torch.randn(PAGE_TOKENS, dim, generator=torch.Generator().manual_seed(seed))
    page[:, 3] *= 30.0
    page[:, 5] = -0.75
    page[7, :] = 0.5
    return page.to(torch.bfloat16)


@pytest.mark.parametrize(("side", "axis"), SIDE_AXES)
@pytest.mark.parametrize("dim", DIMS)
def test_record_sizes_are_exact(side, axis, dim):
    for num_bits, group_size, param_dtype in itertools.product(
        (1, 2, 3, 4, 8, 16), (32, 64, 128), ("float16", "bfloat16", "float32")
    ):
        layout = layout_of(side, num_bits, axis, group_size, dim, param_dtype)
        expected = oracles.record_bytes(num_bits, side, axis, group_size, dim, param_dtype, "bfloat16")
        assert layout.record_bytes == expected and expected % 16 == 0
        record = layout.encode(torch.zeros(PAGE_TOKENS, dim))
        assert (record.dtype, tuple(record.shape)) == (torch.uint8, (expected,))


CASES = [
    (side, axis, num_bits, group_size, dim, param_dtype)
    for (side, axis), (num_bits, group_size, dim, param_dtype) in itertools.product(
        SIDE_AXES,
        [
            (1, 32, 16, "float16"),
            (2, 32, 64, "float16"),
            (3, 64, 20, "bfloat16"),
            (4, 128, 16, "float32"),
            (8, 64, 80, "float16"),
        ],
    )
]


@pytest.mark.parametrize(("side", "axis", "num_bits", "group_size", "dim", "param_dtype"), CASES)
def test_records_equal_the_oracle_byte_for_byte(side, axis, num_bits, group_size, dim, param_dtype):
    page = random_page(dim)
    layout = layout_of(side, num_bits, axis, group_size, dim, param_dtype)
    record = layout.encode(page)
    expected = oracles.page_record(page, side, num_bits, axis, group_size, param_dtype, "bfloat16")
    assert bytes(record.tolist()) == expected
    values = oracles.quantized_page(page, num_bits, axis, group_size, param_dtype)
    assert torch.equal(layout.decode(record), values)


@pytest.mark.parametrize("cache_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dim", [16, 20])
def test_16_bit_pages_hold_the_values(dim, cache_dtype):
    page = random_page(dim).float()
    layout = layout_of("k", 16, "token", 128, dim, cache_dtype=cache_dtype)
    record = layout.encode(page)
    assert bytes(record.tolist()) == oracles.page_record(page, "k", 16, "token", 128, "float16", cache_dtype)
    decoded = layout.decode(record)
    assert str(decoded.dtype) == f"torch.{cache_dtype}" and torch.equal(decoded.float(), page)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_golden_records(case):
    """Page of (37 token + 11 channel) mod 64 - 20, in eighths: what a file or a process packed must read the same."""
    token, channel = torch.arange(PAGE_TOKENS).unsqueeze(1), torch.arange(case["dim"])
    page = ((37 * token + 11 * channel) % 64 - 20) / 8
    layout = layout_of(case["side"], case["num_bits"], case["axis"], case["group_size"], case["dim"])
    record = bytes(layout.encode(page).tolist())
    assert hashlib.sha256(record).hexdigest() == case["sha256"]
    assert record[:64].hex() == case["first_bytes"] and record[-64:].hex() == case["last_bytes"]
