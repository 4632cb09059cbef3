"""Two caches for measuring plans. Both give attention the keys and values of a dynamic ``PlanCache``.

DenseCache     keeps no records where it can do without: for likelihoods and divergences of many plans at once
DecodedCache   is the packed cache, with a dense copy of it: for texts and generation whose bytes are counted. With a
               small model on a CPU, decoding all pages in every step is most of the time
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from kvcal.cache.attached import attached, attached_for
from kvcal.cache.paged_layer import PagedLayer
from kvcal.cache.plan_cache import PlanCache
from kvcal.cache.sliding_window import BoundedLayer
from kvcal.errors import UnsupportedModel
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.plan import Plan
from kvcal.stages.measuring.decoded_layer import DecodedLayer, Unwritten
from kvcal.stages.measuring.dense_layer import DenseLayer, UnreadPages


class DenseCache(PlanCache):
    """Without padding; its layers are dense where they can be (kvcal.stages.measuring.dense_layer), and
    ``nbytes`` does not count these. ``unread``: of all caches that are fed in lockstep, chunk by chunk.
    Raises as PlanCache."""

    def __init__(self, plan: Plan, config: PretrainedConfig, unread: UnreadPages | None = None) -> None:
        self._unread = unread or UnreadPages()
        super().__init__(plan, config)

    @property
    def unread(self) -> UnreadPages:
        return self._unread

    def look_ahead(self, is_obeyed: bool) -> None:
        """Whether attention obeys the masks of layers."""
        self._unread.looks_ahead = is_obeyed

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


@contextmanager
def looking_ahead(model: PreTrainedModel, caches: Sequence[PlanCache]) -> Iterator[None]:
    """The context in which a model is fed in lockstep with ``caches``: ``attached`` where one of them needs it, or
    packs in stripes, of which attention then reads several in a chunk. A model whose attention cannot be replaced
    is fed stripe by stripe."""
    plans = [cache.plan for cache in caches]
    copies = [cache for cache in caches if isinstance(cache, DenseCache | DecodedCache)]
    has_stripes = any(
        fmt.stripe_tokens < PAGE_TOKENS for plan in plans for layer in plan.layers for fmt in layer.formats
    )
    with ExitStack() as context:
        try:
            context.enter_context(attached(model) if has_stripes and copies else attached_for(model, *plans))
        except UnsupportedModel:
            if any(plan.needs_queries for plan in plans):
                raise
            copies = []
        for cache in copies:
            cache.look_ahead(has_stripes)
            context.callback(cache.look_ahead, False)
        yield


class DecodedCache(PlanCache):
    """A dynamic cache whose pages are decoded once. ``attention_mask``, ``lookahead``, errors: as PlanCache."""

    def __init__(
        self, plan: Plan, config: PretrainedConfig, attention_mask: Tensor | None = None, lookahead: int = 0
    ) -> None:
        self._unwritten = Unwritten()
        super().__init__(plan, config, attention_mask, lookahead=lookahead)

    def empty_layers(self) -> list[Any]:
        """Layers that also keep a state of linear attention keep no copy."""
        layers, unwritten = super().empty_layers(), self._unwritten
        unwritten.clear()
        return [DecodedLayer(one.plan, one.state, unwritten) if type(one) is PagedLayer else one for one in layers]

    def look_ahead(self, is_obeyed: bool) -> None:
        """Whether attention obeys the masks of layers."""
        self._unwritten.looks_ahead = is_obeyed

    def verify_decoded(self) -> None:
        """Compare the copy with a fresh read of the packed pages, every value of every layer.

        Raises:
            ArtifactError: they differ.
        """
        for layer in self.layers:
            if isinstance(layer, DecodedLayer):
                layer.verify()
