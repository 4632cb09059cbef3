"""The kernel that encodes complete pages of stored forms: the bytes of torch, on the same GPU and on a CPU, also in a
captured graph as lengths grow over the boundaries of pages."""

from __future__ import annotations

import pytest
import torch
from encode_cases import NAMES, complete_at, page_of, prepared, run
from reconstruct_cases import BATCH, PAGES

from kvcal.kernels import encode as operator
from kvcal.kernels.reference import NON_FINITE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels need a GPU"),
]

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


MANY = ["lattice 2 bits d=2, 8 x 128", "lattice before RoPE, predicted, kept"]


@pytest.mark.parametrize("name", MANY)
def test_more_tiles_than_blocks(name: str) -> None:
    """2,048 and 512 of them, where an H200 has 396 blocks."""
    lengths = [complete_at(page) for page in (0, 1, 2)] * 10 + [0, complete_at(0) - 1]
    assert_same_bytes(run(name, "cuda", lengths, seed=1)[0], run(name, "cpu", lengths)[0])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", [*MANY, "keys per channel, 3 x 64"])
def test_what_is_not_finite_is_noted_where_a_page_is_complete(name: str, value: float) -> None:
    for row, page, expected in ((0, 0, NON_FINITE), (2, PAGES - 1, NON_FINITE), (0, 1, 0), (1, 1, 0), (3, 2, 0)):
        tokens = page_of(name).tokens.clone()
        tokens[row, page, 1, 77, 3] = value
        assert run(name, "cuda", tokens=tokens)[1] == expected, (row, page)


def test_a_norm_that_its_dtype_cannot_hold_is_noted() -> None:
    name = "lattice 2 bits d=2, 8 x 128"
    assert run(name, "cuda", tokens=page_of(name).tokens * 1e5)[1] == NON_FINITE


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
