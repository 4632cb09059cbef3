"""The search stage: λ and predictors for the choices that need them, then the search itself, then its artifact.

λ is calibrated for each choice with rescale on its own, with that choice's quantizer in every layer. Predictors are
fitted on the first predicted choices, and once more on the layers that were chosen. The plan with these is measured
like all others: it ships if its KL is less than that of the plan that was searched, which ships otherwise.

Texts of the fits and texts of the KL are two data sets. Measured KLs are kept in a checkpoint: an interrupted search
goes on after the last group of plans. Every fit has a checkpoint of its own, which only a fit of the same layers with
the same tensors takes up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from kvcal.artifact import sha256_json, tensors_sha256
from kvcal.data.sequences import TokenDataset
from kvcal.models.load import LoadedModel, weight_bytes
from kvcal.plan.plan import SIDES, LayerPlan, Plan, Workload, bare_layers
from kvcal.plan.tensors import lattice_tensors
from kvcal.progress import Reporter
from kvcal.recipe import CacheSpec, Recipe
from kvcal.specs import PredictorSpec, ReparamSpec, SearchSpec
from kvcal.stages.allocate.budget import ModelSizes, resolve_budget, workspace_bytes
from kvcal.stages.allocate.record import Allocation, layer_bytes
from kvcal.stages.checkpoint import Checkpoint, State
from kvcal.stages.divergence import PHASE, KLMeter, declare_kls, kl_texts
from kvcal.stages.predictors import stage as fit_predictors
from kvcal.stages.reparam import stage as reparam
from kvcal.stages.search.compositions import Materials, composed_layers, key_format, most_scratch, value_format
from kvcal.stages.search.problem import Choice, Problem, problem_of, uniform_choices
from kvcal.stages.search.record import KIND, SCHEMA, SearchRecord, SearchReport, UnitResult, load, save
from kvcal.stages.search.search import Outcome, search
from kvcal.strict import dump

__all__ = ["KIND", "SCHEMA", "SearchRecord", "load", "run_search"]

# Texts fed at once: as in the profile on a CPU; a GPU takes 16 short ones in the time of one.
KL_BATCH = {"cpu": 4, "cuda": 16}


def run_search(
    loaded: LoadedModel,
    recipe: Recipe,
    fit_data: TokenDataset,
    select_data: TokenDataset,
    reparam_data: TokenDataset | None,
    inputs: dict[str, Any],
    path: Path,
    provenance: dict[str, Any],
    reporter: Reporter,
) -> SearchRecord:
    """Search and write to ``path``. ``fit_data``: for predictors; ``select_data``: for the KL of plans;
    ``reparam_data``: for λ, where a choice takes it.

    Raises:
        UsageError: a choice that cannot be composed, or no text long enough.
        InfeasibleBudget: nothing fits.
        NonFiniteActivations, UnsupportedModel, ArtifactError: as the stages it calls.
    """
    spec, allocate = recipe.search, recipe.allocate
    assert spec is not None and allocate is not None
    workload = Workload(allocate.batch, allocate.context)
    bare = bare_layers(loaded.geometry)
    fixed, _ = layer_bytes(bare, loaded.geometry.cache_dtype, workload)
    vocab_size = loaded.model.config.get_text_config(decoder=True).vocab_size
    per_head = allocate.granularity == "head"
    ways = [bare] if per_head else [bare, most_scratch(loaded.geometry, spec, recipe.cache, recipe.predictors)]
    most = max(ways, key=lambda layers: workspace_bytes(layers, loaded.geometry.cache_dtype, workload))
    budget = resolve_budget(ModelSizes(loaded.geometry, weight_bytes(loaded.model), vocab_size), allocate, most, fixed)
    paged_bytes = budget.cache - fixed
    problem = problem_of(loaded.geometry, spec, recipe.cache, recipe.predictors, workload, paged_bytes, per_head)
    materials = _materials(loaded, recipe, fit_data, reparam_data, workload, inputs, path, reporter)
    texts = kl_texts(select_data, spec.kl_samples, spec.kl_tokens, recipe.cache)

    def plan_of(choice: Choice) -> Plan:
        layers, tensors = composed_layers(loaded.geometry, problem.chosen(choice), materials)
        return Plan(loaded.identity, loaded.geometry.cache_dtype, layers, workload, {}, tensors)

    with Checkpoint(path, KIND, inputs, State({}, {PHASE: 0}), declare_kls, reporter) as checkpoint:
        batch = KL_BATCH.get(loaded.model.device.type, 4)
        meter = KLMeter(loaded, texts, batch, checkpoint, reporter)

        def measure(choices: Sequence[Choice], what: str) -> list[float]:
            return meter.kl([plan_of(choice) for choice in choices], what)

        _say_counts(problem, spec, reporter)
        outcome = search(problem, spec, measure)
        plan = plan_of(outcome.choice)
        refitted = _refitted(loaded, recipe, fit_data, plan, workload, inputs, path, reporter)
        refitted_kl = None if refitted is None else meter.kl([refitted], "the plan with refitted predictors")[0]
        report = _report(problem, outcome, refitted_kl, len(checkpoint.state.means))
        if refitted is not None:
            kls = f"KL {outcome.kl:.4g} as searched, {refitted_kl:.4g} with refitted predictors"
            reporter.say(f"search: {kls}; the {report.shipped} plan ships")
            plan = refitted if report.shipped == "refitted" else plan
        paged = layer_bytes(plan.layers, loaded.geometry.cache_dtype, workload)[1]
        split = budget.split(fixed, paged, reserved=0)
        allocation = Allocation(
            loaded.identity, loaded.geometry.cache_dtype, plan.layers, workload, provenance, split, report.kl
        )
        record = SearchRecord(allocation, report, plan.tensors)
        save(record, inputs, path)
    return record


def _say_counts(problem: Problem, spec: SearchSpec, reporter: Reporter) -> None:
    """Counts the plans to be measured."""
    uniform, single = len(uniform_choices(problem)), sum(map(len, problem.options))
    reporter.say(
        f"search: plans to measure: {uniform} uniform, {single} with one unit changed, {spec.proxy_plans} random, and "
        f"those of at most {spec.refine_rounds} rounds of refinement"
    )


def _report(problem: Problem, outcome: Outcome, refitted_kl: float | None, num_plans: int) -> SearchReport:
    units = tuple(
        UnitResult(str(unit), tuple(option.name for option in options), sizes, costs, chosen)
        for unit, options, sizes, costs, chosen in zip(
            problem.units, problem.options, problem.nbytes, outcome.costs, outcome.choice, strict=True
        )
    )
    kl: float = outcome.kl
    shipped: Literal["searched", "refitted"] = "searched"
    if refitted_kl is not None and refitted_kl < kl:
        kl, shipped = refitted_kl, "refitted"
    return SearchReport(units, kl, shipped, outcome.kl, refitted_kl, outcome.history, outcome.proxy, num_plans)


def _materials(
    loaded: LoadedModel,
    recipe: Recipe,
    data: TokenDataset,
    reparam_data: TokenDataset | None,
    workload: Workload,
    inputs: dict[str, Any],
    path: Path,
    reporter: Reporter,
) -> Materials:
    """λ for every choice with rescale, and the first fit of the predictors."""
    spec, cache = recipe.search, recipe.cache
    assert spec is not None
    value = value_format(spec.values[0], cache)
    lambdas: dict[int, dict[int, Tensor]] = {}
    for number, choice in enumerate(spec.keys):
        if choice.rescale and reparam_data is not None:
            layers = tuple(
                LayerPlan(layer.geometry, (key_format(choice, cache),), (value,)) if layer.is_paged else layer
                for layer in bare_layers(loaded.geometry)
            )
            part = path.with_name(f"{path.stem}.lambda-{number}{path.suffix}")
            found = reparam.run_reparam(
                loaded, layers, {}, reparam_data, recipe.reparam or ReparamSpec(), inputs, part, reporter
            )
            lambdas[number] = dict(found.lambdas)
            part.unlink()
    predicted = _predicted_layers(loaded, spec, cache, recipe.predictors)
    if predicted is None or recipe.predictors is None:
        return Materials(lambdas, {})
    tensors = lattice_tensors(predicted)
    part = path.with_name(f"{path.stem}.predictors{path.suffix}")
    fitted = _fitted(loaded, predicted, tensors, data, recipe.predictors, workload, inputs, part, reporter)
    return Materials(lambdas, fitted)


def _predicted_layers(
    loaded: LoadedModel, spec: SearchSpec, cache: CacheSpec, predictors: PredictorSpec | None
) -> tuple[LayerPlan, ...] | None:
    """Layers in the first predicted choices of keys and values; None where nothing is predicted."""
    keys = [choice for choice in spec.keys if choice.predicted]
    values = [choice for choice in spec.values if choice.predicted]
    if predictors is None or not (keys or values):
        return None
    k, v = key_format((keys or spec.keys)[0], cache), value_format((values or spec.values)[0], cache)
    k_pages: Literal["post", "pre"] = "pre" if keys else "post"
    return tuple(
        LayerPlan(layer.geometry, (k,), (v,), k_pages=k_pages) if layer.is_paged else layer
        for layer in bare_layers(loaded.geometry)
    )


def _fitted(
    loaded: LoadedModel,
    layers: tuple[LayerPlan, ...],
    tensors: dict[str, Tensor],
    data: TokenDataset,
    spec: PredictorSpec,
    workload: Workload,
    inputs: dict[str, Any],
    part: Path,
    reporter: Reporter,
) -> dict[str, Tensor]:
    """The tensors of predictors for all sides of ``layers``, whether they pay or not: the search decides that.
    ``part``: a file for this fit alone, which is gone in the end."""
    keep_all = replace(spec, drop=False)
    layers_sha256 = sha256_json([dump(layer) for layer in layers])
    inputs = {**inputs, "fitted.layers.sha256": layers_sha256, "fitted.tensors.sha256": tensors_sha256(tensors)}
    found = fit_predictors.run_fit_predictors(loaded, layers, tensors, data, keep_all, workload, inputs, part, reporter)
    part.unlink()
    return found.tensors()


def _refitted(
    loaded: LoadedModel,
    recipe: Recipe,
    data: TokenDataset,
    plan: Plan,
    workload: Workload,
    inputs: dict[str, Any],
    path: Path,
    reporter: Reporter,
) -> Plan | None:
    """The chosen plan with predictors fitted on what they read now; None without predictors."""
    wanted: set[tuple[int, str]] = {
        (layer.geometry.index, side) for layer in plan.layers for side in SIDES if layer.predictor(side) is not None
    }
    if not wanted or recipe.predictors is None:
        return None
    bare = tuple(replace(layer, k_predictor=None, v_predictor=None) for layer in plan.layers)
    others = {name: tensor for name, tensor in plan.tensors.items() if "_predictor." not in name}
    part = path.with_name(f"{path.stem}.chosen-predictors{path.suffix}")
    fitted = _fitted(loaded, bare, others, data, recipe.predictors, workload, inputs, part, reporter)
    return replace(plan, tensors={name: fitted.get(name, tensor) for name, tensor in plan.tensors.items()})
