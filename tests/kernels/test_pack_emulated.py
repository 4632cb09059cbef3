"""``append`` and ``pack`` emulated on a CPU store, byte for byte, what the reference stores. Needs no GPU."""

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from emulated import EmulatedKernel, compiled, require_compiler, translated
from kernel_oracle import GROUP_HEADS, Case, Paged, boosted, reference_pages
from test_kernels_pack import N, assert_same, poisoned_pages, variant_of

from kvcal.geometry import CacheDtype
from kvcal.kernels import ops, reference
from kvcal.kernels.operands import NOTHING, Memory, PageTransform, Place, QueryStatistic
from kvcal.kernels.packing import PackShape, append_defines, append_shape, pack_defines, pack_shape
from kvcal.kernels.reference import NO_ROOM
from kvcal.kernels.variants import Variant
from kvcal.plan.page_format import SIDES, Format, Side, Tier

NUM_BLOCKS, ROOM = (
    25,
    227 * 1024,
)  # SMs and shared memory: pages of one sequence are dealt in parts of 32 tokens, of two in 64


@pytest.fixture(autouse=True)
def emulation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    require_compiler()
    kernels: dict[object, EmulatedKernel] = {}

    def append_kernel(variant: Variant, has_rows: bool, _: int) -> tuple[EmulatedKernel, PackShape, int]:
        if variant not in kernels:
            kernels[variant] = EmulatedKernel("pack", "append", append_defines(variant, has_rows, ROOM), tmp_path)
        return kernels[variant], append_shape(variant, ROOM), NUM_BLOCKS

    def side_kernel(entry: str, side: Side, variant: Variant, _: int) -> tuple[EmulatedKernel, PackShape]:
        return EmulatedKernel("pack", entry, pack_defines(variant, side, ROOM), tmp_path), pack_shape(
            variant, side, ROOM
        )

    monkeypatch.setattr(ops, "_append_kernel", append_kernel)
    monkeypatch.setattr(ops, "_side_kernel", side_kernel)


def rotated(side: Side, bits: int, size: int, dim: int, cache: CacheDtype, **more: bool) -> Case:
    return Case(side, Format(bits, "token", size, 5, quantizer="rotated"), dim, cache, **{"feedback": True} | more)


# All bits, groups of every size, channels that are no whole block; one that is packed page by page.
PACKED = [
    rotated("k", 2, 128, 128, "bfloat16", rescale=True, offset=True),
    rotated("k", 4, 32, 64, "float16"),
    rotated("v", 3, 64, 128, "bfloat16", gain=True),
    rotated("v", 8, 128, 96, "float16"),
    rotated("k", 1, 32, 72, "bfloat16"),
    rotated("v", 2, 64, 80, "float16", feedback=False),
    Case("k", Format(2, "channel", 128, 5), feedback=True),
    rotated("k", 2, 128, 256, "bfloat16", rescale=True, offset=True),
    rotated("v", 3, 128, 256, "float16", gain=True),
    rotated("v", 8, 64, 136, "bfloat16"),
    rotated("k", 4, 128, 192, "bfloat16", feedback=False),
]


@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.name)
def test_a_prompt_is_packed_as_the_codec_does(case: Case) -> None:
    """Two pages of odd heads, at scattered slots, of tokens that lie between others."""
    codec, slots, pages = case.codec(), [3, 0], poisoned_pages(case, "cpu")
    x = case.tokens(1, 5 + 2 * 128, N).transpose(1, 2)[:, :, 5:]
    mean = torch.rand(1, N, case.dim, generator=torch.Generator().manual_seed(11)) * 3
    error, table = torch.zeros(1, dtype=torch.int32), torch.tensor([slots], dtype=torch.int32)
    ops.launch_pack(x, pages, table, 0, mean, case.transform("cpu"), error, case.side, case.variant)
    expected = reference_pages(case, codec, x[0], mean[0] if case.fmt.needs_queries else None)
    wrong = (pages[slots] != expected).nonzero()
    assert int(error) == 0 and not len(wrong), (len(wrong), wrong[:3].tolist())


# Values beside every tie of a step, and others of every size, whose code is not the nearest, half to even.
WRONG_CODES = """#include "cuda_on_cpu.h"
typedef unsigned u32;
%s
template <unsigned LEVELS> static int is_wrong(float y, float step) {
    const float code = Grid(step, 0.0f).code<LEVELS>(y) - MAGIC;
    return code != fminf(nearbyintf(fmaxf(y / step, 0.0f)), LEVELS);
}
template <unsigned LEVELS> static int number_of_wrong(float step) {
    int count = 0;
    for (int i = 0; i <= LEVELS; i++) {
        const unsigned tie = __float_as_uint((i + 0.5f) * step);
        for (int apart = -300; apart <= 300; apart++) count += is_wrong<LEVELS>(__uint_as_float(tie + apart), step);
    }
    for (unsigned bits = 0x30000000; bits < 0x70000000; bits += 2039)
        count += is_wrong<LEVELS>(__uint_as_float(bits), step);
    return count + is_wrong<LEVELS>(0.0f, step) + is_wrong<LEVELS>(-step, step);
}
extern "C" int wrong_codes(float step) {
    return number_of_wrong<1>(step) + number_of_wrong<3>(step) + number_of_wrong<7>(step) + number_of_wrong<255>(step);
}
"""


def test_a_code_without_a_division_is_the_nearest(tmp_path: Path) -> None:
    """Of every mantissa that a step has, and the smallest and largest steps."""
    case = rotated("k", 8, 128, 128, "bfloat16")
    text = WRONG_CODES % translated("feedback.cuh")
    library = compiled(text, "codes", pack_defines(case.variant, "k", ROOM), tmp_path)
    library.wrong_codes.argtypes = [ctypes.c_float]
    steps = [1.0, 1.25, 1.5, 1.75, 2.0**-16, 3 * 2.0**-16, 57344.0]
    assert [library.wrong_codes(step) for step in steps] == [0] * len(steps)


class EmulatedPaged(Paged):
    def append(self, rows: slice, k_new: torch.Tensor, v_new: torch.Tensor, q: torch.Tensor) -> None:
        k, v = (Memory(*self._of_rows(side, rows)) for side in SIDES)
        queries = QueryStatistic(*(part[rows] for part in self.queries))
        place, transform = Place(*self._place(rows)), PageTransform(*self.transform)
        ops.launch_append(k_new, v_new, q, k, v, queries, place, transform, self.error, self.variant)


@pytest.mark.parametrize("case", [PACKED[0], PACKED[2], PACKED[5]], ids=lambda case: case.name)
def test_chunks_of_stripes_are_packed_as_the_reference_does(case: Case) -> None:
    """At several places of a page, over its end, and of a whole page: a page that is begun is 0 besides."""
    case = replace(case, fmt=replace(case.fmt, stripe_tokens=16))
    ours, theirs = (poisoned_pages(case, "cpu") for _ in range(2))
    x, error, start = case.tokens(1, 640, N).transpose(1, 2), torch.zeros(1, dtype=torch.int32), 0
    for stop in (16, 112, 160, 192, 496, 512, 640):
        slots = torch.tensor([[3, 0, 6, 2, 5]], dtype=torch.int32)[:, start // 128 : -(-stop // 128)]
        given = case.transform("cpu"), error, case.side, case.variant
        ops.launch_pack(x[:, :, start:stop], ours, slots, start % 128, NOTHING, *given)
        reference.pack(x[:, :, start:stop], theirs, slots, start % 128, None, *given)
        wrong = (ours != theirs).nonzero()
        assert int(error) == 0 and not len(wrong), (stop, len(wrong), wrong[:3].tolist())
        start = stop
    whole = reference_pages(case, case.codec(), x[0, :, :640], None)
    assert torch.equal(ours[[3, 0, 6, 2, 5]], whole)


TOKENS = Format(2, "token", 64, 4, quantizer="rotated")
STRIPES = replace(TOKENS, recent_window=9, stripe_tokens=16)
LONG_STRIPES = replace(TOKENS, group_size=32, recent_window=7, stripe_tokens=32)
KITTY = boosted("query_magnitude", Tier(4, 0.125))


@pytest.mark.parametrize(
    ("k", "v"),
    [
        (Case("k", TOKENS, feedback=True), Case("v", TOKENS, feedback=True, gain=True)),
        (Case("k", STRIPES, feedback=True), Case("v", replace(STRIPES, num_bits=3), feedback=True, gain=True)),
        (
            Case("k", replace(STRIPES, group_size=128), 256, feedback=True),
            Case("v", replace(STRIPES, num_bits=3, group_size=128), 256, feedback=True, gain=True),
        ),
        (Case("k", KITTY, 256), Case("v", replace(TOKENS, num_bits=3, group_size=128), 256, feedback=True)),
        (Case("k", STRIPES, 64), Case("v", replace(STRIPES, num_sink_tokens=21), 64)),
        (Case("k", LONG_STRIPES, 96, feedback=True), Case("v", replace(LONG_STRIPES, num_bits=1), 96, feedback=True)),
        (
            Case("k", replace(LONG_STRIPES, num_bits=4), 72, "float16", feedback=True),
            Case("v", LONG_STRIPES, 72, "float16"),
        ),
        (Case("k", KITTY, 64), Case("v", replace(TOKENS, num_bits=3), 64, feedback=True)),
        (Case("k", Format(2, "channel", 32, 4, 30), 64), Case("v", Format(3, "token", 64, 4), 64)),
    ],
    ids=lambda case: case.name,
)
def test_steps_store_what_the_reference_stores(k: Case, v: Case) -> None:
    """Of three sequences the second completes a page three steps after the others."""
    ours, theirs = (kind(variant_of(k, v), 3, 1, "cpu", N) for kind in (EmulatedPaged, Paged))
    x = [case.tokens(3, 131, N) for case in (k, v)]
    q = k.tokens(3, 131, N * GROUP_HEADS)
    for step in range(131):
        for rows in [slice(0, 1), slice(2, 3)] if step < 3 else [slice(0, 3)]:
            for paged in (ours, theirs):
                paged.step(rows, x[0][rows, step], x[1][rows, step], q[rows, step])
    assert_same(ours, theirs)
    assert int(ours.error) == 0 and ours.place.lengths.tolist() == [131, 128, 131]


@pytest.mark.parametrize("fmt", [TOKENS, STRIPES], ids=["pages", "stripes"])
def test_steps_with_drafts_store_what_the_reference_stores(fmt: Format) -> None:
    """Three tokens a step, of which one or three stay: what rejected ones completed is packed again by what takes
    their place. The second page has no room."""
    k, v = (Case(side, fmt, 64, feedback=True) for side in SIDES)
    variant = replace(variant_of(k, v), step_tokens=3, query_tokens=3)
    ours, theirs = (kind(variant, 1, 1, "cpu", N) for kind in (EmulatedPaged, Paged))
    k_new, v_new, q = (k.tokens(1, 300, heads) for heads in (N, N + 1, N * GROUP_HEADS))
    v_new = v_new[:, :, 1:]
    while (tokens := int(ours.place.lengths)) < 128 + fmt.stripe_tokens:
        are_kept = tokens % 5 == 0
        step = [tokens, tokens + 1, tokens + 2] if are_kept else [tokens, 290, 291]
        for paged in (ours, theirs):
            paged.append(slice(0, 1), *(x[:, step] for x in (k_new, v_new, q)))
            paged.place.lengths.add_(3 if are_kept else 1)
        if 120 < tokens < 132:
            assert_same(ours, theirs)
            assert int(ours.error) == 0
    assert_same(ours, theirs)
    assert int(ours.error) == NO_ROOM
