"""Launching ``enter`` and ``leave``: macros and grid of the kernels of csrc/basis.cu."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from kvcal.kernels.compile import Kernel, kernel
from kvcal.kernels.operands import DTYPE_NAMES, loadable
from kvcal.kernels.variants import DTYPES, Defines

THREADS = 64
BLOCK_CHANNELS = 32  # of the result, of one KV head
ROWS_AT_ONCE = 8
MOST_BLOCKS = 1024  # of a product: they take more rows in turn with the matrix that they have


@functools.cache
def _kernel(entry: str, head_dim: int, group_heads: int, dtypes: tuple[torch.dtype, ...], device: int) -> Kernel:
    return kernel("basis", entry, basis_defines(entry, head_dim, group_heads, dtypes), device)


def basis_defines(entry: str, head_dim: int, group_heads: int, dtypes: tuple[torch.dtype, ...]) -> Defines:
    """All macros: ``dtypes`` of the cache and of queries, or of what leaves, before and after."""
    names = ("DTYPE", "Q_DTYPE") if entry == "enter" else ("IN_DTYPE", "OUT_DTYPE")
    found = {name: DTYPES[DTYPE_NAMES[dtype]] for name, dtype in zip(names, dtypes, strict=True)}
    return {"DIM": head_dim, "GROUP": group_heads} | found


def launch_enter(
    k_new: Tensor, v_new: Tensor, q: Tensor, k_basis: Sequence[Tensor], v_basis: Sequence[Tensor], error: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As ``ops.enter``."""
    q = loadable(q, q.dtype) if q.numel() else q
    k_basis, v_basis = ([part.contiguous() for part in basis] for basis in (k_basis, v_basis))
    keys, values = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k_new, v_new))
    turned = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    entering = [
        (loadable(x, x.dtype), basis, out)
        for x, basis, out in ((k_new, k_basis, keys), (v_new, v_basis, values))
        if x.numel()
    ]
    sides = [
        (x.data_ptr(), *_strides(x), basis[0].data_ptr(), basis[2].data_ptr() if len(basis) > 2 else 0, out.data_ptr())
        for x, basis, out in entering
    ]
    (tokens, _, _), *_ = entering
    heads, dim, rows = tokens.shape[-2], tokens.shape[-1], tokens.shape[:-2].numel()
    of_queries = (q.data_ptr(), *_strides(q), k_basis[1].data_ptr(), turned.data_ptr()) if q.numel() else (0,) * 6
    group = q.shape[-2] // heads if q.numel() else 1
    q_dtype = q.dtype if q.numel() else tokens.dtype
    channels, shares = _grid(heads, dim, rows)
    query_shares = _grid(heads, dim, rows * group)[1] if q.numel() else 0
    _kernel("enter", dim, group, (tokens.dtype, q_dtype), tokens.get_device()).launch(
        (channels, len(sides) * shares + query_shares, 1),
        THREADS,
        0,
        *sides[0], *(sides[1] if len(sides) > 1 else (0,) * 7), *of_queries,
        shares, rows, tokens.shape[1] if tokens.dim() == 4 else 1, heads, error.data_ptr(), follows=True,
    )  # fmt: skip
    return keys, values, turned


def launch_leave(y: Tensor, basis: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """As ``ops.leave``."""
    y, out = loadable(y, y.dtype), torch.empty(y.shape, dtype=dtype, device=y.device)
    basis = [part.contiguous() for part in basis]  # torch.linalg.inv gives matrices by columns
    (heads, dim), rows = basis[1].shape[:2], y.shape[:-2].numel()
    group = y.shape[-2] // heads
    _kernel("leave", dim, group, (y.dtype, dtype), y.get_device()).launch(
        (*_grid(heads, dim, rows * group), 1), THREADS, 0,
        y.data_ptr(), *_strides(y), basis[1].data_ptr(), basis[2].data_ptr() if len(basis) > 2 else 0, out.data_ptr(),
        rows, y.shape[1] if y.dim() == 4 else 1, heads, follows=True,
    )  # fmt: skip
    return out


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Of x [B, n, D] or [B, S, n, D]: from row to row, token to token, and head to head."""
    return x.stride(0), x.stride(1) if x.dim() == 4 else 0, x.stride(-2)


def _grid(heads: int, head_dim: int, rows: int) -> tuple[int, int]:
    """Blocks of all channels, and shares of the rows, which take equally many turns."""
    channels, tiles = heads * -(-head_dim // BLOCK_CHANNELS), -(-rows // ROWS_AT_ONCE)
    turns = -(-tiles // max(1, MOST_BLOCKS // channels))
    return channels, -(-tiles // turns)
