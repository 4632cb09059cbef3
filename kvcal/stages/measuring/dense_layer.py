"""A full-attention layer as dense tensors, for measuring plans: what a ``PagedLayer`` gives, bit for bit,
without records, tables and byte counts, which take the host longer than the layer takes a GPU.

Tokens stay exact until attention comes to read their page, or stripe. Then it is encoded, decoded and written
over them. By then pages of other layers are due, too, and of other caches that are fed the same chunks: those that
are stored alike go through one call of the codec (``UnreadPages``). A page that is never read is never
encoded, whatever it holds.

Stripes come to be read after every few tokens. So that chunks may be longer, attention is given those that come to
be read within one twice (kvcal.stages.measuring.ahead), where ``UnreadPages.looks_ahead``, within ``kvcal.attached``.

In a basis tokens are kept twice until their page is due: as attention reads them, and in the basis, as they
are encoded. Products of what leaves a basis round by the number of tokens at once: there, "bit for bit" is to
the last bits of fp32.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from kvcal.cache.paged_layer import PagedLayer
from kvcal.cache.plan_layer import PlanLayer, require_shapes, tokens_to_next_event
from kvcal.geometry import CACHE_DTYPES
from kvcal.pages.codec import ENCODE_PAGES, PageCodec
from kvcal.pages.layout_protocol import PAGE_TOKENS, require_finite
from kvcal.plan.page_format import RAW, SIDES, Side, num_pages
from kvcal.stages.measuring.ahead import Ahead, ahead_of, stripes_of, tokens_ahead
from kvcal.store.paged_tensor import BEYOND_FLOAT16
from kvcal.systems.kitty.scores import query_sum

# Values that the codec takes at once of several layers, by device: bounds its scratch, on a CPU to what
# caches hold.
VALUES_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 24}


class UnreadPages:
    """Pages that hold exact tokens still; of one cache, or of several that are fed in lockstep. ``looks_ahead``:
    whether attention obeys the masks of layers."""

    def __init__(self) -> None:
        self._layers: list[weakref.ref[DenseLayer]] = []  # which hold this object, and are freed with their cache
        self.looks_ahead = False

    def add(self, layer: DenseLayer) -> None:
        """A layer that comes as far as the others with every chunk."""
        self._layers.append(weakref.ref(layer))

    def read_back(self, num_tokens: int, last: int) -> None:
        """Decode what attention reads of ``num_tokens`` tokens, and beside that, what comes to be read by the time
        there are ``last``. NonFiniteActivations: NaN or infinity in a page."""
        alike: dict[object, list[_Page]] = {}
        for layer in filter(None, (held() for held in self._layers)):
            for page in layer.take_due(num_tokens, last):
                tokens = page.tokens
                kind = page.first, page.part.codec.kind, tokens.shape, tokens.dtype, tokens.device
                alike.setdefault(kind, []).append(page)
        for pages in alike.values():
            tokens = pages[0].tokens
            count = max(1, values_at_once(tokens.device) // tokens.numel())
            for first in range(0, len(pages), count):
                _read_back(pages[first : first + count])


def values_at_once(device: torch.device) -> int:
    """``VALUES_AT_ONCE`` of a device."""
    return VALUES_AT_ONCE.get(device.type, VALUES_AT_ONCE["cpu"])


class _Page(NamedTuple):
    """A page, or stripes of one, of each of B sequences. ``tokens`` [B, n, T, D], number ``first`` and those after
    it: where they lie; ``exact``: what is encoded, the same or as they are in the basis."""

    part: _Part
    first: int
    tokens: Tensor
    exact: Tensor


def _read_back(pages: Sequence[_Page]) -> None:
    """Write pages of one kind over their tokens, but for sinks."""
    first, (rows, _, count, _), dim = pages[0].first, pages[0].tokens.shape, 0
    number, codecs = first // PAGE_TOKENS, [page.part.codec for page in pages]
    if codecs[0].has_own_factor:
        codec, dim = PageCodec.beside(codecs), 1
    else:
        codec = PageCodec.joined(codecs, rows)
    fmt, cache_dtype = codec.format, CACHE_DTYPES[codec.cache_dtype]
    exact = torch.cat([fmt.packed(page.exact, first) for page in pages], dim).to(cache_dtype)
    mean = torch.cat([page.part.query_means.pop(number) for page in pages], dim) if fmt.needs_queries else None
    ordinals = torch.full((len(exact),), number, device=exact.device)
    at_once = ENCODE_PAGES if len(pages) == 1 else len(exact)
    records = codec.encode(exact, ordinals, fmt.num_bits, mean, at_once=at_once)
    decoded = codec.restore(codec.decode(records, fmt.num_bits), ordinals, fmt.num_bits)[:, :, :count]
    sinks = min(count, fmt.sinks_left(first))
    for page, found in zip(pages, decoded.split(pages[0].tokens.shape[dim], dim), strict=True):
        page.tokens[:, :, sinks:] = page.part.left(found[:, :, sinks:].to(page.tokens.dtype))


class _Part:
    """One side of a layer, stored as ``codec`` says. ``query_means`` [B, n, D]: of whole pages that were not
    read back, by number."""

    def __init__(self, side: Side, codec: PageCodec, group_heads: int) -> None:
        self.side, self.codec, self._group_heads = side, codec, group_heads
        self._num_read, self._last = 0, -1
        self.ahead: Tensor | None = None  # decoded tokens that come to be read within a chunk, after those
        self._entered: Tensor | None = None  # in a basis, tokens that were not read back
        self._query_sum, self._query_since = torch.zeros(()), 0
        self.query_means: dict[int, Tensor] = {}

    def is_behind(self, last: int) -> bool:
        """Whether attention reads what was not read back of a page, by the time there are ``last`` tokens."""
        return last > self._last and (self.ahead is not None or self.codec.format.tokens_read(last) > self._num_read)

    def take_due(self, num_tokens: int, last: int, dense_BNSD: Tensor) -> Iterator[_Page]:
        fmt, first, self._last = self.codec.format, self._num_read, last
        if self.ahead is not None:
            count = self.ahead.shape[2]
            dense_BNSD[:, :, first : first + count] = self.ahead
            first, self.ahead = first + count, None
        self._num_read, stop = fmt.tokens_read(num_tokens), fmt.tokens_read(last)
        if first == stop:
            return
        exact = dense_BNSD[:, :, first:stop]
        if self._entered is not None:
            exact, self._entered = self._entered[:, :, : stop - first], self._entered[:, :, stop - first :]
        read = self._num_read
        ahead = dense_BNSD[:, :, read:stop].clone()
        self.ahead = ahead if stop > read else None
        pages = range(first - first % PAGE_TOKENS + PAGE_TOKENS, stop, PAGE_TOKENS)
        bounds = sorted({first, read, *pages} - {stop})
        sizes = [b - a for a, b in pairwise([*bounds, stop])]
        for start, page in zip(bounds, exact.split(sizes, 2), strict=True):
            held, at = (dense_BNSD, start) if start < read else (ahead, start - read)
            yield _Page(self, start, held[:, :, at : at + page.shape[2]], page)

    def kept(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """New tokens x [B, n, T, D] in the cache's dtype, as they are read until their page is due, in
        ``dtype``. NonFiniteActivations: as ``PagedTensor.entered``."""
        basis = self.codec.basis
        if basis is None:
            return x.to(dtype)
        entered = basis.enter(x.transpose(1, 2)).transpose(1, 2)
        if x.dtype == torch.float16:
            require_finite(entered, BEYOND_FLOAT16, "check the model's outputs; a model in bfloat16 has room for them")
        self._entered = entered if self._entered is None else torch.cat([self._entered, entered], 2)
        return self.left(entered.to(dtype))

    def left(self, y: Tensor) -> Tensor:
        """y [B, n, T, D] as it is read, out of the basis, in its own dtype."""
        basis = self.codec.basis
        return y if basis is None else basis.leave(y.transpose(1, 2)).transpose(1, 2).to(y.dtype)

    def observe(self, num_tokens: int, num_new: int, query_sum: Tensor) -> None:
        """Take ``query_sum`` [B, n, D], the sum of |q| over the ``num_new`` last of ``num_tokens`` tokens."""
        self._query_sum = self._query_sum.to(query_sum.device) + query_sum
        completed = range(num_pages(num_tokens - num_new), num_pages(num_tokens))
        if completed:
            num_queries = (num_tokens - self._query_since) * self._group_heads
            # By a tensor: CUDA divides by a Python number as a product with its rounded reciprocal.
            mean = self._query_sum / self._query_sum.new_full((), num_queries)
            self.query_means |= dict.fromkeys(completed, mean)
            self._query_sum, self._query_since = torch.zeros(()), num_tokens


class DenseLayer(DynamicLayer, PlanLayer):
    """Keys and values as attention reads them, in the dtype of the new ones. ``unread``: of the cache;
    ``columns``: fed."""

    def __init__(self, layer: PagedLayer, unread: UnreadPages) -> None:
        super().__init__()
        self.plan, self.padding, self._state = layer.plan, layer.padding, layer.state
        self._unread, self.columns, self._is_observed = unread, 0, True
        self._parts: list[_Part] = []
        self._ahead: Ahead | None = None
        self._stripes, self._needs_queries = stripes_of(layer.plan), layer.plan.needs_queries

    @staticmethod
    def can_stand_for(layer: PagedLayer) -> bool:
        """Whether an empty layer's pages stay as they are packed, apart from those of others, and it has no
        state."""
        plan, state, index = layer.plan, layer.state, layer.plan.geometry.index
        is_read = index in state.later_sources or any((index, side) in state.sources for side in SIDES)
        reads_others = any(plan.sources(side) for side in SIDES)
        return not (is_read or reads_others or state.is_scheduled or plan.geometry.state_bytes)

    @property
    def tensors(self) -> list[Tensor]:
        """None of the plan's bytes."""
        return []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        tensors, self._parts = self._state.tensors_on(key_states.device), []
        for side in SIDES:
            codec = PageCodec.of_layer(self.plan, side, self._state.plan.cache_dtype, tensors)
            if codec.format != RAW or codec.is_pre:  # it differs from the exact tokens
                self._parts.append(_Part(side, codec, self.plan.attention.group_heads))
        self._unread.add(self)

    @property
    def _looks_ahead(self) -> bool:
        """Whether attention is given tokens twice: its sides come to read the same ones."""
        return self._unread.looks_ahead and self._stripes is not None

    def take_due(self, num_tokens: int, last: int) -> Iterator[_Page]:
        last = last if self._looks_ahead else num_tokens
        for part in self._parts:
            dense_BNSD = self.keys if part.side == "k" else self.values
            assert dense_BNSD is not None
            yield from part.take_due(num_tokens, last, dense_BNSD)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As ``PagedLayer.update``."""
        require_shapes(self.plan.attention, key_states, value_states)
        self.padding.resolve(key_states.shape[0])
        assert self._is_observed, "queries were not observed"
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        num_tokens, cache_dtype = self.get_seq_length(), CACHE_DTYPES[self._state.plan.cache_dtype]
        last = num_tokens + key_states.shape[2] - 1
        if any(part.is_behind(last if self._looks_ahead else num_tokens) for part in self._parts):
            self._unread.read_back(num_tokens, last)
        self._is_observed = not self._needs_queries
        self.columns += key_states.shape[2]
        # In the model's dtype, which holds what the cache's dtype has left of its numbers.
        kept = {side: x.to(cache_dtype) for side, x in zip(SIDES, (key_states, value_states), strict=True)}
        kept |= {part.side: part.kept(kept[part.side], key_states.dtype) for part in self._parts}
        keys, values = super().update(*(x.to(key_states.dtype) for x in kept.values()))
        ahead = {part.side: part.ahead for part in self._parts if part.ahead is not None}
        self._ahead = None
        if not ahead:
            return keys, values
        assert self._stripes is not None
        self._ahead = ahead_of(self._stripes, num_tokens, key_states.shape[2])
        read = self._ahead.read
        assert all(len(read) == x.shape[2] for x in ahead.values())
        exact = (keys[:, :, read.start : read.stop], values[:, :, read.start : read.stop])
        beside = (ahead.get(side, x) for side, x in zip(SIDES, exact, strict=True))
        twice = [torch.cat([whole, more], 2) for whole, more in zip((keys, values), beside, strict=True)]
        return twice[0], twice[1]

    def mask_of(self, attention_mask: Tensor | None, query_BHTD: Tensor, base: str) -> Tensor | None:
        return attention_mask if self._ahead is None else self._ahead.mask(query_BHTD, base)

    def observe(self, q_post_BHTD: Tensor) -> None:
        """Take the queries of the last update, where pages are packed by them."""
        if self._is_observed:
            return
        self._is_observed = True
        is_real_BT = torch.ones(len(q_post_BHTD), q_post_BHTD.shape[2], dtype=torch.bool, device=q_post_BHTD.device)
        per_head = query_sum(q_post_BHTD, is_real_BT, self.plan.attention.num_kv_heads)
        for part in self._parts:
            if part.codec.format.needs_queries:
                part.observe(self.get_seq_length(), q_post_BHTD.shape[2], per_head)

    def tokens_to_next_page(self) -> int:
        found, held = tokens_to_next_event(self.plan, self.padding.rows, self.columns), self.columns
        return max(found, tokens_ahead(self._stripes, held)) if self._looks_ahead and self._stripes else found

    def get_seq_length(self) -> int:
        return self.columns
