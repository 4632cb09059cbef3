"""Snapshots that a static cache can be put back to, and dynamic caches that it can be filled from.

    prefix = load_prefix(loaded, plan, "prompt.safetensors")    # kvcal.stages.prefix: a dynamic cache
    cache = PlanCache(plan, loaded.model.config, max_tokens=4096)
    cache.allocate(8, "cuda")
    cache.copy_from(prefix.cache)                               # one sequence, into all eight rows
    cache.mark()                                                # behind the prompt
    for request in requests:
        ...                                                     # the model, with this cache
        cache.rewind()

Both caches hold the same parts, byte for byte, so nothing is packed anew.

Later tokens overwrite little: sinks, rings, query statistics and lengths. A mark keeps these in memory of its own, and
rewinding copies them back in place. Packed pages stay where they are: what a later token packs lies behind them, and is
not read before it is packed again. So a mark takes the bytes of the unquantized part alone
(``PlanCache.workspace_nbytes``), and a step that was captured in a CUDA graph stays valid. It holds until rows change
places, the cache is reset, or a crop goes back into pages before it, which moves them or has them overwritten; its
memory stays and the next mark uses it again. Left out: layers that keep a state, which transformers keeps for itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from kvcal.cache.paged_layer import PagedLayer
from kvcal.cache.sliding_window import BoundedLayer, StaticWindow, require_left_padding
from kvcal.errors import UsageError
from kvcal.plan.page_format import Side, num_pages
from kvcal.store.padding import Rows
from kvcal.store.state import StepState


class Mark:
    """The tensors that later tokens overwrite, as they were at ``mark``."""

    def __init__(self, state: StepState, layers: Sequence[PagedLayer]) -> None:
        self._state = state
        overwritten = [tensor for layer in layers for tensor in layer.overwritten]
        self._live = [tensor for tensor in (state.lengths, state.columns, *overwritten) if tensor.numel()]
        with torch.inference_mode(False):  # or nothing could be written to them outside of inference mode
            self._kept = [torch.empty_like(tensor) for tensor in self._live]
        self._holds = False
        self._longest, self._in_prompt = 0, False
        self._pages: list[int] = []

    @property
    def nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept)

    def mark(self) -> None:
        """From now on, ``rewind`` comes back here."""
        self._holds, self._longest, self._in_prompt = True, self._state.longest, self._state.in_prompt
        self._pages = [num_pages(length) for length in self._state.lengths.tolist()]
        for kept, live in zip(self._kept, self._live, strict=True):
            kept.copy_(live)

    def forget(self) -> None:
        """Forgets the mark: pages that were packed before it are gone."""
        self._holds = False

    def crop(self, lengths: Sequence[int]) -> None:
        """So many tokens of every row are left."""
        if any(num_pages(length) < pages for length, pages in zip(lengths, self._pages, strict=True)):
            self.forget()

    def rewind(self) -> None:
        """Everything is as it was. Nothing here waits for the device.

        Raises:
            UsageError: the mark holds no longer.
        """
        if not self._holds:
            raise UsageError(
                "there is no mark to go back to: since then rows have changed places, pages before it were cropped, or "
                "the cache was reset",
                hint="take the prompt in again, and call mark()",
            )
        self._state.longest, self._state.in_prompt = self._longest, self._in_prompt
        for kept, live in zip(self._kept, self._live, strict=True):
            live.copy_(kept)


def copy_layers(state: StepState, ours: Sequence[object], theirs: Sequence[object], rows: Rows, columns: int) -> None:
    """The layers of a dynamic cache, fed with so many ``columns`` of ``rows``, into those of an empty static one.

    Raises:
        UsageError, UnsupportedModel: as ``PlanCache.copy_from``; nothing was copied then.
    """
    if rows.batch not in (1, state.batch):
        raise UsageError(f"the other cache holds {rows.batch} sequences, expected 1 or {state.batch}")
    lengths = rows.lengths(columns)
    state.require_room(max(lengths))
    pairs = [(our, their) for our, their in zip(ours, theirs, strict=True) if isinstance(our, PagedLayer)]
    for _, their in pairs:
        if isinstance(their, PagedLayer):
            their.require_observed()
        else:
            require_left_padding(rows)
    origins = list(range(rows.batch)) * (state.batch // rows.batch)
    for (our, their), (row, origin) in itertools.product(pairs, enumerate(origins)):
        if isinstance(our, StaticWindow):
            assert isinstance(their, BoundedLayer)
            _copy_window(their, our, rows, row, origin)
        else:
            assert isinstance(their, PagedLayer)
            _copy_parts(their, our, lengths[origin], row, origin)
    state.shared.padding.rows = rows.select(origins)
    state.set_columns(columns)


def _copy_parts(source: PagedLayer, target: PagedLayer, length: int, row: int, origin: int) -> None:
    pages = num_pages(length)
    for ours, theirs in zip(target.parts, source.parts, strict=True):
        copied = (ours.sinks, ours.query_sum, ours.query_since), (theirs.sinks, theirs.query_sum, theirs.query_since)
        for new, old in zip(*copied, strict=True):
            if new.numel():
                new[row] = old[origin]
        first = max(0, length - min(ours.ring.shape[2], theirs.ring.shape[2]))  # one of them may have room for drafts
        tokens = theirs.ring[origin].index_select(1, theirs.places(first, length))
        ours.ring[row].index_copy_(1, ours.places(first, length), tokens.to(ours.ring.device))
        if pages:
            records = theirs.pool.records[theirs.pool.slots([(origin, 0, pages)])]
            ours.pool.records[ours.pool.slots([(row, 0, pages)])] = records.to(ours.pool.records.device)


def _copy_window(source: BoundedLayer, target: StaticWindow, rows: Rows, row: int, origin: int) -> None:
    assert source.keys is not None and source.values is not None
    columns, held = source.cumulative_length, source.keys.shape[2]
    real = rows.mask(columns - held, held, source.keys.device)[origin]
    one, device = slice(origin, origin + 1), target.window.ring["k"].device
    new: dict[Side, Tensor] = {"k": source.keys[one, :, real].to(device), "v": source.values[one, :, real].to(device)}
    target.window.extend(slice(row, row + 1), rows.lengths(columns)[origin] - new["k"].shape[2], new)
