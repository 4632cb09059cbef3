"""PlanCache: a plan as ``past_key_values``.

    from kvcal import PlanCache, load_plan

    plan = load_plan("plan.safetensors")
    cache = PlanCache(plan, model.config, attention_mask=inputs["attention_mask"])
    model.generate(**inputs, past_key_values=cache)

``attention_mask`` is needed only for batches with padding: without it every column counts as a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from kvcal.errors import ArtifactError
from kvcal.geometry import AttentionGeometry, StateGeometry
from kvcal.layer_plan import LayerPlan
from kvcal.plan import Plan
from kvcal.runtime.bounded_layer import BoundedLayer
from kvcal.runtime.paged_layer import NO_PAGE, PagedLayer
from kvcal.runtime.plan_state import PlanState
from kvcal.runtime.rows import Padding


class PlanCache(Cache):
    """The packed cache of one plan. ``nbytes`` equals ``plan.nbytes(lengths, columns)`` at any time, but for one case:
    while past recording is on (assisted decoding), sliding-window layers hold the tokens of the last update on top,
    until the next crop or update."""

    def __init__(self, plan: Plan, config: PretrainedConfig, attention_mask: Tensor | None = None) -> None:
        """config: the model's; attention_mask [B, columns] of the prompt, 0 at padding.

        Raises:
            ArtifactError: the plan's layers are not the model's.
        """
        self.plan = plan
        self.config = config
        self.state = PlanState(plan, attention_mask)
        model_type = config.get_text_config(decoder=True).model_type
        if model_type != plan.model.model_type:
            raise ArtifactError(
                f"the plan is for model type {plan.model.model_type!r}, the model is {model_type!r}",
                hint="compile a plan for this model, or load the model the plan names: " + plan.model.id,
            )
        super().__init__(layers=self._empty_layers())

    def _empty_layers(self) -> list[Any]:
        """The layers that the model's configuration asks for, those of the plan in their places."""
        layers: list[Any] = DynamicCache(config=self.config).layers
        by_index = {layer.geometry.index: layer for layer in self.plan.layers}
        for index, native in enumerate(layers):
            if index in by_index:
                layers[index] = self._layer(index, native, by_index.pop(index))
            elif isinstance(native, DynamicLayer):
                raise ArtifactError(f"the model caches layer {index}, which the plan does not know")
        if by_index:
            raise ArtifactError(f"the plan has layer {min(by_index)}, the model caches only {len(layers)} layers")
        return layers

    def _layer(self, index: int, native: object, layer: LayerPlan) -> object:
        """What stores layer ``index``: ours for attention, the native one for states."""
        if type(native) is DynamicLayer and layer.is_paged:
            return PagedLayer(layer, self.state)
        geometry = layer.geometry
        if type(native) is DynamicSlidingWindowLayer and isinstance(geometry, AttentionGeometry) and geometry.window:
            if geometry.window == native.sliding_window:
                return BoundedLayer(native.sliding_window, self.plan.cache_dtype, self.padding)
            raise ArtifactError(
                f"layer {index} has a sliding window of {native.sliding_window} tokens, the plan says {geometry.window}"
            )
        if not isinstance(native, DynamicLayer) and isinstance(geometry, StateGeometry):
            return native
        kind = "a state" if isinstance(geometry, StateGeometry) else "a sliding window"
        raise ArtifactError(
            f"layer {index} of the model is a {type(native).__name__}, the plan has "
            f"{'full attention' if layer.is_paged else kind} there"
        )

    @property
    def padding(self) -> Padding:
        return self.state.padding

    @property
    def paged_layers(self) -> list[PagedLayer]:
        return [layer for layer in self.layers if isinstance(layer, PagedLayer)]

    @property
    def nbytes(self) -> int:
        """Bytes of the storages of all tensors held, measured, with those of the plan."""
        held = [*self.state.tensors.values(), *(tensor for layer in self.layers for tensor in _tensors(layer))]
        return sum(tensor.untyped_storage().nbytes() for tensor in held)

    @property
    def lengths(self) -> list[int]:
        """Tokens of every sequence (padding not counted)."""
        rows = self.padding.rows
        return [] if rows is None else rows.lengths(self.get_seq_length())

    def tokens_to_next_page(self) -> int:
        """New tokens until some page is quantized; a chunk of at most this many is exactly like single steps."""
        return min((layer.tokens_to_next_page() for layer in self.paged_layers), default=NO_PAGE)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        rows = self.padding.rows
        if rows is not None:
            self._select(torch.arange(rows.batch)[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = self.padding.rows
        if rows is not None:
            self._select([row for row in range(rows.batch) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """As the layers'. The last layer first: a predicted layer needs its source's pages to cut its own."""
        layers: list[Any] = self.layers  # of which a linear attention's has a crop of its own, or refuses
        for layer in reversed(layers):
            layer.crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget all sequences; the next update may bring another batch (without padding, or with the same mask)."""
        self.padding.reset()
        self.layers = self._empty_layers()

    def _select(self, indices: list[int]) -> None:
        rows = self.padding.rows
        if rows is None:
            return
        self.padding.rows = rows.select(indices)
        row_indices = torch.LongTensor(indices)
        for layer in self.layers:
            layer.reorder_cache(row_indices)


def _tensors(layer: object) -> list[Tensor]:
    """What a layer holds on the device."""
    if isinstance(layer, PagedLayer | BoundedLayer):
        return layer.tensors
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        states = [*layer.conv_states.values(), *layer.recurrent_states.values()]
        return [state for state in states if state is not None]
    return []
