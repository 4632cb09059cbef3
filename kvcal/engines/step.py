"""Storing new tokens of one layer in an engine's memory, and attention to all tokens of their sequences.

An engine gives every layer its blocks and rings once (``PagedStep.bind``), and with every step the place of
each sequence in them. Two kinds of sequences are served:

    decode    one token each for many sequences, or several each: the operators of kvcal.kernels.ops,
              with the engine's tables of blocks and of rings as they are. On CUDA these are the kernels;
              nothing waits for the device, so that the call may be captured in a CUDA graph
    extend    a chunk of tokens of one sequence: it attends to its past, page tile by page tile, and to itself at full
              precision. Sizes come from the host

Either packs every page that its tokens fill, into the page's block, before it returns. A full block may be
shared, hashed, moved or kept from then on; nothing in it depends on the sequence that filled it, but for
channels that the queries of its chunk choose. A sequence that begins after shared blocks begins at a multiple
of 128. Its ring then needs sinks, which the engine's plug-in brings, and the tokens of its window, which are
decoded from their pages (``begin``).

Several tokens of a step are stored, and attend, as tokens that come alone. A sequence takes them back by its
length at the next step, of which the device alone may know: nothing of this depends on the host. The page
that they complete is packed with them, because later ones read it. It becomes a page of the sequence when its
last token is accepted; until then its block is nobody else's, and the token that takes the place of a
rejected one packs it again, of tokens that the ring still has.

An engine may let a sequence begin after blocks that another one fills in the same step. Then all tokens of
the step must be stored before any attention is computed: each call has a half that stores and a half that
attends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from kvcal.engines.prefill import TILE_TOKENS, Logits, attend_chunk
from kvcal.engines.scratch import Chunk, Decodes, Scratch, Stored, Tail
from kvcal.engines.shard import HeadShard
from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels.choice import long_step_reasons
from kvcal.kernels.operands import Memory, PageTransform, Place, QueryStatistic
from kvcal.kernels.variants import variant_of
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.page_format import SIDES, Side
from kvcal.store.paged_tensor import LAUNCHED_PAGES
from kvcal.store.sinks_ring_pages import Part
from kvcal.store.step import KernelCodec, LayerStep
from kvcal.systems.basis.basis import Basis
from kvcal.systems.kitty.scores import query_sum


class PagedStep:
    """See the module's docstring: layer ``index`` of a shard. Built once; ``bind`` before the first step.

    Keys and values are those of the rank's N heads after RoPE, queries of its H = N G heads, in any float
    dtype; D is the head size. Both calls return attention in the queries' dtype.
    """

    def __init__(self, shard: HeadShard, index: int, scratch: Scratch) -> None:
        self.layout = shard.blocks[index]
        self.scratch = scratch
        self.dtype = CACHE_DTYPES[shard.plan.cache_dtype]
        self._tensors = {name: tensor.to(scratch.device) for name, tensor in shard.tensors(index).items()}
        k_basis, v_basis = (Basis.of(self._tensors, side) for side in SIDES)
        self._bases = k_basis, v_basis
        self._step: LayerStep | None = None
        geometry = self.layout.layer.attention
        queries = geometry.group_heads * self.layout.step_tokens
        # Now, so that an engine's measurement of free memory counts it.
        self._workspace = scratch.workspace(geometry.num_kv_heads, queries, geometry.k_head_dim)

    def bind(self, blocks: Tensor, rings: Tensor) -> None:
        """The layer's memory: blocks, uint8 [blocks, block_bytes or more], and rings, uint8 [rings,
        ring_bytes or more], bytes side by side, with strides between them of multiples of 16."""
        variant = variant_of(self.layout.layer, self.layout.cache_dtype)
        most = 1 if any(long_step_reasons(variant)) else self.layout.step_tokens
        variant = dataclasses.replace(variant, step_tokens=self.layout.step_tokens)
        k, v = (Memory(*self.layout.unquantized(rings, side), self.layout.pages(blocks, side)) for side in SIDES)
        scratch, transform = self.scratch, PageTransform.of_variant(variant, self._tensors, self.scratch.nothing)
        self._step = LayerStep(
            scratch,
            k,
            v,
            self.layout.statistic(rings) if self.layout.needs_queries else scratch.no_statistic,
            transform,
            self._bases,
            self._workspace,
            tuple(dataclasses.replace(variant, query_tokens=1 + more).number for more in range(most)),
        )
        layer = self.layout.layer
        self._parts = {side: Part(m.sinks, m.ring, layer.format(side)) for side, m in zip(SIDES, (k, v), strict=True)}
        self._codecs = {side: KernelCodec(side, transform, scratch.error, variant) for side in SIDES}
        self._read_at = scratch.read_at(variant.k), scratch.read_at(variant.v)

    @property
    def _held(self) -> LayerStep:
        assert self._step is not None, "bind() before the first step"
        return self._step

    def _place(self, decodes: Decodes) -> Place:
        return Place(decodes.lengths, decodes.table, *self._read_at, decodes.rings)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, decodes: Decodes, logits: Logits) -> Tensor:
        """Store k, v [B, N, D], one token a sequence, and attend from q [B, H, D] to all tokens of each: [B,
        H, D].

        Of S tokens each: k, v [B, S, N, D], and q [B, S, H, D] as attention,
        each to the tokens up to its own. Rows with fewer may be filled up with finite tokens, which count
        as taken back."""
        return self.attend(self.append(q, k, v, decodes), decodes, logits, q.dtype)

    def append(self, q: Tensor, k: Tensor, v: Tensor, decodes: Decodes) -> Tensor:
        """The first half of :meth:`decode`. Returns the queries as the second half takes them."""
        if self.layout.needs_queries:
            self._begin_sums(decodes)
        return self._held.append(q, k, v, self._place(decodes))

    def _begin_sums(self, decodes: Decodes) -> None:
        """Of sequences at the end of a page: one that begins after shared blocks has another one's in its
        ring."""
        rings, lengths = decodes.rings.long(), decodes.lengths.unsqueeze(1)
        is_new = lengths % PAGE_TOKENS == 0
        sums, since = (part[rings] for part in self._held.statistic)
        self._held.statistic.sum[rings] = sums.masked_fill(is_new.unsqueeze(2), 0.0)
        self._held.statistic.since[rings] = torch.where(is_new, lengths, since)

    def attend(self, queries: Tensor, decodes: Decodes, logits: Logits, dtype: torch.dtype) -> Tensor:
        """The second half of :meth:`decode`: attention in ``dtype``."""
        return self._held.attend(queries, self._place(decodes), *logits, dtype)

    def extend(self, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk, logits: Logits) -> Tensor:
        """Store k, v [T, N, D], and attend from q [T, H, D] to the past and, each up to its own token, to k
        and v: [T, H, D]."""
        return self.attend_chunk(self.store(q, k, v, chunk), chunk, logits, q.dtype)

    def begin(self, chunk: Chunk, total: int) -> None:
        """Of a sequence after shared blocks, which will have ``total`` tokens: what its ring holds of them,
        decoded. A token of the step reads what is read before it, and the last one may be computed again, by
        another engine that goes on."""
        fewest = max(chunk.num_past, total - self.layout.step_tokens)
        for side in SIDES:
            first = self.layout.layer.format(side).tokens_read(fewest)
            if first < chunk.num_past:
                tokens = self._tail(side, first, chunk, self.dtype, is_begun=True)
                numbers = torch.arange(first, chunk.num_past, device=tokens.device)
                self._parts[side].put(chunk.rows, numbers, tokens.unsqueeze(0))

    def begun_tail(self, chunk: Chunk, tail: Tail, is_begun: Tensor) -> Tail:
        """The ``tail`` of a chunk, or what pages have of it where ``is_begun``, bool [1]: with it a sequence
        begins."""
        decoded = (self._tail(side, tail.first, chunk, tail.keys.dtype, is_begun=True) for side in SIDES)
        pairs = zip(decoded, (tail.keys, tail.values), strict=True)
        return Tail(tail.first, *(torch.where(is_begun, own, held) for own, held in pairs))

    def store(self, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk) -> Stored:
        """The first half of :meth:`extend`. Returns the new tokens as they attend, and what it may overwrite of
        the past. Turned queries are rounded to the dtype of q, which FlashAttention takes; a decode step has
        them in fp32."""
        first = min(self.layout.layer.format(side).tokens_read(chunk.num_past) for side in SIDES)
        tail = Tail(first, *(self._tail(side, first, chunk, q.dtype) for side in SIDES))
        query_mean = self._observe(q, chunk) if self.layout.needs_queries else None
        queries, k, v = self._held.enter(q, k, v)
        self._store("k", k, chunk, query_mean)
        self._store("v", v, chunk)
        keys, values = (new.to(self.dtype).to(q.dtype) for new in (k, v))
        return Stored(queries.to(q.dtype), keys, values, tail)

    def _observe(self, q: Tensor, chunk: Chunk) -> Tensor:
        """Count the queries of a chunk [T, H, D]; returns their mean |q| since the last page, fp32 [1, N, D].
        A page that the chunk fills begins the sums anew, after the whole chunk."""
        geometry, ring = self.layout.layer.attention, chunk.ring.long()
        statistic = QueryStatistic(*(part[ring] for part in self._held.statistic))
        if chunk.num_past % PAGE_TOKENS == 0:
            statistic.begin(slice(0, 1), chunk.num_past)
        are_real = torch.ones(1, len(q), dtype=torch.bool, device=q.device)
        statistic.sum.add_(query_sum(q.transpose(0, 1).unsqueeze(0), are_real, geometry.num_kv_heads))
        total = chunk.num_past + len(q)
        mean = statistic.mean(slice(0, 1), total, geometry.group_heads)
        if total // PAGE_TOKENS > chunk.num_past // PAGE_TOKENS:
            statistic.begin(slice(0, 1), total)
        for part, own in zip(self._held.statistic, statistic, strict=True):
            part[ring] = own
        return mean

    def attend_chunk(self, stored: Stored, chunk: Chunk, logits: Logits, dtype: torch.dtype) -> Tensor:
        """The second half of :meth:`extend`, of what :meth:`store` returned: attention in ``dtype``."""
        queries, keys, values, tail = stored
        past = self._past(chunk, tail, queries.dtype)
        attended = attend_chunk(queries, keys, values, past, logits, self.scratch.flash)
        return self._held.leave(attended, dtype)

    def warm_up(self, num_tokens: int, dtype: torch.dtype) -> None:
        """Allocate for a moment what :meth:`extend` of so many tokens in ``dtype`` takes besides its result,
        for an engine that measures how much memory a model leaves; the room for decoded pages stays."""
        layer, geometry = self.layout.layer, self.layout.layer.attention
        for side in SIDES:
            self.scratch.past(side, geometry.num_kv_heads, layer.head_dim(side), dtype)
            tail = geometry.num_kv_heads, layer.format(side).ring_tokens(), layer.head_dim(side)
            torch.empty(tail, dtype=dtype, device=self.scratch.device)
        self.scratch.warm_up(geometry, num_tokens)

    def _past(self, chunk: Chunk, tail: Tail, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [N, S, D] of the chunk's past: tiles of pages, valid until the next, and the tail, with
        the last tile where there is room."""
        layer, left = self.layout.layer, chunk.num_past > tail.first
        for first in range(0, tail.first, TILE_TOKENS):
            tile, stop = [], min(first + TILE_TOKENS, tail.first)
            has_tail = left and stop == tail.first and chunk.num_past - first <= TILE_TOKENS
            end = chunk.num_past if has_tail else stop
            for side, newest in zip(SIDES, (tail.keys, tail.values), strict=True):
                room = self.scratch.past(side, layer.attention.num_kv_heads, layer.head_dim(side), dtype)
                self._unpack(side, chunk, first, room[:, : stop - first])
                if has_tail:
                    room[:, stop - first : end - first] = newest
                tile.append(room[:, : end - first])
            yield tile[0], tile[1]
            left = left and not has_tail
        if left:
            yield tail.keys, tail.values

    def _tail(self, side: Side, first: int, chunk: Chunk, dtype: torch.dtype, is_begun: bool = False) -> Tensor:
        """[N, ..., D]: a copy of the past from token ``first`` on, as it is read; ``is_begun``: of pages
        alone."""
        layer = self.layout.layer
        shape = layer.attention.num_kv_heads, chunk.num_past - first, layer.head_dim(side)
        out = torch.empty(shape, dtype=dtype, device=self.scratch.device)
        paged = max(0, layer.format(side).tokens_read(chunk.num_past) - first)
        if is_begun:
            self._unpack(side, chunk, first, out)
            out[:, paged:] = out[:, paged:].to(self.dtype)  # as the ring has them afterwards
            return out
        out[:, paged:] = self._parts[side].newest(chunk.rows, first + paged, chunk.num_past)[0]
        if paged:
            self._unpack(side, chunk, first, out[:, :paged])
        return out

    def _unpack(self, side: Side, chunk: Chunk, first: int, out: Tensor) -> None:
        """Write the tokens from ``first`` on, which pages have, to out [n, ..., D]; sinks as the ring has
        them."""
        stop = first + out.shape[1]
        # In front of the first whole page, whole pages, and after them.
        whole = min(-(-first // PAGE_TOKENS), stop // PAGE_TOKENS), stop // PAGE_TOKENS
        for pages in (range(first // PAGE_TOKENS, whole[0]), range(*whole), range(whole[1], -(-stop // PAGE_TOKENS))):
            if not pages:
                continue
            a, b = max(first, PAGE_TOKENS * pages.start), min(stop, PAGE_TOKENS * pages.stop)
            part = out[:, a - first : b - first]
            is_whole = b - a == PAGE_TOKENS * len(pages)
            room = part if is_whole else part.new_empty(len(part), PAGE_TOKENS, part.shape[2])
            slots = chunk.slots(pages)
            self._codecs[side].unpack(self._held.memory(side).pages, slots, room.unsqueeze(0))
            if not is_whole:
                part.copy_(room[:, a % PAGE_TOKENS :][:, : b - a])
        self._parts[side].put_sinks(chunk.rows, first, out.unsqueeze(0))

    def _store(self, side: Side, new: Tensor, chunk: Chunk, query_mean: Tensor | None = None) -> None:
        """Pack the stripes that new [T, N, D] fill, and put the tokens into sinks and ring."""

        def pack(tokens: Tensor, start: int) -> None:
            slots = chunk.slots(range(start // PAGE_TOKENS, -(-(start + tokens.shape[2]) // PAGE_TOKENS)))
            self._codecs[side].pack(tokens, self._held.memory(side).pages, slots, start % PAGE_TOKENS, query_mean)

        tokens = new.to(self.dtype).transpose(0, 1).unsqueeze(0)
        self._parts[side].write(chunk.rows, chunk.num_past, tokens, pack, LAUNCHED_PAGES)
