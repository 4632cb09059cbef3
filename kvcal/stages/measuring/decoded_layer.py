"""A layer of a dynamic cache with a dense copy of what it would read back, in the model's dtype.

A dynamic cache reads all of its pages at every step. A token never changes once it is packed, so the copy
takes it from its page once. What the model attends to is the same bit for bit (``verify`` compares); products
of what leaves a basis round by the number of tokens at once: there, it is the same to the last bits of fp32.
It saves time and not memory.

As attention reads the copy, nobody needs the store until a token comes to be read from a page that it has not
packed yet. Until then new tokens wait (``Unwritten``); then those of all layers are stored, and their stripes
packed, and decoded, at once. All that asks for the store, such as a count of its bytes, has them stored first.

Within ``kvcal.attached`` chunks may be longer than a stripe, too (kvcal.stages.measuring.ahead).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcal.cache.paged_layer import PagedLayer
from kvcal.errors import ArtifactError
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import RAW, Side
from kvcal.stages.measuring.ahead import Ahead, ahead_of, stripes_of, tokens_ahead
from kvcal.store.layer_store import LayerStore, NewTokens, Wanted
from kvcal.store.padding import Rows
from kvcal.store.paged_tensor import PagedTensor, decode_together
from kvcal.store.pool import Span
from kvcal.store.state import PlanState
from kvcal.store.unpacked import Unpacked, pack_together

# Columns that a copy grows by at least, besides a quarter: each growth copies it.
GROWTH = 256


class Unwritten:
    """New tokens that layers of a cache have not stored yet. ``looks_ahead``: whether attention obeys the masks of
    layers."""

    def __init__(self) -> None:
        self._waiting: dict[DecodedLayer, list[NewTokens]] = {}
        self.looks_ahead = False

    def add(self, layer: DecodedLayer, new: NewTokens) -> None:
        self._waiting.setdefault(layer, []).append(new)

    def drop(self, layer: DecodedLayer) -> None:
        self._waiting.pop(layer, None)

    def clear(self) -> None:
        self._waiting = {}

    def write(self, layer: DecodedLayer) -> list[DecodedLayer]:
        """Store those of a layer, if there are any, and with them those of the others, which are returned.
        NonFiniteActivations: NaN or infinity in a stripe."""
        if layer not in self._waiting:
            return []
        waiting, self._waiting = self._waiting, {}
        unpacked: list[Unpacked] = []
        for one, new in waiting.items():
            keys, values = (torch.cat(x, 2) for x in zip(*((part.keys, part.values) for part in new), strict=True))
            assert one._store is not None
            one._store.write(NewTokens(keys, values, new[0].rows, new[0].columns), None, unpacked)
        pack_together(unpacked)
        return list(waiting)


class _Unread(NamedTuple):
    """Tokens of a side to read from pages, and where to."""

    store: LayerStore
    side: Side
    wanted: list[Wanted]
    out: Tensor

    @property
    def part(self) -> PagedTensor:
        return self.store.sides[self.side]

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(span for one in self.wanted for span in one.spans)


@dataclass
class Copy:
    """One side's ``dense`` [B, N, >= columns, D], of pages of ``num_bits``. Of every row it has the first ``read``
    tokens from pages. ``ahead`` [B, N, T, D]: in its first columns the tokens from number ``first`` on, decoded, of the
    ``packed`` ones."""

    dense: Tensor
    num_bits: int
    read: list[int]
    packed: list[int]
    first: list[int] = field(default_factory=list)
    ahead: Tensor | None = None


class DecodedLayer(PagedLayer):
    """See the module's docstring. ``unwritten``: of the cache."""

    def __init__(self, plan: LayerPlan, state: PlanState, unwritten: Unwritten) -> None:
        super().__init__(plan, state)
        self.copies: dict[Side, Copy] = {}
        self._unwritten, self._stripes = unwritten, stripes_of(plan)
        self._ahead: Ahead | None = None
        self._entered: dict[Side, Tensor] = {}
        self._waits = not (plan.needs_queries or state.is_scheduled or state.sources)

    def forget(self) -> None:
        """Decode all pages anew with the next update."""
        self.copies, self._ahead = {}, None

    @property
    def store(self) -> LayerStore:
        """With all tokens."""
        self._unwritten.write(self)
        return super().store

    @property
    def sides(self) -> dict[Side, PagedTensor]:
        return {} if self._store is None else self.store.sides

    def is_served(self, device: torch.device) -> bool:
        """Every token is read from the copy."""
        return False

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As the parent's: views of the copies, valid until the next call; within ``looks_ahead``, stripes that come to
        be read within the chunk after them."""
        rows, ahead = self.padding.resolve(key_states.shape[0]), None
        if self._looks_ahead and not rows.width and key_states.shape[2]:
            assert self._stripes is not None
            ahead = ahead_of(self._stripes, self.columns, key_states.shape[2])
        self._ahead = ahead if ahead is not None and ahead.read else None
        return super().update(key_states, value_states)

    @property
    def _looks_ahead(self) -> bool:
        return self._unwritten.looks_ahead and self._stripes is not None

    def whole(self, side: Side, states: Tensor, dtype: torch.dtype, new: NewTokens) -> Tensor:
        assert self._store is not None
        part = self._store.sides[side]
        self._entered[side] = part.entered(states)
        return self._copied(side, part.left(self._entered[side], dtype), new.rows, new.columns)

    def write(self, new: NewTokens, query_sum: Tensor | None) -> None:
        assert self._store is not None
        if self._waits:
            self._unwritten.add(self, NewTokens(self._entered["k"], self._entered["v"], new.rows, new.columns))
        else:
            self._store.write(new, query_sum)

    def mask_of(self, attention_mask: Tensor | None, query_BHTD: Tensor, base: str) -> Tensor | None:
        return attention_mask if self._ahead is None else self._ahead.mask(query_BHTD, base)

    def tokens_to_next_page(self) -> int:
        found = super().tokens_to_next_page()
        return max(found, tokens_ahead(self._stripes, self.columns)) if self._looks_ahead and self._stripes else found

    def _copied(self, side: Side, new: Tensor, rows: Rows, columns: int) -> Tensor:
        """The past, new [B, N, T, D] after it, and what comes to be read ahead."""
        stop, ahead = columns + new.shape[2], range(0) if self._ahead is None else self._ahead.read
        copy = self._refreshed(side, new, rows, columns, stop + len(ahead))
        if columns >= rows.width:
            copy.dense[:, :, columns:stop] = new
        else:
            for block in rows.blocks:
                for a, b in rows.intervals(block, columns, stop):
                    copy.dense[block.rows, :, a:b] = new[block.rows, :, a - columns : b - columns]
        if ahead:
            copy.dense[:, :, stop : stop + len(ahead)] = self._decoded(side, copy, ahead, columns)
        return copy.dense[:, :, : stop + len(ahead)]

    def _decoded(self, side: Side, copy: Copy, ahead: range, columns: int) -> Tensor:
        """[B, N, T, D]: tokens of a batch without padding as they come to be read."""
        if self.plan.format(side) == RAW:
            return copy.dense[:, :, ahead.start : ahead.stop]
        if copy.packed[0] < ahead.stop:
            self._take_ahead()
        assert copy.ahead is not None
        return copy.ahead[:, :, ahead.start - copy.first[0] : ahead.stop - copy.first[0]]

    def _refreshed(self, side: Side, new: Tensor, rows: Rows, columns: int, room: int) -> Copy:
        """The copy, with room for so many columns, up to date with what ``columns`` read from pages: all tokens anew
        where there was none, or pages have other bits."""
        assert self._store is not None
        part, lengths = self._store.sides[side], rows.lengths(columns)
        counts = [part.format.tokens_read(length) for length in lengths]
        copy = self.copies.get(side)
        if copy is None or copy.dense.shape[2] < room:
            # New columns are zero, as padding must be.
            dense = new.new_zeros(*new.shape[:2], -(-(room + room // 4) // GROWTH) * GROWTH, new.shape[3])
            if copy is not None:
                dense[:, :, :columns] = copy.dense[:, :, :columns]
                copy.dense = dense
        if copy is None or copy.num_bits != part.num_bits:
            copy = self.copies[side] = Copy(dense if copy is None else copy.dense, part.num_bits, counts, counts)
            wanted = [
                Wanted(block.rows, range(lengths[row]), counts[row], rows.intervals(block, 0, columns))
                for block in rows.blocks
                if lengths[row := block.rows.start]
            ]
            if wanted:
                self.store.read_tokens(side, wanted, copy.dense)
        elif counts != copy.read:
            self._take_due(side, copy, rows, columns, counts)
        return copy

    def _take_due(self, side: Side, copy: Copy, rows: Rows, columns: int, counts: list[int]) -> None:
        """Tokens that have come to be read from pages since, ``counts`` of every row."""
        if any(count > packed for count, packed in zip(counts, copy.packed, strict=True)):
            self._take_ahead()
        assert copy.ahead is not None
        for block in rows.blocks:
            row = block.rows.start
            tokens, at = range(copy.read[row], counts[row]), copy.read[row] - copy.first[row]
            for a, b in rows.places(block, tokens):
                copy.dense[block.rows, :, a:b] = copy.ahead[block.rows, :, at : at + b - a]
                at += b - a
        copy.read = counts

    def _take_ahead(self) -> None:
        """Decode all tokens that are packed, after those that the copies have from pages; those of layers whose
        tokens waited, too."""
        alike: dict[object, list[_Unread]] = {}
        for layer in self._unwritten.write(self) or [self]:
            for one in layer._unread():
                alike.setdefault((one.part.kind, one.spans), []).append(one)
        for of_kind in alike.values():
            decoded = decode_together([one.part for one in of_kind], of_kind[0].spans, of_kind[0].out.dtype)
            for one, pages in zip(of_kind, decoded, strict=True):
                one.store.read_tokens(one.side, one.wanted, one.out, pages)

    def _unread(self) -> Iterator[_Unread]:
        """Tokens of each side to read, and their places; the copies are told."""
        rows, store = self.padding.rows, self._store
        assert rows is not None and store is not None
        for side, copy in self.copies.items():
            fmt = self.plan.format(side)
            copy.first, copy.packed = copy.read, [fmt.tokens_packed(length) for length in rows.lengths(self.columns)]
            spans = [range(copy.read[block.rows.start], copy.packed[block.rows.start]) for block in rows.blocks]
            copy.ahead = copy.dense.new_empty(*copy.dense.shape[:2], max(map(len, spans)), copy.dense.shape[3])
            wanted = [
                Wanted(block.rows, tokens, tokens.stop, [(0, len(tokens))])
                for block, tokens in zip(rows.blocks, spans, strict=True)
                if tokens
            ]
            if wanted:
                yield _Unread(store, side, wanted, copy.ahead)

    def verify(self) -> None:
        """ArtifactError where the copy is not what the pages read as now; nothing is compared where nothing
        was read since a crop."""
        rows = self.padding.rows
        if rows is None:
            return
        self._ahead = None
        for side, copy in list(self.copies.items()):
            fresh = self.store.read(side, rows, self.columns, 0, copy.dense.dtype)
            copied = self._copied(side, fresh[:, :, :0], rows, self.columns)
            difference = float((copied - fresh).abs().max()) if fresh.numel() else 0.0  # NaN where one has NaN
            # Products with a basis round by the number of tokens that are read at once.
            allowed = 1e-6 * float(fresh.abs().max()) if self.plan.basis(side) else 0.0
            if not difference <= allowed:
                raise ArtifactError(
                    f"layer {self.plan.geometry.index}: the decoded {side} differ from the packed cache by "
                    f"{difference:g}, expected {allowed:g}",
                    hint="the packed cache changed under the evaluation: please report this",
                )

    def crop(self, tokens_to_remove: int) -> None:
        held = self.columns
        super().crop(tokens_to_remove)
        if self.columns != held:
            self.forget()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._unwritten.write(self)
        super().reorder_cache(beam_idx)
        self.forget()

    def reset(self) -> None:
        self._unwritten.drop(self)
        super().reset()
        self.forget()
