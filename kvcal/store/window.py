"""The memory of a sliding-window layer of a static cache, allocated once: the last W - 1 tokens of every row in a ring,
for a window of W. Token number i of a row has slot i modulo the ring's size.

A step is ``append_window`` (kvcal.kernels.ops), then ``decode``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels import ops
from kvcal.kernels.operands import Memory, PageTransform, Place
from kvcal.kernels.variants import Variant, window_variant
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES, Side
from kvcal.store.pool import fixed
from kvcal.store.state import StepState


@dataclass(frozen=True)
class WindowStore:
    """Keys and values of all heads of a layer. ``ring`` [B, N, ring tokens, D]; ``evicted`` [B, N, 1, D] is scratch,
    the same for all layers of a shape; ``no_pages`` [0, N, record]."""

    variant: Variant
    number: int  # the variant's, ready for torch.compile
    state: StepState
    ring: Mapping[Side, Tensor]
    evicted: Mapping[Side, Tensor]
    no_pages: Tensor
    workspace: Tensor
    no_table: Tensor

    @classmethod
    def allocate(cls, plan: LayerPlan, state: StepState) -> WindowStore:
        """Zeroed, on the device of ``state``, which is allocated."""
        geometry, device, cache_dtype = plan.attention, state.lengths.device, state.plan.cache_dtype
        assert geometry.window is not None
        num_heads, dim, dtype = geometry.num_kv_heads, geometry.k_head_dim, CACHE_DTYPES[cache_dtype]
        ring_tokens = min(state.max_tokens, geometry.window - 1)
        variant = window_variant(geometry, ring_tokens, cache_dtype)
        shape, record = (state.batch, num_heads, ring_tokens, dim), variant.layout("k").record_bytes
        return cls(
            variant,
            variant.number,
            state,
            {side: fixed(torch.zeros(shape, dtype=dtype, device=device)) for side in SIDES},
            {side: state.evicted(side, num_heads, dim, dtype) for side in SIDES},
            torch.empty(0, num_heads, record, dtype=torch.uint8, device=device),
            state.workspace(num_heads, variant.group_heads, dim),
            torch.empty(state.batch, 0, dtype=torch.int32, device=device),
        )

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that are stored, and count as the plan's bytes."""
        return list(self.ring.values())

    @property
    def ring_tokens(self) -> int:
        return self.ring["k"].shape[2]

    def append(self, k_new: Tensor, v_new: Tensor) -> None:
        """Store one token of every row: k_new, v_new [B, N, D]."""
        ops.append_window(
            k_new,
            v_new,
            self.evicted["k"],
            self.ring["k"],
            self.evicted["v"],
            self.ring["v"],
            self.state.lengths,
            self.state.error,
            self.state.max_tokens,
        )

    def decode(self, q: Tensor, s_aux: Tensor | None, scale: float, softcap: float) -> Tensor:
        """Attention [B, N G, D] of q [B, N G, D], with s_aux [N G], over the window that the step's token ends."""
        k, v = (list(Memory(self.evicted[side], self.ring[side], self.no_pages)) for side in SIDES)
        nothing, none = self.state.nothing, self.state.in_order
        place = Place(self.state.lengths, self.no_table, none, none, none)
        attended: Tensor = ops.decode(
            q, k, v, list(place), list(PageTransform(*[nothing] * 6)), nothing if s_aux is None else s_aux,
            self.workspace, scale, softcap, [self.number], nothing, [],
        )  # fmt: skip
        return attended

    def read(self, side: Side, rows: slice, num_tokens: int, out: Tensor) -> None:
        """Write the last T of the ``num_tokens`` tokens of each of ``rows`` to out [b, N, T, D], T as many as there are
        in the ring at most."""
        slots = self._slots(num_tokens - out.shape[2], num_tokens)
        out.copy_(self.ring[side][rows].index_select(2, slots))

    def extend(self, rows: slice, num_tokens: int, new: Mapping[Side, Tensor]) -> None:
        """Store T new tokens [b, N, T, D] (T 1 or more, cache dtype) behind the ``num_tokens`` of each of ``rows``."""
        for side in SIDES:
            last = new[side][:, :, -self.ring_tokens :]
            total = num_tokens + new[side].shape[2]
            self.ring[side][rows].index_copy_(2, self._slots(total - last.shape[2], total), last)

    def loss(self, num_tokens: int, kept_tokens: int) -> str | None:
        """Why a row of ``num_tokens`` cannot go back to ``kept_tokens``; None where it can."""
        if kept_tokens < num_tokens and num_tokens > self.ring_tokens:
            return f"tokens before them have left the sliding window of {self.ring_tokens + 1}"
        return None

    def select(self, indices: Tensor) -> None:
        """Rows in another order, or repeated, int64 [B], in the same memory."""
        for tensor in self.tensors:
            tensor.copy_(tensor.index_select(0, indices))

    def _slots(self, first: int, stop: int) -> Tensor:
        """int64: where the tokens ``first`` ... ``stop`` - 1 of a row lie."""
        return torch.arange(first, stop, device=self.ring["k"].device) % self.ring_tokens
