"""Pages that the kernels cannot read as they are stored: lattices, residuals of a prediction, keys before RoPE.

None of them folds into a query. So they stay what they are in memory, the same bytes as in the dynamic cache, and in
every step the pages of one layer are reconstructed into pages of 16 bits, in a workspace that all layers share
(kvcal.runtime.form_workspace), over which the ordinary kernels run. Reconstruction is ``PageCodec``'s, in fp32, rounded
once to the cache's dtype. What is predicted from is reconstructed for its readers as well, before RoPE and in fp32.

A step knows no lengths on the host: it reconstructs all pages that there is room for (what lies beyond a row's own is
never read), and encodes one page of every row, the one that ``append`` has just moved out of the buffer, or zeros where
none was due. So its cost is that of full rows, whatever they hold, and a captured graph stays valid as they grow. It is
torch, 20 to 100 operations for each ``VALUES_AT_ONCE``: far slower than packed pages, which the cache says by
``SlowPath``. What would be cheaper: kernels of their own, or reconstructing once (AQUA-KV's codec mode), at 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal.formats import Format
from kvcal.kernels.reference import NON_FINITE
from kvcal.quantizers.finite import noted_in
from kvcal.quantizers.pages import PAGE_TOKENS
from kvcal.runtime.page_codec import PageCodec
from kvcal.runtime.prediction import predicted
from kvcal.transforms.linear_predictor import LinearPredictor

# Rows and ordinals of M pages, int64 [M] each, on the device: an index of the first two dimensions of [B, pages, ...].
Places = tuple[Tensor, Tensor]
# Values reconstructed, or encoded, at once: every temporary in fp32 is 32 MB then.
VALUES_AT_ONCE = 2**23


@dataclass(frozen=True)
class Predicted:
    """What a side's pages are predicted from: ``inputs`` [B, pages, .., 128, ..] fp32, of the source first."""

    predictor: LinearPredictor
    inputs: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class StoredForm:
    """One side of neighbouring heads in one format.

    ``records`` [B, pages, r, record_bytes] uint8, one tensor for each head range that packs its own (a side that is
    merely predicted from), else a single one. ``tokens`` [B, pages, n, 128, D] in the cache's dtype: what the kernels
    of each head range meet; none where they read the records. ``kept`` [B, pages, N, 128, D] fp32: for predictors.
    ``page_at`` as in kvcal.kernels.ops; ``lengths`` and ``error`` are the cache's.
    """

    codec: PageCodec
    records: tuple[Tensor, ...]
    tokens: tuple[Tensor, ...]
    kept: Tensor | None
    predicted: Predicted | None
    page_at: Tensor
    lengths: Tensor
    error: Tensor

    @property
    def format(self) -> Format:
        return self.codec.format

    @property
    def max_pages(self) -> int:
        return self.records[0].shape[1]

    def pack_due(self) -> None:
        """Within a step, behind ``append``: encode the page that it took from every row's buffer, where it did."""
        if not self.tokens or not self.max_pages:
            return
        packed = self._num_pages((self.lengths - 1).clamp(min=0))
        is_due = (self._num_pages(self.lengths) > packed) & (packed < self.max_pages)
        every_row = torch.arange(len(packed), device=packed.device)
        self._encode((every_row, packed.clamp(max=self.max_pages - 1).long()), is_due)

    def pack(self, rows: slice, pages: range) -> None:
        """Encode these pages of each of ``rows``, which are in ``tokens``."""
        for places in self._places(rows, pages) if self.tokens else ():
            self._encode(places, None)

    def load(self, rows: slice, pages: range) -> None:
        """Reconstruct these pages of each of ``rows``."""
        for places in self._places(rows, pages):
            self._decode(places)

    def _encode(self, places: Places, is_due: Tensor | None) -> None:
        """``is_due`` bool [M]: the others keep what they have; None for all."""
        x = torch.cat([part[places] for part in self.tokens], dim=1)
        prediction = self._prediction(places)
        if is_due is not None:  # what is not due may be anything, NaN included
            wanted = is_due[:, None, None, None]
            x = torch.where(wanted, x, 0)
            prediction = None if prediction is None else torch.where(wanted, prediction, 0)
        with noted_in(self.error, NON_FINITE):
            found = self.codec.encode(x, places[1], self.format.num_bits, prediction=prediction)
        (records,) = self.records
        records[places] = found if is_due is None else torch.where(is_due[:, None, None], found, records[places])

    def _decode(self, places: Places) -> None:
        records = torch.cat([part[places] for part in self.records], dim=1)
        stored = self.codec.decode(records, self.format.num_bits, self._prediction(places))
        if self.kept is not None:
            self.kept[places] = self.codec.before_rope(stored, places[1])
        if self.tokens:
            values = self.codec.restore(stored, places[1]).split([part.shape[2] for part in self.tokens], dim=1)
            for part, of_range in zip(self.tokens, values, strict=True):
                part[places] = of_range.to(part.dtype)

    def _prediction(self, places: Places) -> Tensor | None:
        if self.predicted is None:
            return None
        inputs = [kept[places] for kept in self.predicted.inputs]
        return predicted(self.predicted.predictor, inputs, self.codec.num_heads)

    def _num_pages(self, lengths: Tensor) -> Tensor:
        """``Format.num_pages`` of int32 [B], on the device."""
        fmt = self.format
        if fmt.window_rule is not None:
            return torch.searchsorted(self.page_at, lengths, right=True)
        return (lengths - fmt.num_sink_tokens - fmt.recent_window).clamp(min=0) // PAGE_TOKENS

    def _places(self, rows: slice, pages: range) -> Iterator[Places]:
        """All of these, row by row, as many at a time as the scratch allows. Nothing is copied from the host."""
        count = (rows.stop - rows.start) * len(pages)
        step = max(1, VALUES_AT_ONCE // (self.codec.num_heads * PAGE_TOKENS * self.codec.head_dim))
        for start in range(0, count, step):
            number = torch.arange(start, min(start + step, count), device=self.lengths.device)
            yield rows.start + number // len(pages), pages.start + number % len(pages)
