"""Launches of ``csrc/pack.cu``: what each kernel gets is said there; the operators that end here are kvcal.kernels.ops.

A launch is paid for every layer and step where no graph replays it, so nothing but pointers, strides and sizes is
computed here; which kernel serves a variant on a device is looked up. Tensors in another dtype than the cache's (a
model that computes in fp32), or in strides that a 16-byte load does not take, are copied before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels.compile import Kernel, kernel
from kvcal.kernels.decode import region_addresses, row_defines, table_shape
from kvcal.kernels.operands import DTYPE_NAMES, Memory, PageTransform, Place, QueryStatistic, Regions
from kvcal.kernels.variants import DTYPES, Variant
from kvcal.pages.record_layout import PAGE_TOKENS
from kvcal.plan.page_format import SIDES, Side

THREADS = 256


@functools.cache
def _append_kernel(variant: Variant, is_staged: bool, has_rows: bool, device_index: int) -> Kernel:
    defines = variant.defines | ({"STAGED": 1} if is_staged else {}) | row_defines(has_rows)
    return kernel("pack", "append", defines, device_index)


@functools.cache
def _side_kernel(entry: str, side: Side, variant: Variant, device_index: int) -> Kernel:
    """``pack`` or ``unpack`` of one side, with the macros of that side alone: shared by all formats of the other."""
    own = {"DTYPE": variant.defines["DTYPE"], "SIDE": SIDES.index(side)}
    own |= {name: value for name, value in variant.defines.items() if name.startswith(f"{side.upper()}_")}
    return kernel("pack", entry, own, device_index)


def launch_append(
    k_new: Tensor, v_new: Tensor, q: Tensor, k: Memory, v: Memory, queries: QueryStatistic, place: Place,
    transform: PageTransform, error: Tensor, variants: Sequence[Variant], regions: Regions | None = None,
) -> None:  # fmt: skip
    """As ``ops.append``. With ``regions`` there is a launch for every variant, of which the one for the present bits
    does the work."""
    dtype = k.ring.dtype
    k_new, v_new = loadable(k_new, dtype), loadable(v_new, dtype)
    of_queries: tuple[int, ...] = (0, 0, 0, 0, 0, 0, 0)
    if queries.sum.numel():
        q = loadable(q, dtype)
        of_queries = (
            q.data_ptr(), *q.stride()[:2], queries.sum.data_ptr(), queries.sum.stride(0), queries.since.data_ptr(),
            queries.since.stride(0),
        )  # fmt: skip
    batch, heads = k_new.shape[0], k_new.shape[-2]
    for variant in variants:
        _append_kernel(variant, regions is not None, place.rows.numel() > 0, k_new.get_device()).launch(
            (heads, batch, 2),
            THREADS,
            0,
            k_new.data_ptr(), k_new.stride(0), k_new.stride(-2), v_new.data_ptr(), v_new.stride(0), v_new.stride(-2),
            *of_queries,
            *(number for tensor in (*k, *v) for number in (tensor.data_ptr(), tensor.stride(0))),
            place.lengths.data_ptr(), place.rows.data_ptr(), place.table.data_ptr(), *table_shape(place.table),
            *map(Tensor.data_ptr, transform), variant.first_head, error.data_ptr(), *region_addresses(regions),
            *k_new.stride()[1:-2], *v_new.stride()[1:-2],
        )  # fmt: skip


def launch_pack(
    x: Tensor, pages: Tensor, slots: Tensor, first_page: int, query_mean: Tensor, transform: PageTransform,
    error: Tensor, side: Side, variant: Variant,
) -> None:  # fmt: skip
    """As ``ops.pack``."""
    x = loadable(x, CACHE_DTYPES[variant.cache_dtype])
    batch, heads, tokens = x.shape[:3]
    query_mean = query_mean.contiguous()
    _side_kernel("pack", side, variant, x.get_device()).launch(
        (tokens // PAGE_TOKENS, heads, batch),
        THREADS,
        0,
        x.data_ptr(), *x.stride()[:3], pages.data_ptr(), pages.stride(0), slots.data_ptr(), slots.stride(0), first_page,
        *map(Tensor.data_ptr, transform), query_mean.data_ptr(), variant.first_head, error.data_ptr(),
    )  # fmt: skip


def launch_unpack(
    pages: Tensor, slots: Tensor, out: Tensor, transform: PageTransform, side: Side, variant: Variant
) -> None:
    """As ``ops.unpack``."""
    batch, heads, tokens = out.shape[:3]
    _side_kernel("unpack", side, variant, pages.get_device()).launch(
        (tokens // PAGE_TOKENS, heads, batch),
        THREADS,
        0,
        pages.data_ptr(), pages.stride(0), slots.data_ptr(), slots.stride(0),
        out.data_ptr(), DTYPES[DTYPE_NAMES[out.dtype]], *out.stride()[:3], *map(Tensor.data_ptr, transform[:2]),
        transform.signs(side).data_ptr(),
    )  # fmt: skip


def loadable(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in ``dtype``, as the kernels load it: channels side by side, everything else at multiples of 16 bytes."""
    x = x.to(dtype)
    *outer, channel = x.stride()
    aligned = x.data_ptr() % 16 == 0 and math.gcd(*outer) % 8 == 0
    return x if aligned and (not x.numel() or channel == 1) else x.clone(memory_format=torch.contiguous_format)
