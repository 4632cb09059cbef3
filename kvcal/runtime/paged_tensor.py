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
from kvcal.quantizers.pages import PAGE_TOKENS
from kvcal.runtime.page_codec import PageCodec

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
        self.sinks = torch.zeros(*shape, fmt.num_sink_tokens, codec.head_dim, dtype=dtype, device=device)
        self.buffer = torch.zeros(*shape, fmt.buffer_tokens, codec.head_dim, dtype=dtype, device=device)
        records = (codec.records_per_page, codec.record_bytes(self.num_bits))
        self.pages = torch.empty(0, *records, dtype=torch.uint8, device=device)
        self.num_pages = [0] * batch
        channels = codec.head_dim if fmt.needs_queries else 0
        self.query_sum = torch.zeros(*shape, channels, dtype=torch.float32, device=device)
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

    def decode(self, spans: Sequence[Span]) -> Tensor:
        """[M, n, 128, D]: these pages as keys after RoPE, or as values."""
        stored = self.stored(spans)
        if self.keep is not None:
            self.keep(spans, stored)
        return self.codec.restore(stored, ordinals_of(spans, stored.device), self.num_bits)

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
            x = torch.cat([self.buffer[rows, :, :held], x], dim=2)
            written = [(row, n, n + due) for row, n in enumerate(self.num_pages) if rows.start <= row < rows.stop]
            self._add_pages(written, self._encode(written, x[:, :, : due * PAGE_TOKENS]))
            x, held = x[:, :, due * PAGE_TOKENS :], 0
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
            decoded = self.decode([(row, whole, self.num_pages[row])]).to(self.buffer.dtype)
            self.buffer[row, :, :rest] = torch.cat([*decoded, self.buffer[row]], dim=1)[:, :rest]
        for row in range(rows.start, rows.stop):
            by_row[row] = by_row[row][:whole]
            self.num_pages[row] = whole
        self.pages = torch.cat(by_row)

    def select(self, indices: list[int]) -> None:
        """Keep, repeat or reorder rows."""
        by_row = self.pages.split(self.num_pages)
        self.sinks, self.buffer = self.sinks[indices], self.buffer[indices]
        self.query_sum, self.query_count = self.query_sum[indices], [self.query_count[index] for index in indices]
        self.pages = torch.cat([by_row[index] for index in indices])
        self.num_pages = [self.num_pages[index] for index in indices]

    def _encode(self, spans: list[Span], x: Tensor) -> Tensor:
        """x [b, n, P * 128, D], P pages a row -> records [b * P, r, record_bytes] of ``spans``."""
        pages = x.unflatten(2, (-1, PAGE_TOKENS)).transpose(1, 2)
        query_mean = None
        if self.format.needs_queries:
            rows = [row for row, first, stop in spans for _ in range(first, stop)]
            counts = self.query_sum.new_tensor([self.query_count[row] for row in rows])
            query_mean = self.query_sum[rows] / counts[:, None, None]
            for row, _, _ in () if self.format.keeps_queries else spans:
                self.query_sum[row] = 0
                self.query_count[row] = 0
        ordinals = ordinals_of(spans, x.device)
        return self.codec.encode(pages.flatten(0, 1), ordinals, self.num_bits, query_mean, self._prediction(spans))

    def _prediction(self, spans: Sequence[Span]) -> Tensor | None:
        return None if self.predict is None else self.predict(spans)

    def _add_pages(self, spans: list[Span], records: Tensor) -> None:
        """Append records, ordered as ``spans``, behind the pages of their rows."""
        new = dict(zip([row for row, _, _ in spans], records.split([b - a for _, a, b in spans]), strict=True))
        parts = []
        for row, old in enumerate(self.pages.split(self.num_pages)):
            parts.append(old)
            if row in new:
                parts.append(new[row])
                self.num_pages[row] += len(new[row])
        self.pages = torch.cat(parts)
