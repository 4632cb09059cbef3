"""Lets a PlanCache hear the queries of the model it serves, for plans that choose channels by queries (MixKVQ).

    with kvcal.hear_queries(model):
        model.generate(**inputs, past_key_values=cache)

Every plan cache that the model is called with within the context, by any thread, hears its own queries; other caches
are left alone, and so is a plan that needs no queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcal.cache.current import noting_cache
from kvcal.cache.paged_layer import PagedLayer
from kvcal.models.attention import layer_index, listen
from kvcal.plan.plan import Plan


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
    with noting_cache(model) as current:

        def hand_over(module: nn.Module, q_post_BHTD: Tensor, k_post_BNSD: Tensor, v_BNSD: Tensor) -> None:
            index = layer_index(module)
            if current.cache is not None and index is not None:
                layer = current.cache.layers[index]
                if isinstance(layer, PagedLayer):
                    layer.observe_queries(q_post_BHTD)

        with listen(model, hand_over):
            yield
