"""A full-attention layer as dense tensors, for measuring plans: what a ``PagedLayer`` gives, bit for bit, without
records, tables and byte counts, which take the host longer than the layer takes a GPU.

A page is encoded and decoded once, when attention comes to read it, and written over the exact tokens. By then other
layers have pages, too, and so do other caches that are fed the same chunks: those that are stored alike go through one
call of the codec (``Unread``).

Left out: padding on the left, pages that shrink, layers that are predicted or that others are predicted from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from kvcal.cache.paged_layer import PagedLayer, require_shapes, tokens_to_next_event
from kvcal.geometry import CACHE_DTYPES
from kvcal.pages.codec import PageCodec
from kvcal.pages.record_layout import PAGE_TOKENS, without_sinks
from kvcal.pages.scores import query_sum
from kvcal.plan.page_format import RAW, SIDES, Side, num_pages

# Values that the codec takes at once, by device: bounds its scratch, on a CPU to what its caches hold.
VALUES_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 24}


class Unread:
    """Pages that layers have packed and nobody has read back; of one cache, or of several that are fed in lockstep."""

    def __init__(self) -> None:
        self._pages: list[_Pages] = []

    def add(self, pages: _Pages) -> None:
        """Pages of layers that have come as far as each other."""
        self._pages.append(pages)

    def read_back(self) -> None:
        """Hand all pages to their parts, decoded. NonFiniteActivations: NaN or infinity in one."""
        alike: dict[object, list[_Pages]] = {}
        for pages in self._pages:
            alike.setdefault((pages.codec.kind, pages.tokens.shape, pages.part.dtype), []).append(pages)
        self._pages = []
        for group in alike.values():
            most = VALUES_AT_ONCE.get(group[0].tokens.device.type, VALUES_AT_ONCE["cpu"])
            count = max(1, most // group[0].tokens.numel())
            for first in range(0, len(group), count):
                _read_back(group[first : first + count])


@dataclass(frozen=True, eq=False)
class _Pages:
    """P pages of each of B sequences, from ``first`` on: ``tokens`` [B P, n, 128, D] as the codec takes them;
    ``query_mean`` [B P, n, D] for query scores."""

    codec: PageCodec
    part: _Part
    first: int
    tokens: Tensor
    ordinals: Tensor
    query_mean: Tensor | None


def _read_back(group: list[_Pages]) -> None:
    """Pages of one kind and shape."""
    codec = PageCodec.joined([pages.codec for pages in group], len(group[0].tokens))
    means = [pages.query_mean for pages in group if pages.query_mean is not None]
    tokens, ordinals = (torch.cat(parts) for parts in zip(*((p.tokens, p.ordinals) for p in group), strict=True))
    num_bits = codec.format.num_bits
    records = codec.encode(tokens, ordinals, num_bits, torch.cat(means) if means else None, at_once=len(tokens))
    decoded = codec.restore(codec.decode(records, num_bits), ordinals, num_bits).to(group[0].part.dtype)
    for pages, of_layer in zip(group, decoded.split(len(group[0].tokens)), strict=True):
        pages.part.take(of_layer, pages.first)


class _Part:
    """Heads of one side in one format, stored as ``codec`` says, and read in ``dtype``. Tokens behind the last whole
    page are in ``tail`` [B, n, < 128, D], pages that attention does not read yet in ``decoded`` [B, n, 128, D]."""

    def __init__(self, codec: PageCodec, group_heads: int, dtype: torch.dtype) -> None:
        self.codec, self.dtype, self._group_heads = codec, dtype, group_heads
        self._num_tokens, self._num_decoded, self._tail = 0, 0, torch.empty(0)
        self._query_sum, self._query_since = torch.zeros(()), 0
        self._decoded: dict[int, Tensor] = {}

    def pack(self, new: Tensor, query_sum: Tensor | None) -> _Pages | None:
        """The pages that new tokens [B, n, T, D] in the cache's dtype complete; ``query_sum`` [B, n, D]: of theirs."""
        fmt = self.codec.format
        first, self._num_tokens = num_pages(self._num_tokens), self._num_tokens + new.shape[2]
        count = num_pages(self._num_tokens) - first
        tokens = torch.cat([self._tail, new], dim=2) if self._tail.numel() else new
        self._tail = tokens[:, :, PAGE_TOKENS * count :].clone()
        if query_sum is not None:
            self._query_sum = self._query_sum.to(query_sum.device) + query_sum
        if not count:
            return None
        mean = None
        if fmt.needs_queries:
            num_queries = (self._num_tokens - self._query_since) * self._group_heads
            # By a tensor: CUDA divides by a Python number as a product with its rounded reciprocal.
            mean = (self._query_sum / self._query_sum.new_full((), num_queries)).repeat_interleave(count, dim=0)
            if not fmt.keeps_queries:
                self._query_sum, self._query_since = torch.zeros(()), self._num_tokens
        whole = without_sinks(tokens[:, :, : PAGE_TOKENS * count], fmt.num_sink_tokens, first)
        pages = whole.unflatten(2, (-1, PAGE_TOKENS)).transpose(1, 2).flatten(0, 1)
        ordinals = torch.arange(first, first + count, device=new.device).repeat(len(new))
        return _Pages(self.codec, self, first, pages, ordinals, mean)

    def take(self, pages: Tensor, first: int) -> None:
        """Decoded pages [B P, n, 128, D] of all sequences, from ``first`` on."""
        of_rows = pages.unflatten(0, (len(self._tail), -1))
        self._decoded |= {first + number: page for number, page in enumerate(of_rows.unbind(1))}
        self._num_decoded = first + of_rows.shape[1]

    @property
    def is_behind(self) -> bool:
        """Whether attention now reads a page that was not read back."""
        return self.codec.format.pages_read(self._num_tokens) > self._num_decoded

    def read(self, dense_BNSD: Tensor) -> None:
        """Write the pages that attention now reads over the exact tokens, but for sinks."""
        fmt = self.codec.format
        for number in [number for number in self._decoded if number < fmt.pages_read(self._num_tokens)]:
            begin = PAGE_TOKENS * number
            sinks = min(PAGE_TOKENS, max(0, fmt.num_sink_tokens - begin))
            page = self._decoded.pop(number)[:, :, sinks:]
            dense_BNSD[:, self.codec.heads, begin + sinks : begin + PAGE_TOKENS] = page


class DenseLayer(DynamicLayer):
    """Keys and values as attention reads them, in the dtype of the new ones. ``unread``: of the cache."""

    static = None

    def __init__(self, layer: PagedLayer, unread: Unread) -> None:
        super().__init__()
        self.plan, self.padding, self._state = layer.plan, layer.padding, layer.state
        self._unread, self._skipped = unread, 0
        self._parts: list[tuple[Side, _Part]] = []
        self._unseen: dict[Side, Tensor] | None = None

    @staticmethod
    def can_stand_for(layer: PagedLayer) -> bool:
        """Whether an empty layer's pages stay as they are packed, apart from those of others, and it has no state."""
        plan, state, index = layer.plan, layer.state, layer.plan.geometry.index
        is_read = index in state.later_sources or any((index, side) in state.sources for side in SIDES)
        is_predicted = any(plan.predictor(side) is not None for side in SIDES)
        return not (is_read or is_predicted or state.is_scheduled or plan.geometry.state_bytes)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._parts = list(self._parts_of(key_states))

    def _parts_of(self, states: Tensor) -> Iterator[tuple[Side, _Part]]:
        """Those that differ from the exact tokens."""
        plan, cache_dtype = self.plan, self._state.plan.cache_dtype
        tensors = self._state.tensors_on(states.device)
        for side in SIDES:
            for fmt, heads in plan.runs(side):
                codec = PageCodec.of_layer(plan, side, fmt, heads, cache_dtype, tensors)
                if fmt != RAW or codec.is_pre:
                    yield side, _Part(codec, plan.attention.group_heads, states.dtype)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As ``PagedLayer.update``."""
        require_shapes(self.plan.attention, key_states, value_states)
        self.padding.resolve(key_states.shape[0])
        assert self._unseen is None, "queries were not observed"
        if any(part.is_behind for _, part in self._parts):
            self._unread.read_back()
        for side, part in self._parts:
            dense_BNSD = self.keys if side == "k" else self.values
            assert dense_BNSD is not None
            part.read(dense_BNSD)
        cache_dtype = CACHE_DTYPES[self._state.plan.cache_dtype]
        new: dict[Side, Tensor] = {"k": key_states.to(cache_dtype), "v": value_states.to(cache_dtype)}
        whole = super().update(new["k"].to(key_states.dtype), new["v"].to(value_states.dtype))
        if any(fmt.needs_queries for fmt in self.plan.k):
            self._unseen = new
        else:
            self._pack(new, None)
        return whole

    def observe(self, q_post_BHTD: Tensor) -> None:
        """Take the queries of the last update, where pages are packed by them."""
        if self._unseen is not None:
            new, self._unseen = self._unseen, None
            is_real_BT = torch.ones(len(q_post_BHTD), q_post_BHTD.shape[2], dtype=torch.bool, device=q_post_BHTD.device)
            self._pack(new, query_sum(q_post_BHTD, is_real_BT, new["k"].shape[1]))

    def _pack(self, new: dict[Side, Tensor], per_head: Tensor | None) -> None:
        for side, part in self._parts:
            heads, needs_queries = part.codec.heads, part.codec.format.needs_queries
            of_heads = per_head[:, heads] if per_head is not None and needs_queries else None
            pages = part.pack(new[side][:, heads], of_heads)
            if pages is not None:
                self._unread.add(pages)

    def tokens_to_next_page(self) -> int:
        """As ``PagedLayer.tokens_to_next_page``."""
        return tokens_to_next_event(self.plan, self.padding.rows, self.get_seq_length())

    def skip(self, tokens: int) -> None:
        """Count columns that are never stored nor read, in a layer that is fed none."""
        self._skipped += tokens

    def get_seq_length(self) -> int:
        return self._skipped or super().get_seq_length()
