"""The memory of one full-attention layer: the parts that hold its keys and values, and its steps by the kernels.

A dynamic cache reads and writes parts through the host (``read``, ``write``), a static one does so with prompts. One
token for every sequence of a static cache, or a few where drafts are verified, is a step (``attend``): it stores them
and attends to all tokens, by two operators a head range (``HeadStep``); between them, what the kernels cannot read as
it is stored is reconstructed (kvcal.store.dequantize). A step waits for nothing and knows no lengths on the host, so
that it may be captured in a CUDA graph. Nothing here knows of transformers or of who owns the memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES, CacheDtype
from kvcal.kernels import ops
from kvcal.kernels.operands import Memory, PageTransform, Place, QueryStatistic
from kvcal.kernels.variants import HeadRange, Variant, head_ranges, stored_form, variant_of
from kvcal.pages.basis import Basis
from kvcal.pages.codec import PageCodec
from kvcal.pages.record_layout import RAW_BITS
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES, Format, Side, num_pages
from kvcal.plan.tensors import layer_transforms
from kvcal.store.dequantize import StepForm, dequantized_tokens, step_forms
from kvcal.store.padding import Block, Rows
from kvcal.store.pages_and_ring import KernelCodec, PagedTensor
from kvcal.store.pool import Pool, TablePool, fixed
from kvcal.store.prediction import Prediction
from kvcal.store.shrinking import RegionPool
from kvcal.store.state import PlanState, StepState


@dataclass(frozen=True)
class HeadStep:
    """KV heads ``heads`` of a layer; ``queries`` are theirs. ``variants``: one, or where pages shrink, one for each
    pair of bits that keys and values come to have; ``regions``: where those pages lie, else empty. ``with_drafts``: the
    variants of steps of 2, 3, ... tokens."""

    heads: slice
    queries: slice
    state: StepState
    k: Memory
    v: Memory
    statistic: QueryStatistic
    place: Place
    transform: PageTransform
    workspace: Tensor
    variants: tuple[int, ...]
    with_drafts: tuple[int, ...]
    present: Tensor
    regions: tuple[int, ...]
    needs_queries: bool

    def append(self, k_new: Tensor, v_new: Tensor, q: Tensor) -> None:
        """Store one token of every row: k_new, v_new [B, N, D] and queries q [B, N G, D] of all heads of the layer; or
        S tokens, [B, S, N, D] and [B, S, N G, D]."""
        scored = q[..., self.queries, :] if self.needs_queries else self.state.nothing
        ops.append(
            k_new[..., self.heads, :], v_new[..., self.heads, :], scored, list(self.k), list(self.v),
            list(self.statistic), list(self.place), list(self.transform), self.state.error, self._variants(k_new),
            self.present, list(self.regions),
        )  # fmt: skip

    def decode(self, q: Tensor, s_aux: Tensor | None, scale: float, softcap: float) -> Tensor:
        """Attention [B, n G, D] of these heads' queries, of q [B, N G, D] and s_aux [N G] of all heads; of S tokens
        [B, S, n G, D] and [B, S, N G, D]."""
        sinks = self.state.nothing if s_aux is None else s_aux[self.queries]
        attended: Tensor = ops.decode(
            q[..., self.queries, :], list(self.k), list(self.v), list(self.place), list(self.transform), sinks,
            self.workspace, scale, softcap, self._variants(q), self.present, list(self.regions),
        )  # fmt: skip
        return attended

    def _variants(self, x: Tensor) -> list[int]:
        """Of a step of x [B, .., D], or of x [B, S, .., D]."""
        return list(self.variants) if x.dim() == 3 else [self.with_drafts[x.shape[1] - 2]]


def phased_variants(variant: Variant, pools: Sequence[RegionPool]) -> list[Variant]:
    """One for each pair of bits that pages in these regions, of keys and of values, come to have."""
    phases = pools[0].phases
    return [with_bits(variant, *bits) for bits in phases.widths([pool.number for pool in pools])]


def with_bits(variant: Variant, k_bits: int, v_bits: int) -> Variant:
    """The variant for pages of these bits. Those of 16 hold K as the model made them."""
    is_plain = k_bits == RAW_BITS
    return replace(
        variant,
        k_bits=k_bits,
        v_bits=v_bits,
        rescale=variant.rescale and not is_plain,
        offset=variant.offset and not is_plain,
    )


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
    """See the module's docstring. ``sides``: the parts; ``static``: the state of a static cache; ``bases`` of keys and
    of values, None where a side has none."""

    def __init__(
        self, plan: LayerPlan, state: PlanState, static: StepState | None, batch: int, device: torch.device
    ) -> None:
        self.plan, self.static = plan, static
        self.cache_dtype: CacheDtype = state.plan.cache_dtype
        self.prediction = Prediction(plan, state)
        self.sides: dict[Side, list[PagedTensor]] = {"k": [], "v": []}
        tensors, group = state.tensors_on(device), plan.attention.group_heads
        for side in SIDES:
            for fmt, heads in parts_of(plan, side, (plan.geometry.index, side) in state.sources):
                codec = PageCodec.of_layer(plan, side, fmt, heads, self.cache_dtype, tensors)
                pool, kernels, predict = self._pool(codec), self._kernels(codec), self.prediction.of(side)
                self.sides[side].append(
                    PagedTensor(codec, group, batch, device, pool, predict, kernels, state.lookahead)
                )
        self.prediction.attach(self.sides)
        index = plan.geometry.index
        self.bases = [Basis.of(tensors, f"layers.{index}.{side}") if plan.basis(side) else None for side in SIDES]
        self.forms: list[StepForm] = [] if static is None else step_forms(plan, static, self.sides)
        self.steps = [] if static is None else [self._head_step(pair, static) for pair in head_ranges(plan)]

    @property
    def parts(self) -> list[PagedTensor]:
        return [*self.sides["k"], *self.sides["v"]]

    # ---- through the host

    def set_bits(self, columns: int) -> None:
        """Pages of a dynamic cache to the bits of so many columns."""
        for part in self.parts:
            part.set_bits(part.format.bits_at(columns))

    def resize(self, lengths: list[int]) -> None:
        """Room for the pages of sequences of these lengths."""
        for part in self.parts:
            part.pool.resize([num_pages(length) for length in lengths])

    def read(self, side: Side, rows: Rows, columns: int, new: int, dtype: torch.dtype) -> Tensor:
        """[B, N, S + new, D]: the past at its S columns, zero at padding; the last columns are left to the caller."""
        padded = any(block.start or block.stop < rows.width for block in rows.blocks)
        allocate = torch.zeros if padded else torch.empty
        shape = (rows.batch, self.plan.attention.num_kv_heads, columns + new, self.plan.head_dim(side))
        out = allocate(*shape, dtype=dtype, device=self.sides[side][0].ring.device)
        for part in self.sides[side]:
            spans = [part.read_spans(block.rows, rows.num_tokens(block, columns)) for block in rows.blocks]
            decoded = part.decode([span for of_block in spans for span in of_block], dtype)
            counts = [sum(stop for _, _, stop in of_block) for of_block in spans]
            for block, pages in zip(rows.blocks, decoded.split(counts), strict=True):
                _read_block(part, block, rows, columns, pages, out)
        return out

    def write(self, new: NewTokens, query_sum: Tensor | None) -> None:
        """Store new tokens behind what every sequence holds. ``query_sum`` [B, N, D] fp32: the sum of their |q|, where
        channels are chosen by queries. Keys first: values may be predicted from them."""
        for part in self.sides["k"]:
            if part.format.needs_queries:
                assert query_sum is not None
                part.observe(query_sum[:, part.heads])
        self._write_side("k", new.keys, new)
        self._write_side("v", new.values, new)
        self.prediction.release()

    def _write_side(self, side: Side, states: Tensor, new: NewTokens) -> None:
        rows, columns, parts = new.rows, new.columns, self.sides[side]
        if states.shape[2] == 1 and columns >= rows.width:
            lengths = rows.lengths(columns)
            parts = [part for part in parts if not part.write_step(lengths, states[:, part.heads])]
        counts = [num_pages(length) for length in rows.lengths(new.stop)] if parts else []
        for part in parts:
            part.pool.resize(counts)
        for part, block in itertools.product(parts, rows.blocks):
            intervals = rows.intervals(block, columns, new.stop)
            if intervals:
                chunks = [states[block.rows, part.heads, a - columns : b - columns] for a, b in intervals]
                tokens = chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=2)
                self.prediction.written(side, part.write(block.rows, rows.num_tokens(block, columns), tokens))

    def crop(self, rows: Rows, held: int, columns: int) -> None:
        """Keep the first ``columns`` of the ``held`` columns."""
        for side in reversed(SIDES):  # predicted values are decoded with the help of the keys
            for part, block in itertools.product(self.sides[side], rows.blocks):
                part.crop(block.rows, rows.num_tokens(block, held), rows.num_tokens(block, columns))
        self.resize(rows.lengths(columns))
        if self.static is None:
            self.set_bits(columns)
        self.prediction.forget()

    def select(self, indices: list[int]) -> None:
        """Keep, repeat or reorder sequences."""
        for part in self.parts:
            part.select(indices)
        self.prediction.forget()

    # ---- steps of a static cache

    def attend(
        self, q: Tensor, k_new: Tensor, v_new: Tensor, s_aux: Tensor | None, scale: float, softcap: float
    ) -> Tensor:
        """Store k_new, v_new [B, N, D], and attend from q [B, N G, D] to all tokens: [B, N G, D] in q's dtype.
        Of S tokens: [B, S, N, D] and [B, S, N G, D]. ``softcap`` 0 for none."""
        (k_basis, v_basis), dtype = self.bases, CACHE_DTYPES[self.cache_dtype]
        if k_basis is not None:
            k_new, q = k_basis.enter(k_new.to(dtype)), k_basis.turned_queries(q)
        v_new = v_new if v_basis is None else v_basis.enter(v_new.to(dtype))
        for step in self.steps:
            step.append(k_new, v_new, q)
        if self.forms:
            self._reconstruct()
        parts = [step.decode(q, s_aux, scale, softcap) for step in self.steps]
        attended = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
        return attended if v_basis is None else v_basis.outputs(attended)

    @torch.compiler.disable
    def _reconstruct(self) -> None:
        """Not for torch.compile: products and sums that it would fuse round otherwise, and records must be the same
        bytes everywhere."""
        for form in self.forms:
            form.step()

    # ---- how the memory is made

    def _pool(self, codec: PageCodec) -> Pool | None:
        """The pool of a part of a static cache; None for a pool that grows."""
        if self.static is None:
            return None
        if self.static.phases is not None:
            return RegionPool(self.static.phases, self.plan.geometry.index, codec.heads.start, codec.side)
        return TablePool(self.static.table, (codec.records_per_page, codec.record_bytes(codec.format.bits_at(0))))

    def _kernels(self, codec: PageCodec) -> KernelCodec | None:
        """The kernels that pack prompts of a static cache, where they read pages as they are stored."""
        if self.static is None or stored_form(self.plan, codec.side, codec.format) is not None:
            return None
        pairs = [pair for pair in head_ranges(self.plan) if pair.heads == codec.heads]
        if not pairs:
            return None
        variant, error = variant_of(self.plan, pairs[0], self.cache_dtype), self.static.error
        transform = self._transform(variant, codec.heads, self.static)
        if codec.side == "v":
            transform = transform.of_values
        if self.static.phases is None:
            return KernelCodec({(): variant}, [], transform, error)
        pools = self._regions(pairs[0], self.static)
        by_bits = {tuple(v.num_bits(side) for side in SIDES): v for v in phased_variants(variant, pools)}
        return KernelCodec(by_bits, pools, transform, error)

    def _regions(self, pair: HeadRange, static: StepState) -> list[RegionPool]:
        assert static.phases is not None
        return [RegionPool(static.phases, self.plan.geometry.index, pair.heads.start, side) for side in SIDES]

    def _transform(self, variant: Variant, heads: slice, static: StepState) -> PageTransform:
        of_heads = layer_transforms(static.tensors, self.plan.geometry.index, heads)
        return PageTransform.of_variant(variant, of_heads, static.nothing)

    def _head_step(self, pair: HeadRange, static: StepState) -> HeadStep:
        lookahead, group = static.shared.lookahead, self.plan.attention.group_heads
        variant = replace(variant_of(self.plan, pair, self.cache_dtype), lookahead=lookahead)
        variants, present, regions = [variant], static.nothing, tuple[int, ...]()
        if static.phases is not None:
            pools = self._regions(pair, static)
            variants, present = phased_variants(variant, pools), static.phases.present
            regions = tuple(pool.number for pool in pools)
        k_part = self._part_of(pair, "k")
        return HeadStep(
            pair.heads,
            slice(pair.heads.start * group, pair.heads.stop * group),
            static,
            self._memory(pair, "k", static),
            self._memory(pair, "v", static),
            QueryStatistic(k_part.query_sum, k_part.query_since),
            static.place(pair.k, pair.v),
            self._transform(variant, pair.heads, static),
            static.workspace(pair.num_heads, group * (1 + lookahead), variant.head_dim),
            tuple(v.number for v in variants),
            tuple(replace(variant, query_tokens=2 + drafts).number for drafts in range(lookahead)),
            present,
            regions,
            pair.k.needs_queries,
        )

    def _memory(self, pair: HeadRange, side: Side, static: StepState) -> Memory:
        part = self._part_of(pair, side)
        heads = slice(pair.heads.start - part.heads.start, pair.heads.stop - part.heads.start)
        if static.phases is not None:
            pages = static.phases.pages
        elif stored_form(self.plan, side, pair.format(side)) is not None:
            pages = dequantized_tokens(static, self.plan, pair.heads, side).flatten(2).view(torch.uint8)
        else:  # a part of these heads alone, or of all heads, which something is predicted from
            pages = part.pool.records[:, heads]
        return Memory(*map(fixed, (part.sinks[:, heads], part.ring[:, heads], pages)))

    def _part_of(self, pair: HeadRange, side: Side) -> PagedTensor:
        (part,) = [part for part in self.sides[side] if part.heads.start <= pair.heads.start < part.heads.stop]
        return part


def parts_of(plan: LayerPlan, side: Side, is_source: bool) -> list[tuple[Format, slice]]:
    """Formats and heads of the parts: the head ranges, or all heads at once where a lattice or a prediction wants them
    in a row."""
    is_lattice = any(fmt.lattice_dim is not None for fmt in plan.formats(side))
    if is_lattice or is_source or plan.predictor(side) is not None:
        return list(plan.runs(side))
    return [(pair.format(side), pair.heads) for pair in head_ranges(plan)]


def _read_block(part: PagedTensor, block: Block, rows: Rows, columns: int, decoded: Tensor, out: Tensor) -> None:
    """Write the past of one block's rows to its columns of out [B, N, columns, D]; ``decoded``: their pages."""
    view = out[block.rows, part.heads]
    intervals = rows.intervals(block, 0, columns)
    if len(intervals) == 1:
        (start, stop) = intervals[0]
        part.read(block.rows, stop - start, decoded, view[:, :, start:stop])
    elif intervals:
        tokens = view.new_empty(*view.shape[:2], rows.num_tokens(block, columns), view.shape[3])
        part.read(block.rows, tokens.shape[2], decoded, tokens)
        for start, stop in intervals:
            view[:, :, start:stop], tokens = tokens[:, :, : stop - start], tokens[:, :, stop - start :]
