"""The decode kernel against attention in fp64 over the decoded pages, and against the reference, on a GPU."""

import dataclasses

import pytest
import torch
from decode_cases import (
    CASES,
    LENGTHS,
    ROTATED,
    TOLERANCE,
    Case,
    in_turn,
    k_format,
    relative_error,
    v_format,
    variant_of,
)
from kernel_oracle import PAIRS, Paged, pair_variant, states

from kvcal.kernels.choice import is_plain
from kvcal.plan.page_format import Format

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("name", "dim"), in_turn(CASES, 64, 128))
def test_every_format(name: str, dim: int) -> None:
    case = Case(variant_of(*CASES[name], dim=dim), LENGTHS, heads=2, seed=1)
    assert relative_error(case.run(0.4 * dim**-0.5), case.expected(0.4 * dim**-0.5)) <= TOLERANCE


@pytest.mark.parametrize("group", (1, 2, 3, 4, 5, 7, 8, 12, 16, 17))
@pytest.mark.parametrize("name", ("2 bits", "4 bits", "Kitty", "rotated 2 bits"))
def test_query_groups(name: str, group: int) -> None:
    case = Case(variant_of(*CASES[name], group=group), LENGTHS, heads=3, seed=2)
    assert relative_error(case.run(0.06), case.expected(0.06)) <= TOLERANCE


@pytest.mark.parametrize(("name", "group"), in_turn(CASES, 8, 16))
def test_every_format_for_large_groups(name: str, group: int) -> None:
    case = Case(variant_of(*CASES[name], group=group), LENGTHS, heads=2, seed=15)
    assert relative_error(case.run(0.035), case.expected(0.035)) <= TOLERANCE


SIZES = ((64, 8), (96, 1), (96, 7), (192, 4), (256, 4), (256, 8), (256, 16))
SIZED = ("1 bits", "2 bits", "3 bits", "4 bits", "8 bits", "Kitty", "K per token", "sinks and windows")


@pytest.mark.parametrize(
    ("name", "dim", "group"), [(name, *size) for n, name in enumerate(SIZED) for size in SIZES[n % 2 :: 2]]
)
def test_head_sizes(name: str, dim: int, group: int) -> None:
    variant = variant_of(*CASES[name], dim=dim, group=group)
    if is_plain(variant):
        pytest.skip("the plain kernel serves it")
    case, scale = Case(variant, LENGTHS, heads=2, seed=16), 0.4 * dim**-0.5
    assert relative_error(case.run(scale), case.expected(scale)) <= TOLERANCE


@pytest.mark.parametrize(("dim", "group"), ((256, 1), (256, 2), (256, 4), (256, 8), (256, 16), (192, 8), (96, 4)))
@pytest.mark.parametrize("name", ("rotated 2 bits", "rotated V", "stripes", "stripes of 3 bits", "stripes of 4 bits"))
def test_rotated_pages_of_other_head_sizes(name: str, dim: int, group: int) -> None:
    """Of more than 128 channels scales are of two groups, and a warp rotates two halves of a head back. The plain
    kernel serves 96 channels of 3 bits alone."""
    variant = variant_of(*CASES[name], dim=dim, group=group)
    assert is_plain(variant) == (dim == 96 and 3 in (variant.k.num_bits, variant.v.num_bits))
    case, scale = Case(variant, LENGTHS, heads=2, seed=19), 0.4 * dim**-0.5
    assert relative_error(case.run(scale), case.expected(scale)) <= TOLERANCE


@pytest.mark.parametrize("dim", (64, 96, 128, 192, 256))
@pytest.mark.parametrize("name", ("1 bits", "2 bits", "3 bits", "4 bits", "Kitty 90 %", "K per token"))
def test_the_largest_code_in_all_channels(name: str, dim: int) -> None:
    """Products of the query's limbs with a token's codes add up to as much as they can."""
    case = Case(variant_of(*CASES[name], dim=dim, group=8), (300, 700), heads=2, seed=18, alike=True)
    assert relative_error(case.run(8 / dim), case.expected(8 / dim)) <= TOLERANCE


@pytest.mark.parametrize("name", ("2 bits", "16 bits", "MixKVQ", "sinks and windows"))
def test_half_precision(name: str) -> None:
    case = Case(variant_of(*CASES[name], dtype="float16"), LENGTHS, heads=2, seed=3)
    assert relative_error(case.run(0.06, dtype=torch.float16), case.expected(0.06, dtype=torch.float16)) <= TOLERANCE
    assert relative_error(case.run(0.06), case.expected(0.06)) <= TOLERANCE


@pytest.mark.parametrize(("rescale", "offset"), ((False, True), (True, False), (True, True)))
@pytest.mark.parametrize("key", (k_format(3), k_format(3, "token"), k_format(3, "token", **ROTATED)), ids=str)
@pytest.mark.parametrize(("group", "dim"), ((4, 128), (8, 128), (12, 128), (8, 256)))
def test_rescaled_keys(rescale: bool, offset: bool, key: Format, group: int, dim: int) -> None:
    formats = dataclasses.replace(key, num_sink_tokens=4), v_format(3, num_sink_tokens=4)
    case = Case(variant_of(*formats, dim=dim, group=group, rescale=rescale, offset=offset), LENGTHS, heads=2, seed=5)
    assert relative_error(case.run(0.05), case.expected(0.05)) <= TOLERANCE


@pytest.mark.parametrize("name", ("2 bits", "sinks and windows", "16 bits"))
def test_softcap_and_sink_logits(name: str) -> None:
    case = Case(variant_of(*CASES[name]), LENGTHS, heads=2, seed=6)
    s_aux = torch.linspace(-2, 3, 8, device="cuda")
    for softcap, aux in ((2.0, None), (30.0, s_aux), (0.0, s_aux)):
        assert relative_error(case.run(0.1, softcap, aux), case.expected(0.1, softcap, aux)) <= TOLERANCE


@pytest.mark.parametrize("group", (4, 8))
@pytest.mark.parametrize("outlier", (1.0, 100.0, 1000.0))
@pytest.mark.parametrize("name", ("2 bits", "4 bits", "K per token", "Kitty", "rotated 2 bits"))
def test_outliers_and_sharp_or_flat_attention(name: str, outlier: float, group: int) -> None:
    case = Case(variant_of(*CASES[name], group=group), (5, 600, 1300), heads=2, seed=7, outlier=outlier)
    for scale in (0.0, 1e-3, 0.02 / outlier, 0.5 / outlier):
        assert relative_error(case.run(scale), case.expected(scale)) <= TOLERANCE


@pytest.mark.parametrize(
    ("batch", "heads", "length"), ((1, 1, 5000), (1, 8, 20000), (70, 3, 200), (300, 2, 40), (3, 8, 4095))
)
def test_many_and_long_rows(batch: int, heads: int, length: int) -> None:
    lengths = tuple((length * (row + 1)) // batch for row in range(batch))
    case = Case(variant_of(*CASES["2 bits"]), lengths, heads=heads, seed=8)
    assert relative_error(case.run(0.06), case.expected(0.06)) <= TOLERANCE


@pytest.mark.parametrize("group", (4, 8))
def test_lengths_that_differ_much(group: int) -> None:
    """A block has parts of many heads, and begins and ends within what a head counts for beyond its units."""
    lengths = (130, 40_000, 3, 900, 5_000, 20_000, 128, 260)
    case = Case(variant_of(*CASES["2 bits"], group=group), lengths, heads=3, seed=17)
    first = case.run(0.06)
    assert relative_error(first, case.expected(0.06)) <= TOLERANCE
    assert all(torch.equal(first, case.run(0.06)) for _ in range(5))


def test_repeats_bit_for_bit_and_leaves_counters_at_zero() -> None:
    case = Case(variant_of(*CASES["Kitty"]), LENGTHS, heads=2, seed=9)
    first = case.run(0.06)
    assert all(torch.equal(first, case.run(0.06)) for _ in range(20))


@pytest.mark.parametrize("name", ("2 bits", "sinks and windows", "16 bits"))
@pytest.mark.parametrize("batch", (513, 1100))
def test_rows_beyond_one_launch(batch: int, name: str) -> None:
    lengths = tuple(row * 37 % 300 for row in range(batch))
    case = Case(variant_of(*CASES[name]), lengths, heads=1, seed=10)
    workspace = case.workspace()
    first = case.run(0.06, workspace=workspace)
    assert relative_error(first, case.expected(0.06)) <= TOLERANCE
    assert all(torch.equal(case.run(0.06, workspace=workspace), first) for _ in range(3))


@pytest.mark.parametrize("name", ("2 bits", "sinks beyond a page", "window rules", "K 2 V 16", "K 16 V 2", "16 bits"))
@pytest.mark.parametrize("plain", (False, True))
def test_where_pages_lie_changes_no_bit(name: str, plain: bool) -> None:
    variant = dataclasses.replace(variant_of(*CASES[name]), plain=plain)
    cases = (Case(variant, LENGTHS, heads=2, seed=12, scattered=scattered) for scattered in (False, True))
    assert torch.equal(*(case.run(0.06) for case in cases))


@pytest.mark.parametrize("dim", (64, 80))
@pytest.mark.parametrize("name", PAIRS)
def test_steps_read_what_the_reference_reads(name: str, dim: int) -> None:
    """Row 1 is 38 tokens ahead."""
    variant = pair_variant(name, dim=dim)
    ours, theirs = Paged(variant, 2, 4, "cuda", seed=5, is_slice=True), Paged(variant, 2, 4)
    x = [states(2, 400, heads, dim, seed) for seed, heads in enumerate((2, 2, 4))]
    for step in range(380):
        rows = slice(1, 2) if step < 38 else slice(0, 2)
        at = theirs.place.lengths[rows].long()
        taken = [tensor[torch.arange(2)[rows], at] for tensor in x]
        for paged in (ours, theirs):
            paged.append(rows, *(tensor.to(paged.device) for tensor in taken))
        if step % 29 == 0 or step % 128 in (126, 127, 0, 1):
            q = taken[-1].float()
            found, expected = ours.decode(rows, q.cuda(), 0.1).cpu(), theirs.decode(rows, q, 0.1)
            assert relative_error(found, expected.double()) <= TOLERANCE, step
        for paged in (ours, theirs):
            paged.place.lengths[rows] += 1
    assert int(ours.error) == 0


def test_lengths_beyond_the_room_read_nothing_outside() -> None:
    """A replayed graph knows no end: it must stay inside what was allocated (``append`` reports it)."""
    case = Case(variant_of(*CASES["sinks and windows"]), (700, 300), heads=2, seed=11)
    case.lengths.add_(100_000)
    assert case.run(0.06).shape == case.q.shape
    torch.cuda.synchronize()
