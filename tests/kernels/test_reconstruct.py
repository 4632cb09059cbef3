"""Reconstructing stored forms: in torch what the page codec reads, for every head range and part of the pages; by the
kernel the bits of torch, of complete pages and of no others, also in a captured graph as lengths grow."""

from __future__ import annotations

import pytest
import torch
from reconstruct_cases import BATCH, CASES, PAGES, codec_of, prepared, run, tensors_of
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels import reconstruct as operator
from kvcal.kernels.compile import cubin
from kvcal.kernels.page_codec import SHARED_BYTES, Reconstruction, unserved
from kvcal.plan.page_format import Format

ALL_PAGES = torch.arange(BATCH * PAGES)


def expected_of(name: str) -> tuple[Tensor, Tensor]:
    """Tokens [BATCH, PAGES, N, 128, D] and what is kept [BATCH, PAGES, 128, N, D], by the page codec."""
    case, codec, given = CASES[name], codec_of(name), tensors_of(name)
    prediction = given["prediction"].transpose(1, 2) if case.is_predicted else None
    stored = codec.decode(given["records"].flatten(0, 1), case.form.format.num_bits, prediction)
    ordinals = ALL_PAGES % PAGES
    tokens = codec.restore(stored, ordinals).to(CACHE_DTYPES[case.form.cache_dtype])
    kept = codec.before_rope(stored, ordinals) if case.is_kept else torch.empty(BATCH * PAGES, 0, 0)
    return tokens.unflatten(0, (BATCH, PAGES)), kept.transpose(1, 2).unflatten(0, (BATCH, PAGES))


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("name", CASES)
def test_pages_are_what_the_page_codec_reads(name: str, seed: int | None) -> None:
    case, (tokens, kept) = CASES[name], expected_of(name)
    *found, found_kept = run(name, "cpu", seed=seed)
    if case.merely:
        assert all(bool((part == 7).all()) for part in found)
    else:
        assert torch.equal(torch.cat(found, dim=2), tokens)
    assert not case.is_kept or torch.equal(found_kept, kept)


IN_PARTS = ["lattice before RoPE, partial", "keys per channel, 2 x 80", "λ and offset, kept, fp16"]


@pytest.mark.parametrize("numbers", [range(4, 8), range(5, 5)])
@pytest.mark.parametrize("name", IN_PARTS)
def test_some_pages(name: str, numbers: range) -> None:
    """At their positions, and no others are touched."""
    for part, whole in zip(run(name, "cpu", numbers=numbers, seed=1), run(name, "cpu"), strict=True):
        if part.numel():
            inside = slice(numbers.start, numbers.stop)
            flat = part.flatten(0, 1).clone()
            assert torch.equal(flat[inside], whole.flatten(0, 1)[inside])
            flat[inside] = 7
            assert bool((flat == 7).all())


@pytest.mark.parametrize("name", ["lattice before RoPE, predicted, kept", "values, 3 x 64", "lattice, two head ranges"])
def test_a_page_at_a_time_gives_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(name, "cpu")
    monkeypatch.setattr(operator, "VALUES_AT_ONCE", 1)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(run(name, "cpu"), whole, strict=True))


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_120"])
@pytest.mark.parametrize("name", ["lattice d=4, 1 x 8", "lattice d=2, 3 x 80", "lattice, 33 x 256", *IN_PARTS])
def test_unusual_sizes_compile(name: str, arch: str) -> None:
    """The source holds the sizes of its shared memory against those it is launched with."""
    form = CASES[name].form
    assert unserved(form) is None
    assert cubin("reconstruct", form.defines, arch)


def test_what_the_kernel_does_not_take_says_why() -> None:
    wide = Reconstruction("v", Format(2, lattice_dim=2), 80, 256, "bfloat16")
    assert unserved(wide) is None
    wider = Reconstruction("v", Format(2, lattice_dim=2), 96, 256, "bfloat16")
    assert wider.tile_tokens == 1 and wider.shared_bytes > SHARED_BYTES
    assert unserved(wider) == (
        f"a row of 24576 values takes {wider.shared_bytes} bytes of shared memory; allowed: {SHARED_BYTES}"
    )


SOME = ["lattice 2 bits d=2, 8 x 128", "lattice before RoPE, predicted, kept", "lattice, two head ranges"]
SOME += ["keys, window that grows, 3 x 64", "values, 3 bits, 2 x 80", "λ and offset, kept, fp16"]


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        ours, theirs = (x.cpu().contiguous().view(torch.uint8) for x in (ours, theirs))
        wrong = (ours != theirs).nonzero()
        assert not len(wrong), f"output {number} differs in {len(wrong)} bytes, first at {wrong[0].tolist()}"


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("name", CASES)
def test_pages_have_the_bits_of_torch(name: str, seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(name, "cuda", seed=seed)
    assert_same_bits(found, run(name, "cpu"))
    launched = []
    monkeypatch.setattr(operator, "unserved", lambda form: launched.append(form) or "asked for")
    assert_same_bits(found, run(name, "cuda", seed=seed))
    assert launched


@pytest.mark.gpu
@pytest.mark.parametrize("name", SOME)
def test_some_pages_have_the_bits_of_torch(name: str) -> None:
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


@pytest.mark.gpu
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("lengths", [[0, 127, 300, 5000], [1, 129, 0, 250], [0, 0, 0, 126]])
def test_pages_that_are_not_complete_are_left_as_they_are(name: str, lengths: list[int]) -> None:
    found = run(name, "cuda", lengths=lengths, seed=3)
    assert_complete(found, run(name, "cpu"), complete_of(lengths))


@pytest.mark.gpu
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
