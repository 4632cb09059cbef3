"""kvcal compiles one KV-cache quantization plan for a model and runs it.

    from kvcal import PlanCache, attached, load_plan

Names are imported on first use: the command line's help should not wait for torch, nor a plan for transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcal.cache.attached import attached
    from kvcal.cache.plan_cache import PlanCache
    from kvcal.plan.plan import Plan, load_plan, save_plan

__all__ = ["Plan", "PlanCache", "attached", "load_plan", "save_plan"]

_MODULES = {"PlanCache": "kvcal.cache.plan_cache", "attached": "kvcal.cache.attached"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'kvcal' has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, "kvcal.plan.plan")), name)
