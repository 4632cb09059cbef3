"""What the benchmarks time: pages of sane random contents, their bytes, and sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvcal.bench.grid import (
    DEFAULT_PAIRS,
    PAIRS,
    POINTS,
    QUICK_PAIRS,
    QUICK_POINTS,
    TARGETS,
    chosen_pairs,
    chosen_points,
    recipe_pair,
    target,
)
from kvcal.bench.kernel_case import kernel_case, prefill_call, refusal, stored_read_bytes
from kvcal.bench.layer import packing_lengths, plain_length
from kvcal.bench.random_pages import CODE_RANGE, fill_pages
from kvcal.bench.shape import Heads, Pair, Point, bits_per_value, raw_bytes, read_bytes
from kvcal.bench.timing import CACHES, L2_FACTOR, num_caches, spread
from kvcal.errors import UsageError
from kvcal.formats import Boost, Format, Tier
from kvcal.quantizers.tiers import NO_SLOT, TieredLayout

CPU = torch.device("cpu")
HEADS = Heads(num_kv_heads=2, head_dim=64, group=2)
MIXKVQ = recipe_pair("mixkvq")
EVERY_PAIR = [*PAIRS.values(), MIXKVQ]


@pytest.mark.parametrize("context", [128, 129, 255, 256, 700])
@pytest.mark.parametrize("pair", EVERY_PAIR, ids=lambda pair: pair.name)
def test_the_bytes_that_are_read_are_those_of_the_tensors(pair: Pair, context: int) -> None:
    point = Point(2, context)
    case = kernel_case(pair, HEADS, point, 1, CPU)
    assert read_bytes(pair, HEADS, point) == stored_read_bytes(case.stores[0], context)


def test_bits_that_are_read_count_scales_and_the_index() -> None:
    """In whole pages of a long context: b + 32 / 128 bits, Kitty 5,248 bytes of keys a page at head size 128."""
    heads, point = Heads(), Point(1, 128 * 1024)
    for bits in (1, 2, 3, 4, 8):
        assert bits_per_value(PAIRS[str(bits)], heads, point) == pytest.approx(bits + 0.25, abs=2e-3)
    kitty = 8 * (5248 + 128 * 128 * 2.25 / 8) / (2 * 128 * 128)
    assert bits_per_value(PAIRS["kitty"], heads, point) == pytest.approx(kitty, abs=2e-3)
    # 16-bit pages: the tokens themselves, and the new one.
    assert read_bytes(PAIRS["16"], heads, point) == raw_bytes(heads, Point(1, point.context + 1))


@pytest.mark.parametrize("pair", EVERY_PAIR, ids=lambda pair: pair.name)
def test_attention_over_random_pages_is_finite_and_agrees_with_fp64(pair: Pair) -> None:
    case = kernel_case(pair, HEADS, Point(2, 300), 2, CPU)
    outputs = [case.attend(store) for store in case.stores]
    assert all(torch.isfinite(out).all() for out in outputs)
    assert not torch.equal(outputs[0], outputs[1]), "the caches hold the same contents"
    assert case.relative_error() < 4e-3, "bf16 rounds by 2^-9"


def test_a_wrong_page_is_far_beyond_the_error_of_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    case = kernel_case(PAIRS["2"], HEADS, Point(1, 256), 1, CPU)
    right = case.attend(case.stores[0])

    class Swapped:
        def __call__(self, *args: object) -> torch.Tensor:
            return right.roll(1, dims=1)  # every head gets its neighbour's result

    monkeypatch.setattr("kvcal.bench.kernel_case.KernelCase.attend", Swapped())
    assert case.relative_error() > 0.1


@pytest.mark.parametrize(
    "pair", [PAIRS["2"], PAIRS["3"], PAIRS["8"], PAIRS["kitty"], MIXKVQ], ids=lambda pair: pair.name
)
def test_pages_hold_random_codes_within_the_range_that_they_should(pair: Pair) -> None:
    layout = pair.k.layout("k", 1, 64, "bfloat16", pair.k.num_bits)
    pages = torch.zeros(3, 2, layout.record_bytes, dtype=torch.uint8)
    fill_pages(pages, "k", pair.k, 64, "bfloat16", torch.Generator().manual_seed(0))
    fields = pages[..., : sum(layout.plane_sizes)]
    assert len(fields.unique()) == 256, "every byte comes up among random codes"
    if not isinstance(layout, TieredLayout):
        _, scale, zero = layout.fields(pages)
        middle = CODE_RANGE / (2**pair.k.num_bits - 1)
        assert scale.min() >= 0.49 * middle and scale.max() <= 1.51 * middle
        assert zero.max() < -0.04
        assert len(scale.unique()) > 50
        assert layout.decode(pages).abs().max() < 0.4


@pytest.mark.parametrize("pair", [PAIRS["kitty"], MIXKVQ], ids=lambda pair: pair.name)
def test_every_slot_belongs_to_one_channel(pair: Pair) -> None:
    layout = pair.k.layout("k", 1, 64, "bfloat16", pair.k.num_bits)
    assert isinstance(layout, TieredLayout)
    pages = torch.zeros(5, layout.record_bytes, dtype=torch.uint8)
    fill_pages(pages, "k", pair.k, 64, "bfloat16", torch.Generator().manual_seed(0))
    assert torch.isfinite(layout.decode(pages)).all()
    *_, index, _ = layout._split(pages)
    for slots in index.tolist():
        assert sorted(slot for slot in slots if slot != NO_SLOT) == list(range(layout.num_slots))
    assert len({tuple(slots) for slots in index.tolist()}) == 5, "pages boost different channels"


def test_a_step_stores_its_token_and_packs_what_is_due() -> None:
    pair = PAIRS["2"]
    case = kernel_case(pair, HEADS, Point(1, 256), 1, CPU)
    store = case.stores[0]
    before = store.pages["k"].clone()
    case.step(store)
    assert not torch.equal(before[:, 1], store.pages["k"][:, 1]), "the second page was due"
    assert torch.equal(before[:, 0], store.pages["k"][:, 0])
    assert torch.equal(store.buffer["k"][:, :, 0], case.k_new)
    assert int(case.state.error) == 0


def test_packing_a_prompt_writes_every_page() -> None:
    case = kernel_case(PAIRS["kitty"], HEADS, Point(2, 512), 1, CPU)
    store = case.stores[0]
    before = {side: store.pages[side].clone() for side in ("k", "v")}
    call, nbytes = prefill_call(case, 4)
    call()
    for side in ("k", "v"):
        changed = (before[side][:, :4] != store.pages[side][:, :4]).any(-1)
        assert changed.all()
    written = sum(store.pages[side][:, :4].numel() for side in ("k", "v"))
    assert nbytes == written + 2 * (2 * 2 * 512 * 64 * 2)
    assert int(case.state.error) == 0


def test_a_page_is_due_once_in_128_steps() -> None:
    point = Point(1, 1024)
    assert packing_lengths(PAIRS["2"], point) == (1024,)
    assert packing_lengths(PAIRS["2-window"], point) == (1056,)  # 32 sinks: 1056 = 32 + 128 + 7 pages
    uneven = Pair("uneven", PAIRS["2"].k, replace(PAIRS["2"].v, recent_window=64))
    assert packing_lengths(uneven, point) == (1024, 1088)
    for pair in (*PAIRS.values(), uneven):
        assert plain_length(pair, point) not in packing_lengths(pair, point)


def test_what_the_kernels_do_not_take_is_refused_with_a_reason() -> None:
    lattice = Format(2, "token", 128, lattice_dim=2)
    assert "lattice" in (refusal(Pair("lattice", lattice, lattice), HEADS) or "")
    assert "100" in (refusal(PAIRS["2"], Heads(2, 100, 2)) or "")
    assert all(refusal(pair, Heads()) is None for pair in PAIRS.values())


def test_working_sets_exceed_the_l2_cache_and_leave_memory_free() -> None:
    l2, memory = 60 << 20, 140 << 30
    for nbytes in (1 << 20, 5 << 20, 40 << 20, 4 << 30):
        for is_quick in (False, True):
            count = num_caches(nbytes, l2, memory, is_quick)
            assert count * nbytes >= L2_FACTOR * l2
            assert count * nbytes <= memory / 4
    assert num_caches(40 << 20, l2, memory) == CACHES
    assert num_caches(40 << 20, l2, memory, is_quick=True) == 6
    assert num_caches(4 << 30, l2, memory) == 8
    assert num_caches(1 << 50, l2, memory) == 1


def test_spread_is_the_median_and_the_middle_half() -> None:
    times = spread([5.0, 1.0, 2.0, 3.0, 4.0], calls=7)
    assert (times.low_us, times.median_us, times.high_us, times.replays, times.calls) == (2.0, 3.0, 4.0, 5, 7)


def test_targets_are_those_that_were_set() -> None:
    assert [target("2", Heads(), point) for point in POINTS] == [2.1, 3.4, 4.7, 3.8, 5.0, 5.5]
    assert target("kitty", Heads(), Point(32, 32768)) == 5.2
    assert target("kitty", Heads(), Point(8, 32768)) is None
    assert target("2", Heads(num_kv_heads=4), POINTS[0]) is None
    assert target("2", Heads(), Point(1, 8193)) is None
    assert set(TARGETS) <= set(PAIRS)
    # No target is beyond what its bytes allow.
    for name, by_point in TARGETS.items():
        for (batch, kilo), factor in by_point.items():
            point = Point(batch, 1024 * kilo)
            assert factor < raw_bytes(Heads(), point) / read_bytes(PAIRS[name], Heads(), point)


def test_formats_and_sizes_are_chosen_by_name() -> None:
    assert [pair.name for pair in chosen_pairs((), (), DEFAULT_PAIRS)] == list(DEFAULT_PAIRS)
    assert [pair.name for pair in chosen_pairs(("4",), ("kivi-2",), DEFAULT_PAIRS)] == ["4", "kivi-2"]
    assert [pair.name for pair in chosen_pairs((), ("uniform-2",), DEFAULT_PAIRS)] == ["uniform-2"]
    assert set(QUICK_PAIRS) <= set(PAIRS) and set(DEFAULT_PAIRS) <= set(PAIRS)
    assert chosen_points((), (), QUICK_POINTS) == QUICK_POINTS
    assert chosen_points((2, 4), (256,), POINTS) == (Point(2, 256), Point(4, 256))
    assert chosen_points((2,), (), POINTS) == (Point(2, 8192), Point(2, 32768))
    assert chosen_points((), (512,), POINTS) == (Point(1, 512), Point(8, 512), Point(32, 512))


def test_unknown_formats_and_recipes_without_formats_are_refused() -> None:
    with pytest.raises(UsageError, match="--format '5' is none of 1, 2, 3, 4, 8, 2-window, kitty, 16"):
        chosen_pairs(("5",), (), DEFAULT_PAIRS)
    with pytest.raises(UsageError, match=r"'best' leaves its formats to a solver"):
        chosen_pairs((), ("best",), DEFAULT_PAIRS)
    with pytest.raises(UsageError, match="--context 100: expected at least 128"):
        chosen_points((), (100,), POINTS)


def test_the_kitty_of_the_grid_is_the_papers_share() -> None:
    k = PAIRS["kitty"].k
    assert k.boost == Boost("magnitude", (Tier(4, 0.125),)) and k.num_sink_tokens == 0
    assert recipe_pair("kitty").k.boost == k.boost
