"""Taking tokens back from a static cache, as assisted decoding does with those that it rejects.

What is not packed yet can go: sinks and buffers keep everything that a shorter row needs. A packed page does not come
back, and neither do pages that shrank, or tokens that left a sliding window: what was there is gone.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcal.cache.static_layer import DYNAMIC_HINT, StaticLayer
from kvcal.errors import UsageError
from kvcal.store.static_state import StaticState


def crop_static(layers: Sequence[StaticLayer], state: StaticState, tokens_to_remove: int) -> None:
    """Remove the last -n columns (n negative), or keep the first n, in all layers of a static cache.

    Raises:
        UsageError: some of these tokens are packed, pages have shrunk since, or what was before them has left a
            sliding window.
    """
    held = int(state.columns) if state.is_allocated else 0
    columns = max(0, tokens_to_remove if tokens_to_remove > 0 else held + tokens_to_remove)
    if columns >= held:
        return
    before, after = state.rows.lengths(held), state.rows.lengths(columns)
    stores = [store for layer in layers for store in layer.stores]
    losses = (store.loss(*counts) for store in stores for counts in zip(before, after, strict=True))
    for loss in filter(None, losses):
        raise UsageError(f"cannot remove {held - columns} of {held} tokens: {loss}", hint=DYNAMIC_HINT)
    if state.pool is not None and columns and state.pool.has_shrunk(columns):
        raise UsageError(f"cannot go back from {held} tokens to {columns}: pages have shrunk since", hint=DYNAMIC_HINT)
    for store in stores:
        store.uncount([old - new for old, new in zip(before, after, strict=True)])
    state.set_columns(columns)
