"""Rotations, windows, rooms of tiers, and which channels count where keys are divided by λ."""

from __future__ import annotations

import torch
from tier_oracle import channel_bits
from torch import Tensor

from kvcal.geometry import AttentionGeometry
from kvcal.pages.codec import PageCodec
from kvcal.pages.tiered import TieredLayout
from kvcal.pages.transforms import rotate, unrotate
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import Boost, Format, Tier, WindowRule

BOOSTED = Format(2, "channel", 32, boost=Boost("query_range", (Tier(4, 0.25),)))


def test_keys_turn_as_complex_numbers_and_back() -> None:
    """Pairs (0, 3) and (5, 1) with amplitudes as of YaRN; channels 2 and 4 in no pair."""
    table = torch.tensor([[0, 3, 0.7, 1.25], [5, 1, 0.01, 0.8]], dtype=torch.float64)
    positions = torch.tensor([0, 1, 17, 4000])
    keys = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    expected = keys.double().clone()
    for a, b, angle, amplitude in table.tolist():
        turn = amplitude * torch.exp(1j * angle * positions.double())
        turned = torch.complex(keys[..., int(a)].double(), keys[..., int(b)].double()) * turn
        expected[..., int(a)], expected[..., int(b)] = turned.real, turned.imag
    found = rotate(keys, table, positions)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(unrotate(found, table, positions), keys, rtol=1e-6, atol=1e-6)


def test_a_window_is_a_share_of_the_tokens_as_written() -> None:
    rule = WindowRule("clamped", 0.29, max_tokens=500, min_tokens=3)
    assert [rule.window(count) for count in (5, 100, 200, 1700, 10_000)] == [3, 29, 58, 493, 500]


def test_a_tier_has_room_for_its_share_of_the_channels_rounded() -> None:
    rooms = {
        (0.125, 128): 16,
        (0.125, 64): 8,
        (0.1, 16): 2,
        (0.3, 8): 2,
        (0.125, 100): 13,
        (0.01, 16): 1,
        (1.0, 80): 80,
    }
    assert {(share, dim): Tier(4, share).num_channels(dim) for share, dim in rooms} == rooms


def codec(k_rescale: bool, tensors: dict[str, Tensor]) -> PageCodec:
    plan = LayerPlan(AttentionGeometry(0, 4, 2, 16, 16), (BOOSTED,), (Format(2),), k_rescale=k_rescale)
    return PageCodec.of_layer(plan, "k", "float32", tensors)


def test_lambda_does_not_change_which_channels_count() -> None:
    """Keys are divided by it and queries multiplied: their product, the score, is what it was."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(3, 2, 128, 16, generator=generator)
    query_mean = torch.rand(3, 2, 16, generator=generator)
    lambdas = 2.0 ** torch.randint(-4, 5, (2, 16), generator=generator)
    ordinals = torch.arange(3)
    plain, divided = codec(False, {}), codec(True, {"layers.0.k_rescale": lambdas})
    layout = BOOSTED.layout("k", 2, 16, "float32", 2)
    assert isinstance(layout, TieredLayout)
    bits = [channel_bits(layout, one.encode(keys, ordinals, 2, query_mean)) for one in (plain, divided)]
    assert torch.equal(*bits) and set(bits[0].flatten().tolist()) == {2, 4}
    alone = channel_bits(layout, plain.encode(keys / lambdas[:, None], ordinals, 2, query_mean))
    assert not torch.equal(alone, bits[0])
