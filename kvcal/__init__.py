"""kvcal compiles one KV-cache quantization plan for a model and runs it.

    from kvcal import PlanCache, attached, load_plan         runs a plan
    from kvcal import build_plan, load_model, load_recipe    makes one, as ``kvcal plan`` does (docs/api.md)

Names are imported on first use: the command line's help should not wait for torch, nor a plan for
transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcal.cache.attached import attached
    from kvcal.cache.plan_cache import PlanCache
    from kvcal.folder import Folder
    from kvcal.models.load import load as load_model
    from kvcal.plan.plan import Plan, Workload, load_plan, save_plan
    from kvcal.recipe import AllocateSpec, Recipe
    from kvcal.recipe_files import load_recipe, with_knobs
    from kvcal.stages.formats import allocate_folder as allocate
    from kvcal.stages.formats import profile_folder as profile
    from kvcal.stages.pipeline import build_plan
    from kvcal.stages.pipeline import compile_folder as compile

__all__ = [
    "AllocateSpec", "Folder", "Plan", "PlanCache", "Recipe", "Workload", "allocate", "attached", "build_plan",
    "compile", "load_model", "load_plan", "load_recipe", "profile", "save_plan", "with_knobs",
]  # fmt: skip

_PLACES = {
    "AllocateSpec": "kvcal.recipe:AllocateSpec",
    "Folder": "kvcal.folder:Folder",
    "Plan": "kvcal.plan.plan:Plan",
    "PlanCache": "kvcal.cache.plan_cache:PlanCache",
    "Recipe": "kvcal.recipe:Recipe",
    "Workload": "kvcal.plan.plan:Workload",
    "allocate": "kvcal.stages.formats:allocate_folder",
    "attached": "kvcal.cache.attached:attached",
    "build_plan": "kvcal.stages.pipeline:build_plan",
    "compile": "kvcal.stages.pipeline:compile_folder",
    "load_model": "kvcal.models.load:load",
    "load_plan": "kvcal.plan.plan:load_plan",
    "load_recipe": "kvcal.recipe_files:load_recipe",
    "profile": "kvcal.stages.formats:profile_folder",
    "save_plan": "kvcal.plan.plan:save_plan",
    "with_knobs": "kvcal.recipe_files:with_knobs",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'kvcal' has no attribute {name!r}")
    module, _, attribute = _PLACES[name].partition(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return [*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__"]
