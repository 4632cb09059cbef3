"""The kernel that reconstructs stored forms: the bits of torch, on the same GPU and on a CPU, of the pages that are
complete and of no others, also in a captured graph as lengths grow."""

from __future__ import annotations

import pytest
import torch
from reconstruct_cases import BATCH, CASES, PAGES, prepared, run
from torch import Tensor

from kvcal.kernels import reconstruct as operator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels need a GPU"),
]

SOME = ["lattice 2 bits d=2, 8 x 128", "lattice before RoPE, predicted, kept", "lattice, two head ranges"]
SOME += ["keys, window that grows, 3 x 64", "values, 3 bits, 2 x 80", "λ and offset, kept, fp16"]


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        ours, theirs = (x.cpu().contiguous().view(torch.uint8) for x in (ours, theirs))
        wrong = (ours != theirs).nonzero()
        assert not len(wrong), f"output {number} differs in {len(wrong)} bytes, first at {wrong[0].tolist()}"


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("name", CASES)
def test_pages_have_the_bits_of_torch(name: str, seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(name, "cuda", seed=seed)
    assert_same_bits(found, run(name, "cpu"))
    launched = []
    monkeypatch.setattr(operator, "unserved", lambda form: launched.append(form) or "asked for")
    assert_same_bits(found, run(name, "cuda", seed=seed))
    assert launched


@pytest.mark.parametrize("name", SOME)
def test_some_pages(name: str) -> None:
    assert_same_bits(run(name, "cuda", numbers=range(4, 11), seed=1), run(name, "cpu", numbers=range(4, 11)))


def complete_of(lengths: list[int]) -> list[int]:
    """Pages that are complete behind the step's token."""
    return [min(PAGES, (length + 1) // 128) for length in lengths]


def assert_complete(found: list[Tensor], whole: list[Tensor], complete: list[int]) -> None:
    """What is complete is as in ``whole``; the rest is as it was."""
    for ours, theirs in zip(found, whole, strict=True):
        for row, pages in enumerate(complete if ours.numel() else ()):
            assert torch.equal(ours[row, :pages].cpu(), theirs[row, :pages]), (row, pages)
            assert bool((ours[row, pages:] == 7).all()), (row, pages)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("lengths", [[0, 127, 300, 5000], [1, 129, 0, 250], [0, 0, 0, 126]])
def test_pages_that_are_not_complete_are_left_as_they_are(name: str, lengths: list[int]) -> None:
    found = run(name, "cuda", lengths=lengths, seed=3)
    assert_complete(found, run(name, "cpu"), complete_of(lengths))


@pytest.mark.parametrize("name", SOME)
def test_a_captured_call_follows_lengths_as_they_grow(name: str) -> None:
    place, read, write = prepared(name, "cuda", [0] * BATCH, seed=4)
    write()  # compiled and loaded
    torch.cuda.synchronize()
    whole = run(name, "cpu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write()
    for grown in ([0, 0, 5, 0], [127, 128, 129, 140], [300, 200, 260, 390], [700, 800, 900, 5000]):
        place.lengths.copy_(torch.tensor(grown, dtype=torch.int32))
        graph.replay()
        assert_complete(read(), whole, complete_of(grown))
