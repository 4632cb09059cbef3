"""``append``, ``pack`` and ``unpack`` store, byte for byte, what the page codec and the reference on a CPU
store."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from cubin_resources import old_compiler_bytes, resources
from kernel_oracle import (
    GROUP_HEADS,
    HEADS,
    KITTY,
    MIXKVQ,
    PACKED,
    PAGED,
    POISON,
    RULE,
    TIERED,
    Case,
    Paged,
    boosted,
    pair_variant,
    reference_pages,
    states,
)
from torch import Tensor

from kvcal.errors import NonFiniteActivations
from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels import ops
from kvcal.kernels.compile import cubin
from kvcal.kernels.decode import shared_room
from kvcal.kernels.packing import append_defines, pack_defines
from kvcal.kernels.reference import NO_ROOM, NON_FINITE
from kvcal.kernels.variants import Variant
from kvcal.plan.page_format import SIDES, Format, Side, Tier

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
N = HEADS.stop - HEADS.start
NUM_SLOTS = 7


def poisoned_pages(case: Case, device: str) -> Tensor:
    """[NUM_SLOTS, n, record_bytes], heads in the middle of a larger tensor."""
    shape = (NUM_SLOTS, N + 2, case.codec().record_bytes(case.fmt.num_bits))
    return torch.full(shape, POISON, dtype=torch.uint8, device=device)[:, 1:-1]


def pack(
    case: Case, x: Tensor, pages: Tensor, slots: list[list[int]], mean: Tensor | None = None, begin: int = 0
) -> int:
    """x [b, n, T, D] -> pages[slots], from token ``begin`` of the first on; the error flag."""
    device = str(pages.device)
    error = torch.zeros(1, dtype=torch.int32, device=device)
    mean = torch.empty(0) if mean is None else mean
    table = torch.tensor(slots, dtype=torch.int32, device=device)
    ops.pack(
        x.to(device), pages, table, begin, mean.to(device), list(case.transform(device)), error,
        SIDES.index(case.side), case.variant.number,
    )  # fmt: skip
    return int(error)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.name)
def test_a_prompt_is_packed_and_unpacked_as_the_codec_does(case: Case, device: str) -> None:
    """Two rows of a batch [B, T, n, D], 2 pages each, at scattered slots."""
    codec, slots = case.codec(), [[5, 0], [2, 4]]
    x = case.tokens(2, 5 + 2 * 128, N).transpose(1, 2)[:, :, 5:]
    generator = torch.Generator().manual_seed(11)
    mean = torch.rand(2, N, case.dim, generator=generator) * 3 if case.fmt.needs_queries else None
    pages = poisoned_pages(case, device)
    assert pack(case, x, pages, slots, mean) == 0
    for row, of_row in enumerate(slots):
        expected = reference_pages(case, codec, x[row], None if mean is None else mean[row])
        assert torch.equal(pages[of_row].cpu(), expected)
        decoded = codec.decode(expected, case.fmt.num_bits)
        values = codec.restore(decoded, torch.arange(2)).transpose(0, 1).flatten(1, 2).float()
        for dtype in (torch.float32, CACHE_DTYPES[case.cache]):
            out = torch.full((1, 2 * 128 + 1, N, case.dim), POISON, dtype=dtype, device=device).transpose(1, 2)
            table = torch.tensor([of_row], dtype=torch.int32, device=device)
            operands = (list(case.transform(device)), SIDES.index(case.side), case.variant.number)
            ops.unpack(pages, table, out[:, :, :-1], *operands)
            assert torch.equal(out[0, :, :-1].cpu(), values.to(dtype))
            assert bool((out[:, :, -1] == POISON).all())
    untouched = [slot for slot in range(NUM_SLOTS) if slot not in sum(slots, [])]
    assert bool((pages[untouched] == POISON).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("side", "dim"), [("k", 128), ("v", 128), ("v", 256)])
def test_chunks_of_stripes_make_the_pages_that_are_packed_at_once(side: Side, dim: int, device: str) -> None:
    """Two rows, at several places of a page and over its end: a page that is begun is 0 besides."""
    case = Case(side, replace(STRIPES, num_bits=3), dim, feedback=True)
    codec, slots, pages = case.codec(), [[5, 0, 3], [2, 4, 1]], poisoned_pages(case, device)
    x, start = case.tokens(2, 384, N).transpose(1, 2), 0
    whole = torch.stack([reference_pages(case, codec, row, None) for row in x])
    layout = codec._layout(3)
    for stop in (16, 112, 160, 192, 384):
        at = slice(start // 128, -(-stop // 128))
        assert pack(case, x[:, :, start:stop], pages, [row[at] for row in slots], begin=start % 128) == 0
        for page in range(-(-stop // 128)):
            own = layout.token_bytes(0, min(128, stop - 128 * page))
            found = pages[[row[page] for row in slots]].cpu()
            assert torch.equal(found, torch.where(own, whole[:, page], 0)), (stop, page)
        start = stop


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", ["token", "channel", "sign"])
@pytest.mark.parametrize(
    "case",
    [Case("k", Format(2, "channel", 64)), Case("v", Format(4, "token", 64), 80), *TIERED[:1], TIERED[6]],
    ids=lambda case: case.name,
)
def test_what_is_not_finite_is_noted_and_nothing_else_is(case: Case, where: str, device: str) -> None:
    places = {"token": (77, 1, math.nan), "channel": (3, case.dim - 1, math.inf), "sign": (127, 5, -math.inf)}
    token, channel, value = places[where]
    x = case.tokens(1, N, 128)
    assert pack(case, x, poisoned_pages(case, device), [[0]]) == 0
    x[0, N - 1, token, channel] = value
    with pytest.raises(NonFiniteActivations):
        reference_pages(case, case.codec(), x[0], None)
    assert pack(case, x, poisoned_pages(case, device), [[0]]) == NON_FINITE


@pytest.mark.parametrize("device", DEVICES)
def test_a_range_beyond_the_params_is_noted(device: str) -> None:
    half, wide = (Case("v", Format(2, "token", 128, param_dtype=params)) for params in ("float16", "bfloat16"))
    x = half.tokens(1, N, 128)
    x[0, 1, 9, 7] = 1e6
    assert pack(half, x, poisoned_pages(half, device), [[1]]) == NON_FINITE
    assert pack(wide, x, poisoned_pages(wide, device), [[1]]) == 0


ROTATED = Format(2, "token", 64, 4, quantizer="rotated")
STRIPES = replace(ROTATED, recent_window=9, stripe_tokens=16)
LONG_STRIPES = replace(ROTATED, group_size=32, recent_window=7, stripe_tokens=32)
APPENDED = [
    (Case("k", Format(2, "channel", 32, 4, 30)), Case("v", Format(3, "token", 64, 4, 150))),
    (Case("k", Format(4, "token", 64), 80, "float16"), Case("v", Format(16), 80, "float16")),
    (Case("k", replace(KITTY, recent_window=17), rescale=True, offset=True), Case("v", Format(2, num_sink_tokens=5))),
    (Case("k", MIXKVQ, 64, rescale=True), Case("v", Format(2, "token", 32, 5, 33), 64)),
    (Case("k", boosted("variance", Tier(4, 0.1)), 64, "float16"), Case("v", Format(1, "token", 128, 5), 64, "float16")),
    (
        Case("k", replace(MIXKVQ, window_rule=PAGED, num_sink_tokens=3)),
        Case("v", Format(8, "token", 32, 3, window_rule=RULE, param_dtype="float32")),
    ),
    (Case("k", Format(2, "channel", 128), 256), Case("v", Format(4, window_rule=PAGED), 256)),
    (Case("k", Format(2, "channel", 32, 130), 256), Case("v", Format(4, "token", 32, 300), 256)),
    (Case("k", Format(2, "channel", 128, 4, 30), feedback=True), Case("v", Format(2, "token", 128, 4), feedback=True)),
    (
        Case("k", replace(MIXKVQ, num_sink_tokens=3), 64, rescale=True, feedback=True),
        Case("v", Format(3, "token", 32), 64),
    ),
    (Case("k", Format(16), 80), Case("v", Format(4, "token", 64), 80, feedback=True)),
    (Case("k", ROTATED, feedback=True), Case("v", ROTATED, feedback=True, gain=True)),
    (Case("k", STRIPES, feedback=True), Case("v", replace(STRIPES, num_bits=3), feedback=True, gain=True)),
    (Case("k", replace(STRIPES, num_sink_tokens=21), 64), Case("v", replace(STRIPES, num_sink_tokens=37), 64)),
    (Case("k", LONG_STRIPES, 96, feedback=True), Case("v", replace(LONG_STRIPES, num_bits=1), 96, feedback=True)),
    (
        Case("k", replace(LONG_STRIPES, num_bits=4), 72, "float16", feedback=True),
        Case("v", LONG_STRIPES, 72, "float16"),
    ),
    (
        Case("k", replace(STRIPES, group_size=128), 256, feedback=True),
        Case("v", replace(STRIPES, num_bits=3, group_size=128), 256, feedback=True, gain=True),
    ),
    (Case("k", ROTATED, 136, feedback=True), Case("v", Format(2, "token", 64, 4), 136)),
]


def variant_of(k: Case, v: Case) -> Variant:
    return Variant(
        k.fmt, v.fmt, k.dim, k.cache, GROUP_HEADS, k.rescale, k.offset,
        k_feedback=k.feedback, v_feedback=v.feedback, v_gain=v.gain,
    )  # fmt: skip


def assert_same(ours: Paged, theirs: Paged) -> None:
    """Everything that both store, whatever the slots."""
    for side in SIDES:
        for name in ("sinks", "ring"):
            mine, other = (getattr(paged.memory[side], name).cpu() for paged in (ours, theirs))
            assert torch.equal(mine, other), (side, name)
        for row in range(len(ours.place.lengths)):
            wrong = (ours.records(side, row) != theirs.records(side, row)).nonzero()
            assert not len(wrong), (side, row, len(wrong), wrong[0].tolist())
    for mine, other in zip(ours.queries, theirs.queries, strict=True):
        assert torch.equal(mine.cpu(), other.cpu())
    assert int(ours.error) == int(theirs.error)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize(("k", "v"), APPENDED, ids=lambda case: case.name)
def test_steps_store_what_the_reference_stores(k: Case, v: Case, seed: int | None) -> None:
    """Row 1 is 38 tokens ahead. Tokens and queries come as slices of wider tensors, as projections give
    them."""
    variant = variant_of(k, v)
    ours = Paged(variant, 2, 4, "cuda", N, seed, is_slice=seed is not None)
    theirs = Paged(variant, 2, 4, "cpu", N)
    count = 470
    x = [case.tokens(2, count, N + 1) for case in (k, v)]
    q = k.tokens(2, count, (N + 1) * GROUP_HEADS)
    on_device = [tensor.cuda() for tensor in (*x, q)]
    for step in range(count):
        rows = slice(1, 2) if step < 38 else slice(0, 2)
        for paged, (k_of, v_of, q_of) in ((ours, on_device), (theirs, (*x, q))):
            paged.step(rows, k_of[rows, step, 1:], v_of[rows, step, 1:], q_of[rows, step, GROUP_HEADS:])
        if step % 46 == 0:
            assert_same(ours, theirs)
    assert_same(ours, theirs)
    assert int(ours.error) == 0 and ours.place.lengths.tolist() == [432, 470]


@pytest.mark.gpu
@pytest.mark.parametrize("side", [0, 1])
def test_a_step_notes_what_it_cannot_store(side: int) -> None:
    """A NaN in the step that completes its page, and a page beyond the room."""
    variant = pair_variant("2 bits", dim=64)
    paged = Paged(variant, 1, 1, "cuda")
    x = [states(1, 300, 2, 64, seed).cuda() for seed in (0, 1)]
    x[side][0, 60, 1, 9] = math.nan
    q = states(1, 300, 4, 64).cuda()
    for step in range(258):
        expected = (NON_FINITE if step > 127 else 0) | (NO_ROOM if step > 255 else 0)
        assert int(paged.error) == expected
        paged.step(slice(0, 1), x[0][:, step], x[1][:, step], q[:, step])


CAPABILITIES = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))


def assert_compiles(defines: dict[str, int], capability: tuple[int, int], local_bytes: int = 16) -> None:
    """On every GPU, and in local memory only what the slow paths of divisions and square roots put there. Two
    blocks of 256 threads where they pack whole pages, and of parts as many registers as there are."""
    has_parts = "PART_TOKENS" in defines
    for entry, needs in resources(cubin("pack", defines, f"sm_{capability[0]}{capability[1]}")).items():
        assert needs.local_bytes <= local_bytes, entry
        assert needs.registers <= (168 if has_parts else 128) and needs.static_shared_bytes <= 48 * 1024, entry


@pytest.mark.parametrize("number", range(0, len(PACKED), 5), ids=[case.name for case in PACKED[::5]])
def test_pack_compiles(number: int) -> None:
    """Every fifth: all bits, axes, groups and head sizes are among them."""
    case = PACKED[number]
    capability = CAPABILITIES[number % len(CAPABILITIES)]
    assert_compiles(pack_defines(case.variant, case.side, shared_room(capability)), capability)


@pytest.mark.parametrize("number", range(len(APPENDED)))
def test_append_compiles(number: int) -> None:
    """Heads of more than 128 channels spill a few registers more in parts (test_kernels_budget.py)."""
    variant, capability = variant_of(*APPENDED[number]), CAPABILITIES[number % len(CAPABILITIES)]
    spilled = 64 if variant.head_dim > 128 else 16 + old_compiler_bytes()
    assert_compiles(append_defines(variant, False, shared_room(capability)), capability, spilled)
