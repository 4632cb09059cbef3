"""The pipeline: basis -> profile -> choice of formats -> transforms -> compile -> evaluate.

Each stage works on what the ones before chose, and leaves one artifact in one folder. A stage whose artifact
was made from the same inputs is skipped; when they differ, the first differing field is named and the stage
runs again. A folder made from another model is left alone.

A search takes the recipes of systems through the same stages, each in the folder ``systems/NAME``. One with
[allocate] is solved at the search's budget; one with [formats] or [importance] has the bytes that it has, and
is left out where these are beyond the budget. The search's [data] says which text all of them read, and how
much at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from kvcal import distributed
from kvcal.artifact import read_inputs, sha256_file, sha256_json
from kvcal.data.pools import Purpose, calibration, data_inputs, require_unseen, shared_sources, with_calibration
from kvcal.errors import InfeasibleBudget, UnsupportedModel, UsageError
from kvcal.folder import Folder, Job, compute_dtype, current_or, job_sequences, model_inputs, search_spec, sequences
from kvcal.geometry import Geometry
from kvcal.models.load import LoadedModel, weight_bytes
from kvcal.plan.layer import LayerPlan, bare_layers, fixed_layers
from kvcal.plan.page_format import SIDES
from kvcal.plan.plan import DEFAULT_WORKLOAD, Plan, Workload, plan_bytes, save_plan
from kvcal.plan.tensors import tensors_nbytes
from kvcal.progress import SILENT, Reporter
from kvcal.quantities import format_bytes
from kvcal.recipe import BUDGET_KINDS, Recipe
from kvcal.recipe_files import load_recipe
from kvcal.stages import formats
from kvcal.stages import search as search_record
from kvcal.stages.allocate import record as allocation_record
from kvcal.stages.allocate.budget import bytes_left, compile_plan, resolve_budget, transform_bytes
from kvcal.stages.allocate.record import Allocation, layer_bytes, layers_in
from kvcal.stages.divergence import kl_texts
from kvcal.stages.evaluate import stage as evaluate_stage
from kvcal.stages.search import SearchRecord, choose_plan, not_for_decoding
from kvcal.stages.transform import Transforms, transform_stages
from kvcal.strict import dump, flat_records
from kvcal.systems.basis import fit as basis_stage
from kvcal.systems.kvmix.importance import layer_format


class Stage(NamedTuple):
    """``is_of``: whether a recipe has it; ``make``: makes its artifact in the job's folder, or reuses it."""

    name: str
    is_of: Callable[[Recipe], bool]
    make: Callable[[Job], object]


@dataclass(frozen=True)
class Result:
    """The artifacts of a run."""

    allocation: Allocation
    plan: Plan
    evaluation: evaluate_stage.Evaluation


def run(
    loaded: LoadedModel, folder: Folder, recipe: Recipe, workload: Workload | None = None, reporter: Reporter = SILENT
) -> Result:
    """All stages, as in ``build_plan`` and ``evaluate_plan``. Raises what the stages raise; whatever was
    finished stays and is reused by the next run."""
    plan = build_plan(loaded, folder, recipe, workload, reporter)
    evaluation = evaluate_plan(recipe, loaded, plan, folder, reporter)
    return Result(allocation_record.load(folder.allocation)[0], plan, evaluation)


def build_plan(
    loaded: LoadedModel, folder: Folder, recipe: Recipe, workload: Workload | None = None, reporter: Reporter = SILENT
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
        formats.require_feasible(job)
    run_stages(job)
    return compile_folder(folder, reporter=reporter, recipe=recipe)


def run_stages(job: Job) -> None:
    for choice in STAGES:
        if choice.is_of(job.recipe):
            choice.make(job)
    for stage in transform_stages():
        if stage.is_of(job.recipe):
            stage.make(job)


def compiled(folder: Folder, reporter: Reporter = SILENT, recipe: Recipe | None = None) -> Plan:
    """The plan of a folder's allocation, with the transforms of the recipe's stages (without a recipe: with
    those that the folder holds for it), and always with the tensors of a search. Raises as
    ``compile_folder``."""
    allocation, made_from = allocation_record.load(folder.allocation)
    if "search.sha256" in made_from:
        searched = search_record.load(folder.search)
        allocation = searched.allocation
        plan = compile_plan(allocation, allocation.layers, searched.plan_tensors)
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
    if recipe is None and taken < reserved:  # stage by stage: who allocates can reserve less
        reporter.say(
            f"compile: transforms take {taken} of the {reserved} bytes that were reserved for them; "
            f"`kvcal allocate` with --reserve {taken} spends the others on formats"
        )
    return plan


def compile_folder(
    folder: Folder, path: Path | None = None, reporter: Reporter = SILENT, recipe: Recipe | None = None
) -> Plan:
    """The compile stage: writes the plan of ``compiled`` to ``path`` (default: into the folder) unless the
    same one lies there.

    Raises:
        InfeasibleBudget: with its transforms, it takes more than its allocation's budget.
        ArtifactError: no allocation, a corrupt artifact, or a plan that cannot be written.
    """
    path = folder.plan if path is None else path
    plan = compiled(folder, reporter, recipe)
    is_current = path.is_file() and path.read_bytes() == plan_bytes(plan)
    distributed.gather(None)  # until all ranks have looked
    if not is_current:
        save_plan(plan, path)
    reporter.say(f"compile: {path.name} is current, skipped" if is_current else f"compile: {path}")
    distributed.gather(None)  # until rank 0 has written the file
    return plan


def evaluate_plan(
    recipe: Recipe, loaded: LoadedModel, plan: Plan, folder: Folder, reporter: Reporter
) -> evaluate_stage.Evaluation:
    """The evaluate stage: the plan next to the recipe's baselines, as JSON."""
    baselines = [load_recipe(name) for name in recipe.evaluate.against]
    plans = [(one.name, baseline_plan(one, loaded, plan.workload, folder)) for one in baselines]
    plans.append((recipe.name, plan))
    spec = evaluate_stage.scheduled_batch(recipe.evaluate, plans, reporter)
    data = sequences(spec.data, loaded, "report", folder)
    evaluate_stage.require_scheduled_texts(plans, data)
    if data.source is not None and (stages := shared_sources(plan.provenance, data)):
        name = f"{data.source.name}, too ({', '.join(stages)})"
        reporter.say(f"evaluate: the plan was calibrated on {name}; no text is in both samples")
    inputs = evaluate_stage.evaluation_inputs(loaded, spec, data)
    return evaluate_stage.evaluate(loaded, plans, spec, data, inputs, folder.evaluation, reporter)


def baseline_plan(recipe: Recipe, loaded: LoadedModel, workload: Workload, folder: Folder | None = None) -> Plan:
    """The plan of a recipe that is [formats] alone, or in the basis that ``folder`` has. UsageError for one
    that needs stages."""
    if recipe.basis is not None and folder is not None and folder.basis.exists():
        plan = basis_stage.load(folder.basis).changed(formats.formats_plan(recipe, loaded, workload))
        fitted_on = calibration("basis", read_inputs(folder.basis))
        return replace(plan, provenance=with_calibration(plan.provenance, fitted_on))
    if not recipe.is_baseline:
        raise UsageError(
            f"recipe {recipe.name!r} in evaluate.against needs stages of its own, expected [formats] alone",
            hint="run it by itself, or with others with `kvcal compare`",
        )
    return formats.formats_plan(recipe, loaded, workload)


PURPOSES: tuple[Purpose, ...] = ("select", "validate")


def system_recipes(recipe: Recipe) -> dict[str, Recipe]:
    """The recipes of [search] systems by name, at the search's budget, on its text: of no more sequences and
    tokens than its [data] has."""
    assert recipe.search is not None and recipe.allocate is not None
    budget = {name: getattr(recipe.allocate, name) for name in (*BUDGET_KINDS, "batch", "context", "workspace")}
    systems = {}
    for system in map(load_recipe, recipe.search.systems):
        ours, theirs, profile = recipe.data, system.data, system.profile
        seq_len = min(ours.seq_len, theirs.seq_len)
        data = replace(
            ours, num_samples=min(ours.num_samples, theirs.num_samples), seq_len=seq_len,
            min_len=min(ours.min_len, theirs.min_len, seq_len),
        )  # fmt: skip
        if recipe.profile.kl_measured == "all":  # --thorough
            profile = replace(profile, kl_measured="all")
        allocate = None if system.allocate is None else replace(system.allocate, **budget)
        systems[system.name] = replace(system, data=data, profile=profile, allocate=allocate)
    return systems


def search_folder(job: Job) -> Allocation:
    """Build and measure the plans of all systems, and keep the best one: its allocation has transforms, whose
    tensors are in the search's own artifact."""
    recipe, loaded, folder = job.recipe, job.loaded, job.folder
    assert recipe.allocate is not None and recipe.search is not None
    job = replace(job, workload=Workload(recipe.allocate.batch, recipe.allocate.context))
    spec, systems = search_spec(recipe, loaded), system_recipes(recipe)
    pools = {purpose: job_sequences(job, recipe.data, purpose) for purpose in PURPOSES}
    inputs = {
        **model_inputs(loaded),
        "search": sha256_json(dump(spec)),
        **flat_records(allocate=recipe.allocate, cache=recipe.cache),
        "systems.sha256": sha256_json({name: system.sha256 for name, system in systems.items()}),
        "fit_data.fingerprint": job_sequences(job, recipe.data, "fit").fingerprint,
        **{key: value for name, pool in pools.items() for key, value in data_inputs(pool, f"{name}_data").items()},
        "provenance": sha256_json(formats.provenance_of(recipe)),
        **compute_dtype(loaded),
        **formats.baseline_inputs(recipe.allocate),
    }

    def make(inputs: dict[str, Any], path: Path, reporter: Reporter) -> SearchRecord:
        select, validate = (kl_texts(pool, spec.kl_samples, spec.kl_tokens, recipe.cache) for pool in pools.values())
        plans, left_out = _plans(job, systems)
        for pool in pools.values():
            for plan in plans.values():
                require_unseen(plan.provenance, pool)
        report = choose_plan(loaded, plans, left_out, select, validate, spec.serve, reporter)
        plan = plans[report.shipped]
        provenance = {**plan.provenance, **formats.provenance_of(recipe), "system": report.shipped}
        provenance = with_calibration(provenance, calibration("search", inputs))
        allocation = replace(_budgeted(job, plan.layers), provenance=provenance, loss=report.kl)
        record = SearchRecord(allocation, report, plan.tensors)
        search_record.save(record, inputs, path)
        reporter.say(f"search: {report.shipped} ships, KL {report.kl:.4g} on {report.num_validate} texts of validate")
        return record

    made_on = f"plans on {' and '.join(pool.description for pool in pools.values())}"
    found = current_or("search", folder.search, search_record.load, inputs, make, job.reporter, made_on).allocation
    made_from = {**model_inputs(loaded), "search.sha256": sha256_file(folder.search)}
    allocation_record.save(found, made_from, folder.allocation)
    distributed.gather(None)  # until rank 0 has written the file
    formats.tell_doubts(found, loaded.max_context, job.reporter)
    return found


def _plans(job: Job, systems: dict[str, Recipe]) -> tuple[dict[str, Plan], dict[str, str]]:
    """The systems' plans by name, and why the others have none."""
    plans, left_out, smallest = dict[str, Plan](), dict[str, str](), list[int]()
    for number, (name, recipe) in enumerate(systems.items()):
        job.reporter.say(f"search: {name} ({number + 1} of {len(systems)})")
        folder = job.folder.of_system(name)
        Folder.create(folder.path)
        Folder.create(folder.profile.parent)
        try:
            layers = _known_layers(recipe, job.loaded.geometry)
            reason = None if layers is None else _refused(job, layers, 0, smallest)
            if reason is None:
                plan = build_plan(job.loaded, folder, recipe, job.workload, job.reporter)
                reason = _refused(job, plan.layers, tensors_nbytes(plan.tensors), smallest)
        except (InfeasibleBudget, UnsupportedModel, UsageError) as error:
            reason = error.message
            smallest += [error.smallest_bytes] if isinstance(error, InfeasibleBudget) else []
        if reason is None:
            plans[name] = plan
        else:
            job.reporter.say(f"search: {name} is left out: {reason}")
            left_out[name] = reason
    if not plans:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise InfeasibleBudget(f"no system has a plan to ship: {reasons}", min(smallest, default=0), "raise the budget")
    return plans, left_out


def _known_layers(recipe: Recipe, geometry: Geometry) -> tuple[LayerPlan, ...] | None:
    """Layers that take no more bytes, and are no slower, than those of the recipe's plan, known before any of
    its stages; None where a solver chooses them."""
    if recipe.formats is not None:
        return fixed_layers(recipe.formats, bare_layers(geometry))
    if recipe.importance is not None:
        k, v = (layer_format(side, False, recipe.importance, recipe.cache) for side in SIDES)
        return layers_in(geometry, k, v)
    return None


def _refused(job: Job, layers: tuple[LayerPlan, ...], tensor_bytes: int, smallest: list[int]) -> str | None:
    """Why the search does not take a plan of these layers: it is beyond the budget (``smallest`` then gets
    the bytes that would do), or, for decoding, slower than 16 bits."""
    recipe = job.recipe
    assert recipe.search is not None
    allocation = _budgeted(job, layers)
    left, budget = bytes_left(allocation, layers, tensor_bytes), allocation.split.budget
    assert left is not None
    if left < 0:
        smallest.append(budget - left)
        return f"it takes {format_bytes(budget - left)}, the budget is {format_bytes(budget)}"
    if recipe.search.serve == "storage":
        return None
    return not_for_decoding(layers, job.loaded.geometry.cache_dtype, job.workload)


def _budgeted(job: Job, layers: tuple[LayerPlan, ...]) -> Allocation:
    loaded, spec, cache_dtype = job.loaded, job.recipe.allocate, job.loaded.geometry.cache_dtype
    assert spec is not None
    split = resolve_budget(spec, layers, cache_dtype, weight_bytes(loaded.model), loaded.vocab_size)
    fixed, paged = layer_bytes(layers, cache_dtype, job.workload)
    split = replace(split, fixed=fixed, paged=paged)
    return Allocation(loaded.identity, cache_dtype, layers, job.workload, {}, split)


# The stages that choose formats, in order; those of transforms follow. Exactly one of search, tune, allocate
# and fix writes the allocation; a search takes every system through its own stages.
STAGES = (
    Stage(
        "profile",
        lambda r: bool(r.importance or (r.allocate and not r.search)),
        lambda job: formats.profile_folder(job.loaded, job.folder, job.recipe, job.reporter),
    ),
    Stage("search", lambda r: bool(r.search), search_folder),
    Stage("tune", lambda r: bool(r.tune), formats.tune_folder),
    Stage("allocate", lambda r: bool(r.allocate and not r.search), formats.allocate_recipe),
    Stage("fix", lambda r: not (r.allocate or r.tune), formats.fix_folder),
)
