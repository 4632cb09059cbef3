"""A point that a static cache can go back to: a prompt is packed once, and requests are served behind it.

    cache.mark()                # behind the prompt
    for request in requests:
        ...                     # the model, with this cache
        cache.rewind()

Later tokens overwrite little: sinks, buffers, the rings of sliding windows, query statistics and lengths. These are
kept in memory of their own, and copied back in place. Packed pages stay where they are: what a later token packs lies
behind them, and is not read before it is packed again. So a mark takes the bytes of the unquantized part alone
(``PlanCache.workspace_nbytes``), and a step that was captured in a CUDA graph stays valid.

A mark holds until the rows change places or the cache is reset, which moves or overwrites the pages before it; its
memory stays and the next mark uses it again. Left out: layers that keep a state, which transformers keeps for itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcal.cache.static_layer import StaticLayer
from kvcal.errors import UsageError
from kvcal.store.static_state import StaticState


class StaticMark:
    """What later tokens overwrite, as it was at ``mark``."""

    def __init__(self, state: StaticState, layers: Sequence[StaticLayer]) -> None:
        self._state = state
        stores = [store for layer in layers for store in layer.stores]
        overwritten = [tensor for store in stores for tensor in (*store.overwritten, *store.control)]
        self._live = [tensor for tensor in (state.lengths, state.columns, *overwritten) if tensor.numel()]
        with torch.inference_mode(False):  # or nothing could be written to them outside of inference mode
            self._kept = [torch.empty_like(tensor) for tensor in self._live]
        self._holds = False
        self._longest, self._in_prompt = 0, False

    @property
    def nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept)

    def mark(self) -> None:
        """From now on, ``rewind`` comes back here."""
        self._holds, self._longest, self._in_prompt = True, self._state.longest, self._state.in_prompt
        for kept, live in zip(self._kept, self._live, strict=True):
            kept.copy_(live)

    def forget(self) -> None:
        """What was packed before the mark is not there any more."""
        self._holds = False

    def rewind(self) -> None:
        """Everything is as it was. Nothing here waits for the device.

        Raises:
            UsageError: the mark holds no longer.
        """
        if not self._holds:
            raise UsageError(
                "there is no mark to go back to: rows have changed places since, or the cache was reset",
                hint="take the prompt in again, and call mark()",
            )
        self._state.longest, self._state.in_prompt = self._longest, self._in_prompt
        for kept, live in zip(self._kept, self._live, strict=True):
            live.copy_(kept)
