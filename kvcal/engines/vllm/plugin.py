"""The entry point ``vllm.general_plugins``: vLLM calls :func:`register` in each of its processes, maybe more than once.

A process without a plan in its configuration is left as it is.

vLLM lets a backend change a layer's cache by a class method that does not know the layer, and a plan gives every layer
bytes of its own. So ``Attention.__init__`` gets our backend, and attaches the layer's step and ring; and
``Attention.get_kv_cache_spec`` says how large the layer's block is. Without a plan both do what they did.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from kvcal.engines.support import refusal
from kvcal.engines.vllm import BACKEND
from kvcal.pages.layout_protocol import PAGE_TOKENS

logger = logging.getLogger("vllm.kvcal")

BACKEND_PATH = "kvcal.engines.vllm.backend.PlanBackend"


def register() -> None:
    """Make the backend known and wrap the attention layer. A version of vLLM without a part that is needed is left as
    it is, with a warning: a plan is refused there by vLLM, which does not know its backend."""
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
    """A member, pickled. `vllm serve` spawns its engine, which unpickles its configuration before it loads plug-ins."""
    return backend, (member.name,)


def wrap_attention() -> None:
    """Wrap both methods, once a process."""
    from vllm.model_executor.layers.attention import Attention

    if hasattr(Attention, "kvcal_layer"):
        return
    Attention.kvcal_layer = None  # a layer's own PlanLayer, where it is served
    Attention.__init__ = _with_plan(Attention.__init__)
    Attention.get_kv_cache_spec = _with_block(Attention.get_kv_cache_spec)


def _with_plan(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, num_heads: int, head_size: int, scale: float, *args: Any, **kwargs: Any) -> None:
        from vllm.config import get_current_vllm_config

        from kvcal.engines.vllm.backend import PlanBackend, PlanLayer
        from kvcal.engines.vllm.serving import serving_of

        config = get_current_vllm_config()
        serving = serving_of(config)
        if serving is None:
            original(self, num_heads, head_size, scale, *args, **kwargs)
            return
        original(self, num_heads, head_size, scale, *args, **kwargs | {"attn_backend": PlanBackend})
        self.kvcal_layer = PlanLayer(serving, self, config)

    return init


def _with_block(original: Any) -> Any:
    @functools.wraps(original)
    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        spec = original(self, vllm_config)
        if self.kvcal_layer is None:
            return spec
        if self.kvcal_layer.ring is None:
            from kvcal.engines.vllm.rings import RingSpec, spec_of

            return spec_of(RingSpec, self.kvcal_layer.serving.shard.largest_ring_bytes)
        # One head slot of one state: the block is bytes to vLLM.
        return dataclasses.replace(
            spec, dtype=torch.uint8, num_head_slots=1, tokens_per_state=PAGE_TOKENS,
            state_content_bytes=self.kvcal_layer.block_bytes,
        )  # fmt: skip

    return get_kv_cache_spec
