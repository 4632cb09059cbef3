"""The layers of a cache: ours for attention, transformers' own for the states of linear attention.

The model's configuration says which layers there are, as it does to transformers' ``DynamicCache``; the plan
has to agree with it, layer by layer. Full attention is stored in pages, a sliding window at 16 bits, either
of them dynamic or static. A layer of both kinds (Falcon-H1, Zamba2) is ours with the state that transformers'
own keeps.
"""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from kvcal.cache.paged_layer import PagedLayer
from kvcal.cache.plan_layer import ANOTHER_MODEL, DYNAMIC_HINT, PlanLayer
from kvcal.cache.sliding_window import BoundedLayer, StaticWindow, require_left_padding, window_refusals
from kvcal.cache.static_layer import Allocate, StaticPages
from kvcal.errors import ArtifactError, UnsupportedModel
from kvcal.geometry import AttentionGeometry, StateGeometry
from kvcal.kernels.choice import not_served, refusals
from kvcal.models.supported_layers import sharing_layers
from kvcal.plan.layer import LayerPlan
from kvcal.store.padding import Rows
from kvcal.store.state import PlanState, StepState


def cache_layers(config: PretrainedConfig, state: PlanState, static: StepState | None, allocate: Allocate) -> list[Any]:
    """Empty layers, in the order of the model. ``static``: what those of a static cache share. ``allocate``:
    what they call with batch and device when the first tokens come."""
    layers: list[Any] = DynamicCache(config=config).layers
    sharing = sharing_layers(config)
    state.shares_layers = bool(sharing)
    if sharing and static is not None:
        raise UnsupportedModel(
            f"a static cache cannot hold layer {sharing[0]}: it reads another layer's keys and values, of which a step "
            "hands on the new ones alone",
            hint=DYNAMIC_HINT,
        )
    by_index = {layer.geometry.index: layer for layer in state.plan.layers}
    with_state = {index: layer.geometry for index, layer in by_index.items() if layer.geometry.state_bytes}
    for index, native in enumerate(layers):
        if type(native) is LinearAttentionLayer:
            layers[index] = StateLayer(index, with_state.get(index), native.number_of_states)
        if index in by_index:
            plan = by_index.pop(index)
            if not _is_ours(native, plan):
                continue
            num_heads = config.get_text_config(decoder=True).num_attention_heads
            if num_heads != plan.attention.num_query_heads:  # which the kernels are compiled for
                raise ArtifactError(
                    f"layer {index} has {num_heads} query heads, but the plan is for {plan.attention.num_query_heads}",
                    hint=ANOTHER_MODEL,
                )
            if static is not None:
                _require_static(plan, config, state)
            takes_back = state.step_tokens > 1 and (plan.is_paged or static is not None)
            for reason in not_served(plan, "drafts") if takes_back else ():
                raise UnsupportedModel(
                    f"layer {index} cannot verify drafts: {reason}",
                    hint="leave lookahead out: drafts then come as prompts do",
                )
            if static is not None:
                of_kind = StaticPages if plan.is_paged else StaticWindow
                layers[index] = of_kind(plan, state, static, allocate)
            elif isinstance(native, LinearAttentionLayer):
                layers[index] = HybridLayer(plan, state, native.number_of_states)
            elif plan.is_paged:
                layers[index] = PagedLayer(plan, state)
            else:
                layers[index] = BoundedLayer(plan.attention, state.plan.cache_dtype, state.padding)
        elif isinstance(native, DynamicLayer):
            raise ArtifactError(f"the model caches layer {index}, which the plan does not know")
    if by_index:
        raise ArtifactError(f"the plan has layer {min(by_index)}, the model caches only {len(layers)} layers")
    return layers


class StateLayer(LinearAttentionLayer, PlanLayer):
    """The state of a layer of linear attention, as transformers stores it. ``geometry``: the plan's, None
    where it knows of no state."""

    keeps_state = True

    def __init__(self, index: int, geometry: AttentionGeometry | StateGeometry | None, number_of_states: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        self.index, self.geometry = index, geometry

    @property
    def tensors(self) -> list[Tensor]:
        return self.states

    @property
    def states(self) -> list[Tensor]:
        """Those that have come to be, [B, ...]."""
        found = [*self.conv_states.values(), *self.recurrent_states.values()]
        return [state for state in found if state is not None]

    def is_as_planned(self) -> bool:
        if not self.states or self.record_past:  # which keeps a larger state until the next crop
            return False
        if self.geometry is None:
            raise ArtifactError(f"layer {self.index} keeps a state, which the plan does not know", hint=ANOTHER_MODEL)
        found, expected = sum(state.nbytes // state.shape[0] for state in self.states), self.geometry.state_bytes
        if found != expected:
            raise ArtifactError(
                f"layer {self.index} keeps a state of {found} bytes per sequence, but the plan is for {expected}",
                hint=f"{ANOTHER_MODEL}, or with the model in another dtype",
            )
        return True

    def require_croppable(self, rows: Rows, held: int, kept: int) -> None:
        if kept != held:
            raise UnsupportedModel(f"layer {self.index} keeps a state of linear attention: no token can be taken back")

    def crop(self, tokens_to_remove: int) -> None:
        """Of no tokens."""


class HybridLayer(StateLayer, PagedLayer):
    """A full-attention layer of a dynamic cache that also keeps a state, as transformers stores it."""

    is_compileable = False
    is_croppable = False

    def __init__(self, plan: LayerPlan, state: PlanState, number_of_states: int) -> None:
        PagedLayer.__init__(self, plan, state)
        StateLayer.__init__(self, plan.geometry.index, plan.geometry, number_of_states)

    @property
    def tensors(self) -> list[Tensor]:
        return [*super(StateLayer, self).tensors, *self.states]

    def lazy_initialization(self, *key_value: Tensor, **states: Any) -> None:  # type: ignore[override]
        """Of pages with keys and values, of a state with its tensors, by their names."""
        if key_value:
            PagedLayer.lazy_initialization(self, *key_value)
        else:
            LinearAttentionLayer.lazy_initialization(self, **states)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)  # type: ignore[arg-type]
        PagedLayer.reorder_cache(self, beam_idx)


def _is_ours(native: object, plan: LayerPlan) -> bool:
    """Whether we store the layer that transformers would store as ``native``, and not transformers, a
    state."""
    geometry = plan.geometry
    has_state = isinstance(geometry, AttentionGeometry) and geometry.state_bytes > 0
    paged = LinearAttentionAndFullAttentionLayer if has_state else DynamicLayer
    if type(native) is paged and plan.is_paged:
        return True
    if type(native) is DynamicSlidingWindowLayer and isinstance(geometry, AttentionGeometry) and geometry.window:
        if geometry.window == native.sliding_window:
            return True
        raise ArtifactError(
            f"layer {geometry.index} has a sliding window of {native.sliding_window} tokens, the plan says "
            f"{geometry.window}"
        )
    if not isinstance(native, DynamicLayer) and isinstance(geometry, StateGeometry):
        return False
    kind = "a state" if isinstance(geometry, StateGeometry) else "a sliding window"
    raise ArtifactError(
        f"layer {geometry.index} of the model is a {type(native).__name__}, the plan has "
        f"{'full attention' if plan.is_paged else kind} there"
    )


def _require_static(plan: LayerPlan, config: PretrainedConfig, state: PlanState) -> None:
    """UnsupportedModel, with the reason, for a layer that a static cache cannot hold."""
    index = plan.geometry.index
    window_reasons = () if plan.is_paged else window_refusals(config, index)
    for reason in itertools.chain(refusals(plan, state.plan.cache_dtype, is_cuda=False), window_reasons):
        raise UnsupportedModel(f"a static cache cannot hold layer {index}: {reason}", hint=DYNAMIC_HINT)
    if not plan.is_paged:
        require_left_padding(state.padding.prompt)
