"""Launches of ``csrc/pack.cu``: what each kernel gets is said there; the operators that end here are kvcal.kernels.ops.

A launch is paid for every layer and step where no graph replays it, so nothing but pointers, strides and sizes is
computed here; which kernel serves a variant on a device is looked up by the variant's key. Tensors in another dtype
than the cache's (a model that computes in fp32), or in strides that a 16-byte load does not take, are copied before.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels.compile import Kernel, kernel
from kvcal.kernels.macros import DTYPES
from kvcal.kernels.variants import parse_key
from kvcal.quantizers.pages import PAGE_TOKENS

NAMES = {dtype: name for name, dtype in CACHE_DTYPES.items()}
THREADS = 256


@functools.cache
def _append_kernel(variant: str, is_staged: bool, device_index: int) -> Kernel:
    defines = parse_key(variant).defines | ({"STAGED": 1} if is_staged else {})
    return kernel("pack", "append", defines, device_index)


@functools.cache
def _side_kernel(entry: str, side: str, variant: str, device_index: int) -> Kernel:
    """``pack`` or ``unpack`` of one side, with the macros of that side alone: shared by all formats of the other."""
    named = parse_key(variant)
    own = {"DTYPE": named.defines["DTYPE"], "SIDE": ("k", "v").index(side)}
    own |= {name: value for name, value in named.defines.items() if name.startswith(f"{side.upper()}_")}
    return kernel("pack", entry, own, device_index)


def launch_append(
    k_new: Tensor,
    v_new: Tensor,
    q: Tensor,
    k_sinks: Tensor,
    k_buffer: Tensor,
    k_pages: Tensor,
    v_sinks: Tensor,
    v_buffer: Tensor,
    v_pages: Tensor,
    query_sum: Tensor,
    query_since: Tensor,
    lengths: Tensor,
    k_page_at: Tensor,
    v_page_at: Tensor,
    k_rescale: Tensor,
    k_offset: Tensor,
    error: Tensor,
    variant: str,
    regions: tuple[int, ...] = (),
) -> None:
    """As ``ops.append``. ``regions``: as for ``launch_decode``."""
    dtype = k_buffer.dtype
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
        *((q.data_ptr(), *q.stride()[:2]) if query_sum.numel() else (0, 0, 0)),
        k_sinks.data_ptr(),
        k_buffer.data_ptr(),
        k_pages.data_ptr(),
        v_sinks.data_ptr(),
        v_buffer.data_ptr(),
        v_pages.data_ptr(),
        query_sum.data_ptr(),
        query_since.data_ptr(),
        lengths.data_ptr(),
        k_page_at.data_ptr(),
        k_page_at.numel(),
        v_page_at.data_ptr(),
        v_page_at.numel(),
        k_pages.shape[1],
        v_pages.shape[1],
        k_rescale.data_ptr(),
        k_offset.data_ptr(),
        parse_key(variant).first_head,
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
    side: str,
    variant: str,
) -> None:
    """As ``ops.pack``."""
    named = parse_key(variant)
    x = loadable(x, CACHE_DTYPES[named.cache_dtype])
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
        named.first_head,
        error.data_ptr(),
    )


def launch_unpack(
    pages: Tensor, out: Tensor, first_page: int, rescale: Tensor, offset: Tensor, side: str, variant: str
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
        DTYPES[NAMES[out.dtype]],
        *out.stride()[:3],
        rescale.data_ptr(),
        offset.data_ptr(),
    )


def loadable(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in ``dtype``, as the kernels load it: channels side by side, everything else at multiples of 16 bytes."""
    x = x.to(dtype)
    aligned = x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in x.stride()[:-1])
    return x if aligned and (not x.numel() or x.stride(-1) == 1) else x.clone(memory_format=torch.contiguous_format)
