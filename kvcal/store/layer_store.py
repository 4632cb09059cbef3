"""The memory of one full-attention layer: the parts that hold its keys and values, and its steps by the
kernels.

A dynamic cache reads and writes parts through the host (``read``, ``write``), a static one does so with
prompts. One token for every sequence of a static cache, or a few where drafts are verified, is a step
(``attend``): it stores them and attends to all tokens, by two operators (``LayerStep``). A step waits for
nothing and knows no lengths on the host, so that it may be captured in a CUDA graph. Nothing here knows of
transformers or of who owns the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvcal.geometry import CacheDtype
from kvcal.kernels.choice import refusals
from kvcal.kernels.operands import Memory, PageTransform, QueryStatistic
from kvcal.kernels.variants import variant_of
from kvcal.pages.codec import PageCodec
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES, Side, num_pages
from kvcal.plan.tensors import layer_transforms
from kvcal.store.padding import Block, Rows
from kvcal.store.pool import Pool, TablePool, fixed
from kvcal.store.prediction import Prediction
from kvcal.store.sinks_ring_pages import PagedTensor
from kvcal.store.state import PlanState, StepState
from kvcal.store.step import KernelCodec, LayerStep
from kvcal.systems.basis.basis import Basis

# Columns that a decoded copy grows by: each growth copies it.
GROWTH = 256


class NewTokens(NamedTuple):
    """Keys and values [B, N, T, D] in the cache's dtype; ``columns`` were fed before them."""

    keys: Tensor
    values: Tensor
    rows: Rows
    columns: int

    @property
    def stop(self) -> int:
        return self.columns + self.keys.shape[2]


class LayerStore:
    """See the module's docstring. ``sides``: the parts; ``static``: the state of a static cache, whose steps
    are ``step``, at ``place``."""

    def __init__(
        self, plan: LayerPlan, state: PlanState, static: StepState | None, batch: int, device: torch.device
    ) -> None:
        self.plan, self.static = plan, static
        self.cache_dtype: CacheDtype = state.plan.cache_dtype
        self.prediction = Prediction(plan, state)
        self.sides: dict[Side, PagedTensor] = {}
        self._variant = replace(variant_of(plan, self.cache_dtype), lookahead=state.lookahead)
        self._tensors, group = state.tensors_on(device), plan.attention.group_heads
        for side in SIDES:
            codec = PageCodec.of_layer(plan, side, self.cache_dtype, self._tensors)
            pool, kernels, predict = self._pool(codec), self._kernels(codec), self.prediction.of(side)
            self.sides[side] = PagedTensor(codec, group, batch, device, pool, predict, kernels, state.lookahead)
        self.prediction.attach(self.sides)
        if static is not None:
            self.step, self.place = self._layer_step(static), static.place(self._variant.k, self._variant.v)

    @property
    def parts(self) -> list[PagedTensor]:
        return list(self.sides.values())

    # ---- through the host

    def set_bits(self, columns: int) -> None:
        for part in self.parts:
            part.set_bits(part.format.bits_at(columns))

    def resize(self, lengths: list[int]) -> None:
        """Room for the pages of sequences of these lengths."""
        for part in self.parts:
            part.pool.resize([num_pages(length) for length in lengths])

    def read(self, side: Side, rows: Rows, columns: int, new: int, dtype: torch.dtype) -> Tensor:
        """[B, N, S + new, D]: the past at its S columns, zero at padding; the last columns are left to the
        caller."""
        padded = any(block.start or block.stop < rows.width for block in rows.blocks)
        allocate = torch.zeros if padded else torch.empty
        shape = (rows.batch, self.plan.attention.num_kv_heads, columns + new, self.plan.head_dim(side))
        part = self.sides[side]
        out = allocate(*shape, dtype=dtype, device=part.ring.device)
        spans = [part.read_spans(block.rows, rows.num_tokens(block, columns)) for block in rows.blocks]
        decoded = part.decode([span for of_block in spans for span in of_block], dtype)
        counts = [sum(stop for _, _, stop in of_block) for of_block in spans]
        for block, pages in zip(rows.blocks, decoded.split(counts), strict=True):
            _read_block(part, block, rows, columns, pages, out)
        return out

    def write(self, new: NewTokens, query_sum: Tensor | None) -> None:
        """Store new tokens after what every sequence holds. ``query_sum`` [B, N, D] fp32: the sum of their
        |q|, where channels are chosen by queries. Keys first: values may be predicted from them."""
        if self.sides["k"].format.needs_queries:
            assert query_sum is not None
            self.sides["k"].observe(query_sum)
        self._write_side("k", new.keys, new)
        self._write_side("v", new.values, new)
        self.prediction.release()

    def _write_side(self, side: Side, states: Tensor, new: NewTokens) -> None:
        rows, columns, part = new.rows, new.columns, self.sides[side]
        if states.shape[2] == 1 and columns >= rows.width and part.write_step(rows.lengths(columns), states):
            return
        part.pool.resize([num_pages(length) for length in rows.lengths(new.stop)])
        for block in rows.blocks:
            intervals = rows.intervals(block, columns, new.stop)
            if intervals:
                chunks = [states[block.rows, :, a - columns : b - columns] for a, b in intervals]
                tokens = chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=2)
                self.prediction.written(side, part.write(block.rows, rows.num_tokens(block, columns), tokens))

    def crop(self, rows: Rows, held: int, columns: int) -> None:
        """Keep the first ``columns`` of the ``held`` columns."""
        for side in reversed(SIDES):  # predicted values are decoded with the help of the keys
            for block in rows.blocks:
                self.sides[side].crop(block.rows, rows.num_tokens(block, held), rows.num_tokens(block, columns))
        self.resize(rows.lengths(columns))
        self.set_bits(columns)
        self.prediction.forget()

    def select(self, indices: list[int]) -> None:
        for part in self.parts:
            part.select(indices)
        self.prediction.forget()

    # ---- steps of a static cache

    def attend(
        self, q: Tensor, k_new: Tensor, v_new: Tensor, s_aux: Tensor | None, scale: float, softcap: float
    ) -> Tensor:
        """Store k_new, v_new [B, N, D], and attend from q [B, N G, D] to all tokens: [B, N G, D] in q's
        dtype. Of S tokens: [B, S, N, D] and [B, S, N G, D]. ``softcap`` 0 for none."""
        queries = self.step.append(q, k_new, v_new, self.place)
        return self.step.attend(queries, self.place, scale, softcap, s_aux, q.dtype)

    # ---- how the memory is made

    def _pool(self, codec: PageCodec) -> Pool | None:
        """The pool of a part of a static cache; None for a pool that grows."""
        if self.static is None:
            return None
        return TablePool(self.static.table, (codec.records_per_page, codec.record_bytes(codec.format.num_bits)))

    def _kernels(self, codec: PageCodec) -> KernelCodec | None:
        """The kernels that pack prompts of a static cache; on a GPU those of a dynamic cache with error
        feedback, too, which torch chooses channel by channel."""
        if self.static is None:
            if codec.feedback is None or not codec.feedback.is_cuda or any(refusals(self.plan, self.cache_dtype)):
                return None
            with torch.inference_mode(False):  # as the memory of a part
                error, nothing = codec.feedback.new_zeros(1, dtype=torch.int32), codec.feedback.new_empty(0)
            transform = self._transform(self._tensors, nothing)
            return KernelCodec(codec.side, transform, error, self._variant, is_awaited=True)
        transform = self._transform(self.static.tensors, self.static.scratch.nothing)
        return KernelCodec(codec.side, transform, self.static.error, self._variant)

    def _transform(self, tensors: Mapping[str, Tensor], nothing: Tensor) -> PageTransform:
        tensors = layer_transforms(tensors, self.plan.geometry.index)
        return PageTransform.of_variant(self._variant, tensors, nothing)

    def _layer_step(self, static: StepState) -> LayerStep:
        geometry, keys, index, scratch = self.plan.attention, self.sides["k"], self.plan.geometry.index, static.scratch
        drafts = range(static.shared.lookahead)
        k_basis, v_basis = (
            Basis.of(static.tensors, f"layers.{index}.{side}") if self.plan.basis(side) else None for side in SIDES
        )
        with_drafts = (replace(self._variant, query_tokens=2 + number).number for number in drafts)
        return LayerStep(
            scratch,
            self._memory("k"),
            self._memory("v"),
            QueryStatistic(keys.query_sum, keys.query_since),
            self._transform(static.tensors, static.scratch.nothing),
            (k_basis, v_basis),
            scratch.workspace(geometry.num_kv_heads, geometry.group_heads * (1 + len(drafts)), geometry.k_head_dim),
            (self._variant.number, *with_drafts),
        )

    def _memory(self, side: Side) -> Memory:
        part = self.sides[side]
        return Memory(*map(fixed, (part.sinks, part.ring, part.pool.records)))


def _read_block(part: PagedTensor, block: Block, rows: Rows, columns: int, decoded: Tensor, out: Tensor) -> None:
    """Write the past of one block's rows to its columns of out [B, N, columns or more, D]; ``decoded``: their
    pages."""
    view = out[block.rows]
    intervals = rows.intervals(block, 0, columns)
    if len(intervals) == 1:
        (start, stop) = intervals[0]
        part.read(block.rows, stop - start, decoded, view[:, :, start:stop])
    elif intervals:
        tokens = view.new_empty(*view.shape[:2], rows.num_tokens(block, columns), view.shape[3])
        part.read(block.rows, tokens.shape[2], decoded, tokens)
        for start, stop in intervals:
            view[:, :, start:stop], tokens = tokens[:, :, : stop - start], tokens[:, :, stop - start :]


class DecodedCopy:
    """A dense copy of what a layer would read back (``PlanCache(keep_decoded=True)``), in the model's dtype.

    A dynamic cache reads all of its pages at every step; with a small model on a CPU that is most of the
    time. Pages never change once they are packed, so the copy decodes every page once. What the model attends
    to is the same bit for bit (``PlanCache.verify_decoded`` compares). It saves time and not memory, so it
    serves evaluation.

    ``dense`` [B, N, >= columns, D] of a side; ``pages``: of every sequence that are in it, of a side, and at
    how many bits."""

    def __init__(self) -> None:
        self.dense: dict[Side, Tensor] = {}
        self.pages: dict[Side, tuple[list[int], int]] = {}

    def whole(self, part: PagedTensor, side: Side, new: Tensor, rows: Rows, columns: int) -> Tensor:
        """The past and new [B, N, T, D] together: a view of the copy, valid until the next call."""
        stop = columns + new.shape[2]
        is_new = self._grow(side, new, stop, columns)
        dense = self.dense[side]
        self._refresh(part, side, rows, columns, dense, is_new)
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

    def _refresh(self, part: PagedTensor, side: Side, rows: Rows, columns: int, dense: Tensor, is_new: bool) -> None:
        """Take in the pages that have come to be read since; all, and what is not in pages, where the copy is
        new or pages have other bits."""
        counts = [part.format.pages_read(length) for length in rows.lengths(columns)]
        before, bits = self.pages.get(side, ([0] * rows.batch, part.num_bits))
        self.pages[side] = counts, part.num_bits
        if is_new and not columns:
            return
        for block in rows.blocks:
            first, held = block.rows.start, rows.num_tokens(block, columns)
            if not is_new and bits == part.num_bits and before[first] == counts[first]:
                continue
            decoded = part.decode(part.read_spans(block.rows, held), dense.dtype)
            _read_block(part, block, rows, columns, decoded, dense)

    def difference(self, part: PagedTensor, side: Side, rows: Rows, fresh: Tensor) -> float:
        """Largest difference between the copy and a fresh read [B, N, S, D] of the packed cache; NaN where
        one has NaN."""
        dense = self.whole(part, side, fresh[:, :, :0], rows, fresh.shape[2])
        return float((dense - fresh).abs().max()) if fresh.numel() else 0.0
