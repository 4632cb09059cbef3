"""Pages that the kernels cannot read as they are stored: lattices, residuals of a prediction, keys before RoPE.

None of them folds into a query. So they stay what they are in memory, the same bytes as in the dynamic cache, and in
every step the pages of one layer are reconstructed into pages of 16 bits, in a workspace that all layers share
(kvcal.store.form_workspace), over which the ordinary kernels run. Reconstruction is a kernel of its own
(kvcal.kernels.reconstruct), in fp32, rounded once to the cache's dtype. What is predicted from is reconstructed for its
readers as well, before RoPE and in fp32.

A step knows no lengths on the host. The kernel reads them, and reconstructs the pages that rows hold. Predictions
(kvcal.kernels.predict) are made of all pages that there is room for, ``VALUES_AT_ONCE`` at a time: their cost is that
of full rows, whatever they hold, which the cache says by ``SlowPath``. The page that ``append`` has just moved out of a
row's buffer is encoded by a kernel (kvcal.kernels.encode_due), which returns at once where none was due; pages whose
channels have different bits in torch, one of every row, or zeros. What would be cheaper than to predict in every step:
to reconstruct once (AQUA-KV's codec mode), at 16 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal.kernels.encode_due import due_pages, encode_due
from kvcal.kernels.form_operands import HeadPages, HeldPages, NumberedPages, PageCoding
from kvcal.kernels.predict import Predict, prepared
from kvcal.kernels.reconstruct import reconstruct
from kvcal.kernels.reconstruction import Reconstruction
from kvcal.kernels.reference import NON_FINITE
from kvcal.pages.codec import PageCodec
from kvcal.pages.layout import RAW_BITS, noted_in
from kvcal.pages.predictor import LinearPredictor
from kvcal.plan.format import Format


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
    ``turns`` as in kvcal.kernels; the ``lengths`` in ``held`` and ``error`` are the cache's; ``nothing`` is empty.
    """

    codec: PageCodec
    records: tuple[Tensor, ...]
    tokens: tuple[Tensor, ...]
    kept: Tensor | None
    predicted: Predicted | None
    held: HeldPages
    turns: Tensor | None
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
        rows = slice(0, len(self.held.lengths))
        self._reconstruct(NumberedPages.of(rows, range(self.max_pages)), self.held, predict)

    def pack(self, rows: slice, pages: range) -> None:
        """Encode these pages of each of ``rows``, which are in ``tokens``."""
        predict = self._predict()
        for part in self._parts(NumberedPages.of(rows, pages)) if self.tokens else ():
            self._encode(part.places(self.held.lengths.device), None, predict)

    def load(self, rows: slice, pages: range) -> None:
        """Reconstruct these pages of each of ``rows``."""
        if pages:
            held = self.held._replace(lengths=self.nothing)  # all of them
            self._reconstruct(NumberedPages.of(rows, pages), held, self._predict())

    def _encode_due(self, predict: Predict | None) -> None:
        """What is predicted is one page of every row, due or not."""
        is_tiered, prediction = self.format.boost is not None, self.nothing
        if is_tiered or self.predicted is not None:
            pages, is_due = due_pages(self.format, self.held, self.max_pages)
            places = torch.arange(len(pages), device=pages.device), pages
            if is_tiered:
                self._encode(places, is_due, predict)
                return
            if self.predicted is not None:
                prediction = self._prediction([kept[places] for kept in self.predicted.inputs], predict)
        (records,) = self.records
        encode_due(self.tokens, records, self.held, self._coding, prediction, self.error, self._form)

    def _encode(self, places: tuple[Tensor, Tensor], is_due: Tensor | None, predict: Predict | None) -> None:
        """``places``: of M pages. ``is_due`` bool [M]: the others keep what they have; None for all."""
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

    def _reconstruct(self, pages: NumberedPages, held: HeldPages, predict: Predict | None) -> None:
        """``held``: as for the operator."""
        kept = self.nothing if self.kept is None else self.kept
        for part in [pages] if self.predicted is None else self._parts(pages):
            prediction = self.nothing
            if self.predicted is not None:
                inputs = [self._taken(source, part) for source in self.predicted.inputs]
                prediction = self._prediction(inputs, predict)
            for heads in self._head_ranges:
                reconstruct(heads, held, self._coding, part, prediction, kept, self._form)

    def _predict(self) -> Predict | None:
        """The predictor, prepared for a few calls; None without one."""
        return None if self.predicted is None else prepared(self.predicted.predictor)

    def _prediction(self, inputs: Sequence[Tensor], predict: Predict | None) -> Tensor:
        """[M, 128, N, D] fp32 from ``Predicted.inputs`` of M pages."""
        assert predict is not None
        return predict([part.flatten(-2) for part in inputs]).unflatten(-1, (self.codec.num_heads, -1))

    def _parts(self, pages: NumberedPages) -> list[NumberedPages]:
        """As many at a time as the scratch allows."""
        return pages.parts(self.codec.num_heads * self.codec.head_dim)

    def _taken(self, kept: Tensor, pages: NumberedPages) -> Tensor:
        """[M, 128, .., ..]: these pages of a source; no copy where they are all of their rows'."""
        if pages.num_pages < self.max_pages:
            return kept[pages.places(kept.device)]
        first = pages.first_row * self.max_pages
        return kept.flatten(0, 1)[first + pages.start : first + pages.stop]

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
    def _head_ranges(self) -> list[HeadPages]:
        """What the operator is given of each."""
        found, first = [], 0
        for number in range(max(len(self.records), len(self.tokens))):
            records = self.records[number if len(self.records) > 1 else 0]
            tokens = self.tokens[number] if self.tokens else self.nothing
            num_heads = tokens.shape[2] if self.tokens else records.shape[2]
            if self.tokens and self.format.lattice_dim is None:
                records = records[:, :, first : first + num_heads]
            found.append(HeadPages(records, tokens, first))
            first += num_heads
        return found

    @functools.cached_property
    def _coding(self) -> PageCoding:
        codec = self.codec
        rescale, offset = (None if x is None else x.squeeze(-2) for x in (codec.rescale, codec.offset))
        given = (codec.grid, codec.signs, rescale, offset, codec.rotary, self.turns)
        return PageCoding(*(self.nothing if x is None else x for x in given))
