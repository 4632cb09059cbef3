"""The keys and values of one head range of a layer, in memory that is allocated once.

A head range is a run of KV heads whose formats stay the same (kvcal.kernels.variants). What is stored is what
``PagedTensor`` stores, with pages for ``max_tokens`` in every row, so that the bytes are ``Plan.nbytes`` of full rows.
Where a plan has pages shrink, those of all layers lie in one pool instead (``StagedStore``).

Packing is lazy. A row of n tokens has pages(n - 1) packed pages, where pages(n) are due: a page that its last token
fills is packed at the beginning of the next update, just before it is read for the first time. So a step of the kernels
knows by the length alone what to do, and needs no host. The buffer holds what is not packed, at most window + 128
tokens. A prompt (``read``, ``extend``) is handled by the host, a range of equal rows at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels import ops
from kvcal.kernels.operands import Operands, PageCounts, PageTransform, QueryStatistic, StoredSide
from kvcal.kernels.reference import num_packed, query_means
from kvcal.kernels.variants import HeadRange, Variant, stored_form, variant_of
from kvcal.pages.layout import PAGE_TOKENS
from kvcal.plan.format import SIDES, Side
from kvcal.plan.layer import LayerPlan
from kvcal.store.fixed import fixed
from kvcal.store.static_state import StaticState


@dataclass(frozen=True)
class HeadStore:
    """KV heads ``heads`` of a layer; ``queries`` are theirs. Shapes of the tensors: kvcal.kernels.operands. The pages
    of sides in ``reconstructed`` are 16-bit ones in the cache's workspace: what is stored is a form of its own
    (kvcal.store.stored_form). ``packs_before_prompts``: a page that is due is packed when a prompt comes to the
    cache, not with its new tokens. ``operands`` are these tensors as every step is given them."""

    packs_before_prompts: ClassVar[bool] = False
    heads: slice
    queries: slice
    variant: Variant
    key: str  # the variant's, ready for torch.compile
    state: StaticState
    sinks: Mapping[Side, Tensor]
    buffer: Mapping[Side, Tensor]
    pages: Mapping[Side, Tensor]
    page_at: Mapping[Side, Tensor]
    query_sum: Tensor
    query_since: Tensor
    rescale: Tensor
    offset: Tensor
    workspace: Tensor
    nothing: Tensor
    reconstructed: tuple[Side, ...]
    operands: Operands = field(init=False)

    def __post_init__(self) -> None:
        queries, transform = QueryStatistic(self.query_sum, self.query_since), PageTransform(self.rescale, self.offset)
        counts = PageCounts(self.state.lengths, self.page_at["k"], self.page_at["v"])
        operands = Operands(self._stored("k"), self._stored("v"), queries, counts, transform)
        object.__setattr__(self, "operands", operands)

    @classmethod
    def allocate(cls, plan: LayerPlan, pair: HeadRange, state: StaticState) -> HeadStore:
        """Zeroed, on the device of ``state``, which is allocated."""
        device, batch = state.lengths.device, state.batch
        variant = variant_of(plan, pair, state.shared.plan.cache_dtype)
        shape, dtype = (batch, pair.num_heads), CACHE_DTYPES[variant.cache_dtype]
        sinks, buffer, page_at = {}, {}, {}
        reconstructed = tuple(side for side in SIDES if stored_form(plan, side, pair.format(side)) is not None)
        for side in SIDES:
            fmt = pair.format(side)
            dim = (variant.head_dim,)
            sinks[side] = fixed(torch.zeros(*shape, fmt.num_sink_tokens, *dim, dtype=dtype, device=device))
            buffer[side] = fixed(torch.zeros(*shape, fmt.buffer_tokens, *dim, dtype=dtype, device=device))
            page_at[side] = state.page_at(fmt)
        channels = variant.head_dim if pair.k.needs_queries else 0
        counted = shape if pair.k.needs_queries else (0,)
        tensors, prefix = state.shared.tensors_on(device), f"layers.{plan.geometry.index}"
        nothing = torch.empty(0, dtype=torch.float32, device=device)
        per_group = variant.group_heads
        return cls(
            pair.heads,
            slice(pair.heads.start * per_group, pair.heads.stop * per_group),
            variant,
            variant.key,
            state,
            sinks,
            buffer,
            cls._new_pages(plan, pair, variant, state),
            page_at,
            fixed(torch.zeros(*shape, channels, dtype=torch.float32, device=device)),
            fixed(torch.zeros(*counted, dtype=torch.int32, device=device)),
            tensors[f"{prefix}.k_rescale"][pair.heads] if variant.rescale else nothing,
            tensors[f"{prefix}.k_offset"][pair.heads] if variant.offset else nothing,
            state.workspace(pair.num_heads, per_group, variant.head_dim),
            nothing,
            reconstructed,
        )

    @classmethod
    def _new_pages(
        cls, plan: LayerPlan, pair: HeadRange, variant: Variant, state: StaticState
    ) -> Mapping[Side, Tensor]:
        pages = {}
        for side in SIDES:
            num_pages, record = pair.format(side).num_pages(state.max_tokens), variant.layout(side).record_bytes
            shape = (state.batch, num_pages, pair.num_heads, record)
            if stored_form(plan, side, pair.format(side)) is None:
                pages[side] = fixed(torch.zeros(shape, dtype=torch.uint8, device=state.lengths.device))
            else:
                pages[side] = fixed(state.forms.pages(plan, pair, side))
        return pages

    @property
    def present_key(self) -> str:
        """The key of the variant for the bits that pages have now."""
        return self.key

    @property
    def tensors(self) -> list[Tensor]:
        """What is stored, and counts as the plan's bytes."""
        stored = [*self.sinks.values(), *self.buffer.values()]
        packed = [self.pages[side] for side in SIDES if side not in self.reconstructed]
        return [*stored, *packed, self.query_sum]

    @property
    def control(self) -> list[Tensor]:
        """What a step changes besides, and is no part of the plan's bytes."""
        return [self.query_since]

    @property
    def overwritten(self) -> list[Tensor]:
        """What later tokens overwrite: all but pages, which stay where they are."""
        return [*self.sinks.values(), *self.buffer.values(), self.query_sum]

    def append(self, k_new: Tensor, v_new: Tensor, q: Tensor) -> None:
        """Store one token of every row: k_new, v_new [B, N, D] and queries q [B, N G, D] of all heads of the layer."""
        k, v, queries, counts, transform = self.operands
        ops.append(*self._own(k_new, v_new, q), k, v, queries, counts, transform, self.state.error, self.key)

    def decode(self, q: Tensor, s_aux: Tensor | None, scale: float, softcap: float) -> Tensor:
        """Attention [B, n G, D] of these heads' queries, of q [B, N G, D] and s_aux [N G] of all heads."""
        (k, v, _, counts, transform), q = self.operands, q[:, self.queries]
        s_aux = self.nothing if s_aux is None else s_aux[self.queries]
        return ops.decode(q, k, v, counts, transform, s_aux, self.workspace, scale, softcap, self.key)

    def pack_due(self, side: Side, rows: slice, num_tokens: int) -> None:
        """Pack the page that ``num_tokens`` fill, if there is one, into its place, and leave the buffer as it is:
        packing it again, as the next update does, gives the same bytes."""
        packed = self._num_packed(side, num_tokens)
        if self.variant.format(side).num_pages(num_tokens) > packed:
            self._pack(side, rows, self.buffer[side][rows, :, :PAGE_TOKENS], packed, num_tokens)

    def read(self, side: Side, rows: slice, num_tokens: int, out: Tensor) -> None:
        """Write the tokens of ``rows``, ``num_tokens`` (1 or more) in each, to out [b, n, num_tokens, D], behind
        ``pack_due``."""
        fmt = self.variant.format(side)
        sinks, pages = min(fmt.num_sink_tokens, num_tokens), fmt.num_pages(num_tokens)
        paged, first = sinks + PAGE_TOKENS * pages, PAGE_TOKENS * (pages - self._num_packed(side, num_tokens))
        out[:, :, :sinks] = self.sinks[side][rows, :, :sinks]
        if pages:
            ops.unpack(
                self.pages[side][rows], out[:, :, sinks:paged], 0, *self._transform(side), side, self.present_key
            )
        out[:, :, paged:] = self.buffer[side][rows, :, first : first + num_tokens - paged]

    def extend(self, rows: slice, num_tokens: int, new: Mapping[Side, Tensor], query_sum: Tensor | None) -> None:
        """Store T new tokens [b, N, T, D] (T 1 or more, cache dtype, all heads of the layer) behind the ``num_tokens``
        of each of ``rows``. ``query_sum`` [b, N, D] fp32: the sum of the |q| of these tokens, for query scores."""
        k, total = self.variant.k, num_tokens + new["k"].shape[2]
        if query_sum is not None and k.needs_queries:
            if k.num_pages(num_tokens) > self._num_packed("k", num_tokens):
                self.pack_due("k", rows, num_tokens)
                self._begin_queries(rows, num_tokens)
            self.query_sum[rows] += query_sum[:, self.heads]
        for side in SIDES:
            self._extend_side(side, rows, num_tokens, new[side][:, self.heads])
        # A page that stays due will be packed with this very sum, as the others of this update are.
        if k.needs_queries and self._num_packed("k", total) == k.num_pages(total) > k.num_pages(num_tokens):
            self._begin_queries(rows, total)

    def loss(self, num_tokens: int, kept_tokens: int) -> str | None:
        """Why a row of ``num_tokens`` cannot go back to ``kept_tokens``; None where it can."""
        is_packed = any(self._num_packed(side, num_tokens) > self._num_packed(side, kept_tokens) for side in SIDES)
        return "some of them are packed" if is_packed else None

    def uncount(self, removed: list[int]) -> None:
        """Every row lost so many tokens, which its query statistic keeps."""
        if self.variant.k.needs_queries:
            self.query_since.sub_(self.query_since.new_tensor(removed).unsqueeze(-1))

    def select(self, indices: Tensor) -> None:
        """Rows in another order, or repeated, int64 [B], in the same memory."""
        for tensor in (*self.tensors, *self.control):
            if tensor.numel():
                tensor.copy_(tensor.index_select(0, indices))

    def reset(self) -> None:
        """No tokens; nothing but the query statistic survives in what a row without tokens reads."""
        self.query_sum.zero_()
        self.query_since.zero_()

    def _stored(self, side: Side) -> StoredSide:
        """As the kernels are given it."""
        return StoredSide(self.sinks[side], self.buffer[side], self.pages[side])

    def _own(self, k_new: Tensor, v_new: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """These heads' part of a token; queries only where they are heard."""
        heard = q[:, self.queries] if self.variant.k.needs_queries else self.nothing
        return k_new[:, self.heads], v_new[:, self.heads], heard

    def _transform(self, side: Side) -> PageTransform:
        return self.operands.transform if side == "k" else self.operands.transform.of_values

    def _num_packed(self, side: Side, num_tokens: int) -> int:
        return num_packed(self.variant.format(side), num_tokens)

    def _begin_queries(self, rows: slice, num_tokens: int) -> None:
        self.query_sum[rows] = 0
        self.query_since[rows] = num_tokens

    def _extend_side(self, side: Side, rows: slice, num_tokens: int, new: Tensor) -> None:
        fmt, total = self.variant.format(side), num_tokens + new.shape[2]
        sinks = min(max(0, fmt.num_sink_tokens - num_tokens), new.shape[2])
        self.sinks[side][rows, :, num_tokens : num_tokens + sinks] = new[:, :, :sinks]
        packed, last = self._num_packed(side, num_tokens), self._num_packed(side, total)
        held = max(0, num_tokens - fmt.num_sink_tokens) - PAGE_TOKENS * packed
        unpacked = new[:, :, sinks:]
        if held:
            unpacked = torch.cat([self.buffer[side][rows, :, :held], unpacked], dim=2)
        # With query scores, the page that was due before is packed already, by the queries until then.
        first = fmt.num_pages(num_tokens) if fmt.needs_queries or self.packs_before_prompts else packed
        begin, end = PAGE_TOKENS * (first - packed), PAGE_TOKENS * (last - packed)
        if first < last:
            self._pack(side, rows, unpacked[:, :, begin:end], first, total)
        self.buffer[side][rows, :, : unpacked.shape[2] - end] = unpacked[:, :, end:]

    def _pack(self, side: Side, rows: slice, x: Tensor, first_page: int, num_tokens: int) -> None:
        """Whole pages x [b, n, 128 P, D] of ``rows``, whose queries were counted for ``num_tokens``."""
        query_mean = self.nothing
        if side == "k" and self.variant.k.needs_queries:
            query_mean = query_means(self.operands.queries, rows, num_tokens, self.variant.group_heads)
        ops.pack(
            x, self.pages[side][rows], first_page, query_mean, *self._transform(side), self.state.error, side,
            self.present_key,
        )  # fmt: skip
