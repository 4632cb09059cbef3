"""``shrink`` and ``slide``: the reference against the conversion of records one by one, and the kernels alike."""

import random

import pytest
import torch
from cubin_resources import resources
from kernel_oracle import Case
from torch import Tensor

from kvcal.errors import NonFiniteActivations
from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels.compile import cubin
from kvcal.kernels.operands import BASE, HEADS, PAGES, RECORD, Region, Stages, layout_table, region_pages, stage_starts
from kvcal.kernels.reference import NON_FINITE
from kvcal.kernels.shrink import Shrinking, new_tickets, shrink, slide
from kvcal.pages.rescale_and_rope import Transform
from kvcal.pages.shrink import convert
from kvcal.plan.page_format import Format

HALVINGS = [(16, 8), (16, 4), (16, 2), (8, 4), (8, 2), (8, 1), (4, 2), (4, 1), (2, 1)]
BATCH, TOKENS, SINKS = 2, (3 * 128 + 5, 127), 1
POISON = 77
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


SIDES_AND_AXES = (("k", "channel"), ("v", "token"), ("k", "token"))


def shrinking(i: int, halving: tuple[int, int]) -> Shrinking:
    """Sides, axes, groups, head sizes and transforms take turns."""
    side, axis = SIDES_AND_AXES[i % 3]
    group, dim, cache = (32, 64, 128)[i // 2 % 3], (128, 80, 64, 24)[i % 4], ("bfloat16", "float16")[i % 2]
    after = Format(halving[1], axis, group, SINKS, param_dtype="float32")
    is_given = side == "k" and halving[0] == 16
    return Shrinking(side, after, dim, cache, halving[0], is_given and i % 4 < 2, is_given and i % 2 == 0)


CASES = [shrinking(i, halving) for i, halving in enumerate(h for h in HALVINGS for _ in SIDES_AND_AXES)]


class Pool:
    """Regions 0 and 2 of 2 heads shrink as the case says, region 1 not; rows have 3 pages and none."""

    def __init__(self, case: Shrinking, device: str) -> None:
        self.case, self.wide_narrow = case, case.layouts()
        sizes = [layout.record_bytes for layout in self.wide_narrow]
        bits = (case.wide_bits, case.format.num_bits)
        rows: list[list[list[int]]] = []
        for stage in (0, 1):
            base, found = 0, []
            for number in range(3):
                at = 0 if number == 1 else stage
                found.append([bits[at], base, 3, 2, sizes[at], 0, 4 * case.head_dim * (number == 2)])
                base += BATCH * 3 * 2 * sizes[at]
            rows.append(found)
        self.layout = torch.tensor(rows, device=device)
        self.pages = torch.full((rows[0][-1][BASE] + BATCH * 3 * 2 * sizes[0],), POISON, dtype=torch.uint8)
        generator = torch.Generator().manual_seed(3)
        self.transforms = torch.rand(8 * case.head_dim, generator=generator) + 0.5
        self.records = [self._fill(row) for row in rows[0]]
        self.pages, self.transforms = self.pages.to(device), self.transforms.to(device)
        self.error = torch.zeros(1, dtype=torch.int32, device=device)

    def _fill(self, row: list[int]) -> Tensor:
        case = self.case
        tokens = Case(case.side, Format(2), case.head_dim, case.cache_dtype).tokens(BATCH, 3, 2, 128)
        view = region_pages(self.pages, row, BATCH)
        view.copy_(self.wide_narrow[0].encode(tokens + row[BASE] % 7))
        return view.clone()

    def run(self, columns: int, lengths: tuple[int, ...] = TOKENS) -> int:
        """The error flag."""
        device = self.pages.device
        ints = {"dtype": torch.int32, "device": device}
        stages = Stages(
            torch.zeros(1, dtype=torch.int64, device=device), torch.tensor([0, 400], device=device), self.layout,
            torch.tensor(columns, device=device),
        )  # fmt: skip
        shrink(
            self.pages, list(stages), torch.tensor([0, 2], device=device), torch.tensor(lengths, **ints),
            self.transforms, self.error, self.case.number,
        )  # fmt: skip
        return int(self.error)

    def expected(self, number: int) -> Tensor:
        """The narrow records of all pages of a region, [B, 3, 2, bytes]."""
        dim, given = self.case.head_dim, self.transforms.cpu()
        start = int(self.layout[0, number, -1])
        rescale, offset = (given[start + i * 2 * dim : start + (i + 1) * 2 * dim].view(2, 1, dim) for i in (0, 1))
        transform = Transform(rescale if self.case.rescale else None, offset if self.case.offset else None)
        return convert(self.records[number], *self.wide_narrow, transform)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.side}-{case.wide_bits}-{case.format}-{case.head_dim}")
def test_packed_pages_shrink_where_they_are(case: Shrinking, device: str) -> None:
    pool = Pool(case, device)
    before = pool.pages.clone()
    assert pool.run(398) == 0 and torch.equal(pool.pages, before)
    assert pool.run(399) == 0
    for number in range(3):
        found = region_pages(pool.pages, pool.layout[0, number].tolist(), BATCH).cpu()
        if number != 1:
            narrow = pool.wide_narrow[1].record_bytes
            assert torch.equal(found[0, :, :, :narrow], pool.expected(number)[0])
            assert torch.equal(found[1], pool.records[number][1])  # whose page is not full yet
        else:
            assert torch.equal(found, pool.records[number])


@pytest.mark.parametrize("device", DEVICES)
def test_a_page_shrinks_from_its_last_token_on(device: str) -> None:
    case = CASES[0]
    pool = Pool(case, device)
    assert pool.run(400, (3 * 128 + 5, 128)) == 0
    found = region_pages(pool.pages, pool.layout[0, 0].tolist(), BATCH).cpu()
    narrow = pool.wide_narrow[1].record_bytes
    assert torch.equal(found[1, :1, :, :narrow], pool.expected(0)[1, :1])
    assert torch.equal(found[1, 1:], pool.records[0][1, 1:])


@pytest.mark.parametrize("device", DEVICES)
def test_values_that_are_not_finite_do_not_shrink(device: str) -> None:
    case = shrinking(0, (16, 8))
    pool = Pool(case, device)
    values = region_pages(pool.pages, pool.layout[0, 2].tolist(), BATCH).view(CACHE_DTYPES[case.cache_dtype])
    values[1, 0, 0, 5] = torch.inf  # not packed
    assert pool.run(400) == 0
    pool = Pool(case, device)
    values = region_pages(pool.pages, pool.layout[0, 2].tolist(), BATCH).view(CACHE_DTYPES[case.cache_dtype])
    values[0, 2, 1, -1] = torch.inf
    assert pool.run(400) == NON_FINITE
    with pytest.raises(NonFiniteActivations):
        convert(values.view(torch.uint8)[0].cpu(), *pool.wide_narrow)


def random_regions(rng: random.Random) -> list[Region]:
    found = []
    for number in range(rng.randint(1, 6)):
        shrink_at = tuple(sorted(rng.randint(0, 1500) for _ in range(rng.randint(0, 3))))
        fmt = Format(
            16 >> len(shrink_at) if shrink_at else 4, "token", 32, rng.choice([0, 3, 5]), rng.choice([0, 40, 128]),
            param_dtype="float32", shrink_at=shrink_at,
        )  # fmt: skip
        found.append(Region("kv"[number % 2], fmt, rng.randint(1, 3), 16, "float32", False, False, 0))
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(6))
def test_every_record_arrives_at_its_place(seed: int, device: str) -> None:
    rng = random.Random(seed)
    regions, batch = random_regions(rng), rng.randint(1, 3)
    starts = stage_starts(regions, 2000)
    table, room = layout_table(regions, starts, batch, 1600)
    pages = torch.randint(0, 256, (room,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)).to(device)
    layout, tickets = torch.tensor(table, device=device), new_tickets(torch.device(device))
    stage, present, idle = torch.zeros(1, dtype=torch.int64, device=device), layout[0].clone(), tickets.clone()
    largest = max(row[RECORD] for rows in table for row in rows)
    begins = torch.tensor(starts, device=device)
    for number in range(len(starts) - 1):
        expected = [region_pages(pages, row, batch).clone() for row in table[number]]
        for columns in (starts[number + 1] - 2, starts[number + 1] - 1):
            assert torch.equal(present, layout[number])
            at = torch.tensor(columns, device=device)
            slide(pages, stage, begins, layout, at, present, tickets, batch, largest)
        assert int(stage) == number + 1 and torch.equal(present, layout[number + 1]) and torch.equal(tickets, idle)
        for old, row in zip(expected, table[number + 1], strict=True):
            found = region_pages(pages, row, batch)
            assert found.shape[1:3] == (row[PAGES], row[HEADS])
            assert torch.equal(found[:, : old.shape[1]], old[..., : row[RECORD]])


@pytest.mark.parametrize("number", range(0, len(CASES), 4))
def test_shrink_compiles(number: int) -> None:
    """Every fourth: all shifts, and most halvings."""
    found = resources(cubin("shrink", CASES[number].defines, ("sm_80", "sm_90", "sm_120")[number // 4 % 3]))["shrink"]
    assert found.local_bytes <= 16 and found.registers <= 128  # what a division's slow path puts on the stack
    assert found.static_shared_bytes <= 16 * 1024


def test_the_sweeps_compile() -> None:
    for found in resources(cubin("slide", {})).values():
        assert found.local_bytes == 0 and found.registers <= 64 and found.static_shared_bytes <= 64
