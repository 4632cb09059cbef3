"""The entry point ``sglang.srt.plugins``: SGLang calls :func:`register` in each of its processes.

SGLang lets a plug-in wrap any of its functions. Some are: which class of pool it makes, what a token of it
costs, what is taken off the memory before (the rings), and which layers have a pool for sliding windows.
``Beginnings`` wraps more where a plan has sinks or windows of its own. Without KVCAL_PLAN, or with an empty
one, a process is left as it is.
"""

from __future__ import annotations

import os
from typing import Any

from kvcal.engines.sglang import BACKEND, PLAN_VARIABLE

CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"


def register() -> None:
    """Make the backend known and wrap the functions, where there is a plan."""
    if not os.environ.get(PLAN_VARIABLE):
        return
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_attention_backend_choices

    register_attention_backend(BACKEND)(_backend)
    add_attention_backend_choices([BACKEND])
    for target, wrapper in WRAPPED.items():
        HookRegistry.register(target, wrapper, HookType.AROUND)


def _backend(runner: Any) -> Any:
    from kvcal.engines.sglang.window_backend import backend_of

    return backend_of(runner)


def _pool_class(original: Any, configurator: Any, *, kind: str, default: type) -> type:
    from kvcal.engines.sglang.serving import PlanPool

    if configurator.is_draft_worker:
        return original(configurator, kind=kind, default=default)
    if kind == "mha" and configurator.server_args.enable_hierarchical_cache:
        from kvcal.engines.sglang import hierarchy

        hierarchy.register()
    is_plans = kind == "mha" and not configurator.is_hybrid_swa  # else one of two pools (``_two_pools``)
    return PlanPool if is_plans else original(configurator, kind=kind, default=default)


def _token_bytes(original: Any, sizes: Any, kvc: Any, num_layers: int) -> int:
    """Bytes of a token: a share of the blocks of all layers, rounded up."""
    from kvcal.engines.sglang.serving import serving_of

    return original(sizes, kvc, num_layers) if kvc.is_draft_worker else serving_of(kvc).token_bytes


def _without_rings(original: Any, kvc: Any, budget_bytes: int, **more: Any) -> Any:
    from kvcal.engines.sglang.serving import serving_of

    rings = 0 if kvc.is_draft_worker else serving_of(kvc).rings_bytes
    return original(kvc, budget_bytes - rings, **more)


def _hybrid_model(original: Any, config: Any) -> None:
    from kvcal.engines.sglang.windows import hybrid_model

    hybrid_model(original, config)


def _two_pools(original: Any, pool: Any, *args: Any, **more: Any) -> None:
    """SGLang's pools beside sliding windows: of full attention it is the plan's."""
    from kvcal.engines.sglang.serving import PlanPool

    original(pool, *args, **more | {"full_kv_pool_class": PlanPool})


def _full_bytes(original: Any, kvc: Any, sub_pool_name: str) -> int | None:
    """Of two pools: bytes of a token in the one of full attention. Where a model drafts, with its layers."""
    from kvcal.engines.sglang.serving import serving_of

    if kvc.is_draft_worker or sub_pool_name != "full":
        return original(kvc, sub_pool_name)
    return serving_of(kvc).token_bytes + serving_of(kvc).draft_bytes


WRAPPED = {
    f"{CONFIGURATOR}._resolve_kv_pool_class": _pool_class,
    f"{CONFIGURATOR}.config_from_budget": _without_rings,
    f"{CONFIGURATOR}.fused_entry_bytes": _full_bytes,
    "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size": _token_bytes,
    "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool.__init__": _two_pools,
    "sglang.srt.configs.model_config.ModelConfig._derive_hybrid_model": _hybrid_model,
}
