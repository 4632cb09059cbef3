"""Launches of ``csrc/pack.cu``: what each kernel gets is said there; the operators that end here are kvcal.kernels.ops.

A launch is paid for every layer and step where no graph replays it, so nothing but pointers, strides and sizes is
computed here; which kernel serves a variant on a device is looked up. Tensors in another dtype than the cache's (a
model that computes in fp32), or in strides that a 16-byte load does not take, are copied before.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels.compile import Kernel, kernel
from kvcal.kernels.macros import DTYPE_NAMES, DTYPES
from kvcal.kernels.operands import PageCounts, PageTransform, QueryStatistic, StoredSide
from kvcal.kernels.variants import Variant
from kvcal.pages.layout import PAGE_TOKENS
from kvcal.plan.format import SIDES, Side

THREADS = 256


@functools.cache
def _append_kernel(variant: Variant, is_staged: bool, device_index: int) -> Kernel:
    defines = variant.defines | ({"STAGED": 1} if is_staged else {})
    return kernel("pack", "append", defines, device_index)


@functools.cache
def _side_kernel(entry: str, side: Side, variant: Variant, device_index: int) -> Kernel:
    """``pack`` or ``unpack`` of one side, with the macros of that side alone: shared by all formats of the other."""
    own = {"DTYPE": variant.defines["DTYPE"], "SIDE": SIDES.index(side)}
    own |= {name: value for name, value in variant.defines.items() if name.startswith(f"{side.upper()}_")}
    return kernel("pack", entry, own, device_index)


def launch_append(
    k_new: Tensor,
    v_new: Tensor,
    q: Tensor,
    k: StoredSide,
    v: StoredSide,
    queries: QueryStatistic,
    counts: PageCounts,
    transform: PageTransform,
    error: Tensor,
    variant: Variant,
    regions: tuple[int, ...] = (),
) -> None:
    """As ``ops.append``. ``regions``: as for ``launch_decode``."""
    dtype = k.buffer.dtype
    k_new, v_new, q = loadable(k_new, dtype), loadable(v_new, dtype), loadable(q, dtype)
    batch, heads = k_new.shape[:2]
    _append_kernel(variant, bool(regions), k_new.device.index).launch(
        (heads, batch, 2),
        THREADS,
        0,
        k_new.data_ptr(),
        *k_new.stride()[:2],
        v_new.data_ptr(),
        *v_new.stride()[:2],
        *((q.data_ptr(), *q.stride()[:2]) if queries.sum.numel() else (0, 0, 0)),
        *map(Tensor.data_ptr, (*k, *v, *queries)),
        counts.lengths.data_ptr(),
        counts.k_page_at.data_ptr(),
        counts.k_page_at.numel(),
        counts.v_page_at.data_ptr(),
        counts.v_page_at.numel(),
        k.pages.shape[1],
        v.pages.shape[1],
        *map(Tensor.data_ptr, transform),
        variant.first_head,
        error.data_ptr(),
        *regions,
    )


def launch_pack(
    x: Tensor,
    pages: Tensor,
    first_page: int,
    query_mean: Tensor,
    rescale: Tensor,
    offset: Tensor,
    error: Tensor,
    side: Side,
    variant: Variant,
) -> None:
    """As ``ops.pack``."""
    x = loadable(x, CACHE_DTYPES[variant.cache_dtype])
    batch, heads, tokens = x.shape[:3]
    query_mean = query_mean.contiguous()
    _side_kernel("pack", side, variant, x.device.index).launch(
        (tokens // PAGE_TOKENS, heads, batch),
        THREADS,
        0,
        x.data_ptr(),
        *x.stride()[:3],
        0,  # every row begins with its first token, none of which is a sink,
        0,
        0,  # and fills all of the grid,
        first_page,
        0,  # from the same page on
        pages.data_ptr(),
        pages.shape[1],
        rescale.data_ptr(),
        offset.data_ptr(),
        query_mean.data_ptr(),
        variant.first_head,
        error.data_ptr(),
    )


def launch_unpack(
    pages: Tensor, out: Tensor, first_page: int, rescale: Tensor, offset: Tensor, side: Side, variant: Variant
) -> None:
    """As ``ops.unpack``."""
    batch, heads, tokens = out.shape[:3]
    _side_kernel("unpack", side, variant, pages.device.index).launch(
        (tokens // PAGE_TOKENS, heads, batch),
        THREADS,
        0,
        pages.data_ptr(),
        pages.shape[1],
        first_page,
        out.data_ptr(),
        DTYPES[DTYPE_NAMES[out.dtype]],
        *out.stride()[:3],
        rescale.data_ptr(),
        offset.data_ptr(),
    )


def loadable(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in ``dtype``, as the kernels load it: channels side by side, everything else at multiples of 16 bytes."""
    x = x.to(dtype)
    *outer, channel = x.stride()
    aligned = x.data_ptr() % 16 == 0 and math.gcd(*outer) % 8 == 0
    return x if aligned and (not x.numel() or channel == 1) else x.clone(memory_format=torch.contiguous_format)
