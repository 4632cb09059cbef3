"""A dense copy of what a layer would read back: every page is decoded once (``PlanCache(keep_decoded=True)``).

A dynamic cache reads all of its pages at every step; with a small model on a CPU that is most of the time. Pages never
change once they are packed, so decoding them again gives the same values: the copy keeps them, in the dtype that the
model computes in. What the model attends to is the same bit for bit: the packed pages are still what is written, and
every quantized value still comes out of them (``PlanCache.verify_decoded`` compares). It saves time and not memory, so
it serves evaluation; ``PlanCache.nbytes`` counts the packed cache alone.
"""

from __future__ import annotations

from torch import Tensor

from kvcal.plan.page_format import Side
from kvcal.store.padding import Rows
from kvcal.store.pages_and_ring import PagedTensor

# Columns that the copy grows by: each growth copies it.
GROWTH = 256


class DecodedCopy:
    """Of one layer. ``dense`` [B, N, >= columns, D] of a side; ``pages``: of every sequence that are in it, of a
    side, and at how many bits."""

    def __init__(self) -> None:
        self.dense: dict[Side, Tensor] = {}
        self.pages: dict[Side, tuple[list[int], int]] = {}

    def whole(self, part: PagedTensor, side: Side, new: Tensor, rows: Rows, columns: int) -> Tensor:
        """The past and new [B, N, T, D] together: a view of the copy, valid until the next call."""
        stop = columns + new.shape[2]
        is_new = self._grow(side, new, stop, columns)
        dense = self.dense[side]
        self._refresh(part, side, rows, columns, dense, is_new)
        if columns >= rows.width:
            dense[:, :, columns:stop] = new
            return dense[:, :, :stop]
        for block in rows.blocks:
            for a, b in rows.intervals(block, columns, stop):
                dense[block.rows, :, a:b] = new[block.rows, :, a - columns : b - columns]
        return dense[:, :, :stop]

    def _grow(self, side: Side, states: Tensor, columns: int, held: int) -> bool:
        """Room for ``columns``, of which ``held`` are kept; new ones are zero, as padding must be. Whether there was
        no copy before."""
        old = self.dense.get(side)
        if old is None or old.shape[2] < columns:
            grown = states.new_zeros(*states.shape[:2], -(-columns // GROWTH) * GROWTH, states.shape[3])
            if old is not None:
                grown[:, :, :held] = old[:, :, :held]
            self.dense[side] = grown
        return old is None

    def _refresh(self, part: PagedTensor, side: Side, rows: Rows, columns: int, dense: Tensor, is_new: bool) -> None:
        """Take in the pages that have come to be read since; all, and what is not in pages, where the copy is new or
        pages have other bits."""
        counts = [part.format.pages_read(length) for length in rows.lengths(columns)]
        before, bits = self.pages.get(side, ([0] * rows.batch, part.num_bits))
        self.pages[side] = counts, part.num_bits
        if is_new and not columns:
            return
        for block in rows.blocks:
            first, held = block.rows.start, rows.num_tokens(block, columns)
            if not is_new and bits == part.num_bits and before[first] == counts[first]:
                continue
            spans = part.read_spans(block.rows, held)
            tokens = dense.new_empty(block.rows.stop - first, part.codec.num_heads, held, dense.shape[3])
            part.read(block.rows, held, part.decode(spans, dense.dtype), tokens)
            for start, stop in rows.intervals(block, 0, columns):
                dense[block.rows, :, start:stop] = tokens[:, :, : stop - start]
                tokens = tokens[:, :, stop - start :]

    def difference(self, part: PagedTensor, side: Side, rows: Rows, fresh: Tensor) -> float:
        """Largest difference between the copy and a fresh read [B, N, S, D] of the packed cache; NaN where one has
        NaN."""
        nothing = fresh[:, :, :0]
        dense = self.whole(part, side, nothing, rows, fresh.shape[2])
        return float((dense - fresh).abs().max()) if fresh.numel() else 0.0
