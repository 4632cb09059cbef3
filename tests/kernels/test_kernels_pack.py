"""``append``, ``pack`` and ``unpack`` store, byte for byte, what the reference on a CPU stores."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from kernel_oracle import (
    GROUP_HEADS,
    HEADS,
    KITTY,
    MIXKVQ,
    PACKED,
    PAGED,
    RULE,
    TIERED,
    Case,
    boosted,
    page_table,
    reference_pages,
)
from torch import Tensor

from kvcal.errors import NonFiniteActivations
from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels.compile import cubin, kernel, resources
from kvcal.kernels.macros import DTYPES
from kvcal.plan.format import SIDES, Format, Tier
from kvcal.store.paged_tensor import PagedTensor

DEVICE = "cuda"
THREADS = 256
NON_FINITE, NO_ROOM = 1, 2
POISON = 77
N = HEADS.stop - HEADS.start


def launch(source: str, entry: str, defines: dict[str, int], grid: tuple[int, int, int], *args: Tensor | int) -> None:
    """Tensors are passed as pointers; they must be on DEVICE."""
    pointers = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]
    kernel(source, entry, defines).launch(grid, THREADS, 0, *pointers)


def on_device(x: Tensor | None) -> Tensor | int:
    """A tensor there, 0 for None."""
    return 0 if x is None else x.to(DEVICE)


def transforms(case: Case) -> tuple[Tensor | int, Tensor | int]:
    codec = case.codec()
    return on_device(codec.rescale), on_device(codec.offset)


def side_of(case: Case) -> dict[str, int]:
    return case.defines | {"SIDE": SIDES.index(case.side)}


def poisoned_pages(case: Case, batch: int, max_pages: int) -> Tensor:
    shape = (batch, max_pages, N, case.codec().record_bytes(case.fmt.num_bits))
    return torch.full(shape, POISON, dtype=torch.uint8, device=DEVICE)


def pack(case: Case, x: Tensor, pages: Tensor, **given: Tensor | int) -> int:
    """x [B, n, T, D] on DEVICE -> pages; the error flag. All pages of x from its first token on, unless ``given``."""
    error = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    most = int(given.get("most", x.shape[2] // 128))
    rescale, offset = transforms(case)
    launch(
        "pack", "pack", side_of(case), (most, N, len(x)), x, *x.stride()[:3], given.get("starts", 0),
        given.get("skip", 0), given.get("counts", 0), given.get("first_page", 0), given.get("first_pages", 0), pages,
        pages.shape[1], rescale, offset, given.get("query_mean", 0), HEADS.start, error,
    )  # fmt: skip
    return int(error)


def unpack(case: Case, pages: Tensor, first_page: int, out: Tensor) -> None:
    """pages[:, first_page:] -> out [B, n, T, D]."""
    rescale, offset = transforms(case)
    grid, dtype = (out.shape[2] // 128, N, len(pages)), DTYPES[str(out.dtype).removeprefix("torch.")]
    launch(
        "pack", "unpack", side_of(case), grid, pages, pages.shape[1], first_page, out, dtype, *out.stride()[:3],
        rescale, offset,
    )  # fmt: skip


def query_mean_of(case: Case, *lead: int) -> Tensor | None:
    generator = torch.Generator().manual_seed(11)
    return torch.rand(*lead, N, case.dim, generator=generator) * 3 if case.fmt.needs_queries else None


@pytest.mark.gpu
@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.name)
def test_a_prompt_is_packed_and_unpacked_as_the_reference_does(case: Case) -> None:
    """Two rows of a padded batch [B, T, n, D]: 2 pages behind 3 there are, and 1 behind none, behind 5 sinks."""
    codec, counts, first_pages, starts = case.codec(), (2, 1), (3, 0), (0, 129)
    x = case.tokens(2, 5 + 2 * 128 + 60, N).transpose(1, 2)
    mean = query_mean_of(case, 2)
    pages, ints = poisoned_pages(case, 2, 5), {"dtype": torch.int32, "device": DEVICE}
    error = pack(
        case, x.to(DEVICE), pages, most=2, starts=torch.tensor(starts, **ints), skip=5,
        counts=torch.tensor(counts, **ints), first_pages=torch.tensor(first_pages, **ints), query_mean=on_device(mean),
    )  # fmt: skip
    assert error == 0
    for row, (count, first, start) in enumerate(zip(counts, first_pages, starts, strict=True)):
        tokens = x[row, :, start + 5 : start + 5 + 128 * count]
        expected = reference_pages(case, codec, tokens, first, None if mean is None else mean[row])
        assert torch.equal(pages[row, first : first + count].cpu(), expected)
        assert (pages[row, :first] == POISON).all() and (pages[row, first + count :] == POISON).all()
        ordinals = torch.arange(len(expected))
        values = (
            codec.restore(codec.decode(expected, case.fmt.num_bits), ordinals).transpose(0, 1).flatten(1, 2).float()
        )
        for dtype in (torch.float32, CACHE_DTYPES[case.cache]):
            out = torch.full((1, 128 * count + 1, N, case.dim), POISON, dtype=dtype, device=DEVICE).transpose(1, 2)
            unpack(case, pages[row : row + 1], first, out[:, :, : 128 * count])
            assert torch.equal(out[0, :, : 128 * count].cpu(), values.to(dtype))
            assert (out[:, :, 128 * count :] == POISON).all()


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["token", "channel", "sign"])
@pytest.mark.parametrize(
    "case",
    [Case("k", Format(2, "channel", 64)), Case("v", Format(4, "token", 64), 80), *TIERED[:1], TIERED[6]],
    ids=lambda case: case.name,
)
def test_what_is_not_finite_is_told_and_nothing_else_is(case: Case, where: str) -> None:
    places = {"token": (77, 1, math.nan), "channel": (3, case.dim - 1, math.inf), "sign": (127, 5, -math.inf)}
    token, channel, value = places[where]
    x = case.tokens(1, N, 128)
    assert pack(case, x.to(DEVICE), poisoned_pages(case, 1, 1)) == 0
    x[0, N - 1, token, channel] = value
    with pytest.raises(NonFiniteActivations):
        reference_pages(case, case.codec(), x[0], 0, None)
    assert pack(case, x.to(DEVICE), poisoned_pages(case, 1, 1)) == NON_FINITE


@pytest.mark.gpu
def test_a_range_beyond_the_params_is_told() -> None:
    half, wide = (Case("v", Format(2, "token", 128, param_dtype=params)) for params in ("float16", "bfloat16"))
    x = half.tokens(1, N, 128)
    x[0, 1, 9, 7] = 1e6
    assert pack(half, x.to(DEVICE), poisoned_pages(half, 1, 1)) == NON_FINITE
    assert pack(wide, x.to(DEVICE), poisoned_pages(wide, 1, 1)) == 0


@pytest.mark.gpu
def test_pages_beyond_the_room_are_not_written() -> None:
    case = Case("v", Format(2))
    pages = poisoned_pages(case, 2, 3)
    x = case.tokens(1, N, 256)
    assert pack(case, x.to(DEVICE), pages[:1], first_page=2) == NO_ROOM
    assert (pages[0, :2] == POISON).all() and (pages[1] == POISON).all()
    assert torch.equal(pages[0, 2:].cpu(), reference_pages(case, case.codec(), x[0, :, :128], 2, None))


APPENDED = [
    (Case("k", Format(2, "channel", 32, 4, 30)), Case("v", Format(3, "token", 64, 4, 150))),
    (Case("k", Format(4, "token", 64), 80, "float16"), Case("v", Format(16), 80, "float16")),
    (Case("k", replace(KITTY, recent_window=17), rescale=True, offset=True), Case("v", Format(2, num_sink_tokens=5))),
    (Case("k", MIXKVQ, 64, rescale=True), Case("v", Format(2, "token", 32, 5, 33), 64)),
    (Case("k", boosted("random", Tier(4, 0.1)), 64, "float16"), Case("v", Format(1, "token", 128, 5), 64, "float16")),
    (
        Case("k", replace(MIXKVQ, window_rule=PAGED, num_sink_tokens=3)),
        Case("v", Format(8, "token", 32, 3, window_rule=RULE, param_dtype="float32")),
    ),
    (Case("k", Format(2, "channel", 128), 256), Case("v", Format(4, window_rule=PAGED), 256)),
]


class Stores:
    """The store of a head range on DEVICE, filled by ``append`` alone, beside the reference's."""

    def __init__(self, k: Case, v: Case, batch: int, max_pages: int) -> None:
        self.cases, self.batch, self.max_pages = (k, v), batch, max_pages
        self.expected = [PagedTensor(case.codec(), batch, torch.device("cpu")) for case in self.cases]
        self.pages = [poisoned_pages(case, batch, max_pages) for case in self.cases]
        self.sinks = [torch.full_like(side.sinks, POISON, device=DEVICE) for side in self.expected]
        self.buffers = [torch.full_like(side.buffer, POISON, device=DEVICE) for side in self.expected]
        self.query_sum = torch.zeros(batch, N, k.dim, device=DEVICE)
        self.query_start = torch.zeros(batch, N, dtype=torch.int32, device=DEVICE)
        self.page_at = [page_table(case.fmt, max_pages) for case in self.cases]
        self.error = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        self.lengths = [0] * batch

    def step(self, rows: slice, new: list[Tensor], q: Tensor) -> None:
        """One token of each of ``rows``: new K and V [b, n, D] and queries [b, n G, D] on DEVICE, any strides."""
        k, v = self.cases
        lengths = torch.tensor(self.lengths[rows], dtype=torch.int32, device=DEVICE)
        strided = [part for x in (*new, q) for part in (x, *x.stride()[:2])]
        tables = [part for table in self.page_at for part in (on_device(table), 0 if table is None else len(table))]
        store = [tensors[side][rows] for side in (0, 1) for tensors in (self.sinks, self.buffers, self.pages)]
        launch(
            "pack", "append", k.defines | v.defines | {"K_RESCALE": int(k.rescale), "K_OFFSET": int(k.offset)},
            (N, len(lengths), 2), *strided, *store, self.query_sum[rows], self.query_start[rows], lengths, *tables,
            self.max_pages, self.max_pages, *transforms(k), HEADS.start, self.error,
        )  # fmt: skip
        self._step_reference(rows, [x.cpu() for x in new], q.cpu())

    def _step_reference(self, rows: slice, new: list[Tensor], q: Tensor) -> None:
        heard = torch.zeros(self.batch, N, q.shape[-1])
        heard[rows] = q.float().abs().unflatten(1, (N, -1)).sum(2)
        if self.cases[0].fmt.needs_queries:
            inside = range(*rows.indices(self.batch))
            self.expected[0].observe(heard, [GROUP_HEADS * (row in inside) for row in range(self.batch)])
        for i, row in enumerate(range(*rows.indices(self.batch))):
            for side, expected in enumerate(self.expected):
                expected.append(slice(row, row + 1), self.lengths[row], new[side][i : i + 1].unsqueeze(2))
            self.lengths[row] += 1

    def check(self) -> None:
        """Pages that are packed, sinks, and the buffer's tokens; nothing was written behind them."""
        for side, (case, expected) in enumerate(zip(self.cases, self.expected, strict=True)):
            for row, held in enumerate(self.lengths):
                packed = case.fmt.num_pages(max(0, held - 1))
                records = expected.records([(row, 0, packed)])
                assert torch.equal(self.pages[side][row, :packed].cpu(), records)
                assert (self.pages[side][row, packed:] == POISON).all()
                sinks = min(held, case.fmt.num_sink_tokens)
                assert torch.equal(self.sinks[side][row, :, :sinks].cpu(), expected.sinks[row, :, :sinks])
                assert (self.sinks[side][row, :, sinks:] == POISON).all()
                if packed == expected.num_pages[row]:
                    buffered = expected.num_buffered(row, held)
                    assert torch.equal(self.buffers[side][row, :, :buffered].cpu(), expected.buffer[row, :, :buffered])
        if self.cases[0].fmt.needs_queries and self.expected[0].num_pages == [
            self.cases[0].fmt.num_pages(held - 1) for held in self.lengths
        ]:
            assert torch.equal(self.query_sum.cpu(), self.expected[0].query_sum)
            tokens = torch.tensor(self.lengths).unsqueeze(-1) - self.query_start.cpu()
            expected = torch.tensor(self.expected[0].query_count).unsqueeze(-1)
            assert torch.equal(GROUP_HEADS * tokens, expected.expand(-1, N))


@pytest.mark.gpu
@pytest.mark.parametrize(("k", "v"), APPENDED, ids=lambda case: case.name)
def test_steps_store_what_the_reference_stores(k: Case, v: Case) -> None:
    """Row 1 is 38 tokens ahead. Tokens and queries come as slices of wider tensors, as projections give them."""
    stores = Stores(k, v, batch=2, max_pages=6)
    count = 470
    states = [case.tokens(2, count, N + 1).to(DEVICE) for case in (k, v)]
    queries = k.tokens(2, count, (N + 1) * GROUP_HEADS).to(DEVICE)
    for step in range(count):
        rows = slice(1, 2) if step < 38 else slice(0, 2)
        stores.step(rows, [x[rows, step, 1:] for x in states], queries[rows, step, GROUP_HEADS:])
        if step % 23 == 0:
            stores.check()
    stores.check()
    assert int(stores.error) == 0
    assert min(stores.expected[0].num_pages) >= 2 and min(stores.expected[1].num_pages) >= 2


@pytest.mark.gpu
@pytest.mark.parametrize("side", [0, 1])
def test_a_step_tells_what_it_cannot_store(side: int) -> None:
    """A NaN is told when its page is packed, one step after it is full; a page beyond the room then, too."""
    cases = Case("k", Format(2, "channel", 128), 64), Case("v", Format(2), 64)
    states = [case.tokens(1, 300, N).to(DEVICE) for case in cases]
    queries = cases[0].tokens(1, 300, N * GROUP_HEADS).to(DEVICE)
    stores = Stores(*cases, batch=1, max_pages=1)
    states[side][0, 60, 1, 9] = float("nan")
    stores.expected = []
    for step in range(258):
        expected = (NON_FINITE if step > 128 else 0) | (NO_ROOM if step > 256 else 0)
        assert int(stores.error) == expected
        stores.step(slice(0, 1), [x[:, step] for x in states], queries[:, step])
        stores.lengths[0] = step + 1


ARCHS = ("sm_80", "sm_89", "sm_90", "sm_120")


def assert_compiles(source: str, defines: dict[str, int], arch: str) -> None:
    """Nothing in local memory, and two blocks of 256 threads on every GPU."""
    for entry, needs in resources(cubin(source, defines, arch)).items():
        assert needs.local_bytes == 0, entry
        assert needs.registers <= 128 and needs.static_shared_bytes <= 48 * 1024, entry


@pytest.mark.parametrize("number", range(len(PACKED)), ids=[case.name for case in PACKED])
def test_every_pack_compiles(number: int) -> None:
    assert_compiles("pack", side_of(PACKED[number]), ARCHS[number % len(ARCHS)])


@pytest.mark.parametrize(("k", "v"), APPENDED, ids=lambda case: case.name)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_append_compiles(k: Case, v: Case, arch: str) -> None:
    assert_compiles("pack", v.defines | k.defines, arch)
