"""A sliding-window layer behind the interface of transformers: it stays at 16 bits, and is counted to the byte."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvcal.cache.shapes import require_shapes
from kvcal.errors import UsageError
from kvcal.geometry import CACHE_DTYPES, AttentionGeometry
from kvcal.store.rows import Padding


class BoundedLayer(DynamicSlidingWindowLayer):
    """A sliding-window layer at 16 bits: the parent's behaviour, in the cache's dtype, without the parent's hold on
    the whole prompt."""

    def __init__(self, geometry: AttentionGeometry, cache_dtype: str, padding: Padding) -> None:
        assert geometry.window is not None
        super().__init__(sliding_window=geometry.window)
        self.geometry = geometry
        self.cache_dtype = CACHE_DTYPES[cache_dtype]
        self.padding = padding

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.keys, self.values) if tensor is not None]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As the parent's.

        Raises:
            ArtifactError: the model's heads or head sizes are not the plan's.
            UsageError: another batch than before.
        """
        require_shapes(self.geometry, key_states, value_states)
        dtype = key_states.dtype
        self.padding.resolve(key_states.shape[0])
        if self.record_past:
            self.crop(0)  # what the last update kept for a crop is not needed any more
        keys, values = super().update(key_states.to(self.cache_dtype), value_states.to(self.cache_dtype))
        self._own()
        return keys.to(dtype), values.to(dtype)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -n tokens (n negative or 0).

        Raises:
            UsageError: the tokens that would come back into the window are gone: once it is full, only tokens of the
                last update can be removed, and only if ``activate_past_recording`` was called before that update.
        """
        if self.keys is None:
            return
        tokens_to_remove = int(tokens_to_remove)  # older transformers hand over a tensor
        self.require_removable(-tokens_to_remove)
        if self.record_past or tokens_to_remove:
            super().crop(tokens_to_remove)
            self._own()

    def require_removable(self, tokens: int) -> None:
        """UsageError where so many of the last tokens cannot be removed: see ``crop``."""
        if self.keys is None:
            return
        spare = max(0, self.keys.shape[2] - self.sliding_window + 1)
        if self.cumulative_length >= self.sliding_window and tokens > spare:
            raise UsageError(
                f"cannot remove {tokens} tokens: the window of {self.sliding_window} tokens is full, with {spare} "
                "tokens beyond it",
                hint="call activate_past_recording() before the update, or reset() and start again",
            )

    def _own(self) -> None:
        """Copy what is kept out of the larger tensors that the parent's slices keep alive."""
        assert self.keys is not None and self.values is not None
        self.keys, self.values = self.keys.clone(), self.values.clone()
