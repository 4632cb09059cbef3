"""A layer of a dynamic cache with a dense copy of what it would read back, in the model's dtype.

A dynamic cache reads all of its pages at every step. A token never changes once it is packed, so the copy
takes it from its page once, when it comes to be read there. What the model attends to is the same bit for bit
(``verify`` compares); products of what leaves a basis round by the number of tokens at once: there, it is the
same to the last bits of fp32. It saves time and not memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcal.cache.paged_layer import PagedLayer
from kvcal.errors import ArtifactError
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import Side
from kvcal.store.layer_store import NewTokens, Wanted
from kvcal.store.padding import Rows
from kvcal.store.state import PlanState

# Columns that a copy grows by: each growth copies it.
GROWTH = 256


class DecodedLayer(PagedLayer):
    """``dense`` [B, N, >= columns, D] of a side; ``paged``: how many tokens of every sequence it has from pages,
    of a side, and of how many bits these are."""

    def __init__(self, plan: LayerPlan, state: PlanState) -> None:
        super().__init__(plan, state)
        self.dense: dict[Side, Tensor] = {}
        self.paged: dict[Side, tuple[list[int], int]] = {}

    def forget(self) -> None:
        """Decode all pages anew with the next update."""
        self.dense, self.paged = {}, {}

    def is_served(self, device: torch.device) -> bool:
        """Every token is read from the copy."""
        return False

    def whole(self, side: Side, states: Tensor, dtype: torch.dtype, new: NewTokens) -> Tensor:
        """As the parent's: a view of the copy, valid until the next call."""
        return self._copy(side, self.sides[side].kept(states, dtype), new.rows, new.columns)

    def _copy(self, side: Side, new: Tensor, rows: Rows, columns: int) -> Tensor:
        """The past, and new [B, N, T, D] after it."""
        stop = columns + new.shape[2]
        is_new = self._grow(side, new, stop, columns)
        dense = self.dense[side]
        self._refresh(side, rows, columns, is_new)
        if columns >= rows.width:
            dense[:, :, columns:stop] = new
            return dense[:, :, :stop]
        for block in rows.blocks:
            for a, b in rows.intervals(block, columns, stop):
                dense[block.rows, :, a:b] = new[block.rows, :, a - columns : b - columns]
        return dense[:, :, :stop]

    def _grow(self, side: Side, states: Tensor, columns: int, held: int) -> bool:
        """Room for ``columns``, of which ``held`` are kept; new ones are zero, as padding must be. Whether
        there was no copy before."""
        old = self.dense.get(side)
        if old is None or old.shape[2] < columns:
            grown = states.new_zeros(*states.shape[:2], -(-columns // GROWTH) * GROWTH, states.shape[3])
            if old is not None:
                grown[:, :, :held] = old[:, :, :held]
            self.dense[side] = grown
        return old is None

    def _refresh(self, side: Side, rows: Rows, columns: int, is_new: bool) -> None:
        """Take in the tokens that have come to be read from pages since; all, and what is not in pages, where the
        copy is new or pages have other bits."""
        part, lengths = self.sides[side], rows.lengths(columns)
        counts = [part.format.tokens_read(length) for length in lengths]
        before, bits = self.paged.get(side, ([0] * rows.batch, part.num_bits))
        self.paged[side] = counts, part.num_bits
        is_stale = is_new or bits != part.num_bits
        wanted = []
        for block in rows.blocks:
            row = block.rows.start
            tokens = range(lengths[row]) if is_stale else range(before[row], counts[row])
            if tokens:
                wanted.append(Wanted(block, tokens, counts[row]))
        if wanted:
            self.store.read_tokens(side, rows, wanted, self.dense[side])

    def verify(self) -> None:
        """ArtifactError where the copy is not what the pages read as now; nothing is compared where nothing
        was read since a crop."""
        rows = self.padding.rows
        if rows is None:
            return
        for side, dense in list(self.dense.items()):
            fresh = self.store.read(side, rows, self.columns, 0, dense.dtype)
            copied = self._copy(side, fresh[:, :, :0], rows, self.columns)
            difference = float((copied - fresh).abs().max()) if fresh.numel() else 0.0  # NaN where one has NaN
            # Products with a basis round by the number of tokens that are read at once.
            allowed = 1e-6 * float(fresh.abs().max()) if self.plan.basis(side) else 0.0
            if not difference <= allowed:
                raise ArtifactError(
                    f"layer {self.plan.geometry.index}: the decoded {side} differ from the packed cache by "
                    f"{difference:g}, expected {allowed:g}",
                    hint="the packed cache changed under the evaluation: please report this",
                )

    def crop(self, tokens_to_remove: int) -> None:
        held = self.columns
        super().crop(tokens_to_remove)
        if self.columns != held:
            self.forget()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self.forget()

    def reset(self) -> None:
        super().reset()
        self.forget()
