"""Tokens of stored forms of every kind, those of reconstruct_cases, and calls of ``kvcal::encode_due`` on them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from reconstruct_cases import BATCH, CASES, PAGES, page_at, tensors_of
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels.encode_due import encode_due
from kvcal.kernels.form_operands import HeldPages, PageCoding
from kvcal.kernels.reconstruct import position_turns
from kvcal.pages.layout import PAGE_TOKENS
from kvcal.plan.format import Format

NAMES = [name for name, case in CASES.items() if case.form.format.boost is None and not case.merely]


@dataclass(frozen=True)
class Page:
    """What is encoded, on the CPU: ``tokens`` [B, PAGES, N, 128, D] in the cache's dtype, and for each row what is told
    about the page that is due, [B, 128, N, D], if the case is predicted. Two points of a lattice's ``grid`` are the
    same."""

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


def due_at(fmt: Format, page: int) -> int:
    """The tokens with which page number ``page`` of a row is due."""
    return next(count for count in range(5000) if fmt.num_pages(count) > page)


def prepared(
    name: str, device: str, lengths: Sequence[int], tokens: Tensor | None = None
) -> tuple[list[Tensor], Callable[[], None]]:
    """Lengths, records full of 7 and the error flag, on a device, and what encodes the pages that are due in rows of so
    many tokens. ``tokens``: in place of the case's, on the CPU."""
    case, given = CASES[name], {key: x.to(device) for key, x in tensors_of(name).items()}
    form, page, nothing = case.form, page_of(name, len(lengths)), torch.empty(0, device=device)
    held = HeldPages(torch.tensor(lengths, dtype=torch.int32, device=device), page_at(form.format).to(device))
    x = (page.tokens if tokens is None else tokens).to(device)
    parts = [part.clone() for part in x.split(case.head_ranges, dim=2)]
    shape = (len(lengths), PAGES, 1 if form.is_lattice else form.num_heads, form.layout.record_bytes)
    records = torch.full(shape, 7, dtype=torch.uint8, device=device)
    prediction = nothing if page.prediction is None else page.prediction.to(device)
    error = torch.zeros(1, dtype=torch.int32, device=device)
    grid = nothing if page.grid is None else page.grid.to(device)
    turns = nothing
    if form.num_pairs:
        turns = position_turns(given["rotary"], form.format.num_sink_tokens + PAGE_TOKENS * PAGES)
    coding = PageCoding(grid, *(given.get(key, nothing) for key in PageCoding._fields[1:-1]), turns)
    operands = (parts, records, held, coding, prediction, error, form.key)
    return [held.lengths, records, error], functools.partial(encode_due, *operands)


def run(name: str, device: str, lengths: Sequence[int], tokens: Tensor | None = None) -> tuple[Tensor, int]:
    """Records, on the CPU, and the error flag."""
    (_, records, error), encode = prepared(name, device, lengths, tokens)
    encode()
    return records.cpu(), int(error)
