"""What a dynamic cache holds, into a static one of the same plan: a prompt from disk, or one that was taken in before.

    prefix = load_prefix(loaded, plan, "prompt.safetensors")    # kvcal.stages.prefix.load: a dynamic cache
    cache = PlanCache(plan, loaded.model.config, max_tokens=4096)
    cache.allocate(8, "cuda")
    cache.copy_from(prefix.cache)                               # one sequence, into all eight rows
    cache.mark()

Byte for byte, nothing is packed anew. The two differ in when a page is packed: the dynamic cache does it with the token
that fills the page, a static one at the beginning of the step after it, from the buffer. So where the last token of a
row has just filled a page, its 16-bit tokens are gone, and the copy is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from kvcal.cache.bounded_layer import BoundedLayer
from kvcal.cache.paged_layer import PagedLayer
from kvcal.cache.static_layer import StaticLayer
from kvcal.cache.static_window import require_left_padding
from kvcal.errors import UnsupportedModel, UsageError
from kvcal.kernels.reference import num_packed
from kvcal.plan.format import SIDES, Side
from kvcal.store.paged_tensor import PagedTensor
from kvcal.store.rows import Rows
from kvcal.store.static_prompt import Store
from kvcal.store.static_state import StaticState
from kvcal.store.static_store import HeadStore
from kvcal.store.window_store import WindowStore


def copy_layers(
    static: StaticState, ours: Sequence[object], theirs: Sequence[object], rows: Rows, columns: int
) -> None:
    """The layers of a dynamic cache, fed with so many ``columns`` of ``rows``, into those of an empty static one.

    Raises:
        UsageError, UnsupportedModel: as ``PlanCache.copy_from``; nothing was copied then.
    """
    if rows.batch not in (1, static.batch):
        raise UsageError(f"the other cache holds {rows.batch} sequences, expected 1 or {static.batch}")
    lengths = rows.lengths(columns)
    static.require_room(max(lengths))
    pairs = [(our, their) for our, their in zip(ours, theirs, strict=True) if isinstance(our, StaticLayer)]
    for our, their in pairs:
        if isinstance(their, PagedLayer):
            _require_pages(their, our.stores, lengths)
        else:
            require_left_padding(rows)
    origins = list(range(rows.batch)) * (static.batch // rows.batch)
    for (our, their), (row, origin) in itertools.product(pairs, enumerate(origins)):
        for store in our.stores:
            if isinstance(store, HeadStore):
                assert isinstance(their, PagedLayer)
                _copy_pages(their, store, lengths[origin], row, origin)
            else:
                assert isinstance(their, BoundedLayer)
                _copy_window(their, store, rows, row, origin)
    static.shared.padding.rows = rows.select(origins)
    static.set_columns(columns)


def _require_pages(source: PagedLayer, stores: Sequence[Store], lengths: Sequence[int]) -> None:
    """UsageError or UnsupportedModel where a static cache cannot take over these pages."""
    source.require_heard()
    for store, side in itertools.product(stores, SIDES):
        assert isinstance(store, HeadStore)
        part, _ = _part_of(source, store, side)
        if part.pages.shape[1:] != (part.codec.num_heads, store.pages[side].shape[-1]):
            raise UnsupportedModel(
                f"layer {source.plan.geometry.index} stores {side} pages in another form than a static cache does"
            )
        for length in lengths:
            if part.format.num_pages(length) > num_packed(part.format, length):
                raise UsageError(
                    f"a sequence of {length} tokens ends where a page was just packed, whose tokens a static cache "
                    "needs once more",
                    hint="take a prompt that is a token longer or shorter",
                )


def _copy_pages(source: PagedLayer, store: HeadStore, num_tokens: int, row: int, origin: int) -> None:
    for side in SIDES:
        part, heads = _part_of(source, store, side)
        store.sinks[side][row] = part.sinks[origin, heads]
        store.buffer[side][row] = part.buffer[origin, heads]
        pages = part.pages.split(part.num_pages)[origin][:, heads]
        store.pages[side][row, : len(pages)] = pages
    part, heads = _part_of(source, store, "k")
    if part.format.needs_queries:
        store.query_sum[row] = part.query_sum[origin, heads]
        store.query_since[row] = num_tokens - part.query_count[origin] // store.variant.group_heads


def _copy_window(source: BoundedLayer, store: WindowStore, rows: Rows, row: int, origin: int) -> None:
    assert source.keys is not None and source.values is not None
    columns, held = source.cumulative_length, source.keys.shape[2]
    real = rows.mask(columns - held, held, source.keys.device)[origin]
    one, device = slice(origin, origin + 1), store.ring["k"].device
    new: dict[Side, Tensor] = {"k": source.keys[one, :, real].to(device), "v": source.values[one, :, real].to(device)}
    first = rows.lengths(columns)[origin] - new["k"].shape[2]
    store.extend(slice(row, row + 1), first, new, None)


def _part_of(source: PagedLayer, store: HeadStore, side: Side) -> tuple[PagedTensor, slice]:
    """The part of a layer that holds the heads of a store, and which of its heads they are."""
    (part,) = [part for part in source.sides[side] if part.heads.start <= store.heads.start < part.heads.stop]
    return part, slice(store.heads.start - part.heads.start, store.heads.stop - part.heads.start)
