"""Pages of keys whose channels have different bits: selection, bytes and values against a Python oracle."""

import math

import pytest
import torch
from page_cases import random_page
from tier_oracle import NO_SLOT, OraclePage, channel_bits

from kvcal.errors import NonFiniteActivations, UsageError
from kvcal.geometry import AttentionGeometry
from kvcal.pages.codec import PageCodec
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.pages.uniform import UniformLayout
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import Boost, Format, Tier
from kvcal.systems.kitty.tiered import TieredLayout

KITTY = ((4, 16, None),)
MIXKVQ = ((16, 3, 1.5), (4, 9, 0.6))


def layout_of(tiers, dim, num_bits=2, group_size=128, param_dtype="float16", cache_dtype="bfloat16") -> TieredLayout:
    return TieredLayout(num_bits, tiers, group_size, dim, param_dtype, cache_dtype)


def oracle_of(layout: TieredLayout, page, scores) -> OraclePage:
    return OraclePage(
        page, scores.tolist(), layout.num_bits, layout.tiers, layout.group_size, layout.param_dtype, layout.cache_dtype
    )


def random_scores(dim: int, seed: int = 0) -> torch.Tensor:
    """[dim] fp64 in quarters: many ties."""
    return torch.randint(0, 9, (dim,), generator=torch.Generator().manual_seed(seed)).double() / 4


def index_of(layout: TieredLayout, record: torch.Tensor) -> list[int]:
    """The index, at the end of the record but for its padding."""
    fields = sum(layout.plane_sizes) + sum(map(sum, layout.high_sizes)) + layout.raw_size + 2 * layout.param_size
    return record[fields : fields + layout.head_dim].tolist()


def assert_stored_as_the_oracle_says(layout: TieredLayout, page: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    oracle = oracle_of(layout, page, scores)
    record = layout.encode(page, scores)
    assert index_of(layout, record) == oracle.index
    assert bytes(record.tolist()) == oracle.record
    decoded = layout.decode(record)
    assert decoded.dtype == torch.float32 and torch.equal(decoded, oracle.decoded)
    assert channel_bits(layout, record).tolist() == oracle.bits
    return record


def test_a_page_of_kitty_has_the_bytes_of_the_paper():
    """Tensor_2bits (128, 128), Tensor_High_2bits (16, 128), scale and zero, Boost_IDX_uint8 (128)."""
    layout = layout_of(KITTY, 128)
    assert layout.plane_sizes == (4096,) and layout.high_sizes == ((512,),)
    assert (2 * layout.param_size, layout.head_dim, layout.raw_size) == (512, 128, 0)
    assert layout.record_bytes == 4096 + 512 + 512 + 128


CASES = [
    (KITTY, 20, 2, 128, "float16", "bfloat16"),
    (((4, 8, None),), 64, 2, 32, "bfloat16", "bfloat16"),
    (((4, 5, None),), 80, 2, 64, "float32", "float16"),
    (KITTY, 128, 2, 128, "float16", "bfloat16"),
    (((8, 6, None),), 64, 4, 64, "float16", "float32"),
    (MIXKVQ, 64, 2, 32, "float16", "bfloat16"),
    (((16, 4, 1.7), (8, 3, 1.2), (4, 6, None)), 20, 2, 128, "float16", "float16"),
    (((16, 2, None), (8, 5, 0.9)), 80, 4, 64, "bfloat16", "float32"),
    (((4, 13, 1.0),), 256, 2, 128, "float16", "bfloat16"),
]


@pytest.mark.parametrize(("tiers", "dim", "num_bits", "group_size", "param_dtype", "cache_dtype"), CASES)
def test_records_equal_the_oracle_byte_for_byte(tiers, dim, num_bits, group_size, param_dtype, cache_dtype):
    layout = layout_of(tiers, dim, num_bits, group_size, param_dtype, cache_dtype)
    for seed in range(2):
        assert_stored_as_the_oracle_says(layout, random_page(dim, seed), random_scores(dim, seed))


@pytest.mark.parametrize(
    ("tiers", "scores", "index"),
    [
        # The two best; on a tie the lower channel.
        (((4, 2, None),), [1.0, 3.0, 2.0, 3.0], {1: 0, 3: 1}),
        (((4, 2, None),), [5.0, 5.0, 5.0, 5.0], {0: 0, 1: 1}),
        (((4, 1, None),), [0.0, 2.0, 2.0, 1.0], {1: 0}),
        # Only what is above the threshold, which is exclusive.
        (((4, 3, 2.0),), [1.0, 3.0, 2.0, 4.0], {3: 0, 1: 1}),
        (((4, 3, 9.0),), [1.0, 3.0, 2.0, 4.0], {}),
        # More above the threshold than there is room for: the rest falls to the next tier, then to the base.
        (((16, 1, 1.0), (4, 2, 1.5)), [4.0, 3.0, 2.0, 1.2], {0: 0, 1: 1, 2: 2}),
        (((16, 1, 1.0), (4, 1, 0.5)), [4.0, 3.0, 2.0, 1.2], {0: 0, 1: 1}),
        # Slots are numbered through all tiers, whether or not those before are full.
        (((16, 2, 5.0), (4, 2, 1.0)), [6.0, 3.0, 2.0, 0.5], {0: 0, 1: 2, 2: 3}),
        # An inverted pair empties the middle tier, as the published (1.52, 1.60).
        (((16, 4, 1.52), (4, 4, 1.60)), [1.50, 1.55, 1.58, 1.70], {3: 0, 2: 1, 1: 2}),
        # A tier that is always filled after one with a threshold.
        (((8, 1, 3.5), (4, 2, None)), [1.0, 3.0, 2.0, 0.0], {1: 1, 2: 2}),
        (((8, 2, None), (4, 2, 0.9)), [1.0, 3.0, 2.0, 0.0], {1: 0, 2: 1, 0: 2}),
    ],
)
def test_selection_by_hand(tiers, scores, index):
    """The first four channels of 16; the others score -1."""
    layout = layout_of(tiers, 16)
    page, scores = random_page(16), torch.tensor(scores + [-1.0] * 12, dtype=torch.float64)
    record = assert_stored_as_the_oracle_says(layout, page, scores)
    assert index_of(layout, record) == [index.get(channel, NO_SLOT) for channel in range(16)]


def test_room_for_all_channels_is_a_plain_page_of_4_bits():
    for dim, group_size in ((20, 64), (128, 128)):
        page = random_page(dim)
        layout = layout_of(((4, dim, None),), dim, group_size=group_size)
        plain = UniformLayout("k", 4, "channel", group_size, dim, "float16", "bfloat16")
        decoded = layout.decode(layout.encode(page, random_scores(dim)))
        assert torch.equal(decoded, plain.decode(plain.encode(page)))


@pytest.mark.parametrize("cache_dtype", ["float16", "bfloat16", "float32"])
def test_16_bit_channels_are_exact_even_where_codes_would_overflow(cache_dtype):
    page = random_page(20).float()
    page[:, 7] = torch.linspace(-60000.0, 60000.0, PAGE_TOKENS).bfloat16()  # a range that no fp16 scale can hold
    page[3, 7] = -(2.0**-14)
    layout = layout_of(((16, 2, None),), 20, group_size=32, cache_dtype=cache_dtype)
    scores = torch.zeros(20, dtype=torch.float64)
    scores[7], scores[19] = 2.0, 1.0
    decoded = layout.decode(assert_stored_as_the_oracle_says(layout, page, scores))
    assert torch.equal(decoded[:, [7, 19]], page[:, [7, 19]])


def test_slots_beyond_127_are_not_mistaken():
    """254 slots of 256 channels: products or sums of slots in uint8 would overflow."""
    page = random_page(256)
    layout = layout_of(((8, 4, None), (4, 250, None)), 256)
    scores = torch.rand(256, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    record = assert_stored_as_the_oracle_says(layout, page, scores)
    index = torch.tensor(index_of(layout, record))
    assert sorted(index.tolist()) == [*range(254), NO_SLOT, NO_SLOT]
    boosted = index != NO_SLOT
    wide = layout.decode(record)[:, boosted]
    error = (wide - page.float()[:, boosted]).square().sum() / page.float().square().sum()
    assert error < 0.015
    wrapped = wide[:, (index[boosted] * 2) % 256 % 254]  # what an overflow makes of it
    assert (wrapped - page.float()[:, boosted]).square().sum() / page.float().square().sum() > 1.0


def test_what_a_dtype_cannot_hold_is_refused():
    page = random_page(20).float()
    page[:, 0] = torch.linspace(-70000.0, 70000.0, PAGE_TOKENS)
    scores = torch.arange(20, 0, -1, dtype=torch.float64)
    for tiers, reason in ((((16, 1, None),), "a value beyond float16"), (((4, 1, None),), "a range beyond float16")):
        with pytest.raises(NonFiniteActivations, match=reason):
            layout_of(tiers, 20, cache_dtype="float16").encode(page, scores)
        layout_of(tiers, 20, param_dtype="bfloat16").encode(page, scores)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_not_finite_are_refused(bad):
    scores = random_scores(20)
    scores[4] = bad
    with pytest.raises(NonFiniteActivations, match="score of a channel"):
        layout_of(KITTY, 20).encode(random_page(20), scores)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tiers": ((4, 256, None),)}, "256 boosted channels of a head, but a page can name at most 254"),
        ({"tiers": ((16, 55, None), (4, 200, 1.0))}, "255 boosted channels"),
    ],
)
def test_tiers_that_cannot_be_stored_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        layout_of(**{"tiers": KITTY, "dim": 256, **changes})


BY_QUERIES = Format(2, "channel", 32, boost=Boost("query_range", (Tier(4, 0.25),)))


def codec(k_rescale: bool, tensors: dict[str, torch.Tensor]) -> PageCodec:
    plan = LayerPlan(AttentionGeometry(0, 4, 2, 16, 16), BY_QUERIES, Format(2), k_rescale=k_rescale)
    return PageCodec.of_layer(plan, "k", "float32", tensors)


def test_lambda_does_not_change_which_channels_count() -> None:
    """Keys are divided by it and queries multiplied: their product, the score, is what it was."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(3, 2, 128, 16, generator=generator)
    query_mean = torch.rand(3, 2, 16, generator=generator)
    lambdas = 2.0 ** torch.randint(-4, 5, (2, 16), generator=generator)
    ordinals = torch.arange(3)
    plain, divided = codec(False, {}), codec(True, {"layers.0.k_rescale": lambdas})
    layout = BY_QUERIES.layout("k", 2, 16, "float32", 2)
    assert isinstance(layout, TieredLayout)
    bits = [channel_bits(layout, one.encode(keys, ordinals, 2, query_mean)) for one in (plain, divided)]
    assert torch.equal(*bits) and set(bits[0].flatten().tolist()) == {2, 4}
    alone = channel_bits(layout, plain.encode(keys / lambdas[:, None], ordinals, 2, query_mean))
    assert not torch.equal(alone, bits[0])
