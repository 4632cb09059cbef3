"""What the benchmarks time: pages of sane random contents, their bytes, sizes, and which kernel serves them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bench_cases import MACHINE

from kvcal.bench.case import (
    CODE_RANGE,
    SHARPNESS,
    KernelUse,
    fill_lattice,
    fill_pages,
    kernel_case,
    kernel_use,
    prefill_call,
    refusal,
)
from kvcal.bench.device import CACHES, L2_FACTOR, num_caches, spread
from kvcal.bench.kernels import step_lengths
from kvcal.bench.shape import (
    DEFAULT_PAIRS,
    PAIRS,
    POINTS,
    QUICK_PAIRS,
    QUICK_POINTS,
    TARGETS,
    Heads,
    Pair,
    Point,
    StepBytes,
    bits_per_value,
    chosen_heads,
    chosen_pairs,
    chosen_points,
    raw_bytes,
    recipe_pair,
    step_bytes,
    target,
)
from kvcal.cache.paged_layer import PagedLayer
from kvcal.errors import UsageError
from kvcal.kernels.variants import VARIANTS, stored_form
from kvcal.pages.lattice import LatticeLayout
from kvcal.pages.tiered import NO_SLOT, TieredLayout
from kvcal.plan.page_format import SIDES, Boost, Format, Tier
from kvcal.store.dequantize import StepForm

CPU = torch.device("cpu")
HEADS = Heads(num_kv_heads=2, head_dim=64, group=2)
MIXKVQ = recipe_pair("mixkvq-capped")
FORMS = [
    PAIRS["pre-rope"], PAIRS["higgs"], PAIRS["aqua"],
    *(recipe_pair(name) for name in ("aqua-kv-int4", "aqua-kv-uniform", "higgs-2")),
    Pair("kitty before RoPE", PAIRS["kitty"].k, Format(16), k_pages="pre"),
]  # fmt: skip
EVERY_PAIR = [*PAIRS.values(), MIXKVQ, *FORMS[3:]]


def tensor_bytes(layer: PagedLayer, context: int) -> StepBytes:
    """What a step after ``context`` tokens moves, counted in the layer's tensors."""
    stored = reconstructed = kept = predictors = 0
    held = 2 * ((context + 1) // 128)  # of two sequences
    for step in layer.store.steps:
        for side, memory in zip(SIDES, (step.k, step.v), strict=True):
            fmt = VARIANTS[step.variants[0]].format(side)
            is_form = stored_form(layer.plan, side, fmt) is not None
            read = 2 * fmt.pages_read(context)
            page, token = memory.pages[:1].nbytes, memory.ring[:, :, :1].nbytes
            stored += token * (context + 1) - token // 2 * 128 * read
            stored += token * min(memory.sinks.shape[2], 64 * read)
            stored += 0 if is_form else read * page
            reconstructed += (held + read) * page if is_form else 0
    for form in layer.forms:
        stored += held * form.records[:1].nbytes if form.tokens else 0
        inputs = () if form.predicted is None else form.predicted.inputs
        for tensor in (*inputs, *([] if form.kept is None else [form.kept])):
            kept += held * tensor[:1, :1].nbytes
        predictors += 0 if form.predicted is None else form.predicted.predictor.nbytes
    return StepBytes(stored, reconstructed, kept, predictors)


@pytest.mark.parametrize("context", [128, 129, 255, 256, 700])
@pytest.mark.parametrize("pair", EVERY_PAIR, ids=lambda pair: pair.name)
def test_the_bytes_that_are_moved_are_those_of_the_tensors(pair: Pair, context: int) -> None:
    point = Point(2, context)
    case = kernel_case(pair, HEADS, point, 1, CPU)
    assert step_bytes(pair, HEADS, point) == tensor_bytes(case.layers[0], context)


def test_a_stored_form_counts_its_records_and_twice_its_16_bit_pages() -> None:
    """At 8 x 8K of 8 heads of 128: 2 bits and a scale of 16 for 1,024 values, then 16 bits out and in again."""
    heads, point = Heads(), Point(8, 8192)
    values = 2 * 8 * 8192 * 8 * 128
    higgs = step_bytes(PAIRS["higgs"], heads, point)
    token = 2 * 8 * 8 * 128 * 2  # the new one
    assert higgs == StepBytes(stored=values * 2 // 8 + values // 1024 * 2 + token, reconstructed=2 * values * 2)
    aqua = step_bytes(PAIRS["aqua"], heads, point)
    assert (aqua.stored, aqua.reconstructed) == (higgs.stored, higgs.reconstructed)
    # In fp32: K and V are left for the next layer; K predicts from one K, V from a V and this layer's K.
    assert aqua.kept == 5 * values // 2 * 4
    assert aqua.predictors == 2 * (1024 * 1024 + 1024) + 2 * (1024 * 2048 + 1024)
    assert aqua.total == sum((aqua.stored, aqua.reconstructed, aqua.kept, aqua.predictors))
    assert bits_per_value(PAIRS["aqua"], heads, point) == pytest.approx(2 + 16 / 1024, abs=3e-3)


def test_bits_that_are_read_count_scales_and_the_index() -> None:
    """In whole pages of a long context: b + 32 / 128 bits, Kitty 5,248 bytes of keys a page at head size 128."""
    heads, point = Heads(), Point(1, 128 * 1024)
    for bits in (1, 2, 3, 4, 8):
        assert bits_per_value(PAIRS[str(bits)], heads, point) == pytest.approx(bits + 0.25, abs=2e-3)
    kitty = 8 * (5248 + 128 * 128 * 2.25 / 8) / (2 * 128 * 128)
    assert bits_per_value(PAIRS["kitty"], heads, point) == pytest.approx(kitty, abs=2e-3)
    # 16-bit pages: the tokens themselves, and the new one.
    assert step_bytes(PAIRS["16"], heads, point) == StepBytes(raw_bytes(heads, Point(1, point.context + 1)))


@pytest.mark.parametrize("pair", EVERY_PAIR, ids=lambda pair: pair.name)
def test_attention_over_random_pages_is_finite_and_agrees_with_fp64(pair: Pair) -> None:
    case = kernel_case(pair, HEADS, Point(2, 300), 2, CPU)
    outputs = [case.attend(layer) for layer in case.layers]
    assert all(torch.isfinite(out).all() for out in outputs)
    assert not torch.equal(outputs[0], outputs[1]), "the caches hold the same contents"
    assert case.relative_error() < 4e-3, "bf16 rounds by 2^-9"


def test_a_wrong_page_is_far_beyond_the_error_of_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    case = kernel_case(PAIRS["2"], HEADS, Point(1, 256), 1, CPU)
    right = case.attend(case.layers[0], SHARPNESS)

    class Swapped:
        def __call__(self, *args: object) -> torch.Tensor:
            return right.roll(1, dims=1)  # every head gets its neighbour's result

    monkeypatch.setattr("kvcal.bench.case.KernelCase.attend", Swapped())
    assert case.relative_error() > 0.1


@pytest.mark.parametrize("context", [300, 8192])
@pytest.mark.parametrize("pair", [PAIRS["2"], PAIRS["8"], PAIRS["16"], PAIRS["kitty"]], ids=lambda pair: pair.name)
def test_a_wrong_page_of_keys_is_beyond_it_too(pair: Pair, context: int) -> None:
    case = kernel_case(pair, HEADS, Point(1, context), 1, CPU)
    (part,) = case.layers[0].sides["k"]
    right = case.attend(case.layers[0], SHARPNESS)
    part.pool.records.copy_(part.pool.records.flip(1))
    wrong = case.attend(case.layers[0], SHARPNESS)
    assert (wrong - right).norm() > 0.1 * right.norm()


@pytest.mark.parametrize("pair", FORMS, ids=lambda pair: pair.name)
def test_pages_that_are_not_reconstructed_are_far_beyond_it_too(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    case = kernel_case(pair, HEADS, Point(1, 300), 1, CPU)
    monkeypatch.setattr(StepForm, "step", lambda form: None)
    assert not case.relative_error() < 0.1


@pytest.mark.parametrize("name", ["aqua-kv-int4", "aqua-kv-uniform"])
def test_layers_that_are_predicted_are_timed_between_a_first_and_a_last_one(name: str) -> None:
    case = kernel_case(recipe_pair(name), HEADS, Point(1, 256), 3, CPU)
    assert len(case.cache.paged_layers) == 5
    assert [layer.plan.geometry.index for layer in (*case.before, *case.layers)] == [0, 1, 2, 3]
    assert case.before[0].plan.k[0].num_bits == 4 and case.before[0].plan.k_predictor is None
    for layer in case.layers:
        assert layer.plan.k[0].num_bits == 2 and [form.codec.side for form in layer.forms] == list(SIDES)
        for form in layer.forms:
            assert form.kept is not None and form.predicted is not None, "predicted from, and predicted"


def test_reconstructions_stay_small_however_often_they_are_timed() -> None:
    case = kernel_case(PAIRS["aqua"], HEADS, Point(1, 256), 3, CPU)
    for _ in range(12):
        outputs = [call() for call in case.calls(case.step)]
    assert all(torch.isfinite(out).all() for out in outputs)
    assert int(case.cache.static.error) == 0
    for layer in case.layers:
        for step in layer.store.steps:
            pages = [memory.pages[:2].view(torch.bfloat16).float() for memory in (step.k, step.v)]
            assert all(0.01 < page.std() < 1 for page in pages)


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
    case = kernel_case(PAIRS["2"], HEADS, Point(1, 255), 1, CPU)
    (part,) = case.layers[0].sides["k"]
    before = part.pool.records.clone()
    case.step(case.layers[0])
    assert not torch.equal(before[1], part.pool.records[1]), "the token completes the second page"
    assert torch.equal(before[0], part.pool.records[0])
    assert torch.equal(part.ring[:, :, 255 % 128], case.k_new)
    assert int(case.cache.static.error) == 0


@pytest.mark.parametrize("pair", [PAIRS["kitty"], MIXKVQ, *FORMS[:4]], ids=lambda pair: pair.name)
def test_storing_a_prompt_writes_every_page(pair: Pair) -> None:
    case = kernel_case(pair, HEADS, Point(2, 512), 1, CPU)
    parts = case.layers[0].parts
    before = [part.pool.records.clone() for part in parts]
    call, nbytes = prefill_call(case, 4)
    call()
    slots = case.cache.static.table[:, :4].flatten().long()
    for part, old in zip(parts, before, strict=True):
        assert (part.pool.records[slots] != old[slots]).any(-1).all()
    assert nbytes == sum(part.pool.records[slots].nbytes for part in parts) + 2 * (2 * 2 * 512 * 64 * 2)
    assert int(case.cache.static.error) == 0


@pytest.mark.parametrize("lattice_dim", [2, 4])
def test_a_lattices_records_hold_random_codes_and_scales_of_their_own(lattice_dim: int) -> None:
    layout = LatticeLayout(2, lattice_dim, 96, "float16")
    records = torch.zeros(3, 2, 1, layout.record_bytes, dtype=torch.uint8)
    fill_lattice(records, layout, torch.Generator().manual_seed(0))
    codes, scale = layout.fields(records)
    assert len(codes.unique()) == layout.num_points
    assert scale.shape == (3, 2, 1, 128, 3) and scale.min() > 0.024 and scale.max() < 0.076
    assert len(scale.unique()) > 100


@pytest.mark.parametrize(
    ("name", "head_dim", "kernel"),
    [
        ("2", 64, "decode"), ("16", 128, "decode"), ("2-window", 128, "decode"), ("kitty", 64, "decode"),
        ("2", 96, "decode"), ("2", 256, "decode"), ("2", 80, "decode_plain"), ("2-uneven", 128, "decode_plain"),
        ("2-rotated", 128, "decode"), ("kitty-rotated", 64, "decode"), ("2-rotated", 80, "decode_plain"),
        ("higgs", 64, "reconstruct + decode"), ("pre-rope", 128, "reconstruct + decode"),
        ("aqua", 64, "reconstruct + decode"), ("higgs", 96, "reconstruct + decode_plain"),
    ],
)  # fmt: skip
def test_every_case_names_its_kernel(name: str, head_dim: int, kernel: str) -> None:
    heads = Heads(2, head_dim, 2)
    case = kernel_case(PAIRS[name], heads, Point(1, 200), 1, CPU)
    assert refusal(PAIRS[name], heads) is None
    found = kernel_use(case.layers)
    assert found.name == kernel and (found.reasons == ()) == (kernel == "decode")
    assert found == KernelUse(kernel, found.reasons), "no launch on a CPU"
    assert case.relative_error() < 4e-3


def test_a_kernels_reasons_are_those_of_the_cache() -> None:
    reasons = kernel_use(kernel_case(PAIRS["aqua"], Heads(2, 96, 2), Point(1, 200), 2, CPU).layers).reasons
    for part in ("k pages are on a lattice", "v pages are on a lattice", "head size 96"):
        assert any(reason.startswith(part) for reason in reasons), part
    assert len(reasons) == len(set(reasons)) == 3


def test_a_page_is_due_once_in_128_steps() -> None:
    assert step_lengths(1024) == (1151, 1087)
    assert step_lengths(1000) == (1023, 959)


def test_what_the_kernels_do_not_take_is_refused_with_a_reason() -> None:
    assert "100" in (refusal(PAIRS["2"], Heads(2, 100, 2)) or "")
    assert all(refusal(pair, Heads()) is None for pair in PAIRS.values())


def test_working_sets_exceed_the_l2_cache_and_leave_memory_free() -> None:
    l2, memory = 60 << 20, 140 << 30
    machine = replace(MACHINE, l2_bytes=l2, memory_bytes=memory)
    for nbytes in (1 << 20, 5 << 20, 40 << 20, 4 << 30):
        for is_quick in (False, True):
            count = num_caches(nbytes, machine, is_quick)
            assert count * nbytes >= L2_FACTOR * l2
            assert count * nbytes <= memory / 4
    assert num_caches(40 << 20, machine) == CACHES
    assert num_caches(40 << 20, machine, is_quick=True) == 6
    assert num_caches(4 << 30, machine) == 8
    assert num_caches(1 << 50, machine) == 1


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
            assert factor < raw_bytes(Heads(), point) / step_bytes(PAIRS[name], Heads(), point).total


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
    with pytest.raises(
        UsageError, match="--format '5' is none of 1, 2, 3, 4, 8, 2-window, kitty, 16, 2-uneven, pre-rope"
    ):
        chosen_pairs(("5",), (), DEFAULT_PAIRS)
    with pytest.raises(UsageError, match=r"'best' leaves its formats to a solver"):
        chosen_pairs((), ("best",), DEFAULT_PAIRS)
    with pytest.raises(UsageError, match="'mixkvq' is tuned for a model, and so are its tiers"):
        recipe_pair("mixkvq")
    with pytest.raises(UsageError, match="'pm-kvq-2' lets pages shrink"):
        chosen_pairs((), ("pm-kvq-2",), DEFAULT_PAIRS)
    with pytest.raises(UsageError, match="--context 100: expected at least 128"):
        chosen_points((), (100,), POINTS)


@pytest.mark.parametrize("head_dim", [100, 4, 520])
def test_head_sizes_that_no_kernel_takes_are_refused(head_dim: int) -> None:
    with pytest.raises(UsageError, match=f"--head-dim {head_dim}: expected a multiple of 8 up to 512") as caught:
        chosen_heads(8, head_dim, 4)
    assert "64, 96, 128, 192, 256 are served by decode" in (caught.value.hint or "")
    assert chosen_heads(8, 96, 4) == Heads(8, 96, 4)


def test_a_recipe_brings_its_predictors_and_the_formats_of_its_first_layer() -> None:
    pair = recipe_pair("aqua-kv-int4")
    assert pair.predictors is not None and (pair.predictors.kind, pair.predictors.group_size) == ("int4", 64)
    first, second = (Heads().layer(pair, index) for index in (0, 1))
    assert (first.k[0].num_bits, first.k_pages, first.k_predictor) == (4, "post", None)
    assert (second.k[0].num_bits, second.k_pages) == (2, "pre")
    assert second.k_predictor == second.v_predictor and second.k_predictor.source == 0
    assert recipe_pair("higgs-2").first is not None and recipe_pair("kivi-2").first is None


def test_the_kitty_of_the_grid_is_the_papers_share() -> None:
    k = PAIRS["kitty"].k
    assert k.boost == Boost("magnitude", (Tier(4, 0.125),)) and k.num_sink_tokens == 0
    assert recipe_pair("kitty").k.boost == k.boost
