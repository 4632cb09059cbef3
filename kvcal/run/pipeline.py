"""The pipeline: profile -> choice of formats -> reparam -> predictors -> feedback -> compile -> evaluate.

Each stage works on what the ones before chose, and leaves one artifact in one folder. A stage whose artifact was made
from the same inputs is skipped; when they differ, the first differing field is named and the stage runs again. A folder
made from another model is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from kvcal.data.pools import shared_sources, with_calibration
from kvcal.distributed import gather
from kvcal.errors import UsageError
from kvcal.folder import Folder, Job, sequences
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import DEFAULT_WORKLOAD, Plan, Workload, plan_bytes, save_plan
from kvcal.plan.tensors import tensors_nbytes
from kvcal.progress import SILENT, Reporter
from kvcal.recipe import Recipe
from kvcal.recipe_files import load_recipe
from kvcal.run.formats import (
    allocate_recipe,
    fix_folder,
    formats_plan,
    profile_folder,
    require_feasible,
    tune_folder,
)
from kvcal.run.search import search_folder
from kvcal.run.transform import Transforms, centre_folder, feedback_folder, fit_predictors_folder, reparam_folder
from kvcal.stages import search as search_record
from kvcal.stages.allocate import record as allocation_record
from kvcal.stages.allocate.budget import transform_bytes
from kvcal.stages.allocate.record import Allocation
from kvcal.stages.compile import compile_plan
from kvcal.stages.evaluate.record import Evaluation
from kvcal.stages.evaluate.stage import evaluate, evaluation_inputs, require_scheduled_texts, scheduled_batch


class Stage(NamedTuple):
    """``is_of``: whether a recipe has it; ``make``: makes its artifact in the job's folder, or reuses it."""

    name: str
    is_of: Callable[[Recipe], bool]
    make: Callable[[Job], object]


# The stages before compilation, in order. Exactly one of search, tune, allocate and fix writes the allocation; a search
# takes every system through its own stages.
STAGES = (
    Stage("basis", lambda r: r.chooses_in_a_basis, feedback_folder),
    Stage(
        "profile",
        lambda r: bool(r.importance or (r.allocate and not r.search)),
        lambda job: profile_folder(job.loaded, job.folder, job.recipe, job.reporter),
    ),
    Stage("search", lambda r: bool(r.search), lambda job: search_folder(job, build_plan)),
    Stage("tune", lambda r: bool(r.tune), tune_folder),
    Stage("allocate", lambda r: bool(r.allocate and not r.search), allocate_recipe),
    Stage("fix", lambda r: not (r.allocate or r.tune), fix_folder),
    Stage("reparam", lambda r: bool(r.reparam), reparam_folder),
    Stage("centre", lambda r: not (r.predictors or r.search), centre_folder),
    Stage("predictors", lambda r: bool(r.predictors), fit_predictors_folder),
    Stage("feedback", lambda r: bool(r.feedback) and not r.chooses_in_a_basis, feedback_folder),
)


@dataclass(frozen=True)
class Result:
    """The artifacts of a run."""

    allocation: Allocation
    plan: Plan
    evaluation: Evaluation


def run(
    loaded: LoadedModel, folder: Folder, recipe: Recipe, workload: Workload | None = None, reporter: Reporter = SILENT
) -> Result:
    """All stages, as in ``build_plan`` and ``evaluate_plan``. Raises what the stages raise; whatever was finished stays
    and is reused by the next run."""
    plan = build_plan(loaded, folder, recipe, workload, reporter)
    evaluation = evaluate_plan(recipe, loaded, plan, folder, reporter)
    return Result(allocation_record.load(folder.allocation)[0], plan, evaluation)


def build_plan(
    loaded: LoadedModel,
    folder: Folder,
    recipe: Recipe,
    workload: Workload | None = None,
    reporter: Reporter = SILENT,
) -> Plan:
    """All stages of a recipe up to its plan, for ``workload`` (default: the recipe's, or 8 x 4,096 tokens).

    Raises:
        What the stages raise; whatever was finished stays.
    """
    if workload is not None and recipe.allocate is not None:
        spec = replace(recipe.allocate, batch=workload.batch, context=workload.context)
        recipe = replace(recipe, allocate=spec)
    job = Job(recipe, loaded, folder, reporter, workload or DEFAULT_WORKLOAD)
    if recipe.allocate is not None and recipe.search is None:
        require_feasible(job)
    run_stages(job)
    return compile_folder(folder, reporter=reporter, recipe=recipe)


def run_stages(job: Job) -> None:
    """Everything before compilation."""
    for stage in STAGES:
        if stage.is_of(job.recipe):
            stage.make(job)


def compile_folder(
    folder: Folder, path: Path | None = None, reporter: Reporter = SILENT, recipe: Recipe | None = None
) -> Plan:
    """The compile stage, with the transforms of the recipe's stages (without a recipe: with those that the folder holds
    for its allocation), and always with the tensors of a search: writes the plan to ``path`` (default: into the
    folder) unless the same one lies there.

    Raises:
        InfeasibleBudget: with them, it takes more than its allocation's budget.
        ArtifactError: no allocation, a corrupt artifact, or a plan that cannot be written.
    """
    path = folder.plan if path is None else path
    allocation, made_from = allocation_record.load(folder.allocation)
    if "search.sha256" in made_from:
        searched = search_record.load(folder.search)
        allocation = searched.allocation
        plan = compile_plan(allocation, searched.layers, searched.plan_tensors)
    else:
        found = (
            Transforms.made_for(folder, allocation.layers, reporter)
            if recipe is None
            else Transforms.of(folder, recipe)
        )
        allocation = replace(allocation, provenance=with_calibration(allocation.provenance, found.calibration))
        plan = compile_plan(allocation, *found.apply(allocation.layers))
    reserved = allocation.split.reserved
    taken = max(0, transform_bytes(allocation, plan.layers, tensors_nbytes(plan.tensors)))
    if taken < reserved:
        reporter.say(
            f"compile: transforms take {taken} of the {reserved} bytes that were reserved for them; "
            f"`kvcal allocate` with --reserve {taken} spends the others on formats"
        )
    is_current = path.is_file() and path.read_bytes() == plan_bytes(plan)
    gather(None)  # until all ranks have looked
    if not is_current:
        save_plan(plan, path)
    reporter.say(f"compile: {path.name} is current, skipped" if is_current else f"compile: {path}")
    gather(None)  # until rank 0 has written the file
    return plan


def evaluate_plan(recipe: Recipe, loaded: LoadedModel, plan: Plan, folder: Folder, reporter: Reporter) -> Evaluation:
    """The evaluate stage: the plan beside the recipe's baselines, as JSON."""
    plans = [(name, baseline_plan(load_recipe(name), loaded, plan.workload)) for name in recipe.evaluate.against]
    plans.append((recipe.name, plan))
    spec = scheduled_batch(recipe.evaluate, plans, reporter)
    data = sequences(spec.data, loaded, "report", folder)
    require_scheduled_texts(plans, data)
    if data.source is not None and (stages := shared_sources(plan.provenance, data)):
        name = f"{data.source.name}, too ({', '.join(stages)})"
        reporter.say(f"evaluate: the plan was calibrated on {name}; no text is in both samples")
    inputs = evaluation_inputs(loaded, spec, data)
    return evaluate(loaded, plans, spec, data, inputs, folder.evaluation, reporter)


def baseline_plan(recipe: Recipe, loaded: LoadedModel, workload: Workload) -> Plan:
    """The plan of a recipe that is [formats] alone, without a folder. UsageError for one that needs stages."""
    if not recipe.is_baseline:
        raise UsageError(
            f"recipe {recipe.name!r} in evaluate.against needs stages of its own, expected [formats] alone",
            hint="run it by itself, or beside others with `kvcal compare`",
        )
    return formats_plan(recipe, loaded, workload)
