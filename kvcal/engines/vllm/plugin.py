"""The entry point ``vllm.general_plugins``: vLLM calls :func:`register` in each of its processes, maybe more than once.

A process without a plan in its configuration is left as it is.
"""

from __future__ import annotations

import copyreg
import logging
from collections.abc import Callable
from typing import Any

from kvcal.engines.versions import refusal
from kvcal.engines.vllm import BACKEND

logger = logging.getLogger("vllm.kvcal")

BACKEND_PATH = "kvcal.engines.vllm.backend.PlanBackend"


def register() -> None:
    """Make the backend known and wrap the attention layer. A version of vLLM without a part that is needed is left as
    it is, with a warning: a plan is refused there by vLLM, which does not know its backend."""
    if (reason := refusal("vllm")) is not None:
        logger.warning("kvcal cannot serve plans in vLLM: %s", reason)
        return
    from kvcal.engines.vllm.hooks import wrap_attention

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
