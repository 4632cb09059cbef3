"""Pages that the kernels cannot read as they are stored: lattices, residuals of a prediction, keys before RoPE.

None of them folds into a query. So they stay what they are in memory, the same bytes as in the dynamic cache, and in
every step the pages of one layer are reconstructed into pages of 16 bits, in a workspace that all layers share
(kvcal.runtime.form_workspace), over which the ordinary kernels run. Reconstruction is a kernel of its own
(kvcal.kernels.reconstruct), in fp32, rounded once to the cache's dtype. What is predicted from is reconstructed for its
readers as well, before RoPE and in fp32.

A step knows no lengths on the host. The kernel reads them, and reconstructs the pages that rows hold. Predictions are
matrix products in torch, for all pages that there is room for, ``VALUES_AT_ONCE`` at a time: their cost is that of full
rows, whatever they hold, which the cache says by ``SlowPath``. The page that ``append`` has just moved out of a row's
buffer is encoded by a kernel (kvcal.kernels.encode_due), which returns at once where none was due; pages whose channels
have different bits in torch, one of every row, or zeros. What would be cheaper than to predict in every step: to
reconstruct once (AQUA-KV's codec mode), at 16 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal.formats import Format
from kvcal.kernels.encode_due import due_pages, encode_due
from kvcal.kernels.predict import Predict, prepared
from kvcal.kernels.reconstruct import VALUES_AT_ONCE, reconstruct
from kvcal.kernels.reconstruction import Reconstruction
from kvcal.kernels.reference import NON_FINITE
from kvcal.quantizers.finite import noted_in
from kvcal.quantizers.pages import PAGE_TOKENS, RAW_BITS
from kvcal.runtime.page_codec import PageCodec
from kvcal.transforms.linear_predictor import LinearPredictor

# Rows and ordinals of M pages, int64 [M] each, on the device: an index of the first two dimensions of [B, pages, ...].
Places = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Predicted:
    """What a side's pages are predicted from: ``inputs`` [B, pages, 128, .., ..] fp32, of the source first."""

    predictor: LinearPredictor
    inputs: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class StoredForm:
    """One side of N neighbouring heads in one format.

    ``records`` [B, pages, r, record_bytes] uint8, one tensor for each head range that packs its own (a side that is
    merely predicted from), else a single one. ``tokens`` [B, pages, n, 128, D] in the cache's dtype: what the kernels
    of each head range meet; none where they read the records. ``kept`` [B, pages, 128, N, D] fp32: for predictors.
    ``page_at`` and ``turns`` as in kvcal.kernels; ``lengths`` and ``error`` are the cache's; ``nothing`` is empty.
    """

    codec: PageCodec
    records: tuple[Tensor, ...]
    tokens: tuple[Tensor, ...]
    kept: Tensor | None
    predicted: Predicted | None
    page_at: Tensor
    turns: Tensor | None
    lengths: Tensor
    error: Tensor
    nothing: Tensor

    @property
    def format(self) -> Format:
        return self.codec.format

    @property
    def max_pages(self) -> int:
        return self.records[0].shape[1]

    def step(self) -> None:
        """Behind ``append``: encode the page that it took from every row's buffer, where it did, then reconstruct the
        pages that rows hold. The other sides that this one is predicted from come before."""
        if not self.max_pages:
            return
        predict = self._predict()
        if self.tokens:
            self._encode_due(predict)
        self._reconstruct(slice(0, len(self.lengths)), range(self.max_pages), self.lengths, predict)

    def pack(self, rows: slice, pages: range) -> None:
        """Encode these pages of each of ``rows``, which are in ``tokens``."""
        predict = self._predict()
        for start, stop in self._parts(rows, pages) if self.tokens else ():
            self._encode(self._places(rows, pages, start, stop), None, predict)

    def load(self, rows: slice, pages: range) -> None:
        """Reconstruct these pages of each of ``rows``."""
        if pages:
            self._reconstruct(rows, pages, self.nothing, self._predict())

    def _encode_due(self, predict: Predict | None) -> None:
        """What is predicted is one page of every row, due or not."""
        is_tiered, prediction = self.format.boost is not None, self.nothing
        if is_tiered or self.predicted is not None:
            pages, is_due = due_pages(self.format, self.lengths, self.page_at, self.max_pages)
            places = torch.arange(len(pages), device=pages.device), pages
            if is_tiered:
                self._encode(places, is_due, predict)
                return
            if self.predicted is not None:
                prediction = self._prediction([kept[places] for kept in self.predicted.inputs], predict)
        (records,) = self.records
        grid, signs, rescale, offset, rotary, turns = self._transforms
        encode_due(
            self.tokens, records, prediction, self.lengths, self.page_at, grid, signs, rescale, offset, rotary, turns,
            self.error, self._form,
        )  # fmt: skip

    def _encode(self, places: Places, is_due: Tensor | None, predict: Predict | None) -> None:
        """``is_due`` bool [M]: the others keep what they have; None for all."""
        x = torch.cat([part[places] for part in self.tokens], dim=1)
        prediction = None
        if self.predicted is not None:
            prediction = self._prediction([kept[places] for kept in self.predicted.inputs], predict).transpose(1, 2)
        if is_due is not None:  # what is not due may be anything, NaN included
            wanted = is_due[:, None, None, None]
            x = torch.where(wanted, x, 0)
            prediction = None if prediction is None else torch.where(wanted, prediction, 0)
        with noted_in(self.error, NON_FINITE):
            found = self.codec.encode(x, places[1], self.format.num_bits, prediction=prediction)
        (records,) = self.records
        records[places] = found if is_due is None else torch.where(is_due[:, None, None], found, records[places])

    def _reconstruct(self, rows: slice, pages: range, lengths: Tensor, predict: Predict | None) -> None:
        """``lengths``: as for the operator."""
        kept = self.nothing if self.kept is None else self.kept
        grid, signs, rescale, offset, rotary, turns = self._transforms
        every = [(0, (rows.stop - rows.start) * len(pages))]
        for start, stop in every if self.predicted is None else self._parts(rows, pages):
            prediction = self.nothing
            if self.predicted is not None:
                inputs = [self._taken(source, rows, pages, start, stop) for source in self.predicted.inputs]
                prediction = self._prediction(inputs, predict)
            for records, tokens, first_head in self._head_ranges:
                reconstruct(
                    records, tokens, kept, prediction, lengths, self.page_at, grid, signs, rescale, offset,
                    rotary, turns, first_head, rows.start, pages.start, len(pages), start, stop, self._form,
                )  # fmt: skip

    def _predict(self) -> Predict | None:
        """The predictor, prepared for a few calls; None without one."""
        return None if self.predicted is None else prepared(self.predicted.predictor)

    def _prediction(self, inputs: Sequence[Tensor], predict: Predict | None) -> Tensor:
        """[M, 128, N, D] fp32 from ``Predicted.inputs`` of M pages."""
        assert predict is not None
        return predict([part.flatten(-2) for part in inputs]).unflatten(-1, (self.codec.num_heads, -1))

    def _parts(self, rows: slice, pages: range) -> list[tuple[int, int]]:
        """All of these pages, numbered row by row, as many at a time as the scratch allows."""
        count = (rows.stop - rows.start) * len(pages)
        step = max(1, VALUES_AT_ONCE // (self.codec.num_heads * PAGE_TOKENS * self.codec.head_dim))
        return [(start, min(start + step, count)) for start in range(0, count, step)]

    def _places(self, rows: slice, pages: range, start: int, stop: int) -> Places:
        """Pages number ``start`` to ``stop`` - 1 of these. Nothing is copied from the host."""
        number = torch.arange(start, stop, device=self.lengths.device)
        return rows.start + number // len(pages), pages.start + number % len(pages)

    def _taken(self, kept: Tensor, rows: slice, pages: range, start: int, stop: int) -> Tensor:
        """[M, 128, .., ..]: these pages of a source; no copy where they are all of their rows'."""
        if len(pages) < self.max_pages:
            return kept[self._places(rows, pages, start, stop)]
        first = rows.start * self.max_pages
        return kept.flatten(0, 1)[first + start : first + stop]

    @functools.cached_property
    def _form(self) -> str:
        """The key of what the operator is specialised for."""
        codec, is_coded = self.codec, self.format.num_bits != RAW_BITS
        rotary = codec.rotary if codec.is_pre or self.kept is not None else None
        return Reconstruction(
            codec.side,
            codec.format,
            codec.num_heads,
            codec.head_dim,
            codec.cache_dtype,
            is_pre=codec.is_pre,
            rescale=codec.rescale is not None and is_coded,
            offset=codec.offset is not None and is_coded,
            num_pairs=0 if rotary is None else len(rotary),
        ).key

    @functools.cached_property
    def _head_ranges(self) -> list[tuple[Tensor, Tensor, int]]:
        """Records, tokens and the first head, within the run, of every head range."""
        found, first = [], 0
        for number in range(max(len(self.records), len(self.tokens))):
            records = self.records[number if len(self.records) > 1 else 0]
            tokens = self.tokens[number] if self.tokens else self.nothing
            num_heads = tokens.shape[2] if self.tokens else records.shape[2]
            if self.tokens and self.format.lattice_dim is None:
                records = records[:, :, first : first + num_heads]
            found.append((records, tokens, first))
            first += num_heads
        return found

    @functools.cached_property
    def _transforms(self) -> list[Tensor]:
        """Grid, signs, rescale, offset, rotary and turns; what there is not, empty."""
        codec = self.codec
        flat = [None if x is None else x.squeeze(-2) for x in (codec.rescale, codec.offset)]
        given = [codec.grid, codec.signs, *flat, codec.rotary, self.turns]
        return [self.nothing if x is None else x for x in given]
