"""The page record: bytes against the oracle's and against golden ones, exact sizes, and what reading gives back."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path

import oracles
import pytest
import torch

from kvcal.pages.record_layout import PAGE_TOKENS, page_positions
from kvcal.pages.uniform import PageLayout

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "pages.json").read_text())
SIDE_AXES = [("k", "channel"), ("k", "token"), ("v", "token")]
DIMS = (16, 20, 64, 80, 96, 128, 256)


def layout_of(side, num_bits, axis, group_size, dim, param_dtype="float16", cache_dtype="bfloat16") -> PageLayout:
    return PageLayout(side, num_bits, axis, group_size, dim, param_dtype, cache_dtype)


def random_page(dim: int, seed: int = 0) -> torch.Tensor:
    """[128, dim] bf16 values, with an outlier channel, a constant channel and a constant token."""
    page = torch.randn(PAGE_TOKENS, dim, generator=torch.Generator().manual_seed(seed))
    page[:, 3] *= 30.0
    page[:, 5] = -0.75
    page[7, :] = 0.5
    return page.to(torch.bfloat16)


def test_pages_begin_at_multiples_of_128():
    found = page_positions(torch.tensor([0, 3]))
    assert found.tolist() == [[[*range(128)]], [[*range(384, 512)]]]


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


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        # 2 bits at D = 128: 4096 of codes, 128 scales and zeros of 2 bytes: with V's, 9,216 a head and page
        (layout_of("k", 2, "channel", 128, 128), 4096 + 2 * 256),
        (layout_of("v", 2, "token", 128, 128), 4096 + 2 * 256),
        (layout_of("k", 2, "channel", 32, 128), 4096 + 2 * 4 * 256),
        (layout_of("v", 3, "token", 64, 128), 4096 + 2048 + 2 * 2 * 256),
        (layout_of("k", 4, "channel", 128, 128, "float32"), 8192 + 2 * 512),
        (layout_of("k", 1, "channel", 128, 20), 128 * 32 // 8 + 2 * 2 * 32),  # 20 channels are stored as 32
        (layout_of("v", 2, "token", 64, 80), 128 * 80 // 4 + 2 * 2 * 2 * 128),  # groups of 64 and 16
        (layout_of("v", 16, "token", 128, 20), 128 * 20 * 2),
        (layout_of("v", 16, "token", 128, 20, cache_dtype="float32"), 128 * 20 * 4),
    ],
)
def test_record_sizes_worked_out_by_hand(layout, size):
    assert layout.record_bytes == size


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


@pytest.mark.parametrize(("num_bits", "parts"), [(3, ((0, 2), (2, 1))), (4, ((0, 2), (2, 2)))])
def test_codes_of_3_and_4_bits_are_two_planes(num_bits, parts):
    """The planes of a page are what packing the low and the high bits of its codes on their own gives."""
    page = random_page(64)
    layout = layout_of("k", num_bits, "channel", 128, 64)
    record = layout.encode(page)
    codes, _, _ = layout.fields(record)
    offset = 0
    for shift, width in parts:
        expected = oracles.packed_plane(((codes >> shift) & (2**width - 1)).tolist(), width)
        assert bytes(record[offset : offset + len(expected)].tolist()) == expected
        offset += len(expected)
    assert layout.plane_sizes == tuple(PAGE_TOKENS * 64 * width // 8 for _, width in parts)
    assert codes.max() == 2**num_bits - 1
