"""The stages that choose a folder's formats: profile, then tune, allocate, or formats that a recipe fixes or
assigns by importance.

Each leaves one artifact, and reuses it as long as it was made from the same inputs (``folder.current_or``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvcal.artifact import read_inputs, sha256_file, sha256_json
from kvcal.data.pools import calibration, data_inputs, with_calibration
from kvcal.data.reading import TuneSpec
from kvcal.folder import (
    Folder,
    Job,
    compute_dtype,
    current_or,
    identity_inputs,
    job_sequences,
    model_inputs,
    profile_data,
    profile_spec,
    sequences,
)
from kvcal.geometry import Geometry
from kvcal.models.attention import attention_modules
from kvcal.models.load import LoadedModel, weight_bytes
from kvcal.plan.plan import RAW, Plan, Workload, save_plan
from kvcal.plan.tensors import layout_tensors
from kvcal.progress import SILENT, Reporter
from kvcal.quantities import format_bytes
from kvcal.recipe import AllocateSpec, CacheSpec, Recipe
from kvcal.recipe_files import load_recipe
from kvcal.stages.allocate import record as allocation_record
from kvcal.stages.allocate import stage as allocation_stage
from kvcal.stages.allocate.budget import compile_plan
from kvcal.stages.allocate.fixed_widths import Contest
from kvcal.stages.allocate.record import Allocation
from kvcal.stages.checkpoint import Mean
from kvcal.stages.profile import record as profile_record
from kvcal.stages.profile import stage as profile_stage
from kvcal.stages.profile.record import Profile, ProfileSetup
from kvcal.stages.transform import reserved_bytes
from kvcal.stages.tune import HIGHEST_SHARE, TaskObjective, Trial, Tuning, choose, tune
from kvcal.strict import dump, flat, flat_records
from kvcal.systems.basis import fit as basis_stage
from kvcal.systems.basis.centre import DATA, centring, takes_mean
from kvcal.systems.basis.stage import basis_folder
from kvcal.systems.kvmix.importance import kvmix_allocation
from kvcal.systems.mixkvq.tier_capacity import score_quantile
from kvcal.systems.pm_kvq.schedule import made_progressive


def require_feasible(job: Job) -> None:
    """Raises what the allocate stage of a recipe will raise, whatever its profile measures (one of zeros
    stands in for it); before it, the reason why the model has no profile. Schedules of bits are
    left out."""
    recipe, loaded = job.recipe, job.loaded
    attention_modules(loaded.model)
    assert recipe.allocate is not None
    setup = ProfileSetup(
        loaded.identity, loaded.geometry, weight_bytes(loaded.model), loaded.vocab_size, recipe.profile, recipe.cache,
        data_fingerprint="", data_description="", num_samples=1, num_tokens=0, num_loss_tokens=0,
    )  # fmt: skip
    zeros = {name: Mean(torch.zeros(shape, dtype=torch.float64), 1) for name, shape in setup.totals().items()}
    reserved = reserved_for(recipe, recipe.allocate, loaded.geometry, recipe.cache)
    allocation_stage.require_feasible(Profile(setup, zeros), recipe.allocate, reserved)


def reserved_for(recipe: Recipe, spec: AllocateSpec, geometry: Geometry, cache: CacheSpec) -> int:
    """Bytes that are kept free for what the recipe's transforms take."""
    is_counted = spec.budget is not None and spec.workspace == "auto"
    workload = Workload(spec.batch, spec.context) if is_counted else None
    return reserved_bytes(geometry, cache, recipe.sections, workload)


def profile_folder(loaded: LoadedModel, folder: Folder, recipe: Recipe, reporter: Reporter = SILENT) -> Profile:
    """The profile stage: the sensitivity of every layer to the candidates of the recipe's [profile], on its
    [data]; in the basis of its [basis], which is fitted first.

    Raises:
        UsageError: data that cannot be read, or are too few.
        UnsupportedModel: keys, values or their projections cannot be found.
        ArtifactError: the folder is another model's, holds a corrupt profile, or cannot be written to.
    """
    data, spec = sequences(profile_data(recipe, loaded), loaded, "fit", folder), profile_spec(recipe.profile, loaded)
    inputs = {
        **model_inputs(loaded),
        **flat_records(profile=spec, cache=recipe.cache),
        **data_inputs(data),
        **compute_dtype(loaded),
    }
    basis = basis_folder(Job(recipe, loaded, folder, reporter)) if recipe.chooses_in_a_basis else None
    inputs |= {} if basis is None else {"basis.sha256": sha256_file(folder.basis)}
    make = partial(profile_stage.run_profile, loaded, data, spec, recipe.cache, basis=basis)
    made_on = data.description
    if spec.kl_samples and spec.kl_measured in ("lowest", "sides"):
        texts = f"{spec.kl_samples} texts of {spec.kl_tokens} tokens"
        made_on += f"; KL at {min(spec.kl_bits)} bits, on {texts} (--thorough: at all bits)"
    return current_or("profile", folder.profile, profile_record.load, inputs, make, reporter, made_on)


def allocate_folder(
    folder: Folder, spec: AllocateSpec, reporter: Reporter = SILENT, recipe: Recipe | None = None, reserved: int = 0
) -> Allocation:
    """The allocate stage, from the folder's profile; a named folder is made. ``recipe``: whose [progressive]
    and sections of transforms follow, so that what they take is kept free; without one, ``reserved`` bytes
    are, by default those of the folder's basis. Fixed widths are not measured: there is no model.

    Raises:
        InfeasibleBudget: nothing fits; the message states the smallest budget that would.
        UsageError, UnsupportedModel: as ``kvcal.stages.allocate.allocate``.
        ArtifactError: no profile, or a corrupt one.
    """
    return _allocated(folder, spec, reporter, recipe, reserved)


def allocate_recipe(job: Job) -> Allocation:
    """The allocate stage of a recipe, with fixed widths next to its choice where it says so."""
    spec = job.recipe.allocate
    assert spec is not None
    return _allocated(job.folder, spec, job.reporter, job.recipe, 0, Contest.of(job) if spec.fixed_widths else None)


def _allocated(
    folder: Folder,
    spec: AllocateSpec,
    reporter: Reporter,
    recipe: Recipe | None,
    reserved: int,
    contest: Contest | None = None,
) -> Allocation:
    profile = profile_record.load(folder.profile)
    Folder.create(folder.path)
    progressive = None if recipe is None else recipe.progressive
    provenance = {"recipe": None} if recipe is None else provenance_of(recipe)
    if recipe is not None:
        reserved = reserved_for(recipe, spec, profile.setup.geometry, profile.setup.cache)
    elif not reserved and folder.basis.exists():
        basis = basis_stage.load(folder.basis).subject.spec
        reserved = reserved_bytes(profile.setup.geometry, profile.setup.cache, {basis.stage: basis})
    inputs = {
        **identity_inputs(profile.setup.identity),
        **flat_records(allocate=spec, cache=profile.setup.cache, progressive=progressive),
        "reserved_bytes": reserved,
        "profile.sha256": sha256_file(folder.profile),
        "provenance": sha256_json(provenance),
        **baseline_inputs(spec),
        **({} if contest is None else contest.inputs),
    }

    def make(inputs: dict[str, Any], path: Path, reporter: Reporter) -> Allocation:
        details = {"objective": spec.objective, "granularity": spec.granularity, "data": profile.setup.data_fingerprint}
        made_from = with_calibration({**provenance, **details}, calibration("profile", read_inputs(folder.profile)))
        allocation = allocation_stage.allocate(profile, spec, made_from, reserved)
        if progressive is not None:
            allocation = made_progressive(allocation, progressive, reserved)
        if contest is not None:
            allocation = contest.decided(allocation, profile, spec, reserved, reporter)
        allocation_record.save(allocation, inputs, path)
        reporter.say(
            f"allocate: {format_bytes(allocation.split.cache)} of cache, loss {allocation.loss:.6g}, "
            f"proven gap {allocation.gap:.2g}"
        )
        return allocation

    allocation = current_or("allocate", folder.allocation, _load_allocation, inputs, make, reporter)
    tell_doubts(allocation, profile.setup.max_positions, reporter)
    return allocation


def fix_folder(job: Job) -> Allocation:
    """The recipe's own formats, or those that KVmix's importance assigns from the folder's profile;
    progressive if asked for."""
    recipe, loaded, folder, workload = job.recipe, job.loaded, job.folder, job.workload
    inputs = {
        **model_inputs(loaded),
        **flat_records(workload=workload, formats=recipe.formats, importance=recipe.importance),
        **flat_records(progressive=recipe.progressive),
        "provenance": sha256_json(provenance_of(recipe)),
    }
    if recipe.importance is not None:
        inputs["profile.sha256"] = sha256_file(folder.profile)

    def make(inputs: dict[str, Any], path: Path, reporter: Reporter) -> Allocation:
        provenance = provenance_of(recipe)
        if recipe.importance is not None:
            profile = profile_record.load(folder.profile)
            provenance = with_calibration(provenance, calibration("profile", read_inputs(folder.profile)))
            allocation = kvmix_allocation(profile, recipe.importance, workload, provenance)
        else:
            assert recipe.formats is not None
            allocation = allocation_record.fixed_allocation(
                recipe.formats, loaded.identity, loaded.geometry, workload, provenance
            )
        if recipe.progressive is not None:
            reserved = reserved_bytes(loaded.geometry, recipe.cache, recipe.sections)
            allocation = made_progressive(allocation, recipe.progressive, reserved)
        allocation_record.save(allocation, inputs, path)
        return allocation

    return current_or("allocate", folder.allocation, _load_allocation, inputs, make, job.reporter)


def tune_folder(job: Job) -> Allocation:
    """The recipe's own formats with the thresholds, and the tiers' capacities, that its [tune] finds; goes on
    with the folder's study."""
    recipe, loaded, folder = job.recipe, job.loaded, job.folder
    plan = formats_plan(recipe, loaded, job.workload)
    data = job_sequences(job, recipe.data, "fit")
    inputs = {
        **model_inputs(loaded),
        "plan.sha256": plan.sha256,
        **flat_records(tune=recipe.tune),
        **data_inputs(data),
        "provenance": sha256_json(plan.provenance),
        **compute_dtype(loaded),
    }

    def make(inputs: dict[str, Any], path: Path, reporter: Reporter) -> Allocation:
        best = tune_plan(loaded, plan, recipe, folder.path, reporter).plan
        provenance = with_calibration(best.provenance, calibration("tune", inputs))
        allocation = allocation_record.unbudgeted(best.layers, best.model, best.cache_dtype, best.workload, provenance)
        allocation_record.save(allocation, inputs, path)
        return allocation

    return current_or("tune", folder.allocation, _load_allocation, inputs, make, job.reporter, data.description)


def formats_plan(recipe: Recipe, loaded: LoadedModel, workload: Workload) -> Plan:
    """The plan of a recipe's [formats], before any stage but the means of keys."""
    assert recipe.formats is not None
    allocation = allocation_record.fixed_allocation(
        recipe.formats, loaded.identity, loaded.geometry, workload, provenance_of(recipe)
    )
    layers = allocation.layers
    if recipe.basis is not None or not any(map(takes_mean, layers)):  # a basis has a center
        return compile_plan(allocation, layers, layout_tensors(layers))
    found = centring(loaded, layers, sequences(DATA, loaded).sequences, SILENT)
    return compile_plan(allocation, found.apply(layers), layout_tensors(layers) | found.tensors())


def provenance_of(recipe: Recipe) -> dict[str, Any]:
    return {"recipe": recipe.name, "recipe_sha256": recipe.sha256, "seed": recipe.data.seed}


def tell_doubts(allocation: Allocation, max_positions: int | None, reporter: Reporter) -> None:
    """Say where a budget or a context is beyond what can be meant. ``max_positions``: of the model, None if
    unknown."""
    split, context = allocation.split, allocation.workload.context
    if split.kind is not None and all(fmt == RAW for layer in allocation.layers for fmt in layer.formats):
        taken, budget = format_bytes(split.cache + split.overhead), format_bytes(split.budget)
        reporter.say(f"allocate: 16 bits fit: {taken} of {budget}; nothing to quantize")
    if max_positions is not None and context > max_positions:
        reporter.say(
            f"allocate: a context of {context} tokens is beyond the model's {max_positions} positions; its bytes "
            "are counted all the same"
        )


def _load_allocation(path: Path) -> Allocation:
    return allocation_record.load(path)[0]


def baseline_inputs(spec: AllocateSpec) -> dict[str, Any]:
    """The content of the recipe whose bytes are the budget."""
    if spec.same_bytes_as is None:
        return {}
    return {"allocate.same_bytes_as.sha256": load_recipe(spec.same_bytes_as).sha256}


@dataclass(frozen=True)
class Tuned:
    """The result of a search: all trials, the one chosen, and its plan."""

    tuning: Tuning
    chosen: Trial
    plan: Plan


def tune_plan(
    loaded: LoadedModel, plan: Plan, recipe: Recipe, folder: Path, reporter: Reporter, max_bytes: int | None = None
) -> Tuned:
    """Search the thresholds of ``plan`` as ``recipe.tune`` says; the best under its ``max_bits`` and
    ``max_bytes`` becomes ``folder``/plan.safetensors. The study lies next to it."""
    spec = recipe.tune or TuneSpec()
    Folder(folder).require_model(model_inputs(loaded))
    objective = TaskObjective(loaded, plan, spec, recipe.evaluate, recipe.data)
    ranges = objective.ranges()
    low, high = next(iter(ranges.values()))
    middle, most = (score_quantile(objective.scores, share) for share in (0.5, HIGHEST_SHARE))
    reporter.say(
        f"tune: half of the channels score above {middle:.3g}, 1 % above {most:.3g}; searched from {low:g} to {high:g}"
    )
    if high < middle:
        reporter.say(
            "tune: no setting leaves half of the channels at the lowest bits; raise 'high', or use --set "
            "tune.fit_range=true"
        )
    # All that outcomes depend on: not how many trials there are, nor which cap the choice is made under.
    asked = {name: value for name, value in dump(spec).items() if name not in ("num_trials", "max_bits")}
    limits = {name: value for name, value in dump(recipe.evaluate).items() if name.startswith("max_")}
    inputs = {
        **model_inputs(loaded),
        **compute_dtype(loaded),
        **flat("tune", asked),
        **flat("evaluate", limits),
        "evaluate.batch": recipe.evaluate.batch,
        "evaluate.seed": recipe.evaluate.seed,
        **flat_records(data=recipe.data),
        "plan.sha256": plan.sha256,
    }
    tuning = tune(ranges, spec, objective, inputs, folder, reporter)
    chosen = choose(tuning, spec.max_bits, max_bytes)
    provenance = {**plan.provenance, "thresholds": chosen.thresholds, "tune_seed": spec.seed}
    best = replace(objective.plan_with(chosen.thresholds), provenance=provenance)
    bits = chosen.outcome.bits_per_value
    reporter.say(f"tune: trial {chosen.number} of {len(tuning.trials)} is chosen, {bits:.3f} bits a value")
    save_plan(best, folder / "plan.safetensors")
    return Tuned(tuning, chosen, best)
