"""The search stage: the plan of every system within the budget, by the system's own stages, and the best of them.

Systems are recipes. One with [allocate] is solved at the search's budget; one with [formats] or [importance] takes the
bytes that it takes, and is left out where these are more than the budget. Their artifacts lie in the folder
``systems/NAME``, and are reused like those of any run. The search's [data] says which text all of them read, and how
much at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcal import distributed
from kvcal.artifact import sha256_file, sha256_json
from kvcal.data.pools import Purpose, calibration, data_inputs, require_unseen, with_calibration
from kvcal.errors import InfeasibleBudget, UnsupportedModel, UsageError
from kvcal.folder import Folder, Job, compute_dtype, current_or, job_sequences, model_inputs, search_spec
from kvcal.geometry import Geometry
from kvcal.models.load import LoadedModel, weight_bytes
from kvcal.plan.layer import LayerPlan, bare_layers
from kvcal.plan.page_format import SIDES
from kvcal.plan.plan import Plan, Workload
from kvcal.plan.tensors import tensors_nbytes
from kvcal.progress import Reporter
from kvcal.quantities import format_bytes
from kvcal.recipe import BUDGET_KINDS, Recipe, fixed_layers
from kvcal.recipe_files import load_recipe
from kvcal.run.formats import baseline_inputs, provenance_of, tell_doubts
from kvcal.stages import search as search_record
from kvcal.stages.allocate import record as allocation_record
from kvcal.stages.allocate.budget import bytes_left, resolve_budget
from kvcal.stages.allocate.importance import layer_format
from kvcal.stages.allocate.record import Allocation, layer_bytes, layers_in
from kvcal.stages.divergence import kl_texts, lockstep_bytes, seconds_a_plan
from kvcal.stages.estimate import Estimate
from kvcal.stages.search import FINALISTS, KL_BATCH, SearchRecord, choose_plan, not_for_decoding
from kvcal.strict import dump, flat_records

PURPOSES: tuple[Purpose, ...] = ("select", "validate")
# All stages of a recipe up to its plan, resuming from the folder's artifacts.
Build = Callable[[LoadedModel, Folder, Recipe, Workload, Reporter], Plan]


def system_recipes(recipe: Recipe) -> dict[str, Recipe]:
    """The recipes of [search] systems by name, at the search's budget, on its text: of no more sequences and tokens
    than its [data] has."""
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


def search_folder(job: Job, build: Build) -> Allocation:
    """Build and measure the plans of all systems, and keep the best one: its allocation has transforms, whose tensors
    are in the search's own artifact.

    Raises:
        InfeasibleBudget: no system has a plan within the budget, with the reason of each.
        UsageError: data that cannot be read, or no text long enough.
        NonFiniteActivations, ArtifactError and others: as the stages of a system.
    """
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
        "provenance": sha256_json(provenance_of(recipe)),
        **compute_dtype(loaded),
        **baseline_inputs(recipe.allocate),
    }

    def make(inputs: dict[str, Any], path: Path, reporter: Reporter) -> SearchRecord:
        select, validate = (kl_texts(pool, spec.kl_samples, spec.kl_tokens, recipe.cache) for pool in pools.values())
        plans, left_out = _plans(job, systems, build)
        for pool in pools.values():
            for plan in plans.values():
                require_unseen(plan.provenance, pool)
        report = choose_plan(loaded, plans, left_out, select, validate, spec.serve, reporter)
        plan = plans[report.shipped]
        provenance = {**plan.provenance, **provenance_of(recipe), "system": report.shipped}
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
    tell_doubts(found, loaded.max_context, job.reporter)
    return found


def estimate_search(job: Job) -> Estimate:
    """The measurements of a search, from one timed plan; the systems' own stages come before them."""
    recipe, loaded = job.recipe, job.loaded
    spec, num_systems = search_spec(recipe, loaded), len(system_recipes(recipe))
    select, validate = (
        kl_texts(job_sequences(job, recipe.data, purpose), spec.kl_samples, spec.kl_tokens, recipe.cache)
        for purpose in PURPOSES
    )
    batch = select[: KL_BATCH.get(loaded.model.device.type, 4)]
    times = (num_systems + 1) * len(select) + (min(FINALISTS, num_systems) + 1) * len(validate)
    seconds = seconds_a_plan(loaded, batch) / len(batch) * times
    nbytes = lockstep_bytes(loaded, len(batch), max(text.tokens_T.numel() for text in select))
    steps = {"plans": num_systems, "plans times texts": times}
    return Estimate("search, without the systems' own stages", steps, seconds, nbytes)


def _plans(job: Job, systems: dict[str, Recipe], build: Build) -> tuple[dict[str, Plan], dict[str, str]]:
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
                plan = build(job.loaded, folder, recipe, job.workload, job.reporter)
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
    """Layers that take no more bytes, and are no slower, than those of the recipe's plan, known before any of its
    stages; None where a solver chooses them."""
    if recipe.formats is not None:
        return fixed_layers(recipe.formats, bare_layers(geometry))
    if recipe.importance is not None:
        common = recipe.importance, recipe.cache.num_sink_tokens, recipe.cache.param_dtype
        k, v = (layer_format(side, False, *common) for side in SIDES)
        return layers_in(geometry, k, v)
    return None


def _refused(job: Job, layers: tuple[LayerPlan, ...], tensor_bytes: int, smallest: list[int]) -> str | None:
    """Why the search does not take a plan of these layers: it is beyond the budget (``smallest`` then gets the bytes
    that would do), or, for decoding, slower than 16 bits."""
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
    """These layers as an allocation of the search's budget."""
    loaded, spec, cache_dtype = job.loaded, job.recipe.allocate, job.loaded.geometry.cache_dtype
    assert spec is not None
    split = resolve_budget(spec, layers, cache_dtype, weight_bytes(loaded.model), loaded.vocab_size)
    fixed, paged = layer_bytes(layers, cache_dtype, job.workload)
    split = replace(split, fixed=fixed, paged=paged)
    return Allocation(loaded.identity, cache_dtype, layers, job.workload, {}, split)
