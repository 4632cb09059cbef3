"""Encoding pages of stored forms that are complete: in torch the page codec's bytes, and no others are written; by the
kernel the bytes of torch, also in a captured graph as lengths grow over the boundaries of pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from encode_cases import COMPLETE, NAMES, complete_at, page_of, prepared, run
from reconstruct_cases import BATCH, CASES, PAGES, codec_of
from torch import Tensor

from kvcal.kernels import encode as operator
from kvcal.kernels.compile import cubin
from kvcal.kernels.page_codec import (
    SHARED_BYTES,
    Reconstruction,
    encoding_defines,
    encoding_shared_bytes,
    encoding_tile_tokens,
    unencoded,
)
from kvcal.kernels.reference import NON_FINITE
from kvcal.plan.page_format import RAW, Format

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def expected_of(name: str, row: int, page: int) -> Tensor:
    """The record [1, bytes], by the page codec."""
    given, codec = page_of(name), codec_of(name)
    codec = replace(codec, operands={**codec.operands, "grid": given.grid})
    told = None if given.prediction is None else given.prediction[row : row + 1].transpose(1, 2)
    x, ordinals = given.tokens[row : row + 1, page], torch.tensor([page])
    return codec.encode(x, ordinals, codec.format.num_bits, prediction=told)[0]


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("name", NAMES)
def test_records_are_those_of_the_page_codec(name: str, seed: int | None) -> None:
    records, error = run(name, "cpu", seed=seed)
    for row in range(BATCH):
        for page in range(PAGES):
            is_complete = COMPLETE.get(row) == page
            expected = expected_of(name, row, page) if is_complete else torch.full_like(records[row, page], 7)
            assert torch.equal(records[row, page], expected), (row, page)
    assert error == 0


FINITE = ["lattice 2 bits d=2, 8 x 128", "lattice before RoPE, predicted, kept", "keys per channel, 3 x 64"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", FINITE)
def test_what_is_not_finite_is_noted_where_a_page_is_complete(name: str, value: float, device: str) -> None:
    for row, page, expected in ((0, 0, NON_FINITE), (2, PAGES - 1, NON_FINITE), (0, 1, 0), (1, 1, 0), (3, 2, 0)):
        tokens = page_of(name).tokens.clone()
        tokens[row, page, 1, 77, 3] = value
        assert run(name, device, tokens=tokens)[1] == expected, (row, page)


@pytest.mark.parametrize("device", DEVICES)
def test_a_norm_that_its_dtype_cannot_hold_is_noted(device: str) -> None:
    name = "lattice 2 bits d=2, 8 x 128"
    assert run(name, device, tokens=page_of(name).tokens * 1e5)[1] == NON_FINITE


COMPILED = ["lattice d=4, 1 x 8", "lattice d=2, 3 x 80", "lattice, 33 x 256", "lattice before RoPE, partial"]
COMPILED += ["keys per channel, 2 x 80", "keys of 1 bit, 1 x 8", "values, 3 bits, 3 x 64", "λ and offset, kept, fp16"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_120"])
@pytest.mark.parametrize("name", COMPILED)
def test_unusual_sizes_compile(name: str, arch: str) -> None:
    """The source holds the sizes of its shared memory against those it is launched with."""
    form = CASES[name].form
    assert unencoded(form) is None
    assert cubin("encode_page", encoding_defines(form), arch)


def test_a_tile_is_a_byte_of_codes_a_thread() -> None:
    for heads, dim, tokens in ((1, 2, 16), (1, 4, 32), (8, 2, 2), (8, 4, 4), (3, 2, 4), (40, 4, 1)):
        form = Reconstruction("v", Format(2, lattice_dim=dim), heads, 128, "bfloat16")
        assert encoding_tile_tokens(form) == tokens


def test_what_the_kernel_does_not_take_says_why() -> None:
    wide = Reconstruction("v", Format(2, lattice_dim=2), 80, 256, "bfloat16")
    assert unencoded(wide) is None
    assert unencoded(wide, 2) == "a row of a lattice lies in 2 head ranges; allowed: 1"
    heads = Reconstruction("v", Format(2), 2, 128, "bfloat16")
    assert unencoded(heads, 2) is None
    assert unencoded(replace(heads, format=RAW)) == "pages of 16 bits have no codes"
    for wider, tokens, values in ((replace(wide, num_heads=96), 1, 24576), (replace(heads, head_dim=256), 128, 256)):
        assert unencoded(wider) == (
            f"{tokens} tokens of {values} values take {encoding_shared_bytes(wider)} bytes of shared memory; allowed: "
            f"{SHARED_BYTES}"
        )


SOME = ["lattice 2 bits d=2, 8 x 128", "lattice 2 bits d=4, 2 x 64, fp16", "lattice d=4, 3 x 80", "lattice, 33 x 256"]
SOME += ["lattice, sinks and a window that grows", "lattice before RoPE, predicted, kept", "lattice, λ and offset"]
SOME += [
    "keys per channel, 3 x 64",
    "values, 3 bits, 2 x 80",
    "before RoPE, two head ranges",
    "λ and offset, kept, fp16",
]


def assert_same_bytes(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    wrong = (ours != theirs).nonzero()
    assert not len(wrong), f"{len(wrong)} bytes differ, first at {wrong[0].tolist()}"


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("name", NAMES)
def test_records_have_the_bytes_of_torch(name: str, seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    found, error = run(name, "cuda", seed=seed)
    assert_same_bytes(found, run(name, "cpu")[0])
    assert error == 0 and [bool((row != 7).any()) for row in found] == [True, False, True, False]
    asked = []
    monkeypatch.setattr(operator, "unencoded", lambda form, **more: asked.append(form) or "asked for")
    assert_same_bytes(run(name, "cuda", seed=seed)[0], found)
    assert asked


@pytest.mark.gpu
@pytest.mark.parametrize("name", FINITE[:2])
def test_more_tiles_than_blocks(name: str) -> None:
    """2,048 and 512 of them, where an H200 has 396 blocks."""
    lengths = [complete_at(page) for page in (0, 1, 2)] * 10 + [0, complete_at(0) - 1]
    assert_same_bytes(run(name, "cuda", lengths, seed=1)[0], run(name, "cpu", lengths)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("name", SOME)
def test_a_captured_call_follows_lengths_as_they_grow(name: str) -> None:
    """Whatever lies in a page becomes its record in the one step that completes it."""
    place, records, error, encode = prepared(name, "cuda", [0] * BATCH, seed=2)
    encode()  # compiled and loaded
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        encode()
    assert bool((records == 7).all())
    due = [complete_at(page) for page in range(PAGES)]
    written = torch.full_like(records[place.table.long()], 7).cpu()
    for grown in (
        [due[0] - 1, due[0], due[0] + 1, 0],
        [due[0], due[0] + 1, due[1] - 1, 1],
        [due[0] + 1, due[1], due[1], due[0]],
        [due[1], due[2], due[2] + 1, due[1]],
    ):
        place.lengths.copy_(torch.tensor(grown, dtype=torch.int32))
        graph.replay()
        now, _ = run(name, "cpu", grown)
        written = torch.where(now == 7, written, now)
        assert_same_bytes(records[place.table.long()].cpu(), written)
    assert int(error) == 0
