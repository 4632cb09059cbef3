"""``kvcal.attached(model)``: the one context for plan caches that need a model's attention.

    cache = PlanCache(plan, model.config, max_tokens=4096)
    with kvcal.attached(model):
        model.generate(**inputs, past_key_values=cache)

Within it, every plan cache that the model is called with, by any thread, is given its own queries, for plans
that choose channels by queries (MixKVQ). One new token for every row goes to the kernels, which read packed
pages (``AttentionLayer.attend``) and need no mask: of a static cache always, of a dynamic one on a GPU. Everything
else goes to the implementation that the model had: prompts, whose tokens are stored then
(``AttentionLayer.observe``), and calls with other caches, or none.

An attention function is registered with ``AttentionInterface``, and a mask function under the same name with
``AttentionMaskInterface``. Attention functions are not handed the cache: it is noted by thread, before every
forward pass of the decoder, which stays in its thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcal.cache.plan_cache import PlanCache
from kvcal.cache.plan_layer import DYNAMIC_HINT, AttentionLayer, PlanLayer
from kvcal.cache.static_layer import StaticLayer
from kvcal.errors import UnsupportedModel, UsageError
from kvcal.models.attention import OURS, attention_modules, base_attention, given_cache, layer_index, replaced_attention
from kvcal.plan.plan import Plan
from kvcal.store.state import Serving


class CurrentCache(threading.local):
    """``cache``: the one of this thread's last forward pass; None if that was no PlanCache."""

    cache: PlanCache | None = None


# By attention module; holds entries only within ``attached``.
_ATTACHED: dict[nn.Module, CurrentCache] = {}


def attached_for(model: PreTrainedModel, *plans: Plan) -> AbstractContextManager[None]:
    """The context to call a model in, for dynamic caches of these plans: ``attached`` if one of them needs
    it."""
    return attached(model) if any(plan.needs_queries for plan in plans) else nullcontext()


def decoding(model: PreTrainedModel, plan: Plan) -> AbstractContextManager[None]:
    """The context to generate in with a dynamic cache of the plan: on a GPU ``attached``, so that kernels read
    its pages, unless the model's attention cannot be replaced; elsewhere as ``attached_for``."""
    if model.device.type == "cuda":
        with suppress(UnsupportedModel), attached(model):
            return attached(model)
    return attached_for(model, plan)


@contextmanager
def attached(model: PreTrainedModel) -> Iterator[None]:
    """See the module's docstring. The attention implementation is restored on exit, also after an error.

    Enter it once for a model, in any thread: it serves all threads that call the model until it is left. A
    second one, in the same thread or in another, is refused until then; so threads share one around them all.

    Raises:
        UnsupportedModel: the model bypasses the attention interface, does not let its implementation be set,
        or calls
            one attention module in several layers (Zamba2).
        UsageError: its attention is neither sdpa nor eager, or is observed or attached already.
    """
    modules, serving, current = attention_modules(model), Serving(), CurrentCache()
    if any(layer_index(module) is None for module in modules):
        raise UnsupportedModel(
            f"several layers of {type(model).__name__} call the same attention module, so that it cannot tell their "
            "caches apart",
            hint="a dynamic PlanCache whose plan has no score by queries needs no attached()",
        )

    def note_cache(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = given_cache(kwargs)
        current.cache = cache if isinstance(cache, PlanCache) else None
        if isinstance(cache, PlanCache):
            cache.state.is_attached = True
            if cache.static is not None:
                cache.static.serving = serving
            elif any(layer.is_stepped for layer in cache.paged_layers):
                cache.state.is_stepping = _may_step(model, cache, args, kwargs)

    def forget_cache(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], __: Any) -> None:
        cache = given_cache(kwargs)
        if isinstance(cache, PlanCache):
            cache.state.is_attached = cache.state.is_stepping = False

    with replaced_attention(model, f"{OURS}attached_", _attention, _mask):
        decoder = model.get_decoder()
        handles = [decoder.register_forward_pre_hook(note_cache, with_kwargs=True)]
        handles += [decoder.register_forward_hook(forget_cache, with_kwargs=True, always_call=True)]
        _ATTACHED.update(dict.fromkeys(modules, current))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            serving.is_active = False
            for module in modules:
                del _ATTACHED[module]


def _attention(
    base: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
) -> tuple[Tensor, Tensor | None]:
    """The registered attention function: query [B, H, T, D]; key and value as the layer's ``update`` returned
    them."""
    current = _ATTACHED.get(module)
    cache = None if current is None else current.cache
    layer = None if cache is None else cache.layers[module.layer_idx]  # type: ignore[index]
    if not isinstance(layer, PlanLayer):
        return _base_attention(base, module, query, key, value, attention_mask, more)
    if isinstance(layer, AttentionLayer) and layer.awaits_step(query.shape[2]):
        _require_plain(module, attention_mask if isinstance(layer, StaticLayer) else None, more)
        scale = more.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        softcap = more.get("softcap") or 0.0
        return layer.attend(query, key, value, more.get("s_aux"), scale, softcap), None
    if isinstance(layer, StaticLayer):
        _require_same_padding(module, layer, attention_mask, key.shape[2])
    attention_mask = layer.mask_of(attention_mask, query, base)
    attended = _base_attention(base, module, query, key, value, attention_mask, more)
    layer.observe(query)
    return attended


@torch.compiler.disable
def _base_attention(base: str, module: nn.Module, *args: Any) -> tuple[Tensor, Tensor | None]:
    """The attention that the model file calls under ``base``; the last of ``args`` are the keyword
    arguments."""
    attended: tuple[Tensor, Tensor | None] = base_attention(base, module)(module, *args[:-1], **args[-1])
    return attended


def _mask(base_mask: Callable[..., Tensor | None], *args: Any, **kwargs: Any) -> Tensor | None:
    """The registered mask function: none where a static layer says that a mask would cover nothing."""
    return None if kwargs.get("kv_length") == 0 else base_mask(*args, **kwargs)


@torch.compiler.disable
def _may_step(model: nn.Module, cache: PlanCache, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the kernels may attend in a forward pass with a dynamic cache: without gradients, to all tokens
    that the cache holds. A mask that hides other columns than its padding is obeyed, by the model's own
    attention. Waits for the device where there is a mask."""
    rows, mask = cache.padding.rows, kwargs.get("attention_mask")
    if rows is None or torch.is_grad_enabled() or model.training or len(args) > 1:
        return False
    is_whole = all(start == 0 and stop == rows.width for start, stop in rows.runs)
    if mask is None:
        return is_whole
    if not isinstance(mask, Tensor) or mask.dim() != 2 or len(mask) != rows.batch:
        return False
    if mask.shape[1] <= int(cache.get_seq_length()):
        return False
    return bool(mask.all()) if is_whole else torch.equal(mask != 0, rows.mask(0, mask.shape[1], mask.device))


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
def _require_same_padding(module: nn.Module, layer: StaticLayer, attention_mask: Tensor | None, columns: int) -> None:
    """UsageError where a prompt's mask hides other columns than the cache's: steps go by the cache's alone.
    UnsupportedModel where it does more than hide. It is of ``columns``, the last of which are the new
    ones."""
    if layer.pending is None:
        return
    window, new = layer.plan.attention.window, layer.pending
    visible = columns if window is None else min(columns, window)
    first = new.columns + new.keys.shape[2] - visible
    real = new.rows.mask(first, visible, new.keys.device)
    seen = torch.ones_like(real)
    if attention_mask is not None:
        last = attention_mask[:, 0, -1, columns - visible : columns]
        seen = last if last.dtype == torch.bool else last == 0
        hidden = ~seen if last.dtype == torch.bool else last <= torch.finfo(last.dtype).min / 2
        if not (seen | hidden).all():
            layer.pending = None
            raise UnsupportedModel(
                f"the attention of {type(module).__name__} adds numbers to its mask", hint=DYNAMIC_HINT
            )
    if not torch.equal(seen.expand_as(real), real):
        layer.pending = None
        raise UsageError(
            "the attention mask that the model was called with is not the one that its cache was built with",
            hint="PlanCache(plan, config, attention_mask=inputs['attention_mask'], max_tokens=...)",
        )
