"""The contract of page layouts, over cases of each: exact bytes, a bounded error, the same bytes of a page in
any batch and on a GPU, and nothing stored that is not finite; and uniform pages against the oracle's
bytes."""

import hashlib
import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import oracles
import pytest
import torch
from page_cases import random_page
from torch import Tensor

from kvcal.errors import NonFiniteActivations
from kvcal.pages.layout_protocol import PAGE_TOKENS, RAW_BITS, Layout
from kvcal.pages.uniform import UniformLayout
from kvcal.plan.page_format import SIDES, Boost, Format, Side, Tier

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "layouts.json").read_text())
SIDE_AXES = [("k", "channel"), ("k", "token"), ("v", "token")]
DIMS = (16, 20, 64, 80, 96, 128, 256)
KITTY = Boost("magnitude", (Tier(4, 0.125),))
MIXKVQ = Boost("magnitude", (Tier(16, 0.05, 1.5), Tier(4, 0.125, 0.6)))
THREE_TIERS = Boost("magnitude", (Tier(16, 0.2, 1.7), Tier(8, 0.15, 1.2), Tier(4, 0.3)))


@dataclass(frozen=True)
class Case:
    """``error``: bound of the squared error, relative to the page's energy. ``feedback``: codes are chosen
    with it."""

    format: Format
    side: Side
    head_dim: int
    error: float
    num_heads: int = 2
    cache_dtype: str = "bfloat16"
    feedback: bool = False

    @property
    def layout(self) -> Layout:
        return self.format.layout(self.side, self.num_heads, self.head_dim, self.cache_dtype, self.format.num_bits)

    def __str__(self) -> str:
        fmt = self.format
        bits = "16 token g128" if fmt.num_bits == RAW_BITS else fmt.label
        return f"{self.side} {bits} {fmt.param_dtype} {self.num_heads}x{self.head_dim} {self.cache_dtype}" + (
            " feedback" if self.feedback else ""
        )


CASES: dict[str, list[Case]] = {
    "uniform": [
        *(
            Case(Format(bits, axis, size, param_dtype=param), side, dim, errors[axis == "token"])
            for (side, axis), (bits, size, param, dim, *errors) in itertools.product(
                SIDE_AXES,
                [
                    (1, 32, "float16", 16, 2.2, 0.07),  # groups with an outlier are half at their minimum
                    (2, 64, "float32", 80, 0.2, 0.3),
                    (3, 64, "float16", 80, 0.04, 0.14),
                    (3, 64, "bfloat16", 16, 0.04, 0.03),
                    (4, 128, "float16", 128, 0.012, 0.06),
                    (8, 32, "float16", 20, 3e-5, 3e-5),
                ],
            )
        ),
        *(Case(Format(16), "v", 20, 0.0, cache_dtype=dtype) for dtype in ("bfloat16", "float32")),
        Case(Format(1, "channel", 32), "k", 20, 4.0, feedback=True),
        Case(Format(2, "token", 64, param_dtype="float32"), "k", 80, 0.5, num_heads=3, feedback=True),
        Case(Format(3, "token", 128), "v", 96, 0.6, num_heads=1, feedback=True),
    ],
    "tiered": [
        Case(Format(2, "channel", 128, boost=KITTY), "k", 20, 0.3),
        Case(Format(2, "channel", 64, boost=KITTY), "k", 80, 0.2),
        Case(Format(2, "channel", 128, boost=KITTY), "k", 128, 0.21),
        Case(Format(2, "channel", 64, boost=MIXKVQ), "k", 80, 0.2),
        Case(Format(2, "channel", 32, param_dtype="bfloat16", boost=MIXKVQ), "k", 64, 0.2, cache_dtype="float16"),
        Case(Format(2, "channel", 128, boost=THREE_TIERS), "k", 20, 0.2, cache_dtype="float16"),
        Case(Format(4, "channel", 64, boost=Boost("range", (Tier(8, 0.1),))), "k", 64, 0.01, cache_dtype="float32"),
        Case(Format(2, "channel", 64, boost=MIXKVQ), "k", 80, 0.35, feedback=True),
        Case(Format(2, "channel", 128, boost=THREE_TIERS), "k", 20, 0.3, cache_dtype="float16", feedback=True),
    ],
    "rotated": [
        *(
            Case(Format(bits, group_size=size, quantizer="rotated"), side, dim, error, 2)
            for side, (bits, size, dim, error) in itertools.product(
                ("k", "v"),
                [
                    (1, 128, 128, 0.13),
                    (2, 128, 128, 0.12),
                    (2, 32, 80, 0.1),
                    (3, 64, 96, 0.032),
                    (4, 128, 20, 0.012),
                    (8, 64, 64, 9e-5),
                ],
            )
        ),
        Case(Format(2, quantizer="rotated"), "v", 96, 0.4, num_heads=3, feedback=True),
    ],
    "fp8": [Case(Format(8, quantizer="fp8"), side, dim, 1e-3, 3) for side in SIDES for dim in (20, 64)],
    "lattice": [
        Case(Format(bits, lattice_dim=dim, param_dtype=param), side, width // heads, error, heads)
        for (bits, dim, error), (side, width, heads, param) in itertools.product(
            [(2, 2, 0.15), (3, 2, 0.05), (4, 2, 0.015), (2, 4, 0.14)],
            [("k", 20, 1, "float16"), ("v", 128, 2, "float16"), ("k", 96, 3, "bfloat16"), ("v", 1024, 8, "float32")],
        )
    ],
}
EVERY = [case for cases in CASES.values() for case in cases]
CODED = [case for case in EVERY if case.format.num_bits != RAW_BITS]


def pages_of(case: Case, num_pages: int = 3) -> Tensor:
    """[M, n, 128, D] bf16 with outlier and constant channels and a constant token."""
    shape = num_pages, case.num_heads
    pages = [random_page(case.head_dim, seed) for seed in range(num_pages * case.num_heads)]
    return torch.stack(pages).unflatten(0, shape)


def operands_of(case: Case, num_pages: int = 3) -> dict[str, Tensor]:
    """The plan's tensors, and scores in quarters, with many ties."""
    operands = {name: case.layout.make_tensor(name, seed=3) for name in case.layout.plan_tensors("layers.0.k")}
    generator = torch.Generator().manual_seed(7)
    scores = torch.randint(0, 9, (num_pages, case.num_heads, case.head_dim), generator=generator).double() / 4
    operands |= {"scores": scores} if case.format.boost is not None else {}
    return operands | ({"feedback": factor_of(case.num_heads, case.head_dim)} if case.feedback else {})


def factor_of(num_heads: int, head_dim: int) -> Tensor:
    """A factor of error feedback, [n, D (D + 1) / 2] fp16: U in 64ths, costs of 1 to 3."""
    row, column = torch.triu_indices(head_dim, head_dim)
    number = torch.arange(num_heads * head_dim * (head_dim - 1) // 2).view(num_heads, -1)
    factor = (row % 3 + 1).repeat(num_heads, 1).half()
    factor[:, row < column] = ((number * 7 % 31 - 15) / 64).half()
    return factor


def part_of(operands: dict[str, Tensor], pages: slice) -> dict[str, Tensor]:
    return {name: tensor[pages] if name == "scores" else tensor for name, tensor in operands.items()}


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_a_record_has_its_bytes_and_reads_as_the_page_within_the_formats_error(case: Case) -> None:
    x, layout = pages_of(case), case.layout
    records = layout.encode_pages(x, operands_of(case))
    num_records = layout.records_per_page(case.num_heads)
    assert (records.dtype, tuple(records.shape)) == (torch.uint8, (3, num_records, layout.record_bytes))
    assert layout.record_bytes % 16 == 0
    fmt = case.format
    values = 3 * case.num_heads * PAGE_TOKENS * case.head_dim
    assert records.numel() * 8 >= values * fmt.num_bits
    decoded = layout.decode_pages(records, case.num_heads, operands_of(case))
    assert decoded.shape == x.shape and decoded.isfinite().all()
    error = (decoded.double() - x.double()).square().sum() / x.double().square().sum()
    assert error.item() <= case.error
    length = 3 * PAGE_TOKENS  # the one cost function counts these bytes
    held = fmt.nbytes(case.side, case.num_heads, case.head_dim, case.cache_dtype, [length])
    unquantized = fmt.nbytes(case.side, case.num_heads, case.head_dim, case.cache_dtype, [0])
    assert held - unquantized == records.numel()


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_pages_of_a_batch_are_encoded_independently(case: Case) -> None:
    x, layout, operands = pages_of(case), case.layout, operands_of(case)
    before = x.clone()
    records = layout.encode_pages(x, operands)
    decoded = layout.decode_pages(records, case.num_heads, operands)
    assert torch.equal(x, before)
    for page in range(3):
        own = part_of(operands, slice(page, page + 1))
        alone = layout.encode_pages(x[page : page + 1].float(), own)
        assert torch.equal(alone, records[page : page + 1])
        assert torch.equal(layout.decode_pages(alone, case.num_heads, own), decoded[page : page + 1])
    strided = layout.encode_pages(x.repeat_interleave(2, -1)[..., ::2], operands)
    assert torch.equal(strided, records)
    nothing = layout.encode_pages(x[:0], part_of(operands, slice(0, 0)))
    assert nothing.shape == (0, *records.shape[1:])
    assert layout.decode_pages(nothing, case.num_heads, operands).shape == (0, *x.shape[1:])


@pytest.mark.parametrize("case", CODED, ids=str)
def test_numbers_that_are_not_finite_are_refused_anywhere(case: Case) -> None:
    layout, operands = case.layout, operands_of(case)
    places = {torch.nan: (0, 0, 0, 0), torch.inf: (2, -1, 127, -1), -torch.inf: (1, -1, 64, 7)}
    for value, place in places.items():
        x = pages_of(case)
        x[place] = value
        with pytest.raises(NonFiniteActivations, match="cannot be (quantized|stored)") as caught:
            layout.encode_pages(x, operands)
        assert caught.value.exit_code == 4 and caught.value.hint


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_golden_records(case: Case) -> None:
    """Page of (37 token + 11 channel) mod 64 - 20, in eighths: what a file or a process packed must read the
    same."""
    assert digest_of(case) == GOLDEN[str(case)]


def digest_of(case: Case) -> str:
    token, channel = torch.arange(PAGE_TOKENS).unsqueeze(1), torch.arange(case.num_heads * case.head_dim)
    row = ((37 * token + 11 * channel) % 64 - 20) / 8
    x = row.unflatten(1, (case.num_heads, -1)).transpose(0, 1).unsqueeze(0)
    records = case.layout.encode_pages(x, operands_of(case, num_pages=1))
    return hashlib.sha256(bytes(records.flatten().tolist())).hexdigest()


@pytest.mark.gpu
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_a_gpu_writes_and_reads_the_same_bytes(case: Case) -> None:
    layout, operands = case.layout, operands_of(case)
    on_device = {name: tensor.cuda() for name, tensor in operands.items()}
    for x in (pages_of(case), pages_of(case).float() / 3):
        records = layout.encode_pages(x, operands)
        found = layout.encode_pages(x.cuda(), on_device)
        assert torch.equal(found.cpu(), records)
        decoded = layout.decode_pages(found, case.num_heads, on_device)
        assert torch.equal(decoded.cpu(), layout.decode_pages(records, case.num_heads, operands))


def layout_of(side, num_bits, axis, group_size, dim, param_dtype="float16", cache_dtype="bfloat16") -> UniformLayout:
    return UniformLayout(side, num_bits, axis, group_size, dim, param_dtype, cache_dtype)


@pytest.mark.parametrize(("side", "axis"), SIDE_AXES)
@pytest.mark.parametrize("dim", DIMS)
def test_record_sizes_are_exact(side, axis, dim):
    for num_bits, group_size, param_dtype in itertools.product(
        (1, 2, 3, 4, 8, 16), (32, 64, 128), ("float16", "bfloat16", "float32")
    ):
        layout = layout_of(side, num_bits, axis, group_size, dim, param_dtype)
        expected = oracles.record_bytes(num_bits, side, axis, group_size, dim, param_dtype, "bfloat16")
        assert layout.record_bytes == expected and expected % 16 == 0
        record = layout.encode(torch.zeros(PAGE_TOKENS, dim))
        assert (record.dtype, tuple(record.shape)) == (torch.uint8, (expected,))


RECORDS = [
    (side, axis, num_bits, group_size, dim, param_dtype)
    for (side, axis), (num_bits, group_size, dim, param_dtype) in itertools.product(
        SIDE_AXES,
        [
            (1, 32, 16, "float16"), (2, 32, 64, "float16"), (3, 64, 20, "bfloat16"), (4, 128, 16, "float32"),
            (8, 64, 80, "float16"),
        ],
    )
]  # fmt: skip


@pytest.mark.parametrize(("side", "axis", "num_bits", "group_size", "dim", "param_dtype"), RECORDS)
def test_records_equal_the_oracle_byte_for_byte(side, axis, num_bits, group_size, dim, param_dtype):
    page = random_page(dim)
    layout = layout_of(side, num_bits, axis, group_size, dim, param_dtype)
    record = layout.encode(page)
    expected = oracles.page_record(page, side, num_bits, axis, group_size, param_dtype, "bfloat16")
    assert bytes(record.tolist()) == expected
    values = oracles.quantized_page(page, num_bits, axis, group_size, param_dtype)
    assert torch.equal(layout.decode(record), values)


@pytest.mark.parametrize("cache_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dim", [16, 20])
def test_16_bit_pages_hold_the_values(dim, cache_dtype):
    page = random_page(dim).float()
    layout = layout_of("k", 16, "token", 128, dim, cache_dtype=cache_dtype)
    record = layout.encode(page)
    assert bytes(record.tolist()) == oracles.page_record(page, "k", 16, "token", 128, "float16", cache_dtype)
    decoded = layout.decode(record)
    assert str(decoded.dtype) == f"torch.{cache_dtype}" and torch.equal(decoded.float(), page)
