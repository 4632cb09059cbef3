"""The entry point ``vllm.general_plugins``: vLLM calls :func:`register` in each of its processes, maybe more
than once.

A process without a plan in its configuration is left as it is.

vLLM does not tell a backend the layer that it is for. So ``Attention.__init__`` gets our backend, and attaches the
layer's step. How large blocks are the backends say (``customize_spec``, which is public). Layers with a
sliding window, and those of a model that drafts, keep vLLM's backend. Without a plan the layer is as it was.
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
    """Make the backend known and wrap the attention layer's constructor. A version of vLLM without a part that
    is needed is left as it is, with a warning: a plan is refused there by vLLM, which does not know its
    backend."""
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
    """Wrap the constructor, once a process."""
    from vllm.model_executor.layers.attention import Attention

    if not hasattr(Attention, "kvcal_layer"):
        Attention.kvcal_layer = None  # a layer's own PlanLayer, where it has pages
        Attention.__init__ = _with_plan(Attention.__init__)


def _with_plan(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, num_heads: int, head_size: int, scale: float, *args: Any, **kwargs: Any) -> None:
        from vllm.compilation.backends import model_tag
        from vllm.config import get_current_vllm_config

        from kvcal.engines.vllm.backend import PlanBackend, PlanLayer, attach_window, require_draft
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
        elif has_pages:
            self.kvcal_layer = PlanLayer(serving, self, config)
        else:
            attach_window(serving, self)

    return init
