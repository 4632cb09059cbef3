"""The search stage: the measurements of plans, the search itself, and its artifact.

Data have purposes: λ, predictors and error feedback are fitted on *fit*, plans are compared on *select*, and *validate*
has the last word. Predictors are fitted once in AQUA-KV's own layers (or in those of the first predicted choices). The
champion is finished by two candidates more, each of which has to win: with predictors fitted once more on the layers
that were chosen, and with error feedback, whose factors' bytes were kept free. The plan that ships was measured on both
pools, byte for byte.

The folder remembers: fits and measurements lie beside the search's artifact, named by what they are of, and so do the
plans of earlier searches. Another budget in the same folder measures only plans that are new, starts from the plans of
fewer bytes, and ships none that the validation shows to be worse. An interrupted search goes on after the last group of
plans.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from kvcal.artifact import tensors_sha256
from kvcal.data.pools import Purpose
from kvcal.distributed import rank
from kvcal.errors import ArtifactError
from kvcal.folder import compute_dtype, model_inputs
from kvcal.kernels.variants import stored_form
from kvcal.models.load import LoadedModel, weight_bytes
from kvcal.plan.layer import LayerPlan, bare_layers
from kvcal.plan.page_format import SIDES, Format, Side
from kvcal.plan.plan import Plan, Workload
from kvcal.plan.tensors import lattice_tensors, needed_tensors
from kvcal.progress import Reporter
from kvcal.recipe import Recipe, SearchSpec
from kvcal.stages.allocate.budget import reserved_bytes, resolve_budget, workspace_bytes
from kvcal.stages.allocate.record import Allocation, Split, layer_bytes, layers_in
from kvcal.stages.checkpoint import Checkpoint, State
from kvcal.stages.divergence import LOCKSTEP, Text, kl_texts, lockstep_bytes, seconds_a_plan
from kvcal.stages.estimate import Estimate
from kvcal.stages.search.compose import FINALISTS, Candidate, Outcome, search
from kvcal.stages.search.compositions import (
    OptionTensors,
    Style,
    complexity,
    composed_layers,
    most_scratch,
    styles_of,
    system_plans,
)
from kvcal.stages.search.cost import planned
from kvcal.stages.search.fits import Fits, SearchData
from kvcal.stages.search.judge import Pool, better, tiers_of
from kvcal.stages.search.kl_meter import PHASE, KLMeter, declare_plans, plan_digest
from kvcal.stages.search.problem import Choice, Problem, problem_of
from kvcal.stages.search.record import (
    KIND,
    CandidateResult,
    OptionResult,
    SearchRecord,
    SearchReport,
    UnitResult,
    load,
    pool_result,
    save,
)
from kvcal.stages.search.speed import Speed, is_no_slower, speed_of

# Texts fed at once: as in the profile on a CPU; a GPU takes 16 short ones in the time of one.
KL_BATCH = {"cpu": 4, "cuda": 16}
# Of the cache: factors of error feedback that take more are not worth their room.
MAX_FEEDBACK_SHARE = 0.01
FED_SIDES: tuple[tuple[Side, ...], ...] = (("k", "v"), ("k",), ("v",))
Layers = tuple[LayerPlan, ...]


def run_search(
    loaded: LoadedModel,
    recipe: Recipe,
    data: SearchData,
    inputs: dict[str, Any],
    path: Path,
    provenance: dict[str, Any],
    reporter: Reporter,
) -> SearchRecord:
    """Search and write to ``path``.

    Raises:
        UsageError: a choice that cannot be composed, or no text long enough.
        InfeasibleBudget: nothing fits.
        NonFiniteActivations, UnsupportedModel, ArtifactError: as the stages it calls.
    """
    job = Search(loaded, recipe, data, path, reporter)
    brought, earlier = job.brought, job.earlier_plans()
    with ExitStack() as stack:
        select, validate = (job.pool(purpose, stack) for purpose in ("select", "validate"))
        reporter.say(job.announcement(select.meter.tiers))
        systems = [job.candidate(name, layers) for name, layers in job.systems.items()]
        fitting = [one for one in (*systems, *earlier) if one.nbytes <= job.budget.for_cache]
        outcome = search(
            job.problem,
            job.spec.refine_rounds,
            select.pool,
            validate.pool,
            [one for one in fitting if one not in earlier],
            [one for one in fitting if one in earlier],
            lambda name, choice: job.composed(name, choice, brought),
            lambda champion: job.finished(champion, select.pool, validate.pool),
        )
        report = job.report(outcome, select, validate)
    plan, budget, workload = outcome.champion.plan, job.budget, job.workload
    fixed, paged = layer_bytes(plan.layers, plan.cache_dtype, workload)
    split = replace(budget, fixed=fixed, paged=paged)
    allocation = Allocation(
        loaded.identity, plan.cache_dtype, plan.layers, workload, provenance, split, report.select.kl
    )
    record = SearchRecord(allocation, report, plan.tensors)
    job.keep_earlier()
    save(record, inputs, path)
    kls = ", ".join(
        f"{n} {p.kl:.4g} ± {p.kl_error:.2g}" for n, p in (("select", report.select), ("validate", report.validate))
    )
    reporter.say(f"search: {report.shipped} ships; KL {kls}; {report.num_plans} plans measured in this folder")
    return record


class _Measured(NamedTuple):
    """A pool, and the meter behind it."""

    pool: Pool[Candidate]
    meter: KLMeter


@dataclass(frozen=True, eq=False)
class Search:
    """One search; see the module's docstring."""

    loaded: LoadedModel
    recipe: Recipe
    data: SearchData
    path: Path
    reporter: Reporter

    @property
    def spec(self) -> SearchSpec:
        assert self.recipe.search is not None
        return self.recipe.search

    @cached_property
    def workload(self) -> Workload:
        assert self.recipe.allocate is not None
        return Workload(self.recipe.allocate.batch, self.recipe.allocate.context)

    @cached_property
    def fits(self) -> Fits:
        return Fits(self.loaded, self.recipe, self.data, self.workload, self.path, self.reporter)

    @cached_property
    def systems(self) -> dict[str, Layers]:
        """Systems' own plans, those that serve."""
        every = system_plans(self.loaded.geometry, self.spec, self.recipe.predictors)
        served = {name: layers for name, layers in every.items() if self._serves(layers)}
        if left_out := sorted(every.keys() - served.keys()):
            self.reporter.say(
                f"search: for {self.spec.serve}, plans not known to be as fast as 16 bits are left out: "
                f"{', '.join(left_out)} (`--for storage` takes them)"
            )
        unfitted = {name for name, layers in served.items() for layer in layers if not self._can_rescale(layer)}
        if unfitted:
            self.reporter.say(
                f"search: texts for λ are too short to read a page of {', '.join(sorted(unfitted))}: left out"
            )
        return {name: layers for name, layers in served.items() if name not in unfitted}

    def _can_rescale(self, layer: LayerPlan) -> bool:
        return not layer.k_rescale or all(map(self.fits.can_rescale, layer.k))

    def _serves(self, layers: Layers) -> bool:
        return is_no_slower(self.speed, layers)

    @cached_property
    def speed(self) -> Speed:
        """The speed of decoding that plans are held to."""
        return speed_of(self.spec.serve, self.loaded.geometry.cache_dtype, self.workload)

    @cached_property
    def styles(self) -> dict[Side, tuple[Style, ...]]:
        recipe, plans = self.recipe, self.systems.values()
        every = {side: styles_of(side, self.spec, recipe.cache, recipe.predictors, plans) for side in SIDES}
        unfitted = {style for style in every["k"] if style.rescale and not self.fits.can_rescale(style.format)}
        if unfitted:
            named = ", ".join(f"'{style}'" for style in sorted(unfitted, key=str))
            self.reporter.say(f"search: texts for λ are too short to read a page of keys {named}: left out")
        return every | {"k": tuple(style for style in every["k"] if style not in unfitted)}

    @cached_property
    def budget(self) -> Split:
        loaded, geometry, allocate = self.loaded, self.loaded.geometry, self.recipe.allocate
        assert allocate is not None
        most = most_scratch(geometry, self.styles, self.recipe.predictors, self.speed)
        extremes = [bare_layers(geometry), most, *self.systems.values()]
        largest = max(extremes, key=lambda layers: workspace_bytes(layers, geometry.cache_dtype, self.workload))
        return resolve_budget(allocate, largest, geometry.cache_dtype, weight_bytes(loaded.model), loaded.vocab_size)

    @cached_property
    def reserved(self) -> int:
        """Bytes that are kept free for the factors of error feedback; 0 where it is not tried."""
        nbytes = reserved_bytes(self.loaded.geometry, self.recipe.cache, None, feedback=self.recipe.feedback)
        if nbytes <= MAX_FEEDBACK_SHARE * self.budget.for_cache:
            return nbytes
        self.reporter.say(
            f"search: no error feedback: its factors would take {nbytes / self.budget.for_cache:.1%} of the cache"
        )
        return 0

    @cached_property
    def problem(self) -> Problem:
        geometry, allocate = self.loaded.geometry, self.recipe.allocate
        assert allocate is not None
        room = self.budget.for_cache - self.budget.fixed - self.reserved
        return problem_of(geometry, self.styles, self.recipe.predictors, self.workload, room, self.speed)

    @cached_property
    def brought(self) -> OptionTensors:
        """The fits, made or read."""
        formats = {layer.k[0] for layers in self.systems.values() for layer in layers if layer.k_rescale}
        formats |= {o.format for options in self.problem.options for o in options if o.style.rescale}
        return OptionTensors(self.fits.lambdas(formats), self._first_predictors())

    def composed(self, name: str, choice: Choice, brought: OptionTensors) -> Candidate:
        """A choice of the problem as a plan."""
        layers, tensors = composed_layers(self.loaded.geometry, self.problem.chosen(choice), brought)
        return self._as_candidate(name, choice, layers, tensors)

    def candidate(self, name: str, layers: Layers) -> Candidate:
        """A system's plan: as a choice where it is one."""
        choice = self.problem.choice_of(layers)
        if choice is not None:
            return self.composed(name, choice, self.brought)
        needed = needed_tensors(layers, self.loaded.geometry.cache_dtype)
        tensors = {n: tensor for n, tensor in self.brought.predictors.items() if n in needed}
        for layer in layers:
            if layer.k_rescale:
                index = layer.geometry.index
                tensors[f"layers.{index}.k_rescale"] = self.brought.lambdas[layer.k[0]][index]
        return self._as_candidate(name, None, layers, tensors | lattice_tensors(layers))

    def _as_candidate(self, name: str, choice: Choice | None, layers: Layers, tensors: dict[str, Tensor]) -> Candidate:
        plan = Plan(self.loaded.identity, self.loaded.geometry.cache_dtype, layers, self.workload, {}, tensors)
        return Candidate(name, choice, complexity(layers), plan.predicted_bytes, plan)

    def pool(self, purpose: Purpose, stack: ExitStack) -> _Measured:
        """Of the texts of one purpose; what is measured stays in the folder."""
        texts, loaded = self.texts(purpose), self.loaded
        of_texts = {f"{n}.{part}": t for n, text in enumerate(texts)
                    for part, t in (("tokens", text.tokens_T), ("mask", text.loss_mask_T))}  # fmt: skip
        inputs = {**model_inputs(loaded), **compute_dtype(loaded), "texts.sha256": tensors_sha256(of_texts)}
        kinds = tuple(text.kind for text in texts)
        tiers = tiers_of(kinds)
        target, start = self.fits.beside(purpose), State({}, {PHASE: 0})
        checkpoint = stack.enter_context(
            Checkpoint(target, KIND, inputs, start, declare_plans(len(texts)), self.reporter, is_kept=True)
        )
        meter = KLMeter(loaded, texts, tiers, self._batch, checkpoint, self.reporter)

        def table(candidates: Sequence[Candidate], num_texts: int, what: str) -> Tensor:
            label = what if purpose == "select" else f"{what}, {purpose}"
            return meter.measure([candidate.plan for candidate in candidates], num_texts, label)[..., 0]

        return _Measured(Pool(kinds, tiers, table, self.reference), meter)

    def texts(self, purpose: Purpose) -> list[Text]:
        data = self.data.select if purpose == "select" else self.data.validate
        return kl_texts(data, self.spec.kl_samples, self.spec.kl_tokens, self.recipe.cache)

    @property
    def _batch(self) -> int:
        return KL_BATCH.get(self.loaded.model.device.type, 4)

    @cached_property
    def reference(self) -> Candidate:
        """2 bits in groups of 32, keys per channel and values per token: KL is counted in its KLs."""
        layers = layers_in(self.loaded.geometry, Format(2, "channel", 32), Format(2, "token", 32))
        return self._as_candidate("2 bits", None, layers, {})

    def earlier_plans(self) -> list[Candidate]:
        """The plans that other searches in the folder shipped, and that can be shipped again."""
        found = []
        for path in [self.path, *sorted(self.path.parent.glob(f"{self.path.stem}.earlier-*{self.path.suffix}"))]:
            if not path.exists():
                continue
            try:
                record = load(path)
            except ArtifactError as error:
                self.reporter.say(f"search: {path.name} is not used: {error.message}")
                continue
            plan = replace(record.plan, workload=self.workload)
            if plan.model == self.loaded.identity and self._serves(plan.layers):
                bits = plan.bits_per_value()
                name, choice = f"{record.report.shipped} of {bits:.3f} bits", self.problem.choice_of(plan.layers)
                same = None if choice is None else self.composed(name, choice, self.brought)
                if same is None or plan_digest(same.plan) != plan_digest(plan):
                    same = Candidate(name, None, complexity(plan.layers), plan.predicted_bytes, plan)
                found.append(same)
        return sorted(found, key=lambda candidate: (candidate.nbytes, candidate.name))

    def keep_earlier(self) -> None:
        """The record that lies where the new one is to be, under a name of its own."""
        if self.path.exists() and rank() == 0:
            digest = hashlib.sha256(self.path.read_bytes()).hexdigest()[:12]
            os.replace(self.path, self.fits.beside(f"earlier-{digest}"))

    def finished(
        self, champion: Candidate, select: Pool[Candidate], validate: Pool[Candidate]
    ) -> tuple[Candidate, list[Candidate]]:
        """With predictors, and then error feedback of both sides or of one, fitted for its own layers, each if that is
        better; and all that was tried."""
        fits: list[Callable[[Candidate], Candidate | None]] = [self.refitted]
        fits += [functools.partial(self.fed, sides=sides) for sides in FED_SIDES]
        tried = []
        for fitted in fits:
            found = fitted(champion)
            if found is not None:
                tried.append(found)
                champion = found if better(found, champion, select, validate) else champion
        return champion, tried

    def refitted(self, champion: Candidate) -> Candidate | None:
        """With predictors fitted on what they read now; None where nothing is predicted."""
        plan = champion.plan
        if not any(layer.predictor(side) for layer in plan.layers for side in SIDES):
            return None
        layers = tuple(replace(layer, k_predictor=None, v_predictor=None) for layer in plan.layers)
        others = {name: tensor for name, tensor in plan.tensors.items() if "_predictor." not in name}
        fitted = self.fits.predictors(layers, others)
        tensors = {name: fitted.get(name, tensor) for name, tensor in plan.tensors.items()}
        return replace(champion, name=f"{champion.name}, refitted", choice=None, plan=replace(plan, tensors=tensors))

    def fed(self, champion: Candidate, sides: tuple[Side, ...]) -> Candidate | None:
        """With error feedback of all codes of these sides that attention reads as they are stored; None where there are
        none on each, or the plan has it, or its kernels or bytes do not allow it."""
        plan = champion.plan
        if not self.reserved or any(layer.feedback(side) for layer in plan.layers for side in SIDES):
            return None
        fitted = self.fits.feedback(plan.layers, plan.tensors)
        reconstructed = {
            (layer.geometry.index, side)
            for layer in plan.layers
            for side in SIDES
            if layer.is_paged and stored_form(layer, side) is not None
        }
        factors = {
            (index, side): factor
            for (index, side), factor in fitted.factors.items()
            if side in sides and (index, side) not in reconstructed
        }
        if {side for _, side in factors} != set(sides):
            return None
        fitted = replace(
            fitted, factors=factors, bases={place: basis for place, basis in fitted.bases.items() if place in factors}
        )
        layers, tensors = fitted.apply(plan.layers), {**plan.tensors, **fitted.tensors()}
        found = self._as_candidate(f"{champion.name}, feedback {'+'.join(sides).upper()}", None, layers, tensors)
        return found if found.nbytes <= self.budget.for_cache and self._serves(layers) else None

    def report(self, outcome: Outcome, select: _Measured, validate: _Measured) -> SearchReport:
        champion, results = outcome.champion, []
        for one in outcome.compared:
            pairs = [(pool.score(one), pool.difference(one, champion)[1]) for pool in (select.pool, validate.pool)]
            results.append(CandidateResult(one.name, one.complexity, one.nbytes, *pairs[0], *pairs[1]))
        of_select, of_validate = (
            pool_result(meter.measure([champion.plan], len(pool.kinds), "plan")[0], pool.kinds, pool.score(champion))
            for pool, meter in (select, validate)
        )
        return SearchReport(
            champion.name,
            self._is_refitted(champion.plan),
            self.spec.serve,
            of_select,
            of_validate,
            tuple(results),
            self._units(outcome),
            outcome.proxy,
            select.meter.num_plans,
        )

    def _is_refitted(self, plan: Plan) -> bool:
        first = self.brought.predictors
        return any(name in first and not tensor.equal(first[name]) for name, tensor in plan.tensors.items())

    def _units(self, outcome: Outcome) -> tuple[UnitResult, ...]:
        """None where the layers that ship are no choice, whatever encodes their pages."""
        problem, choice, units = self.problem, self.problem.choice_of(outcome.champion.plan.layers), []
        for position, option in enumerate(choice or ()):
            options, sizes = problem.options[position], problem.nbytes[position]
            tried = tuple(
                OptionResult(options[c.option].name, sizes[c.option], c.measured, c.error, c.estimate)
                for c in outcome.changes
                if c.position == position
            )
            units.append(UnitResult(str(problem.units[position]), options[option].name, sizes[option], tried))
        return tuple(units)

    def announcement(self, tiers: Sequence[int]) -> str:
        cost = planned(self.problem, tiers, len(self.systems), self.spec.refine_rounds)
        return f"search: at most {cost.plans} plans, {cost.texts} times a text; {tiers[-1]} texts, {tiers[0]} at first"

    def _first_predictors(self) -> dict[str, Tensor]:
        """Tensors of predictors of all layers; none where nothing is predicted."""
        systems = [p for p in self.systems.values() if any(layer.predictor(s) for layer in p for s in SIDES)]
        options = [o for row in self.problem.options for o in row if o.predictor is not None]
        if not (systems or options):
            return {}
        if systems:
            layers = tuple(replace(layer, k_predictor=None, v_predictor=None) for layer in systems[0])
        else:
            k, v = (
                next((style for style in self.styles[side] if style.predicted), self.styles[side][0]) for side in SIDES
            )
            layers = layers_in(self.loaded.geometry, k.format, v.format, "pre" if k.predicted else "post")
        return self.fits.predictors(layers, lattice_tensors(layers))


def dry_run(loaded: LoadedModel, recipe: Recipe, data: SearchData, path: Path, reporter: Reporter) -> Estimate:
    """The size of a search, from one timed plan on the first few texts. Raises as ``run_search``."""
    job = Search(loaded, recipe, data, path, reporter)
    texts = job.texts("select")
    tiers = tiers_of([text.kind for text in texts])
    num_validate = len(job.texts("validate"))
    cost = planned(job.problem, tiers, len(job.systems), job.spec.refine_rounds)
    batch = texts[: min(job._batch, tiers[0])]
    each = seconds_a_plan(loaded, batch) * (1 + 1 / LOCKSTEP) / len(batch)
    validated = num_validate * (len(job.systems) + 2 * FINALISTS)
    steps = {"plans": cost.plans, "texts": len(texts), "plans times texts": cost.texts + validated}
    nbytes = lockstep_bytes(loaded, min(job._batch, len(texts)), max(text.tokens_T.numel() for text in texts))
    return Estimate("search, at most, without fits", steps, each * (cost.texts + validated), nbytes)
