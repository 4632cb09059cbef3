"""Lets a PlanCache hear the queries of the model it serves, for plans that choose channels by queries (MixKVQ).

    with kvcal.hear_queries(model):
        model.generate(**inputs, past_key_values=cache)

Every plan cache that the model is called with within the context hears its own queries; other caches are left alone,
and so is a plan that needs no queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcal.attention import layer_index, listen
from kvcal.plan import Plan
from kvcal.runtime.cache import PlanCache
from kvcal.runtime.paged_layer import PagedLayer


def serving(model: PreTrainedModel, *plans: Plan) -> AbstractContextManager[None]:
    """What a model must be called within for caches of these plans: :func:`hear_queries` if one of them needs it."""
    return hear_queries(model) if any(plan.needs_queries for plan in plans) else nullcontext()


@contextmanager
def hear_queries(model: PreTrainedModel) -> Iterator[None]:
    """See the module's docstring.

    Raises:
        UnsupportedModel: the model bypasses transformers' attention interface.
        UsageError: its attention is neither sdpa nor eager, or is listened to already.
    """
    current: list[PlanCache | None] = [None]

    def note_cache(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("past_key_values")
        current[0] = cache if isinstance(cache, PlanCache) else None

    def hand_over(module: nn.Module, q_post_BHTD: Tensor, k_post_BNSD: Tensor, v_BNSD: Tensor) -> None:
        index = layer_index(module)
        if current[0] is not None and index is not None:
            layer = current[0].layers[index]
            if isinstance(layer, PagedLayer):
                layer.observe_queries(q_post_BHTD)

    handle = model.register_forward_pre_hook(note_cache, with_kwargs=True)
    try:
        with listen(model, hand_over):
            yield
    finally:
        handle.remove()
