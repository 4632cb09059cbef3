"""Sequences' keys and values as the model computes them and as the cache would read them back, layer by
layer.

AQUA-KV's Alg. 1 fits a layer's predictors on what the layers before it are after quantization. A forward of
the model gives exact keys and values (the paper's lines 5-7: quantization does not act on the hidden states);
the taps hand them over layer by layer, and each layer's pages are encoded and decoded by the runtime's own
codec, with the predictors fitted so far. Only the layer before is kept, and the forward ends with the last
layer that is asked for. The pages of all sequences of a batch go through one call of the codec, whose bits do
not depend on how many there are.

Tokens are those of whole pages after the sinks of their side, also of pages that the sequence's end finds in
the recent window: these are read as if they had been packed. Query scores take the queries since the page
before was packed, as in decoding token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcal.data.sequences import TokenDataset
from kvcal.errors import NonFiniteActivations, UnsupportedModel, UsageError
from kvcal.geometry import CACHE_DTYPES, CacheDtype, Geometry
from kvcal.models.forwards import Forward, LayerInputs, kept_inputs
from kvcal.models.streamed import is_streamed
from kvcal.models.taps import Captured, tap
from kvcal.pages.codec import ENCODE_PAGES, PageCodec
from kvcal.pages.layout_protocol import PAGE_TOKENS, page_positions
from kvcal.pages.rescale_and_rope import unrotate
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES, Side, num_pages
from kvcal.stages.checkpoint import Batch, host_bytes
from kvcal.stages.measuring.dense_layer import values_at_once
from kvcal.systems.aqua_kv.predictor import LinearPredictor
from kvcal.systems.aqua_kv.transform import predictor_of, predictor_shape

FIT, HELD_OUT = "fit", "held_out"
STARTS_SHARE = 0.25  # of the device's memory that is free, or of the host's

HOLDOUT_SHARE = 0.25  # of the sequences, to measure fits
# One layer's tokens of whole pages, keys before RoPE and values: fp32 [tokens, N D] each, heads in a row,
# sequence by sequence. A 16-bit side has no sinks, so that its tokens may be others than those of the side
# next to it.
LayerPages = Mapping[Side, Tensor]

# Called with a layer's index, its exact pages, and those read back with each of the plans asked for (a side
# that was not wanted is the exact one).
Receive = Callable[[int, LayerPages, Sequence[LayerPages]], None]


@dataclass(frozen=True)
class Wanted:
    """A layer to look at, and the sides of it that are wanted through the quantizer, too."""

    layer: LayerPlan
    read_back: tuple[Side, ...]


@dataclass(frozen=True, eq=False)
class _RawPages:
    """One layer's pages as the cache is handed them: K_post, V [P, N, 128, D] in the cache's dtype, with
    ``page_index`` [P] in their sequences; for query scores the mean |q| [P, N, D] that each page of keys is
    scored with; ``exact``: as predictors see them."""

    stored: Mapping[Side, Tensor]
    page_index: Tensor
    query_mean: Tensor | None
    exact: LayerPages


@dataclass(frozen=True, eq=False)
class Start:
    """A place where a forward of a batch can begin: ``hidden_BTC``, the input of layer ``layer``, and in each
    way the pages of the wanted layer before it, as read back; None where it is the first."""

    layer: int
    hidden_BTC: Tensor
    before: Sequence[LayerPages | None]

    def to(self, device: torch.device) -> Start:
        before = [pages and {side: x.to(device) for side, x in pages.items()} for pages in self.before]
        return Start(self.layer, self.hidden_BTC.to(device), before)

    @property
    def nbytes(self) -> int:
        return self.hidden_BTC.nbytes + sum(x.nbytes for pages in self.before if pages for x in pages.values())


class Starts:
    """Starts of batches, kept at ``place``: on the device of a model that lies there, or in host memory, up
    to a share of what there is when the stage begins."""

    def __init__(self, model: PreTrainedModel) -> None:
        on_device = model.device.type == "cuda" and not is_streamed(model)
        self.place = model.device if on_device else torch.device("cpu")
        self._free = round(STARTS_SHARE * (torch.cuda.mem_get_info(model.device)[0] if on_device else host_bytes()))
        self._found: dict[tuple[int, ...], Start] = {}

    def take(self, batch: Batch) -> Start | None:
        """That of a batch, which is kept no longer."""
        start = self._found.pop(batch.numbers, None)
        self._free += 0 if start is None else start.nbytes
        return start

    def drop(self) -> None:
        """All of them: batches to come are others."""
        self._free += sum(start.nbytes for start in self._found.values())
        self._found = {}

    def keep(self, batch: Batch, start: Start | None) -> None:
        """If there is one, and room for it."""
        if start is not None and start.nbytes <= self._free:
            self._free -= start.nbytes
            self._found[batch.numbers] = start.to(self.place)


@dataclass(frozen=True, eq=False)
class _Pages:
    """The P whole pages of a batch, ``most`` in a sequence: for each ``row`` [P] in the batch and ``index``
    [P] in its sequence. ``numbers``: the sequences' in the data."""

    numbers: Sequence[int]
    most: int
    row: Tensor
    index: Tensor

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> _Pages:
        counts = [num_pages(length) for length in batch.lengths]
        row = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        index = torch.cat([torch.arange(count) for count in counts])
        return cls(batch.numbers, max(counts), row.to(device), index.to(device))

    def chosen(self, x_BHP: Tensor) -> Tensor:
        """[B, H, most, ...] -> [P, H, ...]."""
        return x_BHP[self.row, :, self.index]


class _Enough(Exception):
    """Ends a forward whose further layers are not needed."""


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """A way to store the layers: their plans (predictors included) and all tensors of these, on the model's
    device. ``tensors`` need a rotary table for every layer."""

    layers: Sequence[LayerPlan]
    tensors: Mapping[str, Tensor]
    cache_dtype: CacheDtype

    def _read_back(self, index: int, sides: Sequence[Side], raw: _RawPages, before: LayerPages | None) -> LayerPages:
        """Layer ``index`` through its quantizer; ``before``: the pages of the layer before, read back, which
        is what it is predicted from. Sides not in ``sides`` stay exact."""
        found = dict(raw.exact)
        for side in sides:
            inputs = [] if before is None else [before["k"]] if side == "k" else [before["v"], found["k"]]
            found[side] = self._through(index, side, raw, inputs)
        return found

    @cached_property
    def _by_index(self) -> dict[int, LayerPlan]:
        return {layer.geometry.index: layer for layer in self.layers}

    def _predictor(self, index: int, side: Side) -> LinearPredictor | None:
        layer = self._by_index[index]
        predictor = predictor_of(layer, side)
        if predictor is None:
            return None
        shape = predictor_shape(layer, self._by_index[predictor.source], side, self.cache_dtype)
        return LinearPredictor.from_tensors(shape, self.tensors, f"layers.{index}.{side}_predictor")

    def _through(self, index: int, side: Side, raw: _RawPages, inputs: Sequence[Tensor]) -> Tensor:
        """Encode and decode one side, [tokens, N D]."""
        layer, fitted, prediction = self._by_index[index], self._predictor(index, side), None
        fmt, heads = layer.format(side), layer.attention.num_kv_heads
        if fitted is not None:
            predicted = fitted.apply(torch.cat(list(inputs), dim=-1))  # [P * 128, N D]
            prediction = predicted.unflatten(0, (-1, PAGE_TOKENS)).unflatten(-1, (heads, -1)).transpose(1, 2)
        codec = PageCodec.of_layer(layer, side, self.cache_dtype, self.tensors)
        pages, query_mean = raw.stored[side], raw.query_mean if fmt.needs_queries else None
        at_once = max(ENCODE_PAGES, values_at_once(pages.device) // pages[:1].numel())
        records = codec.encode(pages, raw.page_index, fmt.num_bits, query_mean, prediction, at_once)
        return _as_rows(codec.before_rope(codec.decode(records, fmt.num_bits, prediction), raw.page_index))


@dataclass(frozen=True, eq=False)
class PageReader:
    """Forwards of batches, no further than the last of ``wanted`` (in cache order); each of these is handed
    over, exact and as read back in each of ``ways``. ``tables``: every layer's rotary table.

    Forwards begin at layer ``first``, and layers before are not handed over; what a forward returns can be
    the start of a later one, at the wanted layer ``kept``, in the same ways up to there."""

    model: PreTrainedModel
    geometry: Geometry
    wanted: Sequence[Wanted]
    ways: Sequence[Reconstruction]
    tables: Mapping[int, Tensor]
    first: int = 0
    kept: int | None = None

    def read(self, batch: Batch, receive: Receive, start: Start | None = None) -> Start | None:
        """The forward of a batch, from ``start`` on, of a reader whose ``first`` is no 0. Returns where a
        later one can begin; None where none was asked for, or layers cannot be begun at."""
        reading, is_whole = _Reading(self, batch, receive, start), self.first == 0 and self.kept is None
        with (
            torch.no_grad(),
            nullcontext(LayerInputs(False)) if is_whole else kept_inputs(self.model) as inputs,
            tap(self.model, reading.take, self.geometry, self.first),
        ):
            inputs.forward = reading.forward
            try:
                self.model(input_ids=batch.tokens_BT.to(self.model.device), use_cache=False)
            except _Enough:
                return reading.start if inputs.can_begin_later else None
        name = f"layer {reading.remaining[0].layer.geometry.index} of {self.geometry.model_type}"
        raise UnsupportedModel(f"{name} was not observed")


class _Reading:
    """A forward of one batch: ``remaining`` layers, and the pages of the layer before, in each way."""

    def __init__(self, reader: PageReader, batch: Batch, receive: Receive, start: Start | None) -> None:
        self._reader, self._receive = reader, receive
        self._pages = _Pages.of(batch, reader.model.device)
        self.remaining = [wanted for wanted in reader.wanted if wanted.layer.geometry.index >= reader.first]
        self._before: list[LayerPages | None] = [None] * len(reader.ways) if start is None else list(start.before)
        self._before_kept: Sequence[LayerPages | None] = ()
        self.forward = Forward(wanted=() if reader.kept is None else (reader.kept,))
        if start is not None:
            self.forward.begin(start.layer, Forward(kept={start.layer: start.hidden_BTC}))

    @property
    def start(self) -> Start | None:
        """Of a later forward; None where none was asked for."""
        kept = self._reader.kept
        return None if kept is None else Start(kept, self.forward.kept[kept], self._before_kept)

    def take(self, captured: Captured) -> None:
        """A layer of the forward. ``_Enough``: the last one."""
        index, reader = captured.layer, self._reader
        if index != self.remaining[0].layer.geometry.index:
            return
        wanted = self.remaining.pop(0)
        if captured.k_pre_BNTD is None:
            raise UnsupportedModel(
                f"layer {index} of {reader.geometry.model_type} changes its keys between RoPE and the cache, or "
                "rotates them by unknown means: there are no keys before RoPE to predict",
                hint="leave [predictors] out for this model",
            )
        if index == reader.kept:
            self._before_kept = tuple(self._before)
        raw = _raw_pages(wanted.layer, captured, reader.tables[index], reader.geometry.cache_dtype, self._pages)
        for number, way in enumerate(reader.ways):
            self._before[number] = way._read_back(index, wanted.read_back, raw, self._before[number])
        self._receive(index, raw.exact, [pages for pages in self._before if pages is not None])
        if not self.remaining:
            raise _Enough


def num_page_tokens(length: int) -> int:
    """Tokens of whole pages, of a sequence of ``length``."""
    return PAGE_TOKENS * num_pages(length)


def _raw_pages(
    layer: LayerPlan, captured: Captured, table: Tensor, cache_dtype: CacheDtype, pages: _Pages
) -> _RawPages:
    index, dtype, sides = captured.layer, CACHE_DTYPES[cache_dtype], {}
    for side, x_BNTD in zip(SIDES, (captured.k_post_BNTD, captured.v_BNTD), strict=True):
        pages_BNPTD = _in_pages(x_BNTD.to(dtype), pages.most)
        is_finite_P = pages.chosen(torch.isfinite(pages_BNPTD).flatten(3).all(-1)).all(-1)
        if not is_finite_P.all():
            sample = pages.numbers[int(pages.row[~is_finite_P][0])]
            name = "keys" if side == "k" else "values"
            raise NonFiniteActivations(f"sequence {sample}: the {name} of layer {index} hold NaN or infinity")
        packed_BNTD = layer.format(side).packed(pages_BNPTD.flatten(2, 3))
        sides[side] = pages.chosen(_in_pages(packed_BNTD, pages.most))
    k_pre = unrotate(sides["k"], table, page_positions(pages.index))
    fmt, query_mean = layer.format("k"), None
    if fmt.needs_queries:
        query_mean = pages.chosen(_query_means(captured.q_post_BHTD, layer.attention.num_kv_heads, pages.most))
    return _RawPages(sides, pages.index, query_mean, {"k": _as_rows(k_pre), "v": _as_rows(sides["v"].float())})


def _in_pages(x_BHTD: Tensor, count: int) -> Tensor:
    """[B, H, T, D] -> [B, H, P, 128, D], the first ``count`` pages."""
    return x_BHTD[:, :, : count * PAGE_TOKENS].unflatten(2, (count, PAGE_TOKENS))


def _query_means(q_post_BHTD: Tensor, num_heads: int, count: int) -> Tensor:
    """fp32 [B, N, P, D]: the mean |q| of the tokens and the heads of the group that each of the first
    ``count`` pages is scored with: its own."""
    by_page = _in_pages(q_post_BHTD, count).float().abs().unflatten(1, (num_heads, -1))
    return by_page.mean((2, 4))


def _as_rows(pages: Tensor) -> Tensor:
    """[P, N, 128, D] -> [P * 128, N D]."""
    return pages.transpose(1, 2).flatten(2).flatten(0, 1)


def split_sequences(data: TokenDataset) -> dict[int, str]:
    """{sequence: FIT or HELD_OUT} of the sequences that fill a page; held-out ones evenly spread, at least
    one. Raises UsageError: fewer than two such sequences."""
    lengths = [tokens_T.numel() for tokens_T in data.sequences]
    numbers = [i for i, length in enumerate(lengths) if num_page_tokens(length)]
    if len(numbers) < 2:
        raise UsageError(
            f"{len(numbers)} of {len(lengths)} sequences fill a page; at least 2 are needed, one of them to hold out",
            hint="give longer sequences, or more of them",
        )
    wanted = min(max(1, round(HOLDOUT_SHARE * len(numbers))), len(numbers) - 1)
    held_out = {numbers[(2 * i + 1) * len(numbers) // (2 * wanted)] for i in range(wanted)}
    return {number: HELD_OUT if number in held_out else FIT for number in numbers}
