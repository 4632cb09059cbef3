"""``append`` and ``decode`` where pages shrink on a schedule: one launch for every pair of bits that keys and values
come to have, of which the one for the present bits does the work, and the others return at once.

Arguments are those of kvcal.kernels.ops, but for ``pages`` (uint8, one dimension: the memory of all regions),
``present`` (int64 [regions, 7]: kvcal.kernels.stages), ``regions`` (which of them are the keys' and the values') and
``variants`` (a key for each pair of bits).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvcal.formats import SIDES
from kvcal.kernels import pack as pack_kernels
from kvcal.kernels import reference
from kvcal.kernels.decode import launch_decode
from kvcal.kernels.stages import BITS, region_pages
from kvcal.kernels.variants import Variant, parse_key

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
    k_sinks: Tensor,
    k_buffer: Tensor,
    v_sinks: Tensor,
    v_buffer: Tensor,
    pages: Tensor,
    query_sum: Tensor,
    query_since: Tensor,
    lengths: Tensor,
    k_page_at: Tensor,
    v_page_at: Tensor,
    k_rescale: Tensor,
    k_offset: Tensor,
    error: Tensor,
    present: Tensor,
    regions: Sequence[int],
    variants: Sequence[str],
) -> None:
    """As ``ops.append``, with the present bits."""
    torch.ops.kvcal.append_staged(
        k_new, v_new, q, k_sinks, k_buffer, v_sinks, v_buffer, pages, query_sum, query_since, lengths, k_page_at,
        v_page_at, k_rescale, k_offset, error, present, regions, variants,
    )  # fmt: skip


def decode_staged(
    q: Tensor,
    k_sinks: Tensor,
    k_buffer: Tensor,
    v_sinks: Tensor,
    v_buffer: Tensor,
    pages: Tensor,
    lengths: Tensor,
    k_page_at: Tensor,
    v_page_at: Tensor,
    k_rescale: Tensor,
    k_offset: Tensor,
    s_aux: Tensor,
    workspace: Tensor,
    scale: float,
    softcap: float,
    present: Tensor,
    regions: Sequence[int],
    variants: Sequence[str],
) -> Tensor:
    """As ``ops.decode``, with the present bits."""
    found: Tensor = torch.ops.kvcal.decode_staged(
        q, k_sinks, k_buffer, v_sinks, v_buffer, pages, lengths, k_page_at, v_page_at, k_rescale, k_offset, s_aux,
        workspace, scale, softcap, present, regions, variants,
    )  # fmt: skip
    return found


@torch.library.impl("kvcal::append_staged", "CPU")
def _append_cpu(
    k_new: Tensor, v_new: Tensor, q: Tensor, k_sinks: Tensor, k_buffer: Tensor, v_sinks: Tensor, v_buffer: Tensor,
    pages: Tensor, query_sum: Tensor, query_since: Tensor, lengths: Tensor, k_page_at: Tensor, v_page_at: Tensor,
    k_rescale: Tensor, k_offset: Tensor, error: Tensor, present: Tensor, regions: list[int], variants: list[str],
) -> None:  # fmt: skip
    variant, k_pages, v_pages = _now(pages, present, regions, variants, len(lengths))
    reference.append(
        k_new, v_new, q, k_sinks, k_buffer, k_pages, v_sinks, v_buffer, v_pages, query_sum, query_since, lengths,
        k_rescale, k_offset, error, variant,
    )  # fmt: skip


@torch.library.impl("kvcal::decode_staged", "CPU")
def _decode_cpu(
    q: Tensor, k_sinks: Tensor, k_buffer: Tensor, v_sinks: Tensor, v_buffer: Tensor, pages: Tensor, lengths: Tensor,
    k_page_at: Tensor, v_page_at: Tensor, k_rescale: Tensor, k_offset: Tensor, s_aux: Tensor, workspace: Tensor,
    scale: float, softcap: float, present: Tensor, regions: list[int], variants: list[str],
) -> Tensor:  # fmt: skip
    variant, k_pages, v_pages = _now(pages, present, regions, variants, len(lengths))
    return reference.decode(
        q, k_sinks, k_buffer, k_pages, v_sinks, v_buffer, v_pages, lengths, k_rescale, k_offset, s_aux, scale, softcap,
        variant,
    )  # fmt: skip


def _now(
    pages: Tensor, present: Tensor, regions: list[int], variants: list[str], batch: int
) -> tuple[Variant, Tensor, Tensor]:
    """The variant for the present bits, and the pages of keys and of values."""
    rows = [present[region].tolist() for region in regions]
    bits = [row[BITS] for row in rows]
    (variant,) = [v for v in map(parse_key, variants) if [v.num_bits(side) for side in SIDES] == bits]
    return variant, region_pages(pages, rows[0], batch), region_pages(pages, rows[1], batch)


@torch.library.impl("kvcal::append_staged", "CUDA")
def _append_cuda(
    k_new: Tensor, v_new: Tensor, q: Tensor, k_sinks: Tensor, k_buffer: Tensor, v_sinks: Tensor, v_buffer: Tensor,
    pages: Tensor, query_sum: Tensor, query_since: Tensor, lengths: Tensor, k_page_at: Tensor, v_page_at: Tensor,
    k_rescale: Tensor, k_offset: Tensor, error: Tensor, present: Tensor, regions: list[int], variants: list[str],
) -> None:  # fmt: skip
    k_new, v_new, q = (pack_kernels.loadable(x, k_buffer.dtype) for x in (k_new, v_new, q))
    whole = pages.unsqueeze(0)  # its shape means nothing: a region says where its pages are, and how many
    for variant in variants:
        pack_kernels.launch_append(
            k_new, v_new, q, k_sinks, k_buffer, whole, v_sinks, v_buffer, whole, query_sum, query_since, lengths,
            k_page_at, v_page_at, k_rescale, k_offset, error, variant, _addresses(present, regions),
        )  # fmt: skip


@torch.library.impl("kvcal::decode_staged", "CUDA")
def _decode_cuda(
    q: Tensor, k_sinks: Tensor, k_buffer: Tensor, v_sinks: Tensor, v_buffer: Tensor, pages: Tensor, lengths: Tensor,
    k_page_at: Tensor, v_page_at: Tensor, k_rescale: Tensor, k_offset: Tensor, s_aux: Tensor, workspace: Tensor,
    scale: float, softcap: float, present: Tensor, regions: list[int], variants: list[str],
) -> Tensor:  # fmt: skip
    q, whole = q.contiguous() if q.stride(-1) != 1 else q, pages.unsqueeze(0)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for variant in variants:
        launch_decode(
            q, k_sinks, k_buffer, whole, v_sinks, v_buffer, whole, lengths, k_page_at, v_page_at, k_rescale, k_offset,
            s_aux, workspace, scale, softcap, parse_key(variant), _addresses(present, regions), out,
        )  # fmt: skip
    return out


def _addresses(present: Tensor, regions: list[int]) -> tuple[int, ...]:
    return tuple(present.data_ptr() + region * present.stride(0) * present.itemsize for region in regions)


@torch.library.register_fake("kvcal::append_staged")
def _append_fake(*args: Any) -> None:
    pass


@torch.library.register_fake("kvcal::decode_staged")
def _decode_fake(q: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)
