"""``append`` and ``pack`` emulated on a CPU store, byte for byte, what the reference stores. Needs no GPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from emulated import EmulatedKernel, require_compiler
from kernel_oracle import FED, ROTATED, Case, Paged, boosted, reference_pages
from test_kernels_pack import N, assert_same, poisoned_pages, variant_of

from kvcal.kernels import ops
from kvcal.kernels.operands import Memory, PageTransform, Place, QueryStatistic
from kvcal.kernels.packing import PackShape, append_defines, pack_defines, pack_shape
from kvcal.kernels.variants import Variant
from kvcal.plan.page_format import RAW, SIDES, Format, Side, Tier

NUM_BLOCKS = 5  # of ``append``, which pack several parts each


@pytest.fixture(autouse=True)
def emulation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    require_compiler()
    compiled: dict[object, EmulatedKernel] = {}

    def append_kernel(variant: Variant, has_rows: bool, _: int) -> tuple[EmulatedKernel, PackShape, int]:
        if variant not in compiled:
            compiled[variant] = EmulatedKernel("pack", "append", append_defines(variant, has_rows), tmp_path)
        return compiled[variant], pack_shape(variant), NUM_BLOCKS

    def side_kernel(entry: str, side: Side, variant: Variant, _: int) -> tuple[EmulatedKernel, PackShape]:
        return EmulatedKernel("pack", entry, pack_defines(variant, side), tmp_path), pack_shape(variant, (side,))

    monkeypatch.setattr(ops, "_append_kernel", append_kernel)
    monkeypatch.setattr(ops, "_side_kernel", side_kernel)


# Bits, groups, head sizes, dtypes, gains, feedback; channels that are no whole block.
MORE = [
    Case(side, Format(bits, "token", size, 5, quantizer="rotated"), dim, cache, feedback=True, **more)
    for side, bits, size, dim, cache, more in [
        ("k", 2, 128, 128, "bfloat16", {"rescale": True, "offset": True}),
        ("k", 4, 32, 64, "float16", {}),
        ("v", 3, 64, 128, "bfloat16", {"gain": True}),
        ("v", 8, 128, 64, "float16", {}),
        ("k", 1, 32, 72, "bfloat16", {}),
    ]
]


@pytest.mark.parametrize("case", [*ROTATED, *MORE, FED[0], FED[7]], ids=lambda case: case.name)
def test_a_prompt_is_packed_as_the_codec_does(case: Case) -> None:
    """Two pages of odd heads, at scattered slots, of tokens that lie between others."""
    codec, slots, pages = case.codec(), [3, 0], poisoned_pages(case, "cpu")
    x = case.tokens(1, 5 + 2 * 128, N).transpose(1, 2)[:, :, 5:]
    mean = torch.rand(1, N, case.dim, generator=torch.Generator().manual_seed(11)) * 3
    error, table = torch.zeros(1, dtype=torch.int32), torch.tensor([slots], dtype=torch.int32)
    ops.launch_pack(x, pages, table, mean, case.transform("cpu"), error, case.side, case.variant)
    expected = reference_pages(case, codec, x[0], mean[0] if case.fmt.needs_queries else None)
    wrong = (pages[slots] != expected).nonzero()
    assert int(error) == 0 and not len(wrong), (len(wrong), wrong[:3].tolist())


class EmulatedPaged(Paged):
    def append(self, rows: slice, k_new: torch.Tensor, v_new: torch.Tensor, q: torch.Tensor) -> None:
        k, v = (Memory(*self._of_rows(side, rows)) for side in SIDES)
        queries = QueryStatistic(*(part[rows] for part in self.queries))
        place, transform = Place(*self._place(rows)), PageTransform(*self.transform)
        ops.launch_append(k_new, v_new, q, k, v, queries, place, transform, self.error, self.variant)


TOKENS = Format(2, "token", 64, 4, quantizer="rotated")
KITTY = boosted("query_magnitude", Tier(4, 0.125))


@pytest.mark.parametrize(
    ("k", "v"),
    [
        (Case("k", TOKENS, feedback=True), Case("v", TOKENS, feedback=True, gain=True)),
        (Case("k", KITTY, 64), Case("v", replace(TOKENS, num_bits=3), 64, feedback=True)),
        (Case("k", Format(2, "channel", 32, 4, 30), 64), Case("v", Format(3, "token", 64, 4), 64)),
        (Case("k", replace(TOKENS, recent_window=20), 64), Case("v", RAW, 64)),
    ],
    ids=lambda case: case.name,
)
def test_steps_store_what_the_reference_stores(k: Case, v: Case) -> None:
    """Of three sequences the second completes a page three steps after the others."""
    variant = variant_of(k, v)
    ours, theirs = EmulatedPaged(variant, 3, 1, "cpu", N), Paged(variant, 3, 1, "cpu", N)
    x = [case.tokens(3, 131, N + 1) for case in (k, v)]
    q = k.tokens(3, 131, (N + 1) * 3)
    for step in range(131):
        rows = [slice(0, 1), slice(2, 3)] if step < 3 else [slice(0, 3)]
        for of_rows in rows:
            for paged in (ours, theirs):
                paged.step(of_rows, x[0][of_rows, step, 1:], x[1][of_rows, step, 1:], q[of_rows, step, 3:])
    assert_same(ours, theirs)
    assert int(ours.error) == 0 and ours.place.lengths.tolist() == [131, 128, 131]
