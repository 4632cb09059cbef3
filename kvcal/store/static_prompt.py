"""A prompt, or a chunk of one, and the stores of a layer of a static cache: the past is read for it, then it is stored.

By the host, for a range of rows with equal padding (``Block``) at a time, which hold the same number of tokens. These
lie in at most two intervals of columns, before and behind the padding of the prompt. What is in a stored form is
reconstructed before the stores read it, and encoded once they have packed it (``LayerForms``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvcal.plan.format import SIDES, Side
from kvcal.store.layer_forms import LayerForms
from kvcal.store.rows import Block, Rows
from kvcal.store.static_store import HeadStore
from kvcal.store.window_store import WindowStore

Store = HeadStore | WindowStore


def read_past(
    stores: Sequence[Store], forms: LayerForms | None, side: Side, rows: Rows, columns: int, out: Tensor
) -> None:
    """Write the tokens of the last S of so many ``columns`` to out [B, N, S, D], any float dtype; padding is left as it
    is there."""
    for block in rows.blocks:
        _read_block(stores, forms, side, block, rows, columns, out[block.rows])


def store_tokens(
    stores: Sequence[Store],
    forms: LayerForms | None,
    rows: Rows,
    columns: int,
    new: Mapping[Side, Tensor],
    dtype: torch.dtype,
    heard: Tensor | None,
) -> None:
    """Store keys and values [B, N, T, D] of the T columns behind so many, rounded to the cache's ``dtype``. ``heard``
    [B, N, D] fp32: the sum of |q| over the tokens of each row, for query scores."""
    stop = columns + new["k"].shape[2]
    for block in rows.blocks:
        held, intervals = rows.num_tokens(block, columns), rows.intervals(block, columns, stop)
        if not intervals:
            continue
        tokens: dict[Side, Tensor] = {}
        for side in SIDES:
            parts = [new[side][block.rows, :, a - columns : b - columns].to(dtype) for a, b in intervals]
            tokens[side] = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        for store in stores:
            store.extend(block.rows, held, tokens, None if heard is None else heard[block.rows])
        if forms is not None:
            forms.extend(block.rows, held, held + tokens["k"].shape[2])


def _read_block(
    stores: Sequence[Store],
    forms: LayerForms | None,
    side: Side,
    block: Block,
    rows: Rows,
    columns: int,
    out: Tensor,
) -> None:
    """``read_past`` of one block, whose rows ``out`` [b, N, S, D] is."""
    base = columns - out.shape[2]
    intervals = [(start - base, stop - base) for start, stop in rows.intervals(block, base, columns)]
    num_tokens = sum(stop - start for start, stop in intervals)
    if not num_tokens:
        return
    (start, stop) = intervals[0]
    direct = len(intervals) == 1
    tokens = out[:, :, start:stop] if direct else out.new_empty(*out.shape[:2], num_tokens, out.shape[3])
    num_held = rows.num_tokens(block, columns)
    for store in stores:
        store.pack_due(side, block.rows, num_held)
    if forms is not None:
        forms.load(side, block.rows, num_held)
    for store in stores:
        store.read(side, block.rows, num_held, tokens[:, store.heads])
    for start, stop in [] if direct else intervals:
        out[:, :, start:stop], tokens = tokens[:, :, : stop - start], tokens[:, :, stop - start :]
