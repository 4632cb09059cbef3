"""A full-attention layer at 16 bits as one dense tensor, for measuring plans: what a ``PagedLayer`` gives of 16-bit
pages, bit for bit, without pages, tables and byte counts, which take the host longer than the layer takes a GPU.

Left out: padding on the left, and layers that others are predicted from.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer

from kvcal.cache.paged_layer import PagedLayer, require_shapes
from kvcal.geometry import CACHE_DTYPES
from kvcal.plan.page_format import RAW, SIDES


class DenseLayer(DynamicLayer):
    """Keys and values in the cache's dtype, returned in that of the new ones."""

    def __init__(self, layer: PagedLayer) -> None:
        super().__init__()
        self._geometry, self._padding = layer.plan.attention, layer.padding
        self._cache_dtype, self._skipped = CACHE_DTYPES[layer.state.plan.cache_dtype], 0

    @staticmethod
    def can_stand_for(layer: PagedLayer) -> bool:
        """Whether an empty layer holds plain 16-bit keys and values and no state, and no other reads its pages."""
        plan, state, index = layer.plan, layer.state, layer.plan.geometry.index
        is_read = index in state.later_sources or any((index, side) in state.sources for side in SIDES)
        is_transformed = plan.k_rescale or plan.k_offset or plan.k_pages == "pre"
        return {*plan.k, *plan.v} == {RAW} and not (is_transformed or is_read or plan.geometry.state_bytes)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As ``PagedLayer.update``."""
        require_shapes(self._geometry, key_states, value_states)
        self._padding.resolve(key_states.shape[0])
        keys, values = super().update(key_states.to(self._cache_dtype), value_states.to(self._cache_dtype))
        return keys.to(key_states.dtype), values.to(value_states.dtype)

    def skip(self, tokens: int) -> None:
        """Count columns that are never stored nor read, in a layer that is fed none."""
        self._skipped += tokens

    def get_seq_length(self) -> int:
        return self._skipped or super().get_seq_length()
