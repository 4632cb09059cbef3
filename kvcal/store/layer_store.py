"""The memory of one full-attention layer: the parts that hold its keys and values, and its steps by the
kernels.

Prompts are read and written through the host (``read``, ``write``). One token for every sequence, or a few
or several at a time, is a step: it stores them and attends to all tokens, by the operators of ``step``. It
waits for nothing. That of a static cache knows no lengths on the host either, so that it
may be captured in a CUDA graph. Nothing here knows of transformers or of who owns the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from kvcal.plan.page_format import SIDES, Side
from kvcal.plan.tensors import layer_transforms
from kvcal.store.growing_steps import GrowingSteps
from kvcal.store.padding import Interval, Rows
from kvcal.store.paged_tensor import PagedTensor, spans_of
from kvcal.store.pool import Span
from kvcal.store.prediction import Prediction
from kvcal.store.state import PlanState, StepState
from kvcal.store.step import KernelCodec, LayerStep
from kvcal.store.unpacked import Unpacked
from kvcal.systems.basis.basis import Basis


class NewTokens(NamedTuple):
    """Keys and values [B, N, T, D] in the cache's dtype; ``columns`` were fed before them."""

    keys: Tensor
    values: Tensor
    rows: Rows
    columns: int

    @property
    def stop(self) -> int:
        return self.columns + self.keys.shape[2]


class Wanted(NamedTuple):
    """Tokens of each of consecutive rows to read; the first ``paged`` of a sequence come from pages, the others from
    the ring. ``places``: the columns that they are written to."""

    rows: slice
    tokens: range
    paged: int
    places: list[Interval]

    @property
    def spans(self) -> list[Span]:
        """The pages that they come from."""
        return spans_of(self.rows, range(self.tokens.start, min(self.tokens.stop, self.paged)))


class LayerStore:
    """See the module's docstring. ``sides``: the parts; ``steps``: of the cache, static or dynamic."""

    def __init__(self, plan: LayerPlan, state: PlanState, steps: StepState | GrowingSteps) -> None:
        self.plan, self.steps = plan, steps
        self.cache_dtype: CacheDtype = state.plan.cache_dtype
        self.prediction = Prediction(plan, state)
        self.sides: dict[Side, PagedTensor] = {}
        self._step: LayerStep | None = None
        self._variant = replace(variant_of(plan, self.cache_dtype), step_tokens=state.step_tokens)
        self._tensors, group = state.tensors_on(steps.device), plan.attention.group_heads
        for side in SIDES:
            codec = PageCodec.of_layer(plan, side, self.cache_dtype, self._tensors)
            pool = steps.pool(codec.record, codec.format)
            kernels, predict = self._kernels(side), self.prediction.of(side)
            self.sides[side] = PagedTensor(codec, group, steps.batch, pool, predict, kernels, state.step_tokens)
        self.prediction.attach(self.sides)

    def __getstate__(self) -> dict[str, object]:
        """Without what lies elsewhere, or has another number, in another process."""
        return vars(self) | {"_step": None}

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
            part.resize(lengths)

    def read(self, side: Side, rows: Rows, columns: int, new: int, dtype: torch.dtype) -> Tensor:
        """[B, N, S + new, D]: the past at its S columns, zero at padding; the last columns are left to the
        caller."""
        padded = any(block.start or block.stop < rows.width for block in rows.blocks)
        allocate = torch.zeros if padded else torch.empty
        shape = (rows.batch, self.plan.attention.num_kv_heads, columns + new, self.plan.head_dim(side))
        out = allocate(*shape, dtype=dtype, device=self.steps.device)
        counts, fmt = [rows.num_tokens(block, columns) for block in rows.blocks], self.sides[side].format
        places = [rows.intervals(block, 0, columns) for block in rows.blocks]
        found = zip(rows.blocks, counts, places, strict=True)
        self.read_tokens(side, [Wanted(block.rows, range(n), fmt.tokens_read(n), at) for block, n, at in found], out)
        return out

    def read_tokens(self, side: Side, wanted: Sequence[Wanted], out: Tensor, decoded: Tensor | None = None) -> None:
        """Write tokens of some rows to out [B, N, columns, D]. ``decoded``: the part's ``decode`` of their pages, if
        that is known."""
        part = self.sides[side]
        if decoded is None:
            decoded = part.decode([span for one in wanted for span in one.spans], out.dtype)
        counts = [sum(stop - first for _, first, stop in one.spans) for one in wanted]
        for (rows, tokens, paged, places), pages in zip(wanted, decoded.split(counts), strict=True):
            view = out[rows]
            if len(places) == 1:
                ((start, stop),) = places
                part.read(rows, tokens, paged, pages, view[:, :, start:stop])
            elif places:
                found = view.new_empty(*view.shape[:2], len(tokens), view.shape[3])
                part.read(rows, tokens, paged, pages, found)
                for start, stop in places:
                    view[:, :, start:stop], found = found[:, :, : stop - start], found[:, :, stop - start :]

    def whole(self, side: Side, states: Tensor, dtype: torch.dtype, rows: Rows, columns: int) -> Tensor:
        """[B, N, S + T, D] in ``dtype``: the past, and after it states [B, N, T, D] in the cache's dtype, as
        new tokens are read until they are packed."""
        new = self.sides[side].kept(states, dtype)
        if not columns:
            return new
        whole = self.read(side, rows, columns, new.shape[2], dtype)
        whole[:, :, columns:] = new
        return whole

    def write(self, new: NewTokens, query_sum: Tensor | None, unpacked: list[Unpacked] | None = None) -> None:
        """Store new tokens after what every sequence holds. ``query_sum`` [B, N, D] fp32: the sum of their
        |q|, where channels are chosen by queries. Keys first: values may be predicted from them. ``unpacked``, and
        whether tokens are ``entered``: as of ``PagedTensor.store``."""
        if self.sides["k"].format.needs_queries:
            assert query_sum is not None
            self.sides["k"].observe(query_sum)
        self._write_side("k", new.keys, new, unpacked)
        self._write_side("v", new.values, new, unpacked)
        self.prediction.release()

    def _write_side(self, side: Side, states: Tensor, new: NewTokens, unpacked: list[Unpacked] | None) -> None:
        rows, columns, part = new.rows, new.columns, self.sides[side]
        is_step = states.shape[2] == 1 and columns >= rows.width and unpacked is None
        if is_step and part.store_step(rows.lengths(columns), states):
            return
        part.resize(rows.lengths(new.stop))
        for block in rows.blocks:
            intervals = rows.intervals(block, columns, new.stop)
            if intervals:
                chunks = [states[block.rows, :, a - columns : b - columns] for a, b in intervals]
                tokens = chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=2)
                spans = part.store(block.rows, rows.num_tokens(block, columns), tokens, unpacked)
                self.prediction.written(side, spans)

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

    # ---- steps

    @property
    def step(self) -> LayerStep:
        """The calls of the operators, on the memory where it lies now."""
        step, (k, v) = self._step, (part.memory for part in self.parts)
        is_moved = step is None or step.k.pages is not k.pages or step.k.ring is not k.ring
        if step is None or is_moved or step.scratch is not self.steps.scratch:
            with torch.inference_mode(False):  # or its scratch could not be written to outside of inference mode
                step = self._step = self._layer_step(k, v)
        return step

    def _layer_step(self, k: Memory, v: Memory) -> LayerStep:
        geometry, keys, scratch = self.plan.attention, self.sides["k"], self.steps.scratch
        k_basis, v_basis = (
            Basis.of(self._tensors, f"layers.{geometry.index}.{side}") if self.plan.basis(side) else None
            for side in SIDES
        )
        most = self._variant.step_tokens
        return LayerStep(
            scratch,
            k,
            v,
            QueryStatistic(keys.query_sum, keys.query_since),
            self._transform(),
            (k_basis, v_basis),
            scratch.workspace(geometry.num_kv_heads, geometry.group_heads * most, geometry.k_head_dim),
            tuple(replace(self._variant, query_tokens=1 + more).number for more in range(most)),
        )

    def _kernels(self, side: Side) -> KernelCodec | None:
        """The codec of pages in place of torch: of a dynamic cache on a GPU, where the kernels take the
        layer; of a static one always."""
        is_cuda = self.steps.device.type == "cuda"
        if isinstance(self.steps, GrowingSteps) and (not is_cuda or any(refusals(self.plan, self.cache_dtype))):
            return None
        return KernelCodec(side, self._transform(), self.steps.scratch.error, self._variant, self.steps.is_awaited)

    def _transform(self) -> PageTransform:
        tensors = layer_transforms(self._tensors, self.plan.geometry.index)
        return PageTransform.of_variant(self._variant, tensors, torch.empty(0, device=self.steps.device))
