"""The pipeline: choose formats -> progressive -> reparam -> predictors -> compile -> evaluate.

Formats are fixed by the recipe (thresholds of key tiers may be tuned), solved for a budget from a profile, assigned by
importance, or searched; each stage then works on what the ones before chose, and leaves one artifact in one folder. A
stage whose artifact was made from the same inputs is skipped; when they differ, the first differing field is named and
the stage runs again. A folder made from another model is left alone.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvcal import artifact
from kvcal.artifact import sha256_json
from kvcal.charts.evaluation import draw
from kvcal.data.pools import calibration, data_inputs, require_unseen, shared_sources, with_calibration
from kvcal.errors import UsageError
from kvcal.folder import Folder, compute_dtype, flat, is_current, model_inputs
from kvcal.models.load import LoadedModel
from kvcal.models.projections import warn_of_biases
from kvcal.plan.plan import RAW, Plan, Workload, plan_bytes, save_plan
from kvcal.plan.tensors import lattice_tensors, tensors_nbytes
from kvcal.progress import Reporter
from kvcal.quantities import format_bytes
from kvcal.recipe import AllocateSpec, Recipe
from kvcal.recipe_files import load_recipe
from kvcal.run.transform import (
    fit_predictors_folder,
    max_context,
    reparam_data,
    reparam_folder,
    sequences,
    transformed,
    with_transform_data,
)
from kvcal.run.tune import tune_folder
from kvcal.stages import allocate as allocation_stage
from kvcal.stages import profile as profile_stage
from kvcal.stages import search as search_stage
from kvcal.stages.allocate import Allocation
from kvcal.stages.allocate.budget import transform_bytes
from kvcal.stages.compile import compile_plan
from kvcal.stages.evaluate.stage import Evaluation, evaluate, require_scheduled_texts, scheduled_batch
from kvcal.stages.profile import Profile
from kvcal.strict import dump

__all__ = ["Folder", "Result", "build_plan", "model_inputs", "run"]

DEFAULT_WORKLOAD = Workload(batch=8, context=4096)


@dataclass(frozen=True)
class Result:
    """What a run made."""

    folder: Folder
    allocation: Allocation
    plan: Plan
    evaluation: Evaluation


def run(recipe: Recipe, loaded: LoadedModel, folder: Folder, reporter: Reporter) -> Result:
    """All stages. Raises what the stages raise; whatever was finished stays and is reused by the next run."""
    plan = build_plan(recipe, loaded, folder, None, reporter)
    evaluation = evaluate_plan(recipe, loaded, plan, folder, reporter)
    return Result(folder, allocation_stage.load(folder.allocation)[0], plan, evaluation)


def build_plan(
    recipe: Recipe, loaded: LoadedModel, folder: Folder, workload: Workload | None, reporter: Reporter
) -> Plan:
    """All stages of a recipe up to its plan, for ``workload`` (default: the recipe's, or 8 x 4,096 tokens).

    Raises:
        What the stages raise; whatever was finished stays.
    """
    if workload is not None and recipe.allocate is not None:
        spec = replace(recipe.allocate, batch=workload.batch, context=workload.context)
        recipe = replace(recipe, allocate=spec)
    seq_len = recipe.data.seq_len
    one_sample = replace(recipe.data, num_samples=1, seq_len=min(seq_len, max_context(loaded) or seq_len))
    warn_of_biases(loaded, lambda: sequences(one_sample, loaded).sequences[0], reporter)
    choose_formats(recipe, loaded, folder, workload or DEFAULT_WORKLOAD, reporter)
    if recipe.search is not None:
        return compile_folder(folder, folder.plan, reporter)
    if recipe.reparam is not None:
        reparam_folder(recipe, loaded, folder, reporter)
    if recipe.predictors is not None:
        fit_predictors_folder(recipe, loaded, folder, reporter)
    return compile_folder(folder, folder.plan, reporter, recipe.reparam is not None, recipe.predictors is not None)


def choose_formats(
    recipe: Recipe, loaded: LoadedModel, folder: Folder, workload: Workload, reporter: Reporter
) -> Allocation:
    """The formats of every layer: the recipe's own, tuned, the solver's, or by importance; progressive if asked for."""
    if recipe.search is not None:
        allocation = search_folder(recipe, loaded, folder, reporter)
        tell_doubts(allocation, max_context(loaded), reporter)
        return allocation
    if recipe.tune is not None:
        return tune_folder(recipe, loaded, formats_plan(recipe, loaded, workload), folder, reporter)
    if recipe.allocate is not None:
        profile_recipe(recipe, loaded, folder, reporter)
        return allocate_folder(folder, recipe.allocate, provenance_of(recipe), reporter, recipe)
    inputs = {
        **model_inputs(loaded),
        **flat("workload", dump(workload)),
        **flat("formats", dump(recipe.formats)),
        **flat("importance", dump(recipe.importance)),
        **flat("progressive", dump(recipe.progressive)),
        "provenance": sha256_json(provenance_of(recipe)),
    }
    if recipe.importance is not None:
        profile_recipe(recipe, loaded, folder, reporter)
        inputs["profile.sha256"] = _sha256(folder.profile)
    kind, schema = allocation_stage.KIND, allocation_stage.SCHEMA
    if is_current("allocate", folder.allocation, kind, schema, inputs, reporter):
        return allocation_stage.load(folder.allocation)[0]
    if recipe.importance is not None:
        profile = profile_stage.load(folder.profile)
        provenance = with_calibration(provenance_of(recipe), _profile_data(folder))
        allocation = allocation_stage.important_allocation(
            profile, recipe.importance, profile.cache, workload, provenance
        )
    else:
        assert recipe.formats is not None
        allocation = allocation_stage.fixed_allocation(
            recipe.formats, loaded.identity, loaded.geometry, workload, provenance_of(recipe)
        )
    if recipe.progressive is not None:
        reserved = allocation_stage.reserved_bytes(loaded.geometry, recipe.cache, recipe.reparam)
        allocation = allocation_stage.made_progressive(allocation, recipe.progressive, reserved)
    allocation_stage.save(allocation, inputs, folder.allocation)
    return allocation


def profile_recipe(recipe: Recipe, loaded: LoadedModel, folder: Folder, reporter: Reporter) -> Profile:
    """The profile stage of a recipe."""
    data = sequences(recipe.data, loaded, "fit")
    inputs = {
        **model_inputs(loaded),
        **flat("profile", dump(recipe.profile)),
        **flat("cache", dump(recipe.cache)),
        **data_inputs(data),
        **compute_dtype(loaded),
    }
    kind, schema = profile_stage.KIND, profile_stage.SCHEMA
    if is_current("profile", folder.profile, kind, schema, inputs, reporter):
        return profile_stage.load(folder.profile)
    reporter.say(f"profile: {data.description}")
    return profile_stage.run_profile(loaded, data, recipe.profile, recipe.cache, inputs, folder.profile, reporter)


def allocate_folder(
    folder: Folder,
    spec: AllocateSpec,
    provenance: dict[str, Any],
    reporter: Reporter,
    recipe: Recipe | None = None,
    reserved: int = 0,
) -> Allocation:
    """The allocate stage, from the folder's profile. ``recipe``: whose [progressive], [reparam] and [predictors]
    follow, so that what they take is kept free; without one, ``reserved`` bytes are."""
    profile = profile_stage.load(folder.profile)
    progressive = None if recipe is None else recipe.progressive
    if recipe is not None:
        is_counted = spec.budget is not None and spec.workspace == "auto"
        workload = Workload(spec.batch, spec.context) if is_counted else None
        reserved = allocation_stage.reserved_bytes(
            profile.geometry, profile.cache, recipe.reparam, recipe.predictors, workload
        )
    inputs = {
        **flat("allocate", dump(spec)),
        **flat("cache", dump(profile.cache)),
        **flat("progressive", dump(progressive)),
        "reserved_bytes": reserved,
        "profile.sha256": _sha256(folder.profile),
        "provenance": sha256_json(provenance),
    }
    if spec.same_bytes_as is not None:
        inputs["allocate.same_bytes_as.sha256"] = load_recipe(spec.same_bytes_as).sha256
    kind, schema = allocation_stage.KIND, allocation_stage.SCHEMA
    if is_current("allocate", folder.allocation, kind, schema, inputs, reporter):
        allocation = allocation_stage.load(folder.allocation)[0]
    else:
        details = {"objective": spec.objective, "granularity": spec.granularity, "data": profile.data_fingerprint}
        provenance = with_calibration({**provenance, **details}, _profile_data(folder))
        allocation = allocation_stage.allocate(profile, spec, profile.cache, provenance, reserved)
        if progressive is not None:
            allocation = allocation_stage.made_progressive(allocation, progressive, reserved)
        allocation_stage.save(allocation, inputs, folder.allocation)
        reporter.say(
            f"allocate: {format_bytes(allocation.split.cache)} of cache, loss {allocation.loss:.6g}, "
            f"gap {allocation.gap:.2g} ({allocation.proof} proof)"
        )
    tell_doubts(allocation, profile.setup.max_positions, reporter)
    return allocation


def tell_doubts(allocation: Allocation, max_positions: int | None, reporter: Reporter) -> None:
    """Say where a budget or a context is beyond what can be meant. ``max_positions``: of the model, None if unknown."""
    split, context = allocation.split, allocation.workload.context
    if split.kind is not None and all(fmt == RAW for layer in allocation.layers for fmt in (*layer.k, *layer.v)):
        taken, budget = format_bytes(split.cache + split.overhead), format_bytes(split.budget)
        reporter.say(f"allocate: 16 bits fit: {taken} of {budget}; nothing to quantize")
    if max_positions is not None and context > max_positions:
        reporter.say(
            f"allocate: a context of {context} tokens is beyond the model's {max_positions} positions; its bytes "
            "are counted all the same"
        )


def search_folder(recipe: Recipe, loaded: LoadedModel, folder: Folder, reporter: Reporter) -> Allocation:
    """The search stage; its allocation has transforms, whose tensors are in its own artifact."""
    fit_data = sequences(recipe.data, loaded, "fit")
    select_data = sequences(recipe.data, loaded, "select")
    assert recipe.allocate is not None and recipe.search is not None
    takes_lambda = any(choice.rescale for choice in recipe.search.keys)
    lambda_data = reparam_data(recipe, loaded) if takes_lambda else None
    inputs = {
        **model_inputs(loaded),
        **flat("search", sha256_json(dump(recipe.search))),
        **flat("allocate", dump(recipe.allocate)),
        **flat("cache", dump(recipe.cache)),
        **flat("reparam", dump(recipe.reparam)),
        **flat("predictors", dump(recipe.predictors)),
        **data_inputs(fit_data, "fit_data"),
        **data_inputs(select_data, "select_data"),
        **(data_inputs(lambda_data, "reparam_data") if lambda_data else {}),
        "provenance": sha256_json(provenance_of(recipe)),
        **compute_dtype(loaded),
    }
    if recipe.allocate.same_bytes_as is not None:
        inputs["allocate.same_bytes_as.sha256"] = load_recipe(recipe.allocate.same_bytes_as).sha256
    if is_current("search", folder.search, search_stage.KIND, search_stage.SCHEMA, inputs, reporter):
        found = search_stage.load(folder.search)
    else:
        provenance = with_calibration(provenance_of(recipe), calibration("search", inputs))
        require_unseen(provenance, select_data)
        reporter.say(f"search: fits on {fit_data.description}; KL on {select_data.description}")
        found = search_stage.run_search(
            loaded, recipe, fit_data, select_data, lambda_data, inputs, folder.search, provenance, reporter
        )
    allocation_stage.save(found.allocation, {"search.sha256": _sha256(folder.search)}, folder.allocation)
    return found.allocation


def sweep_folder(folder: Folder, spec: AllocateSpec, num_points: int) -> tuple[str, list[dict[str, Any]]]:
    """The Pareto front of the folder's profile, also kept as sweep.json: ("front" or "grid", a row per point)."""
    profile = profile_stage.load(folder.profile)
    found, rows = allocation_stage.pareto(profile, spec, profile.cache, num_points)
    text = json.dumps({"method": found.method, "points": rows}, indent=2, sort_keys=True)
    artifact.write_text_atomic(folder.path / "sweep.json", text + "\n")
    return found.method, rows


def compile_folder(
    folder: Folder, path: Path, reporter: Reporter, reparam: bool = False, predictors: bool = False
) -> Plan:
    """The compile stage, with the folder's λ and predictors if asked for, and always with the tensors of a search:
    writes the plan unless the same one lies there.

    Raises:
        InfeasibleBudget: with them, it takes more than its allocation's budget.
    """
    allocation, made_from = allocation_stage.load(folder.allocation)
    if "search.sha256" in made_from:
        found = search_stage.load(folder.search)
        allocation = found.allocation
        plan = compile_plan(allocation, found.layers, found.plan_tensors)
    else:
        provenance = with_transform_data(allocation.provenance, folder, reparam, predictors)
        allocation = replace(allocation, provenance=provenance)
        plan = compile_plan(allocation, *transformed(folder, allocation.layers, reparam, predictors))
    reserved = allocation.split.reserved
    taken = max(0, transform_bytes(allocation, plan.layers, tensors_nbytes(plan.tensors)))
    if taken < reserved:
        reporter.say(
            f"compile: transforms take {taken} of the {reserved} bytes that were reserved for them; "
            f"`kvcal allocate` with --reserve {taken} spends the others on formats"
        )
    if path.is_file() and path.read_bytes() == plan_bytes(plan):
        reporter.say(f"compile: {path.name} is current, skipped")
        return plan
    save_plan(plan, path)
    reporter.say(f"compile: {path}")
    return plan


def evaluate_plan(recipe: Recipe, loaded: LoadedModel, plan: Plan, folder: Folder, reporter: Reporter) -> Evaluation:
    """The evaluate stage: the plan beside the recipe's baselines, as JSON and as a picture."""
    plans = [(name, baseline_plan(load_recipe(name), loaded, plan.workload)) for name in recipe.evaluate.against]
    plans.append((recipe.name, plan))
    spec = scheduled_batch(recipe.evaluate, plans, reporter)
    data = sequences(spec.data, loaded, "report")
    require_scheduled_texts(plans, data)
    if data.source is not None and (stages := shared_sources(plan.provenance, data)):
        name = f"{data.source.name}, too ({', '.join(stages)})"
        reporter.say(f"evaluate: the plan was calibrated on {name}; no text is in both samples")
    inputs = {
        **model_inputs(loaded),
        **flat("evaluate", dump(replace(spec, against=()))),  # rows are kept one by one
        "data.fingerprint": data.fingerprint,
        **compute_dtype(loaded),
    }
    evaluation = evaluate(loaded, plans, spec, data, inputs, folder.evaluation, reporter)
    draw(evaluation, plan, folder.picture)
    return evaluation


def baseline_plan(recipe: Recipe, loaded: LoadedModel, workload: Workload) -> Plan:
    """The plan of a recipe that is [formats] alone, without a folder. UsageError for one that needs stages."""
    if not recipe.is_baseline:
        raise UsageError(
            f"recipe {recipe.name!r} in evaluate.against needs stages of its own, expected [formats] alone",
            hint="run it by itself, or beside others with `kvcal compare`",
        )
    return formats_plan(recipe, loaded, workload)


def formats_plan(recipe: Recipe, loaded: LoadedModel, workload: Workload) -> Plan:
    """The plan of a recipe's [formats], before any stage."""
    assert recipe.formats is not None
    allocation = allocation_stage.fixed_allocation(
        recipe.formats, loaded.identity, loaded.geometry, workload, provenance_of(recipe)
    )
    return compile_plan(allocation, allocation.layers, lattice_tensors(allocation.layers))


def provenance_of(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe a plan carries."""
    return {"recipe": recipe.name, "recipe_sha256": recipe.sha256, "seed": recipe.data.seed}


def _profile_data(folder: Folder) -> dict[str, Any]:
    """The record of the data that the folder's profile was measured on."""
    return calibration("profile", artifact.read(folder.profile, profile_stage.KIND, profile_stage.SCHEMA).inputs)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
