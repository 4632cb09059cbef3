"""Two caches for measuring plans. Both give attention the keys and values of a dynamic ``PlanCache``.

DenseCache     keeps no records where it can do without: for likelihoods and divergences of many plans at once
DecodedCache   is the packed cache, with a dense copy of it: for generation whose bytes are counted. With a small
               model on a CPU, decoding all pages in every step is most of the time
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from kvcal.cache.paged_layer import PagedLayer
from kvcal.cache.plan_cache import PlanCache
from kvcal.cache.sliding_window import BoundedLayer
from kvcal.plan.plan import Plan
from kvcal.stages.measuring.decoded_layer import DecodedLayer
from kvcal.stages.measuring.dense_layer import DenseLayer, UnreadPages


class DenseCache(PlanCache):
    """Without padding; its layers are dense where they can be (kvcal.stages.measuring.dense_layer), and
    ``nbytes`` does not count these. ``unread``: of all caches that are fed in lockstep, chunk by chunk.
    Raises as PlanCache."""

    def __init__(self, plan: Plan, config: PretrainedConfig, unread: UnreadPages | None = None) -> None:
        self._unread = unread or UnreadPages()
        super().__init__(plan, config)

    def empty_layers(self) -> list[Any]:
        return [
            DenseLayer(layer, self._unread)
            if isinstance(layer, PagedLayer) and DenseLayer.can_stand_for(layer)
            else layer
            for layer in super().empty_layers()
        ]

    def skip(self, num_layers: int, batch: int, tokens: int) -> None:
        """Count ``tokens`` more columns, of ``batch`` rows, as fed to the first layers, of which they store
        nothing: a forward that begins after them never reads them."""
        self.padding.resolve(batch)
        for layer in self.layers[:num_layers]:
            if isinstance(layer, BoundedLayer):
                layer.cumulative_length += tokens
            elif isinstance(layer, PagedLayer | DenseLayer):
                layer.columns += tokens


class DecodedCache(PlanCache):
    """A dynamic cache whose pages are decoded once. ``attention_mask``, errors: as PlanCache."""

    def __init__(self, plan: Plan, config: PretrainedConfig, attention_mask: Tensor | None = None) -> None:
        super().__init__(plan, config, attention_mask)

    def empty_layers(self) -> list[Any]:
        """Layers that also keep a state of linear attention keep no copy."""
        layers = super().empty_layers()
        return [DecodedLayer(one.plan, one.state) if type(one) is PagedLayer else one for one in layers]

    def verify_decoded(self) -> None:
        """Compare the copy with a fresh read of the packed pages, every value of every layer.

        Raises:
            ArtifactError: they differ.
        """
        for layer in self.layers:
            if isinstance(layer, DecodedLayer):
                layer.verify()
