"""The entry point ``vllm.general_plugins``: vLLM calls :func:`register` in each of its processes, maybe more
than once.

A process without a plan in its configuration is left as it is.

vLLM lets a backend change a layer's cache by a class method that does not know the layer. So
``Attention.__init__`` gets our backend, and attaches the layer's step; and ``Attention.get_kv_cache_spec``
says how large its block is. Layers with a sliding window, and those of a model that drafts, keep vLLM's
backend. Without a plan both do what they did.
"""

from __future__ import annotations

import copyreg
import functools
import logging
from collections.abc import Callable
from typing import Any

from kvcal.engines.support import refusal
from kvcal.engines.vllm import BACKEND

logger = logging.getLogger("vllm.kvcal")

BACKEND_PATH = "kvcal.engines.vllm.backend.PlanBackend"
MODEL_TAG = "backbone"  # vLLM's, while it builds the model; while it builds one that drafts, it is another


def register() -> None:
    """Make the backend known and wrap the attention layer. A version of vLLM without a part that is needed is
    left as it is, with a warning: a plan is refused there by vLLM, which does not know its backend."""
    if (reason := refusal("vllm")) is not None:
        logger.warning("kvcal cannot serve plans in vLLM: %s", reason)
        return
    copyreg.pickle(type(backend(BACKEND)), _reduced)
    wrap_attention()


def backend(name: str) -> Any:
    """The member of vLLM's backends with this name; KVCAL's is made where it is not yet there."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if BACKEND not in AttentionBackendEnum.__members__:
        register_backend(BACKEND, BACKEND_PATH)
    return AttentionBackendEnum[name]


def _reduced(member: Any) -> tuple[Callable[[str], Any], tuple[str]]:
    """A member, pickled. `vllm serve` spawns its engine, which unpickles its configuration before it loads
    plug-ins."""
    return backend, (member.name,)


def wrap_attention() -> None:
    """Wrap both methods, once a process."""
    from vllm.model_executor.layers.attention import Attention

    if hasattr(Attention, "kvcal_layer"):
        return
    Attention.kvcal_layer = None  # a layer's own PlanLayer or WindowLayer, where it is served
    Attention.__init__ = _with_plan(Attention.__init__)
    Attention.get_kv_cache_spec = _with_block(Attention.get_kv_cache_spec)


def _with_plan(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, num_heads: int, head_size: int, scale: float, *args: Any, **kwargs: Any) -> None:
        from vllm.compilation.backends import model_tag
        from vllm.config import get_current_vllm_config

        from kvcal.engines.vllm.backend import PlanBackend, PlanLayer, WindowLayer, require_draft
        from kvcal.engines.vllm.serving import serving_of, serving_with_drafts

        config = get_current_vllm_config()
        is_draft, chosen = model_tag != MODEL_TAG, config.attention_config.backend
        serving = serving_with_drafts(config) if is_draft else serving_of(config)
        if serving is None:
            original(self, num_heads, head_size, scale, *args, **kwargs)
            return
        has_pages = not is_draft and not serving.has_window(kwargs["prefix"])
        if has_pages:
            kwargs |= {"attn_backend": PlanBackend}
        elif chosen is not None and chosen.name == BACKEND:
            config.attention_config.backend = None  # vLLM's own choice
        try:
            original(self, num_heads, head_size, scale, *args, **kwargs)
        finally:
            config.attention_config.backend = chosen
        if is_draft:
            require_draft(self)
        else:
            self.kvcal_layer = PlanLayer(serving, self, config) if has_pages else WindowLayer(serving, self)

    return init


def _with_block(original: Any) -> Any:
    @functools.wraps(original)
    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        spec = original(self, vllm_config)
        return spec if self.kvcal_layer is None else self.kvcal_layer.spec(spec)

    return get_kv_cache_spec
