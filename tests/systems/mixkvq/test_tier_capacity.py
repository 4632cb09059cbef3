"""Scores of calibration pages, and the room that tiers need there: against loops, and against the runtime's
own."""

import math

import pytest
import torch
from cache_cases import tiny_llama
from evaluation_cases import as_loaded, make_plan, text
from tier_oracle import slots_by_tier
from torch import Tensor

from kvcal import PlanCache, attached
from kvcal.errors import UsageError
from kvcal.pages import codec as page_codec
from kvcal.plan.page_format import Boost, Format, Tier
from kvcal.progress import Silent
from kvcal.systems.kvmix.window_rule import WindowRule
from kvcal.systems.mixkvq.tier_capacity import (
    fitted_boost,
    key_code_bits,
    measure_scores,
    page_scores,
    taken_channels,
    with_thresholds,
)

BOOST = Boost("query_range", (Tier(16, 0.25, 1.5), Tier(4, 0.5, 0.5)))
V = Format(2, "token", 32)


def format_of(boost: Boost = BOOST, sinks: int = 0, window: int = 0, rule: WindowRule | None = None) -> Format:
    return Format(2, "channel", 32, sinks, window, boost=boost, window_rule=rule)


def scores_by_hand(fmt: Format, q_HTD: Tensor, k_NTD: Tensor) -> list[list[list[float]]]:
    """A = I S, page by page, in Python floats: a token at a time, as a cache in decoding would come to it."""
    q, k = q_HTD.double().tolist(), k_NTD.double().tolist()
    T, D, group = len(k[0]), len(k[0][0]), len(q) // len(k)
    pages, since = [], 0
    for num_tokens in range(1, T + 1):
        new = num_tokens // 128 - len(pages)
        for ordinal in range(len(pages), len(pages) + new):
            first = max(fmt.num_sink_tokens, 128 * ordinal)  # sinks are packed as copies of the first token after them
            page = []
            for head, keys in enumerate(k):
                row = []
                for d in range(D):
                    column = [keys[t][d] for t in range(first, 128 * ordinal + 128)]
                    heads = q[head * group : (head + 1) * group]
                    magnitudes = [abs(one[t][d]) for one in heads for t in range(since, num_tokens)]
                    row.append(math.fsum(magnitudes) / len(magnitudes) * (max(column) - min(column)) / 3)
                page.append(row)
            pages.append(page)
        since = num_tokens if new else since
    return pages


@pytest.mark.parametrize(
    ("fmt", "num_pages"),
    [
        (format_of(), 3), (format_of(sinks=5, window=40), 3),
        (format_of(rule=WindowRule("clamped", 0.3, 100, 10)), 3), (format_of(window=300), 3),
    ],
)  # fmt: skip
def test_scores_against_loops(fmt: Format, num_pages: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q_HTD, k_NTD = torch.randn(4, 400, 6, generator=generator), torch.randn(2, 400, 6, generator=generator)
    found, expected = page_scores(fmt, q_HTD, k_NTD), scores_by_hand(fmt, q_HTD, k_NTD)
    assert found.shape == (num_pages, 2, 6) and len(expected) == num_pages
    if num_pages:
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


def test_scores_are_those_that_the_cache_decides_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer 0, whose keys and queries do not depend on quantization; in chunks that end where pages do."""
    loaded = as_loaded(tiny_llama())
    plan = make_plan(loaded, (format_of(BOOST, sinks=3, window=20), V))
    data = text(300)
    measured = measure_scores(loaded, plan, data, Silent())
    decided: list[Tensor] = []
    original = page_codec.channel_scores

    def note(*args: object) -> Tensor:
        decided.append(original(*args))
        return decided[-1]

    monkeypatch.setattr(page_codec, "channel_scores", note)
    cache, tokens, start = PlanCache(plan, loaded.model.config), data.sequences[0][None], 0
    with torch.no_grad(), attached(loaded.model):
        while start < 300:
            stop = min(300, start + cache.tokens_to_next_page())
            loaded.model(input_ids=tokens[:, start:stop], past_key_values=cache)
            start = stop
    of_layer_0 = torch.cat(decided[::2])
    assert measured[0].shape == of_layer_0.shape == (2, 2, 8)
    torch.testing.assert_close(measured[0], of_layer_0, rtol=1e-4, atol=1e-6)


def test_scores_need_a_page() -> None:
    loaded = as_loaded(tiny_llama())
    plan = make_plan(loaded, (format_of(), V))
    with pytest.raises(UsageError, match="at most 120 tokens fill no page"):
        measure_scores(loaded, plan, text(100, 120), Silent())


def random_scores(pages: int = 7, head_dim: int = 24) -> Tensor:
    return torch.rand(pages, 2, head_dim, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 2


TIERS = [
    (Tier(16, 0.25, 1.5), Tier(4, 0.5, 0.5)),
    (Tier(16, 0.05, 1.2), Tier(8, 0.1, 1.0), Tier(4, 0.9, 0.4)),
    (Tier(16, 0.5, 0.7), Tier(4, 0.5, 1.1)),  # inverted: the middle tier is empty
    (Tier(8, 0.125), Tier(4, 0.5, 0.9)),
]


@pytest.mark.parametrize("tiers", TIERS)
def test_taken_channels_are_those_of_the_selection(tiers: tuple[Tier, ...]) -> None:
    scores = random_scores()
    rooms = tuple((tier.num_bits, tier.num_channels(24), tier.above) for tier in tiers)
    counts = taken_channels(tiers, scores)
    for page in range(7):
        for head in range(2):
            chosen = slots_by_tier(scores[page, head].tolist(), rooms)
            assert [int(count[page, head]) for count in counts] == [len(slots) for slots in chosen]


@pytest.mark.parametrize("page_share", [1.0, 0.75])
@pytest.mark.parametrize("tiers", TIERS)
def test_fitted_rooms_are_just_enough(tiers: tuple[Tier, ...], page_share: float) -> None:
    scores = random_scores()
    fitted = fitted_boost(Boost("range", tiers), scores, page_share)
    assert fitted is not None
    unlimited = tuple((t.num_bits, 24 if t.above is not None else t.num_channels(24), t.above) for t in tiers)
    wanted: dict[int, list[int]] = {tier.num_bits: [] for tier in tiers}
    for row in scores.flatten(0, 1).tolist():
        for (bits, _, _), slots in zip(unlimited, slots_by_tier(row, unlimited), strict=True):
            wanted[bits].append(len(slots))
    # The smallest room that so many of the 14 pages fit into.
    rooms = {
        bits: next(room for room in range(25) if sum(count <= room for count in counts) >= page_share * 14)
        for bits, counts in wanted.items()
    }
    expected = {bits: room for bits, room in rooms.items() if room}
    assert {tier.num_bits: tier.num_channels(24) for tier in fitted.tiers} == expected
    assert [tier.above for tier in fitted.tiers] == [tier.above for tier in tiers if tier.num_bits in expected]


def test_rooms_of_pages_that_nothing_boosts_and_of_very_wide_heads() -> None:
    assert fitted_boost(Boost("range", (Tier(4, 0.5, 9.0),)), random_scores()) is None
    wide = torch.ones(2, 1, 256, dtype=torch.float64)
    wide[1] = 0.5
    fitted = fitted_boost(Boost("range", (Tier(16, 0.1, 0.7), Tier(4, 0.1, 0.2))), wide)
    assert fitted is not None and [tier.num_channels(256) for tier in fitted.tiers] == [254]  # an index has no more
    many = torch.cat([wide[..., :200], wide[..., 200:] - 0.45], dim=-1)
    fitted = fitted_boost(Boost("range", (Tier(16, 0.1, 0.7), Tier(4, 0.1, 0.2))), many)
    assert fitted is not None and [tier.num_channels(256) for tier in fitted.tiers] == [200, 54]


def test_thresholds_are_put_into_the_plan() -> None:
    loaded = as_loaded(tiny_llama())
    plan = make_plan(loaded, (format_of(), V))
    scores = measure_scores(loaded, plan, text(300, 270), Silent())
    assert sorted(scores) == [0, 1] and scores[0].shape == (4, 2, 8)
    costs = [with_thresholds(plan, {16: high, 4: low}, scores) for high, low in ((1e9, 1e9), (1e9, 1.0), (1.0, 0.5))]
    assert costs[0].layers[0].k.boost is None and costs[2].layers[0].v == plan.layers[0].v
    boost = costs[2].layers[1].k.boost
    assert boost is not None and {tier.num_bits: tier.above for tier in boost.tiers} == {16: 1.0, 4: 0.5}
    assert costs[0].predicted_bytes < costs[1].predicted_bytes < costs[2].predicted_bytes
    assert key_code_bits(costs[0], scores) == 2
    assert with_thresholds(make_plan(loaded), {16: 0.9, 4: 0.2}, scores) == make_plan(loaded)
