"""The keys, or the values, of some KV heads of one layer: sinks, packed pages and buffer, for all rows of a batch.

A row's tokens run: ``num_sink_tokens`` unquantized, then pages of 128, then the buffer. Nothing else is kept: no
full-precision copy of a packed token exists once ``append`` returns. Pages are written once; they lie in one pool
[all pages of row 0, all pages of row 1, ...], so rows of different lengths waste nothing.

How many pages there are is a function of the number of tokens alone, after ``crop`` too, so that bytes stay exact.
Hence the only exception to "written once": cropping below the token count at which a page was written (assisted
decoding that rejects tokens) moves what is left of that page back into the buffer, as decoded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES
from kvcal.plan import Format, Side
from kvcal.quantizers.pages import PAGE_TOKENS

# Pages encoded at once: bounds the fp32 scratch of a long prefill to a few MB a head.
ENCODE_PAGES = 64


class PagedTensor:
    """See the module's docstring. ``heads`` is the slice of the layer's KV heads held here (n of them).

    Tensors: sinks [B, n, num_sink_tokens, D] and buffer [B, n, buffer_tokens, D] in the cache's dtype;
    pages [sum of rows' pages, n, record_bytes] uint8.
    """

    def __init__(
        self,
        fmt: Format,
        side: Side,
        heads: slice,
        head_dim: int,
        cache_dtype: str,
        batch: int,
        device: torch.device,
    ) -> None:
        self.format = fmt
        self.heads = heads
        self.layout = fmt.layout(side, head_dim, cache_dtype)
        shape = (batch, heads.stop - heads.start)
        dtype = CACHE_DTYPES[cache_dtype]
        self.sinks = torch.zeros(*shape, fmt.num_sink_tokens, head_dim, dtype=dtype, device=device)
        self.buffer = torch.zeros(*shape, fmt.buffer_tokens, head_dim, dtype=dtype, device=device)
        self.pages = torch.empty(0, shape[1], self.layout.record_bytes, dtype=torch.uint8, device=device)
        self.num_pages = [0] * batch

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything this object holds on the device."""
        return self.sinks, self.buffer, self.pages

    def num_buffered(self, row: int, num_tokens: int) -> int:
        """Tokens in the buffer of a row that has seen ``num_tokens``."""
        return max(0, num_tokens - self.format.num_sink_tokens) - PAGE_TOKENS * self.num_pages[row]

    def append(self, rows: slice, num_tokens: int, x: Tensor) -> None:
        """Store x [b, n, T, D] behind the ``num_tokens`` tokens that each of ``rows`` (equal ones) has seen.

        Raises:
            NonFiniteActivations: NaN or infinity in a page that is due.
        """
        sinks = min(max(0, self.format.num_sink_tokens - num_tokens), x.shape[2])
        self.sinks[rows, :, num_tokens : num_tokens + sinks] = x[:, :, :sinks]
        x = x[:, :, sinks:]
        held = self.num_buffered(rows.start, num_tokens)
        due = max(0, held + x.shape[2] - self.format.recent_window) // PAGE_TOKENS
        if due:
            x = torch.cat([self.buffer[rows, :, :held], x], dim=2)
            self._add_pages(rows, self._encode(x[:, :, : due * PAGE_TOKENS]))
            x, held = x[:, :, due * PAGE_TOKENS :], 0
        self.buffer[rows, :, held : held + x.shape[2]] = x

    def append_step(self, num_tokens: list[int], x: Tensor) -> bool:
        """Store one token x [B, n, 1, D] of every row, as :meth:`append` would, if that only fills buffers; else do
        nothing and return False. One indexed write instead of a loop over the rows of a ragged batch."""
        held = [self.num_buffered(row, count) for row, count in enumerate(num_tokens)]
        if min(num_tokens) < self.format.num_sink_tokens or max(held) + 1 >= self.format.buffer_tokens:
            return False
        every_row = torch.arange(len(held), device=x.device)
        self.buffer[every_row, :, torch.tensor(held, device=x.device)] = x[:, :, 0]
        return True

    def page_range(self, rows: slice) -> slice:
        """Where the pages of ``rows`` lie in ``pages``."""
        return slice(sum(self.num_pages[: rows.start]), sum(self.num_pages[: rows.stop]))

    def read(self, rows: slice, num_tokens: int, decoded: Tensor, out: Tensor) -> None:
        """Write the ``num_tokens`` tokens of each of ``rows`` (equal ones) to out [b, n, num_tokens, D];
        ``decoded`` [pages of these rows, n, 128, D] is ``layout.decode`` of their ``page_range``."""
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
            decoded = self.layout.decode(by_row[row][whole:]).to(self.buffer.dtype)
            self.buffer[row, :, :rest] = torch.cat([*decoded, self.buffer[row]], dim=1)[:, :rest]
            by_row[row] = by_row[row][:whole]
            self.num_pages[row] = whole
        self.pages = torch.cat(by_row)

    def select(self, indices: list[int]) -> None:
        """Keep, repeat or reorder rows."""
        by_row = self.pages.split(self.num_pages)
        self.sinks, self.buffer = self.sinks[indices], self.buffer[indices]
        self.pages = torch.cat([by_row[index] for index in indices])
        self.num_pages = [self.num_pages[index] for index in indices]

    def _encode(self, x: Tensor) -> Tensor:
        """x [b, n, P * 128, D] -> records [b, P, n, record_bytes]."""
        pages = x.unflatten(2, (-1, PAGE_TOKENS)).transpose(1, 2)
        return torch.cat([self.layout.encode(part) for part in pages.split(ENCODE_PAGES, dim=1)], dim=1)

    def _add_pages(self, rows: slice, records: Tensor) -> None:
        """Append records [b, P, n, record_bytes] behind the pages of ``rows``."""
        parts = []
        for row, old in enumerate(self.pages.split(self.num_pages)):
            parts.append(old)
            if rows.start <= row < rows.stop:
                parts.append(records[row - rows.start])
                self.num_pages[row] += records.shape[1]
        self.pages = torch.cat(parts)
