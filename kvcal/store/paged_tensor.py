"""A part of a cache (kvcal.store.sinks_ring_pages): keys or values of a layer of transformers' sequences.

No other full-precision copy of a packed token exists once ``write`` returns. How many pages there are is a
function of the number of tokens alone, after ``crop`` too, so that bytes stay exact. Cropping below what the
ring holds (assisted decoding that rejects tokens) brings tokens back from pages, as decoded. A cropped ring
holds fewer tokens than it has room for: those that it lost to removed ones do not come back with a crop.
Sinks, ring and pages hold tokens in the codec's basis, where it has one; what is written and read is not in
it. Where the plan schedules bits, all pages are converted at once (``set_bits``), down as tokens come, up
after a crop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels.operands import Memory, QueryStatistic
from kvcal.pages.codec import ENCODE_PAGES, VALUES_AT_ONCE, PageCodec
from kvcal.pages.layout_protocol import PAGE_TOKENS, require_finite
from kvcal.pages.stripes import pieces
from kvcal.store.pool import GrowingPool, Pool, Span, fixed, ordinals_of
from kvcal.store.sinks_ring_pages import Pack, Part, row_map
from kvcal.store.step import KernelCodec
from kvcal.store.unpacked import TOKENS_AT_ONCE, Unpacked
from kvcal.systems.basis.basis import Basis

Predict = Callable[[Sequence[Span]], Tensor]
Keep = Callable[[Sequence[Span], Tensor], None]
BEYOND_FLOAT16 = "keys or values cannot be stored: NaN, infinity, or a number beyond float16 in the plan's basis"
# Pages that one launch of the kernels takes.
LAUNCHED_PAGES = 2**15


class PagedTensor(Part):
    """See the module's docstring. ``codec`` says how its n KV heads are held. Rows are those of the batch.

    Tensors besides the part's, for query scores: query_sum [B, n, D] fp32, the sum of |q| over the queries of
    each sequence since it had query_since (int32 [B, n]) tokens, mostly those at its last page. ``predict``
    says what a prediction says about pages, [M, n, 128, D] fp32; None without one. ``keep`` gets every page
    that is decoded, before its transforms are undone. ``oldest``: of every row, the first token that the ring
    had after the last crop (tokens to come replace it in turn). ``group_heads``: query heads of a KV head,
    over which |q| is summed. ``step_tokens``: the most of a step, for which the
    ring has room: a crop by as many less one needs no page."""

    def __init__(
        self,
        codec: PageCodec,
        group_heads: int,
        batch: int,
        pool: Pool,
        predict: Predict | None = None,
        kernels: KernelCodec | None = None,
        step_tokens: int = 1,
    ) -> None:
        fmt = codec.format
        self.codec = codec
        self.group_heads, self.predict, self.kernels = group_heads, predict, kernels
        self.num_bits = fmt.bits_at(0)
        shape, device = (batch, codec.num_heads), pool.records.device
        dtype = CACHE_DTYPES[codec.cache_dtype]
        channels = codec.head_dim if fmt.needs_queries else 0
        with torch.inference_mode(False):  # or nothing could be written to them outside of inference mode
            counts = fmt.sinks_left(), fmt.ring_tokens(step_tokens)
            sinks, ring = (torch.zeros(*shape, n, codec.head_dim, dtype=dtype, device=device) for n in counts)
            super().__init__(fixed(sinks), fixed(ring), fmt)
            self.query_sum = fixed(torch.zeros(*shape, channels, dtype=torch.float32, device=device))
            counted = shape if fmt.needs_queries else (0,)
            self.query_since = fixed(torch.zeros(*counted, dtype=torch.int32, device=device))
        self.pool = pool
        self.keep: Keep | None = None
        self.oldest = [0] * batch

    @property
    def memory(self) -> Memory:
        """As operators are given it."""
        return Memory(self.sinks, self.ring, self.pool.records)

    @property
    def overwritten(self) -> list[Tensor]:
        """Tensors that later tokens overwrite, part of the plan's bytes: all but pages, which stay as they
        are."""
        return [self.sinks, self.ring, self.query_sum]

    @property
    def tensors(self) -> list[Tensor]:
        """Everything on the device that counts as the plan's bytes."""
        return [*self.overwritten, *self.pool.held]

    def decode(self, spans: Sequence[Span], dtype: torch.dtype) -> Tensor:
        """[M, n, 128, D] of ``dtype``: these pages as keys after RoPE, or as values. Some at a time, which
        bounds the scratch, where no prediction wants them whole."""
        codec, device = self.codec, self.ring.device
        ordinals = ordinals_of(spans, device)
        if self.keep is not None or self.predict is not None:
            stored = self.stored(spans)
            if self.keep is not None:
                self.keep(spans, stored)
            return codec.restore(stored, ordinals, self.num_bits).to(dtype)
        slots = self.pool.slots(spans)
        out = torch.empty(len(slots), codec.num_heads, PAGE_TOKENS, codec.head_dim, dtype=dtype, device=device)
        pages_at_once = max(1, VALUES_AT_ONCE // (codec.num_heads * PAGE_TOKENS * codec.head_dim))
        if self.kernels is not None:
            pages_at_once = LAUNCHED_PAGES
        for start in range(0, len(slots), pages_at_once):
            part = slice(start, start + pages_at_once)
            if self.kernels is not None:
                self.kernels.unpack(self.pool.records, slots[part].int().unsqueeze(1), out[part])
            else:
                decoded = codec.decode(self.pool.records[slots[part]], self.num_bits)
                out[part] = codec.restore(decoded, ordinals[part], self.num_bits)
        return out

    @property
    def kind(self) -> object:
        """Equal for parts whose pages ``decode_together`` takes at once."""
        is_alone = not self.codec.has_own_factor or self.kernels or self.keep or self.predict
        return id(self) if is_alone else (self.codec.kind, self.num_bits)

    def stored(self, spans: Sequence[Span]) -> Tensor:
        """[M, n, 128, D]: these pages before their transforms are undone (see PageCodec.decode)."""
        slots = self.pool.slots(spans)
        prediction = None if self.predict is None or not len(slots) else self.predict(spans)
        return self.codec.decode(self.pool.records[slots], self.num_bits, prediction)

    def set_bits(self, num_bits: int) -> None:
        """Bring all pages to ``num_bits``, fewer, or more after a crop; pages to come are written with as
        many."""
        if num_bits != self.num_bits:
            assert isinstance(self.pool, GrowingPool)
            self.pool.records = self.codec.convert(self.pool.records, self.num_bits, num_bits)
            self.num_bits = num_bits

    def store(self, rows: slice, num_tokens: int, x: Tensor, unpacked: list[Unpacked] | None = None) -> list[Span]:
        """Store x [b, n, T, D] after the ``num_tokens`` tokens of each of ``rows`` (equal ones), for whose
        pages the pool has room; returns the pages packed, or of which a part was. ``unpacked`` gets what the caller
        packs with that of other parts, where this is possible; x is ``entered`` then."""
        total, fmt = num_tokens + x.shape[2], self.format
        begin, end = fmt.tokens_packed(num_tokens), fmt.tokens_packed(total)
        first, stop = begin // PAGE_TOKENS, -(-end // PAGE_TOKENS)
        spans = [(row, first, stop) for row in range(rows.start, rows.stop)] if begin < end else []
        pack = self._packing(spans, total, unpacked) if spans else _nothing
        is_launched = self.kernels is not None and self.codec.basis is None
        at_once = LAUNCHED_PAGES if is_launched else ENCODE_PAGES
        self.write(row_map(rows, self.ring.device), num_tokens, x, pack, at_once, unpacked is not None)
        if spans and self.format.needs_queries:
            self.query_sum[rows] = 0
            self.query_since[rows] = total
        return spans

    def store_step(self, num_tokens: list[int], x: Tensor) -> bool:
        """Store one token x [B, n, 1, D] of every row, as :meth:`store` would, if it is no sink and completes
        no stripe; else do nothing and return False. One indexed write instead of a loop over the rows of a
        ragged batch."""
        is_special = (self.format.sinks_left(n) or (n + 1) % self.format.stripe_tokens == 0 for n in num_tokens)
        if any(is_special):
            return False
        numbers = torch.tensor(num_tokens, device=x.device).unsqueeze(1)
        self.put(row_map(slice(0, len(num_tokens)), x.device), numbers, self.entered(x))
        return True

    def resize(self, lengths: Sequence[int]) -> None:
        """Room for the pages of sequences of these lengths."""
        self.pool.resize([self.format.num_pages(length) for length in lengths])

    def read(self, rows: slice, tokens: range, paged: int, decoded: Tensor, out: Tensor) -> None:
        """Write these tokens of each of ``rows`` (equal ones) to out [b, n, T, D]: the first ``paged`` of a sequence
        from pages, those after them from the ring. ``decoded`` [.., n, 128, D] is :meth:`decode` of the
        ``spans_of`` them."""
        first, from_pages = tokens.start, min(paged, tokens.stop) - tokens.start
        if from_pages > 0:
            of_rows = decoded.unflatten(0, (rows.stop - rows.start, -1)).transpose(1, 2)
            for some, pages, begin in pieces(first % PAGE_TOKENS, from_pages):
                count = pages.stop - pages.start
                place = out[:, :, some].unflatten(2, (count, -1))
                place.copy_(of_rows[:, :, pages, begin : begin + place.shape[3]])
        every_row, kept = row_map(rows, out.device), max(0, from_pages)
        if kept < len(tokens):
            out[:, :, kept:] = self.newest(every_row, first + kept, tokens.stop)
        self.put_sinks(every_row, first, out)
        if self.codec.basis is not None:
            _by_parts(partial(self._leave, self.codec.basis), out, out, VALUES_AT_ONCE)

    def kept(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x [b, n, T, D] in the cache's dtype, as tokens that stay at 16 bits are read back, in ``dtype``."""
        basis = self.codec.basis
        if basis is None or not x.numel():
            return x.to(dtype)
        return _by_parts(
            lambda part: self._leave(basis, self._enter(basis, part).to(dtype)), x, torch.empty_like(x, dtype=dtype)
        )

    def left(self, entered: Tensor, dtype: torch.dtype) -> Tensor:
        """The same of tokens that are ``entered``."""
        basis = self.codec.basis
        if basis is None or not entered.numel():
            return entered.to(dtype)
        out = torch.empty_like(entered, dtype=dtype)
        return _by_parts(lambda part: self._leave(basis, part.to(dtype)), entered, out)

    def entered(self, x: Tensor) -> Tensor:
        """x [b, n, T, D] in the basis in which sinks, ring and pages are held. NonFiniteActivations: a number
        that float16 cannot hold there. (The other dtypes reach beyond any model's numbers. A bound of T would
        not do: what a model makes has none.)"""
        basis = self.codec.basis
        if basis is None or not x.numel():
            return x
        entered = _by_parts(partial(self._enter, basis), x, torch.empty_like(x))
        if x.dtype == torch.float16:
            require_finite(entered, BEYOND_FLOAT16, "check the model's outputs; a model in bfloat16 has room for them")
        return entered

    def _enter(self, basis: Basis, x: Tensor) -> Tensor:
        """Tokens x [b, T, n, D] in the basis."""
        return basis.enter(x) if self.kernels is None else self.kernels.enter(basis, x)

    def _leave(self, basis: Basis, y: Tensor) -> Tensor:
        """The reverse."""
        return basis.leave(y) if self.kernels is None else self.kernels.leave(basis, y)

    def crop(self, rows: slice, num_tokens: int, kept_tokens: int) -> None:
        """Keep the first ``kept_tokens`` of the ``num_tokens`` tokens of each of ``rows`` (equal ones). What
        the ring has lost of those that it should hold then comes from pages, which the caller drops."""
        first = self.format.tokens_read(kept_tokens)
        oldest = max(self.oldest[rows.start], num_tokens - self.ring.shape[2])
        self.refill(rows, first, min(kept_tokens, oldest))
        self.oldest[rows] = [min(first, oldest)] * (rows.stop - rows.start)
        if self.format.needs_queries:
            self.query_since[rows] -= num_tokens - kept_tokens

    def refill(self, rows: slice, first: int, stop: int) -> None:
        """Bring the tokens ``first`` ... ``stop`` - 1 of each of ``rows`` back into the ring, as decoded from
        pages."""
        if first >= stop:
            return
        spans, begin = spans_of(rows, range(first, stop)), first % PAGE_TOKENS
        decoded = self.decode(spans, self.ring.dtype).unflatten(0, (len(spans), -1)).transpose(1, 2).flatten(2, 3)
        tokens = decoded[:, :, begin : begin + stop - first]
        self.put(row_map(rows, self.ring.device), torch.arange(first, stop, device=tokens.device), tokens)

    def select(self, indices: list[int]) -> None:
        """Keep, repeat or reorder rows; in place where their number stays."""
        if len(indices) == len(self.ring):
            for tensor in (*self.overwritten, self.query_since):
                if tensor.numel():
                    tensor.copy_(tensor[indices])
        else:
            with torch.inference_mode(False):
                self.sinks, self.ring, self.query_sum = (x[indices] for x in self.overwritten)
                self.query_since = self.query_since[indices] if self.format.needs_queries else self.query_since
        self.oldest = [self.oldest[index] for index in indices]
        self.pool.select(indices)

    def observe(self, query_sum: Tensor) -> None:
        """Add to the query statistic: query_sum [B, n, D] is the sum of |q| over the new tokens of every
        row."""
        self.query_sum += query_sum

    def reset(self) -> None:
        """No tokens; nothing but the query statistic survives in what a row without tokens reads."""
        self.oldest = [0] * len(self.oldest)
        self.query_sum.zero_()
        self.query_since.zero_()

    def _packing(self, spans: list[Span], total: int, unpacked: list[Unpacked] | None) -> Pack:
        """The packing of pages of these spans, one a row, whose rows will have ``total`` tokens each."""
        rows, first = slice(spans[0][0], spans[-1][0] + 1), spans[0][1]
        prediction = None if self.predict is None else self.predict(spans).unflatten(0, (len(spans), -1))
        query_mean = None
        if self.format.needs_queries:
            query_mean = QueryStatistic(self.query_sum, self.query_since).mean(rows, total, self.group_heads)
        slots = self.pool.slots(spans).view(len(spans), -1)

        ordinals = ordinals_of(spans, slots.device).view(slots.shape)

        def pack(tokens: Tensor, start: int) -> None:
            page, begin = divmod(start, PAGE_TOKENS)
            part = slice(page - first, page - first - (-(begin + tokens.shape[2]) // PAGE_TOKENS))
            if self.kernels is not None:
                self.kernels.pack(tokens, self.pool.records, slots[:, part].int(), begin, query_mean)
                return
            where, numbers = slots[:, part], ordinals[:, part]
            if unpacked is not None and self.codec.has_own_factor and query_mean is None and prediction is None:
                unpacked.append(Unpacked(self.codec, self.num_bits, self.pool, where, numbers, begin, tokens))
                return
            predicted = None if prediction is None else prediction[:, part]
            places = [(self.pool.records, where)]
            self.codec.put(places, begin, tokens, self.num_bits, numbers, query_mean, predicted)

        return pack


def decode_together(parts: Sequence[PagedTensor], spans: Sequence[Span], dtype: torch.dtype) -> list[Tensor]:
    """``decode`` of the same pages of each of several parts of a ``kind``."""
    if len(parts) == 1:
        return [parts[0].decode(spans, dtype)]
    ordinals, num_bits = ordinals_of(spans, parts[0].ring.device), parts[0].num_bits
    at_once = max(1, TOKENS_AT_ONCE // (len(ordinals) * parts[0].codec.num_heads * PAGE_TOKENS))
    found: list[Tensor] = []
    for some in (parts[first : first + at_once] for first in range(0, len(parts), at_once)):
        codec = PageCodec.beside([part.codec for part in some])
        records = torch.cat([part.pool.records[part.pool.slots(spans)] for part in some], 1)
        decoded = codec.restore(codec.decode(records, num_bits), ordinals, num_bits).to(dtype)
        found += decoded.chunk(len(some), 1)
    return found


def spans_of(rows: slice, tokens: range) -> list[Span]:
    """The pages that these tokens of each of ``rows`` lie in."""
    first, stop = tokens.start // PAGE_TOKENS, -(-tokens.stop // PAGE_TOKENS)
    return [(row, first, stop) for row in range(rows.start, rows.stop)] if tokens else []


def _nothing(tokens: Tensor, start: int) -> None:
    raise AssertionError("no stripe is complete")


@torch.no_grad()
def _by_parts(change: Callable[[Tensor], Tensor], x: Tensor, out: Tensor, values_at_once: int | None = None) -> Tensor:
    """out, which gets ``change`` of tokens x [b, n, T, D], handed over as [b, T, n, D]; of some at a time,
    which bounds the scratch: as many as are encoded, unless told. Without gradients, as packed tokens have
    none."""
    batch, heads, _, dim = x.shape
    at_once = PAGE_TOKENS * max(1, ENCODE_PAGES // batch)
    if values_at_once is not None:
        at_once = max(1, values_at_once // (batch * heads * dim))
    if x.shape[2] <= at_once:  # a step's tokens: a split takes a CPU as long as the change
        changed = change(x.transpose(1, 2)).transpose(1, 2)
        return out.copy_(changed) if out is x else changed.to(out.dtype)
    for part, place in zip(x.split(at_once, dim=2), out.split(at_once, dim=2), strict=True):
        place.copy_(change(part.transpose(1, 2)).transpose(1, 2))
    return out
