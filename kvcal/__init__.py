"""kvcal compiles one KV-cache quantization plan for a model and runs it.

    from kvcal import PlanCache, load_plan

Names are imported on first use: the command line's help should not wait for torch, nor a plan for transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcal.cache.paged_attention import paged_attention
    from kvcal.cache.plan_cache import PlanCache
    from kvcal.cache.queries import hear_queries
    from kvcal.plan.plan import Plan, load_plan, save_plan

__all__ = ["Plan", "PlanCache", "hear_queries", "load_plan", "paged_attention", "save_plan"]

_MODULES = {
    "PlanCache": "kvcal.cache.plan_cache",
    "hear_queries": "kvcal.cache.queries",
    "paged_attention": "kvcal.cache.paged_attention",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'kvcal' has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, "kvcal.plan.plan")), name)
