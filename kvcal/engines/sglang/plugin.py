"""The entry point ``sglang.srt.plugins``: SGLang calls :func:`register` in each of its processes.

SGLang lets a plug-in wrap any of its functions. Three are: which class of pool it makes, what a token of it
costs, and what is taken off the memory before (the rings). ``Beginnings`` wraps more where a plan has sinks
or windows. Without KVCAL_PLAN, or with an empty one, a process is left as it is.
"""

from __future__ import annotations

import os
from typing import Any

from kvcal.engines.sglang import BACKEND, PLAN_VARIABLE

CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
SIZES = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator"


def register() -> None:
    """Make the backend known and wrap the functions, where there is a plan."""
    if not os.environ.get(PLAN_VARIABLE):
        return
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_attention_backend_choices

    register_attention_backend(BACKEND)(_backend)
    add_attention_backend_choices([BACKEND])
    HookRegistry.register(f"{CONFIGURATOR}._resolve_kv_pool_class", _pool_class, HookType.AROUND)
    HookRegistry.register(f"{SIZES}._compute_cell_size", _token_bytes, HookType.AROUND)
    HookRegistry.register(f"{SIZES}.__init__", _with_rings, HookType.AROUND)


def _backend(runner: Any) -> Any:
    from kvcal.engines.sglang.backend import PlanAttentionBackend

    return PlanAttentionBackend(runner)


def _pool_class(original: Any, configurator: Any, *, kind: str, default: type) -> type:
    from kvcal.engines.sglang.serving import PlanPool

    if kind == "mha" and configurator.server_args.enable_hierarchical_cache:
        from kvcal.engines.sglang import hierarchy

        hierarchy.register()
    return PlanPool if kind == "mha" else original(configurator, kind=kind, default=default)


def _token_bytes(original: Any, sizes: Any, kvc: Any, num_layers: int) -> int:
    """Bytes of a token: a share of the blocks of all layers, rounded up."""
    from kvcal.engines.sglang.serving import serving_of

    return serving_of(kvc).token_bytes


def _with_rings(original: Any, sizes: Any, kvc: Any) -> None:
    from kvcal.engines.sglang.serving import serving_of

    original(sizes, kvc)
    sizes._fixed_overhead_bytes += serving_of(kvc).rings_bytes
