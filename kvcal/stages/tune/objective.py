"""The worth of a setting of the thresholds: a plan's packed cache on real tasks, and its bytes (MixKVQ, App. D.1).

A trial takes the plan with its thresholds in the key tiers, which have the capacity that calibration pages need (see
``tier_capacity``) or the recipe's shares, and has the model solve problems through that plan's packed cache; there is
no simulated score. Tasks are the embedded ones (``measure_tasks``), or "lm-eval:NAME" (``measure_harness``); the
accuracy is their mean. Bits count everything at the plan's workload: the paper's count key codes alone, and are kept
as a fact.

Capacity is fixed by the plan, since a page's bytes must not depend on its scores. So with capacities from shares all
trials cost the same, and the search is for accuracy alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from kvcal.data.sequences import DataSpec
from kvcal.errors import UsageError
from kvcal.folder import sequences
from kvcal.models.load import LoadedModel, load
from kvcal.plan.plan import Plan
from kvcal.progress import Silent
from kvcal.quantities import MAX_SEED
from kvcal.recipe import EvaluateSpec, TuneSpec
from kvcal.stages.evaluate.harness import measure_harness, require_lm_eval
from kvcal.stages.evaluate.tasks import mean_accuracy, measure_tasks
from kvcal.stages.tune.study import Outcome, Search, Threshold
from kvcal.stages.tune.tier_capacity import Scores, key_code_bits, measure_scores, score_quantile, with_thresholds

# Of all channels of calibration pages: where the search ends when the recipe does not say it.
HIGHEST_SHARE = 0.99


@dataclass(frozen=True)
class Origin:
    """The source of the model, and how it is loaded: a worker loads it again."""

    source: str
    dtype: str
    device: str
    memory: int | None = None

    def load(self) -> LoadedModel:
        from transformers.utils import logging

        logging.disable_progress_bar()
        return load(self.source, dtype=self.dtype, device=self.device, memory=self.memory)


def tuned_bits(plan: Plan) -> tuple[int, ...]:
    """Bits of the key tiers that have a threshold, from most to fewest.

    Raises:
        UsageError: there is none, or the plan's keys are stored in a way whose scores are not those of the model's.
    """
    paged = [layer for layer in plan.layers if layer.is_paged]
    for layer in paged:
        if len(layer.k) > 1 or layer.k_pages == "pre" or layer.k_rescale or layer.k_offset:
            raise UsageError(
                f"layer {layer.geometry.index} has formats per head or transforms of its keys; thresholds are searched "
                "for one format of plain pages",
                hint="tune a recipe with [formats] alone",
            )
    boosts = [layer.k[0].boost for layer in paged if layer.k[0].boost is not None]
    bits = {tier.num_bits for boost in boosts for tier in boost.tiers if tier.above is not None}
    if not bits:
        raise UsageError(
            "no tier of the keys has a threshold, there is nothing to tune",
            hint="give tiers an 'above' in the recipe's k.boost, as recipes/mixkvq.toml does",
        )
    return tuple(sorted(bits, reverse=True))


@dataclass(frozen=True, eq=False)
class TaskObjective:
    """Callable as ``evaluate`` of the tune stage; sent to workers without the model and what was measured on it.

    ``evaluate`` bounds the tasks' lengths and sets the batch; ``data``: the calibration pages. ``given`` spares loading
    ``origin``. UsageError where lm-eval is asked for and not installed, or as ``tuned_bits``."""

    origin: Origin
    plan: Plan
    spec: TuneSpec
    evaluate: EvaluateSpec
    data: DataSpec
    given: LoadedModel | None = None

    def __post_init__(self) -> None:
        tuned_bits(self.plan)
        if self.tasks.harness_tasks:
            require_lm_eval()

    def __reduce__(self) -> tuple[type[TaskObjective], tuple[object, ...]]:
        return TaskObjective, (self.origin, self.plan, self.spec, self.evaluate, self.data)

    @property
    def tasks(self) -> EvaluateSpec:
        """The tasks of the search; never with the evaluation's seed, whose problems measure the choice."""
        evaluate, spec = self.evaluate, self.spec
        seed = (evaluate.seed + 1 + spec.seed) % (MAX_SEED + 1)
        return replace(evaluate, tasks=spec.tasks, num_problems=spec.num_problems, seed=seed)

    @cached_property
    def loaded(self) -> LoadedModel:
        return self.given or self.origin.load()

    @cached_property
    def scores(self) -> Scores:
        """Scores of the calibration pages."""
        return measure_scores(self.loaded, self.plan, sequences(self.data, self.loaded), Silent())

    def search(self) -> Search:
        """The search space: a threshold "tau_BITS" for every tier that has one."""
        high = self.spec.high
        if self.spec.fit_range:
            # Three digits: the same on machines whose arithmetic differs.
            high = max(float(f"{score_quantile(self.scores, HIGHEST_SHARE):.3g}"), 2 * self.spec.low)
        thresholds = tuple(Threshold(f"tau_{num_bits}", self.spec.low, high) for num_bits in tuned_bits(self.plan))
        return Search(thresholds, self.spec.num_trials, self.spec.seed)

    def plan_with(self, thresholds: Mapping[str, float]) -> Plan:
        """The plan that stands for these thresholds, by name."""
        by_bits = {num_bits: thresholds[f"tau_{num_bits}"] for num_bits in tuned_bits(self.plan)}
        scores = self.scores if self.spec.fit_capacity else None
        return with_thresholds(self.plan, by_bits, scores, self.spec.page_share)

    def __call__(self, thresholds: Mapping[str, float]) -> Outcome:
        """Raises what the tasks raise, such as NonFiniteActivations."""
        plan = self.plan_with(thresholds)
        accuracy, error = self.accuracy(plan)
        facts = {"key_code_bits": key_code_bits(plan, self.scores), **_capacity_shares(plan)}
        return Outcome(accuracy, error, plan.bits_per_value(), plan.predicted_bytes, facts)

    def accuracy(self, plan: Plan) -> tuple[float, float]:
        """Mean accuracy over the tasks, and its standard error."""
        results = measure_tasks(self.loaded, plan, self.tasks, Silent(), "select")
        results += measure_harness(self.loaded, plan, self.tasks, Silent())
        return mean_accuracy(results)


def _capacity_shares(plan: Plan) -> dict[str, float]:
    """{"room_BITS": mean share of the channels, over layers, that the tier of so many bits has capacity for}."""
    formats = [layer.k[0] for layer in plan.layers if layer.is_paged]
    shares: dict[str, float] = {}
    for fmt in formats:
        for tier in fmt.boost.tiers if fmt.boost is not None else ():
            name = f"room_{tier.num_bits}"
            shares[name] = shares.get(name, 0.0) + tier.share / len(formats)
    return shares
