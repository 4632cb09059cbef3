"""Tokens of stored forms of every kind, those of reconstruct_cases, and calls of ``encode_page`` on them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from reconstruct_cases import BATCH, CASES, PAGES, by_slot, place_of, tensors_of
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels.encode import encode_page
from kvcal.kernels.operands import Place
from kvcal.kernels.page_codec import PageCoding
from kvcal.kernels.reconstruct import position_turns
from kvcal.pages.record_layout import PAGE_TOKENS

NAMES = [name for name, case in CASES.items() if case.form.format.boost is None and not case.merely]


@dataclass(frozen=True)
class Page:
    """What is encoded, on the CPU: ``tokens`` [B, PAGES, N, 128, D] in the cache's dtype, and for each row what is told
    about its complete page, [B, 128, N, D], if the case is predicted. Two points of a lattice's ``grid`` are equal."""

    tokens: Tensor
    prediction: Tensor | None
    grid: Tensor | None


@functools.cache
def page_of(name: str, batch: int = BATCH) -> Page:
    """With an outlier channel, and a token that is 0, so that its groups' scales are, where nothing is predicted."""
    case = CASES[name]
    form, generator = case.form, torch.Generator().manual_seed(len(name) + batch)
    shape = (form.num_heads, PAGE_TOKENS, form.head_dim)
    x = torch.randn(batch, PAGES, *shape, generator=generator)
    x[..., 1] *= 20.0
    x[0, 0, :, 5] = 0.0
    told = torch.randn(batch, PAGE_TOKENS, form.num_heads, form.head_dim, generator=generator)
    grid = tensors_of(name).get("grid")
    if grid is not None:
        grid = grid[[0, 1, 2, 1, *range(4, len(grid))]]
    return Page(x.to(CACHE_DTYPES[form.cache_dtype]), told if case.is_predicted else None, grid)


def complete_at(page: int) -> int:
    """The tokens that a sequence held before the step that completes a page."""
    return PAGE_TOKENS * page + PAGE_TOKENS - 1


# A page is complete in rows 0 and 2, one was in the step before, and one has no room.
LENGTHS = [complete_at(0), complete_at(1) + 1, complete_at(PAGES - 1), complete_at(PAGES)]
COMPLETE = {0: 0, 2: PAGES - 1}  # of these: page by row


def prepared(
    name: str, device: str, lengths: Sequence[int] = LENGTHS, tokens: Tensor | None = None, seed: int | None = None
) -> tuple[Place, Tensor, Tensor, Callable[[], None]]:
    """Place, records by slot full of 7 and the error flag, on a device, and what encodes the pages that are complete in
    rows of so many tokens. ``tokens``: in place of the case's, on the CPU; ``seed`` shuffles the slots."""
    case, given = CASES[name], {key: x.to(device) for key, x in tensors_of(name).items()}
    form, page, nothing = case.form, page_of(name, len(lengths)), torch.empty(0, device=device)
    place = place_of(lengths, device, seed)
    x = by_slot(page.tokens if tokens is None else tokens, place)
    parts = [part.clone(memory_format=torch.contiguous_format) for part in x.split(case.head_ranges, dim=1)]
    shape = (len(x), 1 if form.is_lattice else form.num_heads, form.layout.record_bytes)
    records = torch.full(shape, 7, dtype=torch.uint8, device=device)
    prediction = nothing if page.prediction is None else page.prediction.to(device)
    error = torch.zeros(1, dtype=torch.int32, device=device)
    grid = nothing if page.grid is None else page.grid.to(device)
    turns = position_turns(given["rotary"], PAGE_TOKENS * PAGES) if form.num_pairs else nothing
    coding = PageCoding(grid, *(given.get(key, nothing) for key in PageCoding._fields[1:-1]), turns)
    operands = (parts, records, place, coding, prediction, error, form)
    return place, records, error, functools.partial(encode_page, *operands)


def run(name: str, device: str, *args: object, **more: object) -> tuple[Tensor, int]:
    """Records [B, PAGES, r, bytes], on the CPU, and the error flag."""
    place, records, error, encode = prepared(name, device, *args, **more)
    encode()
    return records[place.table.long()].cpu(), int(error)
