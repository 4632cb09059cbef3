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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from kvcal.artifact import sha256_json, tensors_sha256
from kvcal.data.sequences import TokenDataset
from kvcal.models.load import LoadedModel, weight_bytes
from kvcal.plan.layer import LayerPlan, bare_layers
from kvcal.plan.page_format import SIDES
from kvcal.plan.plan import Plan, Workload
from kvcal.plan.tensors import lattice_tensors
from kvcal.progress import Reporter
from kvcal.recipe import Recipe, ReparamSpec, SearchSpec
from kvcal.stages import reparam
from kvcal.stages.allocate.budget import ModelSizes, resolve_budget, workspace_bytes
from kvcal.stages.allocate.record import Allocation, layer_bytes, layers_in
from kvcal.stages.checkpoint import Checkpoint, State
from kvcal.stages.divergence import PHASE, KLMeter, declare_kls, kl_texts
from kvcal.stages.predictors import stage as fit_predictors
from kvcal.stages.search.compositions import OptionTensors, choice_format, composed_layers, most_scratch
from kvcal.stages.search.problem import Choice, Outcome, Problem, problem_of, search, uniform_choices
from kvcal.stages.search.record import KIND, SCHEMA, SearchRecord, SearchReport, UnitResult, less_of, load, save
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
    geometry, cache_dtype = loaded.geometry, loaded.geometry.cache_dtype
    workload = Workload(allocate.batch, allocate.context)
    bare = bare_layers(geometry)
    fixed, _ = layer_bytes(bare, cache_dtype, workload)
    vocab_size = loaded.model.config.get_text_config(decoder=True).vocab_size
    per_head = allocate.granularity == "head"
    extremes = [bare] if per_head else [bare, most_scratch(geometry, spec, recipe.cache, recipe.predictors)]
    largest = max(extremes, key=lambda layers: workspace_bytes(layers, cache_dtype, workload))
    budget = resolve_budget(ModelSizes(geometry, weight_bytes(loaded.model), vocab_size), allocate, largest, fixed)
    problem = problem_of(geometry, spec, recipe.cache, recipe.predictors, workload, budget.cache - fixed, per_head)
    fits = _Fits(loaded, recipe, spec, fit_data, reparam_data, workload, inputs, path, reporter)
    brought = OptionTensors(fits.lambdas(), fits.first_predictors())
    texts = kl_texts(select_data, spec.kl_samples, spec.kl_tokens, recipe.cache)

    def plan_of(choice: Choice) -> Plan:
        layers, tensors = composed_layers(geometry, problem.chosen(choice), brought)
        return Plan(loaded.identity, cache_dtype, layers, workload, {}, tensors)

    with Checkpoint(path, KIND, inputs, State({}, {PHASE: 0}), declare_kls, reporter) as checkpoint:
        meter = KLMeter(loaded, texts, KL_BATCH.get(loaded.model.device.type, 4), checkpoint, reporter)

        def measure(choices: Sequence[Choice], what: str) -> list[float]:
            return meter.kl([plan_of(choice) for choice in choices], what)

        reporter.say(
            f"search: plans to measure: {len(uniform_choices(problem))} uniform, {sum(map(len, problem.options))} with "
            f"one unit changed, {spec.proxy_plans} random, and those of at most {spec.refine_rounds} rounds of "
            "refinement"
        )
        outcome = search(problem, spec, measure)
        plan = plan_of(outcome.choice)
        refitted = fits.refitted(plan)
        refitted_kl = None if refitted is None else meter.kl([refitted], "the plan with refitted predictors")[0]
        report = _report(problem, outcome, refitted_kl, len(checkpoint.state.means))
        if refitted is not None:
            kls = f"KL {outcome.kl:.4g} as searched, {refitted_kl:.4g} with refitted predictors"
            reporter.say(f"search: {kls}; the {report.shipped} plan ships")
            plan = refitted if report.shipped == "refitted" else plan
        split = budget.split(fixed, layer_bytes(plan.layers, cache_dtype, workload)[1], reserved=0)
        allocation = Allocation(loaded.identity, cache_dtype, plan.layers, workload, provenance, split, report.kl)
        record = SearchRecord(allocation, report, plan.tensors)
        save(record, inputs, path)
    return record


def _report(problem: Problem, outcome: Outcome, refitted_kl: float | None, num_plans: int) -> SearchReport:
    units = tuple(
        UnitResult(str(unit), tuple(option.name for option in options), sizes, costs, chosen)
        for unit, options, sizes, costs, chosen in zip(
            problem.units, problem.options, problem.nbytes, outcome.costs, outcome.choice, strict=True
        )
    )
    shipped, kl = less_of(outcome.kl, refitted_kl)
    return SearchReport(units, kl, shipped, outcome.kl, refitted_kl, outcome.history, outcome.proxy, num_plans)


@dataclass(frozen=True, eq=False)
class _Fits:
    """The fits of a search, each with a file of its own beside ``path``, which is gone in the end."""

    loaded: LoadedModel
    recipe: Recipe
    spec: SearchSpec
    fit_data: TokenDataset
    reparam_data: TokenDataset | None
    workload: Workload
    inputs: dict[str, Any]
    path: Path
    reporter: Reporter

    def lambdas(self) -> dict[int, dict[int, Tensor]]:
        """λ of every layer, for every choice with rescale by its number."""
        cache, lambdas = self.recipe.cache, {}
        for number, choice in enumerate(self.spec.keys):
            if choice.rescale and self.reparam_data is not None:
                k, v = choice_format(choice, cache), choice_format(self.spec.values[0], cache)
                layers, part = layers_in(self.loaded.geometry, k, v), self._part(f"lambda-{number}")
                spec, inputs = self.recipe.reparam or ReparamSpec(), self.inputs
                fitted = reparam.run_reparam(self.loaded, layers, self.reparam_data, spec, inputs, part, self.reporter)
                lambdas[number] = dict(fitted.lambdas)
                part.unlink()
        return lambdas

    def first_predictors(self) -> dict[str, Tensor]:
        """Tensors of predictors for layers in the first predicted choices of keys and values; none without such."""
        keys = [choice for choice in self.spec.keys if choice.predicted]
        values = [choice for choice in self.spec.values if choice.predicted]
        if not (keys or values):
            return {}
        k, v = (
            choice_format(choice, self.recipe.cache)
            for choice in ((keys or self.spec.keys)[0], (values or self.spec.values)[0])
        )
        layers = layers_in(self.loaded.geometry, k, v, "pre" if keys else "post")
        return self._predictors(layers, lattice_tensors(layers), "predictors")

    def refitted(self, plan: Plan) -> Plan | None:
        """The chosen plan with predictors fitted on what they read now; None without predictors."""
        if not any(layer.predictor(side) for layer in plan.layers for side in SIDES):
            return None
        layers = tuple(replace(layer, k_predictor=None, v_predictor=None) for layer in plan.layers)
        others = {name: tensor for name, tensor in plan.tensors.items() if "_predictor." not in name}
        fitted = self._predictors(layers, others, "chosen-predictors")
        return replace(plan, tensors={name: fitted.get(name, tensor) for name, tensor in plan.tensors.items()})

    def _predictors(self, layers: tuple[LayerPlan, ...], tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
        """Tensors of predictors for all sides of ``layers``, whether they pay or not: the search decides that."""
        assert self.recipe.predictors is not None
        spec, part = replace(self.recipe.predictors, drop=False), self._part(name)
        layers_sha256 = sha256_json([dump(layer) for layer in layers])
        of_layers = {"fitted.layers.sha256": layers_sha256, "fitted.tensors.sha256": tensors_sha256(tensors)}
        fitted = fit_predictors.run_fit_predictors(
            self.loaded, layers, tensors, self.fit_data, spec, self.workload, self.inputs | of_layers, part,
            self.reporter,
        )  # fmt: skip
        part.unlink()
        return fitted.tensors()

    def _part(self, name: str) -> Path:
        return self.path.with_name(f"{self.path.stem}.{name}{self.path.suffix}")
