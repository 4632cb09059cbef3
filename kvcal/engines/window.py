"""Layers with a sliding window, in an engine's memory: 16 bits, in the ring of a request, and no blocks.

    ring    keys [N, 1, D], keys [N, W - 1, D], values alike, in the cache's dtype: of a window of W tokens, the last
            W - 1 of the past, token t at t modulo their number. The one before them is scratch of a step: the token
            that attention reads for the last time (kvcal.kernels.ops, ``append_window``)

So a request takes the same bytes however long it is, and one that begins after blocks of another would not have its
window. Calls are those of ``kvcal.engines.step.PagedStep``, whose places they take.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal.engines.prefill import Logits, attend_window
from kvcal.engines.scratch import Chunk, Decodes, Scratch, Tail
from kvcal.geometry import CACHE_DTYPES, CacheDtype
from kvcal.kernels.operands import Memory, Place
from kvcal.pages.record_layout import aligned_size
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES, Side
from kvcal.store.step import WindowedStep


@dataclass(frozen=True)
class WindowLayout:
    """See the module's docstring. ``layer``: one with a sliding window, as this rank has it."""

    layer: LayerPlan
    cache_dtype: CacheDtype
    block_bytes: int = 0

    @property
    def ring_tokens(self) -> int:
        """W - 1."""
        assert self.layer.attention.window is not None
        return self.layer.attention.window - 1

    @functools.cached_property
    def ring_bytes(self) -> int:
        """Bytes of a request's ring: a multiple of 16."""
        return aligned_size(sum(self._bytes(side) for side in SIDES))

    def memory(self, rings: Tensor, side: Side) -> Memory:
        """The keys, or values, in rings, uint8 [rings, ring_bytes or more]: views [rings, N, 1, D] and
        [rings, N, W - 1, D] in the cache's dtype, and no pages."""
        heads, dim = self.layer.attention.num_kv_heads, self.layer.head_dim(side)
        first = self._bytes("k") if side == "v" else 0
        held = rings[:, first : first + self._bytes(side)].view(CACHE_DTYPES[self.cache_dtype])
        leaving, window = held[:, : heads * dim], held[:, heads * dim :]
        no_pages = torch.empty(0, heads, 0, dtype=torch.uint8, device=rings.device)
        return Memory(leaving.unflatten(1, (heads, 1, dim)), window.unflatten(1, (heads, -1, dim)), no_pages)

    def _bytes(self, side: Side) -> int:
        token = self.layer.attention.num_kv_heads * self.layer.head_dim(side) * CACHE_DTYPES[self.cache_dtype].itemsize
        return (1 + self.ring_tokens) * token


class WindowStep:
    """See the module's docstring: a layer of a shard, of the calls of ``PagedStep``. Built once; ``bind`` before the
    first step."""

    def __init__(self, layout: WindowLayout, scratch: Scratch) -> None:
        self.layout, self.scratch = layout, scratch
        self.dtype = CACHE_DTYPES[layout.cache_dtype]
        geometry = layout.layer.attention
        # Now, so that an engine's measurement of free memory counts it.
        scratch.workspace(geometry.num_kv_heads, geometry.group_heads, geometry.k_head_dim)

    def bind(self, rings: Tensor) -> None:
        """The layer's memory: rings, uint8 [rings, ring_bytes or more], bytes side by side, with strides between them
        of multiples of 16."""
        k, v = (self.layout.memory(rings, side) for side in SIDES)
        self._memory: dict[Side, Memory] = {"k": k, "v": v}
        self._step = WindowedStep.of(self.layout.layer.attention, self.layout.cache_dtype, k, v, self.scratch)

    def append(self, q: Tensor, k: Tensor, v: Tensor, decodes: Decodes) -> None:
        """Store k, v [B, N, D], one token a sequence."""
        self._step.append(q, k, v, self._place(decodes))

    def attend(self, q: Tensor, decodes: Decodes, logits: Logits) -> Tensor:
        """From q [B, H, D] to the window that each sequence's token ends: [B, H, D]."""
        return self._step.attend(q, self._place(decodes), *logits)

    def _place(self, decodes: Decodes) -> Place:
        none = self.scratch.none
        return Place(decodes.lengths, decodes.table[:, :0], none, none, decodes.rings)

    def store(self, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk) -> Tail:
        """Store k, v [T, N, D]. Returns what attention reads of the past."""
        size, total = self.layout.ring_tokens, chunk.num_past + len(k)
        first = max(0, chunk.num_past - size)
        tail = Tail(first, *(chunk.newest(self._memory[side], first).to(q.dtype) for side in SIDES))
        for side, new in zip(SIDES, (k, v), strict=True):
            chunk.keep(self._memory[side], new.to(self.dtype), max(chunk.num_past, total - size))
        return tail

    def attend_chunk(self, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk, tail: Tail, logits: Logits) -> Tensor:
        """From q [T, H, D] to the window that each of the tokens k, v ends: [T, H, D]."""
        keys, values = (new.to(self.dtype).to(q.dtype) for new in (k, v))
        window = self.layout.ring_tokens + 1
        return attend_window(q, keys, values, tail[1:], window, logits, self.scratch.flash)

    def warm_up(self, num_tokens: int, dtype: torch.dtype) -> None:
        """As ``PagedStep.warm_up``."""
        self.scratch.warm_up(self.layout.layer.attention, num_tokens)
