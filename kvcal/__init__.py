"""kvcal compiles one KV-cache quantization plan for a model and runs it.

    from kvcal import PlanCache, load_plan

Names are imported on first use: the command line's help should not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcal.cache.paged_attention import paged_attention
    from kvcal.cache.plan_cache import PlanCache
    from kvcal.cache.queries import hear_queries
    from kvcal.plan.plan import Plan, load_plan, save_plan

__all__ = ["Plan", "PlanCache", "hear_queries", "load_plan", "paged_attention", "save_plan"]


def __getattr__(name: str) -> Any:
    if name == "PlanCache":
        from kvcal.cache.plan_cache import PlanCache

        return PlanCache
    if name == "hear_queries":
        from kvcal.cache.queries import hear_queries

        return hear_queries
    if name == "paged_attention":
        from kvcal.cache.paged_attention import paged_attention

        return paged_attention
    if name in __all__:
        from kvcal.plan import plan

        return getattr(plan, name)
    raise AttributeError(f"module 'kvcal' has no attribute {name!r}")
