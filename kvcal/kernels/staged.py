"""``append`` and ``decode`` where pages shrink on a schedule: one launch for every pair of bits that keys and values
come to have, of which the one for the present bits does the work, and the others return at once.

Arguments are those of kvcal.kernels.ops, but for the pages, which are one memory for both sides (uint8, one dimension:
all regions), ``present`` (int64 [regions, 7]: kvcal.kernels.stages), ``regions`` (which of them are the keys' and the
values') and ``variants`` (a key for each pair of bits).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvcal.kernels import pack as pack_kernels
from kvcal.kernels import reference
from kvcal.kernels.decode import launch_decode
from kvcal.kernels.operands import PageCounts, PageTransform, QueryStatistic, StoredSide, grouped
from kvcal.kernels.stages import BITS, region_pages
from kvcal.kernels.variants import Variant, parse_key
from kvcal.plan.format import SIDES

_STAGES = "Tensor present, int[] regions, str[] variants"

torch.library.define(
    "kvcal::append_staged",
    "(Tensor k_new, Tensor v_new, Tensor q, Tensor(a!) k_sinks, Tensor(b!) k_buffer, Tensor(c!) v_sinks, "
    "Tensor(d!) v_buffer, Tensor(e!) pages, Tensor(f!) query_sum, Tensor(g!) query_since, Tensor lengths, "
    f"Tensor k_page_at, Tensor v_page_at, Tensor k_rescale, Tensor k_offset, Tensor(h!) error, {_STAGES}) -> ()",
)
torch.library.define(
    "kvcal::decode_staged",
    "(Tensor q, Tensor k_sinks, Tensor k_buffer, Tensor v_sinks, Tensor v_buffer, Tensor pages, Tensor lengths, "
    "Tensor k_page_at, Tensor v_page_at, Tensor k_rescale, Tensor k_offset, Tensor s_aux, Tensor(a!) workspace, "
    f"float scale, float softcap, {_STAGES}) -> Tensor",
)


def append_staged(
    k_new: Tensor,
    v_new: Tensor,
    q: Tensor,
    k: StoredSide,
    v: StoredSide,
    queries: QueryStatistic,
    counts: PageCounts,
    transform: PageTransform,
    error: Tensor,
    present: Tensor,
    regions: Sequence[int],
    variants: Sequence[str],
) -> None:
    """As ``ops.append``, with the present bits. Both sides' ``pages`` are the memory of all regions."""
    torch.ops.kvcal.append_staged(
        k_new, v_new, q, *k[:2], *v[:2], k.pages, *queries, *counts, *transform, error, present, regions, variants
    )


def decode_staged(
    q: Tensor,
    k: StoredSide,
    v: StoredSide,
    counts: PageCounts,
    transform: PageTransform,
    s_aux: Tensor,
    workspace: Tensor,
    scale: float,
    softcap: float,
    present: Tensor,
    regions: Sequence[int],
    variants: Sequence[str],
) -> Tensor:
    """As ``ops.decode``, with the present bits. Both sides' ``pages`` are the memory of all regions."""
    found: Tensor = torch.ops.kvcal.decode_staged(
        q, *k[:2], *v[:2], k.pages, *counts, *transform, s_aux, workspace, scale, softcap, present, regions, variants
    )
    return found


@torch.library.impl("kvcal::append_staged", "CPU")
def _append_cpu(
    k_new: Tensor, v_new: Tensor, q: Tensor, k_sinks: Tensor, k_buffer: Tensor, v_sinks: Tensor, v_buffer: Tensor,
    pages: Tensor, *flat: Any,
) -> None:  # fmt: skip
    queries, counts, transform, error, *stages = grouped(flat, QueryStatistic, PageCounts, PageTransform)
    variant, k_pages, v_pages = _now(pages, len(counts.lengths), *stages)
    k, v = StoredSide(k_sinks, k_buffer, k_pages), StoredSide(v_sinks, v_buffer, v_pages)
    reference.append(k_new, v_new, q, k, v, queries, counts, transform, error, variant)


@torch.library.impl("kvcal::decode_staged", "CPU")
def _decode_cpu(
    q: Tensor, k_sinks: Tensor, k_buffer: Tensor, v_sinks: Tensor, v_buffer: Tensor, pages: Tensor, *flat: Any
) -> Tensor:
    counts, transform, s_aux, _, scale, softcap, *stages = grouped(flat, PageCounts, PageTransform)
    variant, k_pages, v_pages = _now(pages, len(counts.lengths), *stages)
    k, v = StoredSide(k_sinks, k_buffer, k_pages), StoredSide(v_sinks, v_buffer, v_pages)
    return reference.decode(q, k, v, counts, transform, s_aux, scale, softcap, variant)


def _now(
    pages: Tensor, batch: int, present: Tensor, regions: list[int], variants: list[str]
) -> tuple[Variant, Tensor, Tensor]:
    """The variant for the present bits, and the pages of keys and of values."""
    rows = [present[region].tolist() for region in regions]
    bits = [row[BITS] for row in rows]
    (variant,) = [v for v in map(parse_key, variants) if [v.num_bits(side) for side in SIDES] == bits]
    return variant, region_pages(pages, rows[0], batch), region_pages(pages, rows[1], batch)


@torch.library.impl("kvcal::append_staged", "CUDA")
def _append_cuda(
    k_new: Tensor, v_new: Tensor, q: Tensor, k_sinks: Tensor, k_buffer: Tensor, v_sinks: Tensor, v_buffer: Tensor,
    pages: Tensor, *flat: Any,
) -> None:  # fmt: skip
    queries, counts, transform, error, *stages = grouped(flat, QueryStatistic, PageCounts, PageTransform)
    k_new, v_new, q = (pack_kernels.loadable(x, k_buffer.dtype) for x in (k_new, v_new, q))
    k, v = StoredSide(k_sinks, k_buffer, pages.unsqueeze(0)), StoredSide(v_sinks, v_buffer, pages.unsqueeze(0))
    for variant, regions in _launches(*stages):
        pack_kernels.launch_append(k_new, v_new, q, k, v, queries, counts, transform, error, variant, regions)


@torch.library.impl("kvcal::decode_staged", "CUDA")
def _decode_cuda(
    q: Tensor, k_sinks: Tensor, k_buffer: Tensor, v_sinks: Tensor, v_buffer: Tensor, pages: Tensor, *flat: Any
) -> Tensor:
    counts, transform, s_aux, workspace, scale, softcap, *stages = grouped(flat, PageCounts, PageTransform)
    q = q.contiguous() if q.stride(-1) != 1 else q
    k, v = StoredSide(k_sinks, k_buffer, pages.unsqueeze(0)), StoredSide(v_sinks, v_buffer, pages.unsqueeze(0))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for variant, regions in _launches(*stages):
        launch_decode(q, k, v, counts, transform, s_aux, workspace, scale, softcap, variant, regions, out)
    return out


def _launches(present: Tensor, regions: list[int], variants: list[str]) -> Iterator[tuple[Variant, tuple[int, ...]]]:
    """Every variant, and the addresses of both sides' regions, which say where their pages are, and how many: so the
    shape that a kernel is given for them means nothing."""
    step = present.stride(0) * present.itemsize
    addresses = tuple(present.data_ptr() + region * step for region in regions)
    for variant in variants:
        yield parse_key(variant), addresses


@torch.library.register_fake("kvcal::append_staged")
def _append_fake(*args: Any) -> None:
    pass


@torch.library.register_fake("kvcal::decode_staged")
def _decode_fake(q: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)
