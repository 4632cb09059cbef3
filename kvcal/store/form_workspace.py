"""Buffers that a static cache allocates once for its steps, of the sizes that ``kvcal.store.workspace`` counts."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES, Side
from kvcal.plan.plan import Plan
from kvcal.store.workspace import form_bytes, raw_record_bytes, step_workspace


class FormWorkspace:
    """``tokens`` and ``kept`` of a static cache, for all layers. Empty for a plan without stored forms.
    Zeroed, so that nothing that is computed from a page that was never written is NaN."""

    def __init__(self, plan: Plan, batch: int, max_tokens: int, device: torch.device) -> None:
        self._batch, self._max_tokens, self._dtype = batch, max_tokens, plan.cache_dtype
        sizes = step_workspace(plan.layers, plan.cache_dtype, batch, max_tokens)
        self._tokens = {side: torch.zeros(sizes.tokens[side], dtype=torch.uint8, device=device) for side in SIDES}
        self._slots = [torch.zeros(slot, dtype=torch.float32, device=device) for slot in sizes.slots]
        self._kept = {key: self._slots[number] for key, number in sizes.slot_of.items()}

    @property
    def nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in (*self._tokens.values(), *self._slots))

    def pages(self, layer: LayerPlan, side: Side) -> Tensor:
        """uint8 [slots, N, record]: 16-bit pages that the kernels meet, of a side in a stored form."""
        size = form_bytes(layer, side, self._dtype, self._batch, self._max_tokens)
        record = raw_record_bytes(layer, side, self._dtype)
        return self._tokens[side][:size].view(-1, layer.attention.num_kv_heads, record)

    def kept(self, index: int, side: Side) -> Tensor | None:
        """fp32 [B, pages, 128, N, D]: pages of layer ``index`` as predictors read them; None where none does."""
        return self._kept.get((index, side))
