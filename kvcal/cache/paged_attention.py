"""Serves a model from a static PlanCache: the attention of a step reads packed pages, and stores what is new.

    cache = PlanCache(plan, model.config, max_tokens=4096)
    with kvcal.paged_attention(model):
        model.generate(**inputs, past_key_values=cache)

An attention function is registered with ``AttentionInterface``, and a mask function under the same name with
``AttentionMaskInterface``. One new token for every row goes to the cache's kernels (``StaticLayer.attend``), which need
no mask. Everything else goes to the implementation that the model had: prompts, whose tokens are stored afterwards
(``StaticLayer.extend``), and calls with other caches, or none. A dynamic plan cache hears its queries, as it does
within ``hear_queries``.

Left out: implementations other than sdpa and eager, and models that bypass AttentionInterface (models.attention).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcal.cache.current import CurrentCache, noting_cache
from kvcal.cache.paged_layer import PagedLayer
from kvcal.cache.static_layer import DYNAMIC_HINT, StaticLayer
from kvcal.errors import UnsupportedModel, UsageError
from kvcal.models.attention import EAGER, INTERFACE, OURS, attention_modules, forward_of, replaced_attention
from kvcal.store.static_state import Serving

# By attention module; holds entries only within ``paged_attention``.
_SERVING: dict[nn.Module, CurrentCache] = {}


@contextmanager
def paged_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within the context, static plan caches that the model is called with, by any thread, are served by their kernels.
    The attention implementation is restored on exit, also after an error.

    Raises:
        UnsupportedModel: the model bypasses the attention interface, or does not let its implementation be set.
        UsageError: its attention is neither sdpa nor eager, or is listened to or served already.
    """
    modules, serving = attention_modules(model), Serving()
    with replaced_attention(model, f"{OURS}paged_", _attention, _mask), noting_cache(model, serving) as current:
        _SERVING.update(dict.fromkeys(modules, current))
        try:
            yield
        finally:
            serving.is_active = False
            for module in modules:
                del _SERVING[module]


def _attention(
    base: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The registered attention function: query [B, H, T, D]; key and value as ``StaticLayer.update`` returned them."""
    current = _SERVING.get(module)
    cache = None if current is None else current.cache
    layer = None if cache is None else cache.layers[_index(module)]
    if isinstance(layer, StaticLayer) and layer.state.is_step(query.shape[2]):
        _require_plain(module, attention_mask, kwargs)
        scale = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        softcap = kwargs.get("softcap") or 0.0
        return layer.attend(query, key, value, kwargs.get("s_aux"), scale, softcap), None
    if isinstance(layer, PagedLayer):
        layer.observe_queries(query)
    found = _base_attention(base, module, query, key, value, attention_mask, kwargs)
    if isinstance(layer, StaticLayer):
        _require_same_padding(layer, attention_mask, query.shape[2], key.shape[2])
        layer.extend(query, key, value)
    return found


def _index(module: nn.Module) -> int:
    index = module.layer_idx
    assert isinstance(index, int)
    return index


@torch.compiler.disable
def _base_attention(base: str, module: nn.Module, *args: Any) -> tuple[Tensor, Tensor | None]:
    """What the model file would call under ``base``; the last of ``args`` are the keyword arguments."""
    namespace = forward_of(module).__globals__
    attention: Callable[..., tuple[Tensor, Tensor | None]] = namespace[INTERFACE].get_interface(base, namespace[EAGER])
    return attention(module, *args[:-1], **args[-1])


def _mask(base_mask: Callable[..., Tensor | None], *args: Any, **kwargs: Any) -> Tensor | None:
    """The registered mask function: none where a static layer says that a mask would cover nothing."""
    return None if kwargs.get("kv_length") == 0 else base_mask(*args, **kwargs)


def _require_plain(module: nn.Module, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    """UnsupportedModel where a step is more than attention to all tokens of a row."""
    reason = None
    if attention_mask is not None:
        reason = "is given a mask of its own"
    elif kwargs.get("position_bias") is not None:
        reason = "adds a bias of positions"
    elif module.training and kwargs.get("dropout"):
        reason = "drops out weights: the model is in training"
    if reason is not None:
        raise UnsupportedModel(f"the attention of {type(module).__name__} {reason}", hint=DYNAMIC_HINT)


@torch.compiler.disable
def _require_same_padding(layer: StaticLayer, attention_mask: Tensor | None, tokens: int, columns: int) -> None:
    """UsageError where a prompt's mask hides other columns than the cache's: steps go by the cache's alone.
    The mask is of ``columns``, the last of which are the new ``tokens``."""
    window = layer.plan.attention.window
    visible = columns if window is None else min(columns, window)
    first = int(layer.state.columns) + tokens - visible
    real = layer.state.rows.mask(first, visible, layer.state.lengths.device)
    seen = torch.ones_like(real)
    if attention_mask is not None:
        last = attention_mask[:, 0, -1, columns - visible : columns]
        seen = last if last.dtype == torch.bool else last == 0
    if not torch.equal(seen.expand_as(real), real):
        raise UsageError(
            "the attention mask that the model was called with is not the one that its cache was built with",
            hint="PlanCache(plan, config, attention_mask=inputs['attention_mask'], max_tokens=...)",
        )
