"""Bytes of stripes in a record, against the bit layout written down once more; and how tokens lie in pages."""

import oracles
import pytest
import torch

from kvcal.pages.hadamard import random_signs
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.pages.stripes import pieces
from kvcal.plan.page_format import Format
from kvcal.systems.basis.rotated import RotatedLayout

LAYOUTS = [
    Format(bits, "token", size, quantizer="rotated", stripe_tokens=16).layout(side, 1, dim, "bfloat16", bits)
    for side, bits, size, dim in [
        ("k", 1, 32, 64), ("k", 2, 128, 128), ("k", 3, 64, 128), ("k", 4, 128, 72), ("k", 8, 128, 80),
        ("v", 1, 128, 64), ("v", 2, 64, 128), ("v", 3, 128, 128), ("v", 3, 32, 72), ("v", 4, 128, 96), ("v", 8, 32, 64),
    ]
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: f"{one.side}{one.num_bits} {one.head_dim}/{one.group_size}")
def test_a_stripe_has_the_bytes_of_its_codes_and_scales_and_no_other(layout: RotatedLayout) -> None:
    padded, groups = -(-layout.head_dim // 16) * 16, -(-layout.head_dim // layout.group_size)
    shape = (PAGE_TOKENS, padded) if layout.side == "k" else (padded, PAGE_TOKENS)
    expected, start = torch.zeros(8, layout.record_bytes, dtype=torch.bool), 0
    for width in oracles.widths(layout.num_bits):
        for token in range(PAGE_TOKENS):
            for channel in range(layout.head_dim):
                at = (token, channel) if layout.side == "k" else (channel, token)
                expected[token // 16, start + oracles.bit_position(*at, *shape, width)[0]] = True
        start += shape[0] * shape[1] * width // 8
    for group in range(groups):
        for token in range(PAGE_TOKENS):
            expected[token // 16, start + group * PAGE_TOKENS + token] = True
    assert int(expected.sum(0).max()) == 1
    found = torch.stack([layout.token_bytes(first, first + 16) for first in range(0, PAGE_TOKENS, 16)])
    assert torch.equal(found, expected)
    assert torch.equal(layout.token_bytes(48, 112), expected[3:7].any(0))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: f"{one.side}{one.num_bits} {one.head_dim}/{one.group_size}")
def test_parts_of_a_record_are_those_of_the_whole(layout: RotatedLayout) -> None:
    x = torch.randn(2, 3, PAGE_TOKENS, layout.head_dim, generator=torch.Generator().manual_seed(0)).bfloat16()
    operands = {"signs": random_signs(layout.head_dim, 1)}
    whole = layout.encode_pages(x, operands)
    for first, stop in ((0, 16), (16, 48), (112, 128), (0, 128)):
        own, part = layout.token_bytes(first, stop), layout.encode_tokens(x[:, :, first:stop], operands, first)
        assert torch.equal(part, torch.where(own, whole, 0))


def test_pages_of_other_layouts_are_packed_whole() -> None:
    layout = Format(2, "channel").layout("k", 1, 64, "bfloat16", 2)
    for refused in (lambda: layout.token_bytes(0, 16), lambda: layout.encode_tokens(torch.zeros(1, 1, 16, 64), {}, 0)):
        with pytest.raises(ValueError, match="packed whole"):
            refused()
    for formats in ({"axis": "channel"}, {"quantizer": "uniform"}):
        with pytest.raises(ValueError, match="stripe_tokens"):
            Format(2, stripe_tokens=16, **formats)


def test_tokens_lie_in_a_part_of_a_page_whole_pages_and_a_part() -> None:
    found = [(p.tokens, p.pages, p.first) for p in pieces(48, 128 * 3)]
    assert found == [
        (slice(0, 80), slice(0, 1), 48), (slice(80, 336), slice(1, 3), 0), (slice(336, 384), slice(3, 4), 0),
    ]  # fmt: skip
    assert [(p.tokens, p.first) for p in pieces(16, 32)] == [(slice(0, 32), 16)]
    assert [(p.tokens, p.pages) for p in pieces(0, 256)] == [(slice(0, 256), slice(0, 2))]
