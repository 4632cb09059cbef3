"""Scratch of a static cache whose plan has stored forms (kvcal.runtime.stored_form), allocated once for all layers.

    tokens    the pages of ONE layer as the kernels meet them: 16 bits, in the cache's dtype. Layers follow one another,
              so the largest layer's are room enough.
    kept      what predictors read: a layer's pages before RoPE in fp32, from the time they are reconstructed until
              their last reader has used them. A layer that is predicted from the one before makes two exist at a time;
              a layer that many are predicted from stays until the last of them.
    turns     cosine and sine of every position, where keys are turned by a kernel; layers of the same RoPE share them.

Sizes depend on the plan, the batch and ``max_tokens`` alone. Zeroed, so that nothing that is computed from a page that
was never written is NaN. None of it outlives a forward pass, and none of it is part of the plan's bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcal.formats import RAW, SIDES, Side
from kvcal.kernels.macros import page_layout
from kvcal.kernels.reconstruct import position_turns
from kvcal.kernels.variants import HeadRange, head_ranges, stored_form
from kvcal.layer_plan import LayerPlan
from kvcal.plan import Plan
from kvcal.quantizers.pages import PAGE_TOKENS, RAW_BITS


class FormWorkspace:
    """See the module's docstring. Empty for a plan without stored forms."""

    def __init__(self, plan: Plan, batch: int, max_tokens: int, device: torch.device) -> None:
        self._batch, self._max_tokens, self._dtype = batch, max_tokens, plan.cache_dtype
        layers = [layer for layer in plan.layers if layer.is_paged]
        self._tokens: dict[Side, Tensor] = {}
        for side in SIDES:
            most = max((sum(self._token_bytes(layer, side)) for layer in layers), default=0)
            self._tokens[side] = torch.zeros(most, dtype=torch.uint8, device=device)
        self._kept: dict[tuple[int, Side], Tensor] = {}
        self._slots: list[Tensor] = []
        self._share_slots(layers, device)
        self._turns = _turns(plan, max_tokens, device)

    @property
    def nbytes(self) -> int:
        turns = {tensor.data_ptr(): tensor for tensor in self._turns.values()}
        tensors = (*self._tokens.values(), *self._slots, *turns.values())
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    def pages(self, layer: LayerPlan, pair: HeadRange, side: Side) -> Tensor:
        """uint8 [B, pages, n, record]: 16-bit pages that the kernels meet, of a head range in a stored form."""
        number, sizes = head_ranges(layer).index(pair), self._token_bytes(layer, side)
        start = sum(sizes[:number])
        pages = self._tokens[side][start : start + sizes[number]]
        record = self._record_bytes(layer, side)
        return pages.view(self._batch, pair.format(side).num_pages(self._max_tokens), pair.num_heads, record)

    def kept(self, index: int, side: Side) -> Tensor | None:
        """fp32 [B, pages, 128, N, D]: pages of layer ``index`` as predictors read them; None where none does."""
        return self._kept.get((index, side))

    def turns(self, index: int) -> Tensor | None:
        """fp32 [max_tokens, pairs, 2] of layer ``index``, for ``kvcal::reconstruct``; None where no kernel asks."""
        return self._turns.get(index)

    def _token_bytes(self, layer: LayerPlan, side: Side) -> list[int]:
        """Of every head range."""
        found = []
        for pair in head_ranges(layer):
            fmt = pair.format(side)
            is_form = stored_form(layer, side, fmt) is not None
            records = self._batch * fmt.num_pages(self._max_tokens) * pair.num_heads if is_form else 0
            found.append(records * self._record_bytes(layer, side))
        return found

    def _record_bytes(self, layer: LayerPlan, side: Side) -> int:
        return page_layout(side, RAW, layer.head_dim(side), self._dtype, RAW_BITS).record_bytes

    def _share_slots(self, layers: list[LayerPlan], device: torch.device) -> None:
        """A slot for all pages that something is predicted from; free again behind its last reader."""
        last_reader: dict[tuple[int, Side], int] = {}
        for layer in layers:
            for side in SIDES:
                predictor = layer.predictor(side)
                if predictor is None:
                    continue
                last_reader[predictor.source, side] = layer.geometry.index
                if side == "v":
                    last_reader[layer.geometry.index, "k"] = layer.geometry.index
        busy_until: list[int] = []
        for layer in layers:
            for side in SIDES:
                key = layer.geometry.index, side
                if key not in last_reader:
                    continue
                pages = layer.formats(side)[0].num_pages(self._max_tokens)
                shape = (self._batch, pages, PAGE_TOKENS, layer.attention.num_kv_heads, layer.head_dim(side))
                free = [
                    number
                    for number, (slot, until) in enumerate(zip(self._slots, busy_until, strict=True))
                    if until < key[0] and slot.shape == shape
                ]
                if not free:
                    self._slots.append(torch.zeros(shape, dtype=torch.float32, device=device))
                    busy_until.append(-1)
                    free = [len(self._slots) - 1]
                self._kept[key] = self._slots[free[0]]
                busy_until[free[0]] = last_reader[key]


def _turns(plan: Plan, max_tokens: int, device: torch.device) -> dict[int, Tensor]:
    """By the index of every layer with a rotary table; empty on a CPU, where torch computes the angles as it goes."""
    found: dict[int, Tensor] = {}
    by_table: dict[bytes, Tensor] = {}
    for layer in plan.layers if device.type == "cuda" else ():
        rotary = plan.tensors.get(f"layers.{layer.geometry.index}.rotary")
        if rotary is not None:
            table = rotary.cpu().contiguous().numpy().tobytes()
            if table not in by_table:
                by_table[table] = position_turns(rotary.to(device), max_tokens)
            found[layer.geometry.index] = by_table[table]
    return found
