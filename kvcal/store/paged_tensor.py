"""The keys, or the values, of some KV heads of one layer: sinks, packed pages and buffer, for all rows of a batch.

A row's tokens run: ``num_sink_tokens`` unquantized, then pages of 128, then the buffer. Nothing else is kept: no
full-precision copy of a packed token exists once ``append`` returns. Pages are written once; they lie in one pool
[all pages of row 0, all pages of row 1, ...], so rows of different lengths waste nothing.

How many pages there are is a function of the number of tokens alone, after ``crop`` too, so that bytes stay exact.
Hence two exceptions to "written once": cropping below the token count at which a page was written (assisted decoding
that rejects tokens) moves what is left of that page back into the buffer, as decoded; and where the plan has pages
shrink, all of them are converted at once (``set_bits``), down as tokens come, up after a crop.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels.form_operands import VALUES_AT_ONCE
from kvcal.pages.codec import ENCODE_PAGES, PageCodec
from kvcal.pages.layout import PAGE_TOKENS

# (row, first, stop): consecutive pages of a row, by their ordinals within it.
Span = tuple[int, int, int]
Predict = Callable[[Sequence[Span]], Tensor]
Keep = Callable[[Sequence[Span], Tensor], None]


def ordinals_of(spans: Sequence[Span], device: torch.device) -> Tensor:
    """int64 [M]: the ordinal of every page of the spans, in their order."""
    return torch.tensor([i for _, first, stop in spans for i in range(first, stop)], dtype=torch.int64, device=device)


class PagedTensor:
    """See the module's docstring. ``codec`` says which KV heads (n of them) are held here, and how.

    Tensors: sinks [B, n, num_sink_tokens, D] and buffer [B, n, buffer_tokens, D] in the cache's dtype;
    pages [sum of rows' pages, n (1 for a lattice), record_bytes] uint8; for query scores query_sum [B, n, D] fp32, the
    sum of |q| over the ``query_count`` query vectors of each row, all of them or those since its last page. ``predict``
    says what a predictor says about pages, [M, n, 128, D] fp32; None without one. ``keep`` gets every page that is
    decoded, before its transforms are undone.
    """

    def __init__(self, codec: PageCodec, batch: int, device: torch.device, predict: Predict | None = None) -> None:
        fmt = codec.format
        self.codec, self.format, self.heads, self.predict = codec, fmt, codec.heads, predict
        self.num_bits = fmt.bits_at(0)
        shape = (batch, codec.num_heads)
        dtype = CACHE_DTYPES[codec.cache_dtype]
        channels = codec.head_dim if fmt.needs_queries else 0
        with torch.inference_mode(False):  # or nothing could be written to them outside of inference mode
            self.sinks = torch.zeros(*shape, fmt.num_sink_tokens, codec.head_dim, dtype=dtype, device=device)
            self.buffer = torch.zeros(*shape, fmt.buffer_tokens, codec.head_dim, dtype=dtype, device=device)
            self.query_sum = torch.zeros(*shape, channels, dtype=torch.float32, device=device)
        records = (codec.records_per_page, codec.record_bytes(self.num_bits))
        self.pages = torch.empty(0, *records, dtype=torch.uint8, device=device)
        self.num_pages = [0] * batch
        self.query_count = [0] * batch
        self.keep: Keep | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything this object holds on the device."""
        return self.sinks, self.buffer, self.pages, self.query_sum

    def num_buffered(self, row: int, num_tokens: int) -> int:
        """Tokens in the buffer of a row that has seen ``num_tokens``."""
        return max(0, num_tokens - self.format.num_sink_tokens) - PAGE_TOKENS * self.num_pages[row]

    def spans(self, rows: slice) -> list[Span]:
        """All pages of ``rows``, in the pool's order."""
        return [(row, 0, self.num_pages[row]) for row in range(rows.start, rows.stop)]

    def decode(self, spans: Sequence[Span], dtype: torch.dtype) -> Tensor:
        """[M, n, 128, D] of ``dtype``: these pages as keys after RoPE, or as values. Some at a time, which bounds the
        scratch, where no predictor wants them whole."""
        ordinals = ordinals_of(spans, self.pages.device)
        if self.keep is not None or self.predict is not None:
            stored = self.stored(spans)
            if self.keep is not None:
                self.keep(spans, stored)
            return self.codec.restore(stored, ordinals, self.num_bits).to(dtype)
        records, codec = self.records(spans), self.codec
        out = records.new_empty(len(records), codec.num_heads, PAGE_TOKENS, codec.head_dim, dtype=dtype)
        pages_at_once = max(1, VALUES_AT_ONCE // (codec.num_heads * PAGE_TOKENS * codec.head_dim))
        for start in range(0, len(records), pages_at_once):
            part = slice(start, start + pages_at_once)
            out[part] = codec.restore(codec.decode(records[part], self.num_bits), ordinals[part], self.num_bits)
        return out

    def stored(self, spans: Sequence[Span]) -> Tensor:
        """[M, n, 128, D]: these pages before their transforms are undone (see PageCodec.decode)."""
        records = self.records(spans)
        return self.codec.decode(records, self.num_bits, self._prediction(spans) if len(records) else None)

    def records(self, spans: Sequence[Span]) -> Tensor:
        """[M, r, record_bytes]: these pages."""
        first = [0, *itertools.accumulate(self.num_pages)]
        if spans and all(start == 0 and stop == self.num_pages[row] for row, start, stop in spans):
            rows = [row for row, _, _ in spans]
            if rows == list(range(rows[0], rows[-1] + 1)):
                return self.pages[first[rows[0]] : first[rows[-1] + 1]]
        wanted = [first[row] + ordinal for row, start, stop in spans for ordinal in range(start, stop)]
        return self.pages[torch.tensor(wanted, dtype=torch.int64, device=self.pages.device)]

    def set_bits(self, num_bits: int) -> None:
        """Shrink all pages to ``num_bits``, or widen them after a crop; pages to come are written with as many."""
        if num_bits != self.num_bits:
            self.pages = self.codec.convert(self.pages, self.num_bits, num_bits)
            self.num_bits = num_bits

    def append(self, rows: slice, num_tokens: int, x: Tensor) -> list[Span]:
        """Store x [b, n, T, D] behind the ``num_tokens`` tokens that each of ``rows`` (equal ones) has seen; returns
        the pages written.

        Raises:
            NonFiniteActivations: NaN or infinity in a page that is due.
        """
        due = self.format.num_pages(num_tokens + x.shape[2]) - self.num_pages[rows.start]
        sinks = min(max(0, self.format.num_sink_tokens - num_tokens), x.shape[2])
        self.sinks[rows, :, num_tokens : num_tokens + sinks] = x[:, :, :sinks]
        x = x[:, :, sinks:]
        held = self.num_buffered(rows.start, num_tokens)
        written: list[Span] = []
        if due > 0:
            written = [(row, n, n + due) for row, n in enumerate(self.num_pages) if rows.start <= row < rows.stop]
            self._pack(written, self.buffer[rows, :, :held], x)
            left = self.buffer[rows, :, due * PAGE_TOKENS : held].clone()  # where a window's rule has jumped
            self.buffer[rows, :, : left.shape[2]] = left
            x, held = x[:, :, max(0, due * PAGE_TOKENS - held) :], left.shape[2]
        self.buffer[rows, :, held : held + x.shape[2]] = x
        return written

    def append_step(self, num_tokens: list[int], x: Tensor) -> bool:
        """Store one token x [B, n, 1, D] of every row, as :meth:`append` would, if that only fills buffers; else do
        nothing and return False. One indexed write instead of a loop over the rows of a ragged batch."""
        counts = zip(num_tokens, self.num_pages, strict=True)
        if min(num_tokens) < self.format.num_sink_tokens or any(self.format.num_pages(n + 1) > p for n, p in counts):
            return False
        held = [self.num_buffered(row, count) for row, count in enumerate(num_tokens)]
        every_row = torch.arange(len(held), device=x.device)
        self.buffer[every_row, :, torch.tensor(held, device=x.device)] = x[:, :, 0]
        return True

    def observe(self, query_sum: Tensor, counts: list[int]) -> None:
        """Add to the running query statistic: query_sum [B, n, D] is the sum of |q| over ``counts`` vectors a row."""
        self.query_sum += query_sum
        self.query_count = [old + new for old, new in zip(self.query_count, counts, strict=True)]

    def read(self, rows: slice, num_tokens: int, decoded: Tensor, out: Tensor) -> None:
        """Write the ``num_tokens`` tokens of each of ``rows`` (equal ones) to out [b, n, num_tokens, D];
        ``decoded`` [pages of these rows, n, 128, D] is :meth:`decode` of their spans."""
        sinks, pages = min(self.format.num_sink_tokens, num_tokens), self.num_pages[rows.start]
        paged = sinks + pages * PAGE_TOKENS
        out[:, :, :sinks] = self.sinks[rows, :, :sinks]
        if pages:
            of_rows = decoded.unflatten(0, (-1, pages)).transpose(1, 2)
            out[:, :, sinks:paged].unflatten(2, (pages, PAGE_TOKENS)).copy_(of_rows)
        out[:, :, paged:] = self.buffer[rows, :, : num_tokens - paged]

    def crop(self, rows: slice, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` tokens of each of ``rows`` (equal ones)."""
        whole = self.format.num_pages(num_tokens)
        if self.num_pages[rows.start] == whole:
            return
        rest = max(0, num_tokens - self.format.num_sink_tokens) - PAGE_TOKENS * whole
        by_row = list(self.pages.split(self.num_pages))
        for row in range(rows.start, rows.stop):
            decoded = self.decode([(row, whole, self.num_pages[row])], self.buffer.dtype)
            self.buffer[row, :, :rest] = torch.cat([*decoded, self.buffer[row]], dim=1)[:, :rest]
        for row in range(rows.start, rows.stop):
            by_row[row] = by_row[row][:whole]
            self.num_pages[row] = whole
        self.pages = torch.cat(by_row)

    def select(self, indices: list[int]) -> None:
        """Keep, repeat or reorder rows."""
        by_row = self.pages.split(self.num_pages)
        with torch.inference_mode(False):
            self.sinks, self.buffer, self.query_sum = (x[indices] for x in (self.sinks, self.buffer, self.query_sum))
        self.query_count = [self.query_count[index] for index in indices]
        self.pages = torch.cat([by_row[index] for index in indices])
        self.num_pages = [self.num_pages[index] for index in indices]

    def _pack(self, spans: list[Span], held: Tensor, new: Tensor) -> None:
        """Write pages of the first tokens of held [b, n, .., D] and of new [b, n, .., D] behind them, one span a row,
        a part at a time: beside the pages so far and all of them there is never more than the scratch of a part."""
        pool, places = self._with_room(spans)
        (_, first, stop), prediction = spans[0], self._prediction(spans)
        query_mean = self._take_query_mean(spans)
        pages_at_once = max(1, ENCODE_PAGES // len(spans))
        for start in range(first, stop, pages_at_once):
            ordinals = torch.arange(start, min(start + pages_at_once, stop), device=new.device)
            begin, end = (PAGE_TOKENS * (n - first) for n in (start, start + len(ordinals)))
            tokens = new[:, :, max(0, begin - held.shape[2]) : max(0, end - held.shape[2])]
            if begin < held.shape[2]:
                tokens = torch.cat([held[:, :, begin:end], tokens], dim=2)
            pages = tokens.unflatten(2, (-1, PAGE_TOKENS)).transpose(1, 2).flatten(0, 1)
            predicted = None
            if prediction is not None:
                by_row = prediction.unflatten(0, (len(spans), -1))
                predicted = by_row[:, start - first : start - first + len(ordinals)].flatten(0, 1)
            mean = None if query_mean is None else query_mean.repeat_interleave(len(ordinals), dim=0)
            records = self.codec.encode(pages, ordinals.repeat(len(spans)), self.num_bits, mean, predicted)
            for place, part in zip(places, records.unflatten(0, (len(spans), -1)), strict=True):
                pool[place + start - first : place + start - first + len(ordinals)] = part
        self.pages = pool
        for row, _, stop in spans:
            self.num_pages[row] = stop

    def _with_room(self, spans: list[Span]) -> tuple[Tensor, list[int]]:
        """The pages so far, with room for ``spans`` behind those of their rows, and where each span begins."""
        new = {row: stop - first for row, first, stop in spans}
        pool = self.pages.new_empty(len(self.pages) + sum(new.values()), *self.pages.shape[1:])
        places, at = [], 0
        for row, old in enumerate(self.pages.split(self.num_pages)):
            pool[at : at + len(old)] = old
            at += len(old)
            if row in new:
                places.append(at)
                at += new[row]
        return pool, places

    def _take_query_mean(self, spans: list[Span]) -> Tensor | None:
        """[b, n, D]: the mean |q| of each span's row since its last page, which begins anew; None without scores."""
        if not self.format.needs_queries:
            return None
        rows = [row for row, _, _ in spans]
        counts = self.query_sum.new_tensor([self.query_count[row] for row in rows])
        query_mean = self.query_sum[rows] / counts[:, None, None]
        for row in () if self.format.keeps_queries else rows:
            self.query_sum[row] = 0
            self.query_count[row] = 0
        return query_mean

    def _prediction(self, spans: Sequence[Span]) -> Tensor | None:
        return None if self.predict is None else self.predict(spans)
