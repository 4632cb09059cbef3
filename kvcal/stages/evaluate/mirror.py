"""A PlanCache that decodes every packed page once: for long generations on machines where decoding dominates.

PlanCache reads back all of its pages at every step; with a small model on a CPU that is most of the time. Pages are
written once and never change, so decoding them again gives the same values: a MirroredCache keeps them, dense, in
the dtype that the model computes in, and only decodes pages that are new. What the model attends to is the same bit
for bit: the packed pages are still what is written, every quantized value still comes out of them, and
:meth:`MirroredCache.verify` compares the whole mirror with a fresh read of the packed cache.

It saves time and not memory, so it serves evaluation alone; ``nbytes`` still counts the packed cache.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from kvcal.cache.paged_layer import PagedLayer
from kvcal.cache.plan_cache import PlanCache
from kvcal.errors import ArtifactError
from kvcal.plan.format import SIDES, Side
from kvcal.plan.layer import LayerPlan
from kvcal.store.paged_tensor import PagedTensor
from kvcal.store.plan_state import PlanState
from kvcal.store.rows import Block, Rows

# Columns that the mirror grows by: each growth copies it.
GROWTH = 256


class MirroredLayer(PagedLayer):
    """A PagedLayer with a dense copy [B, N, >= columns, D] of what it would read back, a side each.

    ``stale`` lists the rows whose copy is behind, since a page was written. They are read before the next update and
    not at once: the update that writes a page returns its tokens unquantized.
    """

    def __init__(self, plan: LayerPlan, state: PlanState) -> None:
        super().__init__(plan, state)
        self.dense: dict[Side, Tensor] = {}
        self.stale: list[tuple[Side, PagedTensor, Block]] = []

    def _whole(self, side: Side, new: Tensor, dtype: torch.dtype, rows: Rows) -> Tensor:
        self._refresh(side, rows)
        stop = self.columns + new.shape[2]
        dense = self._with_room(side, new.to(dtype), stop)
        if self.columns >= rows.width:
            dense[:, :, self.columns : stop] = new
        else:
            for block in rows.blocks:
                for a, b in rows.intervals(block, self.columns, stop):
                    dense[block.rows, :, a:b] = new[block.rows, :, a - self.columns : b - self.columns]
        return dense[:, :, :stop]

    def _store_side(self, side: Side, new: Tensor, rows: Rows) -> None:
        before = [(list(paged.num_pages), paged.num_bits) for paged in self.sides[side]]
        super()._store_side(side, new, rows)
        for (paged, (pages, bits)), block in itertools.product(zip(self.sides[side], before, strict=True), rows.blocks):
            if paged.num_pages[block.rows] != pages[block.rows] or paged.num_bits != bits:
                self.stale.append((side, paged, block))

    def _with_room(self, side: Side, states: Tensor, columns: int) -> Tensor:
        """The side's dense copy, grown if it has fewer ``columns``; new columns are zero, as padding must be."""
        batch, heads, _, dim = states.shape
        old = self.dense.get(side)
        if old is None or old.shape[2] < columns:
            grown = states.new_zeros(batch, heads, -(-columns // GROWTH) * GROWTH, dim)
            if old is not None:
                grown[:, :, : self.columns] = old[:, :, : self.columns]
            self.dense[side] = grown
        return self.dense[side]

    def _refresh(self, side: Side, rows: Rows) -> None:
        """Bring the stale rows of a side up to date."""
        for _, paged, block in [entry for entry in self.stale if entry[0] == side]:
            self._read_block(
                paged, block, rows, paged.decode(paged.spans(block.rows), self.dense[side].dtype), self.dense[side]
            )
        self.stale = [entry for entry in self.stale if entry[0] != side]

    def difference(self, side: Side) -> float:
        """Largest difference between the dense copy and a fresh read of the packed cache; NaN where one has NaN."""
        rows = self.padding.rows
        if rows is None or not self.is_initialized:
            return 0.0
        self._refresh(side, rows)
        dense = self.dense[side][:, :, : self.columns]
        fresh = self._read_side(side, rows, 0, dense.dtype)
        return float((dense - fresh).abs().max())

    def crop(self, tokens_to_remove: int) -> None:
        """As PagedLayer's; a page that was cut is read again."""
        super().crop(tokens_to_remove)
        rows = self.padding.rows
        if rows is not None and self.is_initialized:
            self.stale = [
                (side, paged, block)
                for side in SIDES
                for paged, block in itertools.product(self.sides[side], rows.blocks)
            ]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """As PagedLayer's. The cache has selected the shared padding already, so every row is read again."""
        super().reorder_cache(beam_idx)
        self.dense = {side: dense[beam_idx.to(dense.device)] for side, dense in self.dense.items()}
        rows = self.padding.rows
        if self.stale and rows is not None:
            self.stale = [
                (side, paged, block)
                for side in {entry[0] for entry in self.stale}
                for paged, block in itertools.product(self.sides[side], rows.blocks)
            ]

    def reset(self) -> None:
        super().reset()
        self.dense, self.stale = {}, []


class MirroredCache(PlanCache):
    """See the module's docstring; built and used like a PlanCache."""

    def _empty_layers(self) -> list[Any]:
        return [
            MirroredLayer(layer.plan, layer.state) if isinstance(layer, PagedLayer) else layer
            for layer in super()._empty_layers()
        ]

    @torch.inference_mode()
    def verify(self) -> None:
        """Compare the mirror with the packed cache, every value of every layer.

        Raises:
            ArtifactError: they differ, so the tokens generated were not those of the packed cache.
        """
        for layer in self.layers:
            if isinstance(layer, MirroredLayer):
                for side in SIDES:
                    difference = layer.difference(side)
                    if difference != 0:
                        raise ArtifactError(
                            f"layer {layer.plan.geometry.index}: the decoded {side} differ from the packed cache by "
                            f"{difference:g}, expected 0",
                            hint="the packed cache changed under the evaluation: please report this",
                        )
