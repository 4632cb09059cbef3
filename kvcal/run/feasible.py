"""Budgets that nothing fits, found before hours of measuring: bytes of formats follow from the model and the recipe.

A profile of zeros stands in for the one to come, so that the allocate stage itself decides, and says the same. Left
out: schedules of pages that shrink, which follow from the choice.
"""

from __future__ import annotations

import torch

from kvcal.folder import Job
from kvcal.geometry import Geometry
from kvcal.models.attention import attention_modules
from kvcal.models.load import weight_bytes
from kvcal.plan.plan import Workload
from kvcal.recipe import AllocateSpec, CacheSpec, Recipe
from kvcal.stages.allocate import budget as allocation_budget
from kvcal.stages.allocate import stage as allocation_stage
from kvcal.stages.checkpoint import Mean
from kvcal.stages.profile.record import Profile, ProfileSetup


def require_feasible(job: Job) -> None:
    """Raises what the allocate stage of a recipe will raise, whatever its profile measures; before it, the reason why
    the model has no profile."""
    recipe, loaded = job.recipe, job.loaded
    attention_modules(loaded.model)
    assert recipe.allocate is not None
    setup = ProfileSetup(
        loaded.identity, loaded.geometry, weight_bytes(loaded.model), loaded.vocab_size, recipe.profile, recipe.cache,
        data_fingerprint="", data_description="", num_samples=1, num_tokens=0, num_loss_tokens=0,
    )  # fmt: skip
    zeros = {name: Mean(torch.zeros(of.extents, dtype=torch.float64), 1) for name, of in setup.totals().items()}
    reserved = reserved_for(recipe, recipe.allocate, loaded.geometry, recipe.cache)
    allocation_stage.require_feasible(Profile(setup, zeros), recipe.allocate, reserved)


def reserved_for(recipe: Recipe, spec: AllocateSpec, geometry: Geometry, cache: CacheSpec) -> int:
    """Bytes that are kept free for what the recipe's transforms take."""
    is_counted = spec.budget is not None and spec.workspace == "auto"
    workload = Workload(spec.batch, spec.context) if is_counted else None
    return allocation_budget.reserved_bytes(
        geometry, cache, recipe.reparam, recipe.predictors, workload, recipe.feedback
    )
