"""Attention as an engine's process computes it, layer by layer, in a file that the environment names: a part
of the recorders of steps. ``AttentionReplay`` computes it again from the same queries, keys and values."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

VARIABLE = "KVCAL_TEST_ATTENTION"


class Attended(NamedTuple):
    """Of one request in layer ``index``: ``num_past`` tokens before, ``table``: the block of each page, what
    comes after is nobody's; q [T, H, D], k and v [T, N, D], attention ``out`` [T, H, D], fp32."""

    index: int
    num_past: int
    table: list[int]
    scale: float
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray


def register() -> None:
    """Wrap the attentions of ``PagedStep`` to single tokens and to chunks. Drafts are not recorded."""
    from kvcal.engines.step import PagedStep

    if VARIABLE not in os.environ or hasattr(PagedStep, "kvcal_recorded"):
        return
    append, attend, store, attend_chunk = PagedStep.append, PagedStep.attend, PagedStep.store, PagedStep.attend_chunk
    by_chunk: dict[int, tuple[Tensor, ...]] = {}

    def appended(self: Any, q: Tensor, k: Tensor, v: Tensor, decodes: Any) -> Tensor:
        self.kvcal_recorded = q, k, v
        return append(self, q, k, v, decodes)

    def attended(self: Any, queries: Tensor, decodes: Any, logits: Any, dtype: torch.dtype) -> Tensor:
        out = attend(self, queries, decodes, logits, dtype)
        places = zip(decodes.lengths.tolist(), decodes.table.tolist(), strict=True)
        for row, (num_past, table) in enumerate(places):
            own = (x[row : row + 1] for x in (*self.kvcal_recorded, out))
            write(self, num_past, table, logits, *own)
        return out

    def stored(self: Any, q: Tensor, k: Tensor, v: Tensor, chunk: Any) -> Any:
        by_chunk[id(chunk)] = q, k, v
        return store(self, q, k, v, chunk)

    def attended_chunk(self: Any, held: Any, chunk: Any, logits: Any, dtype: torch.dtype) -> Tensor:
        out = attend_chunk(self, held, chunk, logits, dtype)
        write(self, chunk.num_past, chunk.table.tolist(), logits, *by_chunk.pop(id(chunk)), out)
        return out

    def write(self: Any, num_past: int, table: list[int], logits: Any, *tensors: Tensor) -> None:
        arrays = (x.float().cpu().numpy() for x in tensors)
        with open(os.environ[VARIABLE], "ab") as file:
            pickle.dump(tuple(Attended(self.layout.layer.geometry.index, num_past, table, logits.scale, *arrays)), file)

    PagedStep.kvcal_recorded = None  # type: ignore[attr-defined]
    PagedStep.append, PagedStep.attend = appended, attended  # type: ignore[method-assign]
    PagedStep.store, PagedStep.attend_chunk = stored, attended_chunk  # type: ignore[method-assign]


def attended_in(path: Path, offset: int = 0) -> Iterator[tuple[Attended, int]]:
    """The content of the file from byte ``offset`` on, each with the byte after it."""
    with open(path, "rb") as file:
        file.seek(offset)
        while file.peek(1):
            found = pickle.load(file)
            yield Attended(*found), file.tell()
