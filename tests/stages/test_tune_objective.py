"""A trial of the threshold search: the plan that is measured, the problems that it is measured on, and the error."""

from __future__ import annotations

import pytest
from evaluation_cases import as_loaded, make_plan, wordy_llama
from transformers import PreTrainedTokenizerBase
from tune_cases import LIMITS, PAIR
from tune_cases import SPEC as TUNE

from kvcal.data.sequences import DataSpec
from kvcal.data.tasks import problems
from kvcal.plan.page_format import Boost, Format, Tier
from kvcal.plan.plan import Plan
from kvcal.recipe import EvaluateSpec, TuneSpec
from kvcal.stages.evaluate.tasks import TaskResult
from kvcal.stages.tune import objective as tune_objective
from kvcal.stages.tune.objective import TaskObjective

BOOST = Boost("query_range", (Tier(16, 0.1, 1.0), Tier(4, 0.2, 0.5)))
DATA = DataSpec("tasks:chain", num_samples=2, seq_len=300)


@pytest.mark.parametrize("seed", [0, 3])
def test_a_trial_measures_the_plan_of_its_thresholds_on_problems_of_its_own(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    measured: list[tuple[Plan, EvaluateSpec]] = []

    def measure(
        loaded: object, plan: Plan, spec: EvaluateSpec, reporter: object, purpose: str
    ) -> tuple[TaskResult, ...]:
        assert purpose == "select"
        measured.append((plan, spec))
        return (TaskResult("chain", 0.5, 0.1, 2, 1, 0, 10, (5, 5)),)

    monkeypatch.setattr(tune_objective, "measure_tasks", measure)
    loaded = as_loaded(wordy_llama(len(tokenizer)), tokenizer)
    untuned, evaluated = make_plan(loaded, (Format(2, "channel", 32, boost=BOOST), Format(2))), EvaluateSpec()
    spec = TuneSpec(tasks=("chain",), num_problems=2, fit_capacity=False, seed=seed)
    objective = TaskObjective(loaded, untuned, spec, evaluated, DATA)
    objective({"tau_16": 0.02, "tau_4": 0.01})
    [(plan, asked)] = measured
    assert [[tier.above for tier in layer.k[0].boost.tiers] for layer in plan.layers] == [[0.02, 0.01]] * 2
    assert (asked.tasks, asked.num_problems) == (("chain",), 2)
    own, others = ({p.prompt for p in problems("chain", 50, s)} for s in (asked.seed, evaluated.seed))
    assert own and not own & others


def test_the_error_of_a_tuned_accuracy_is_that_of_a_mean(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = [TaskResult(name, 0.5, error, 4, 2, 0, 9, (9,) * 4) for name, error in (("chain", 0.3), ("times", 0.4))]
    monkeypatch.setattr(tune_objective, "measure_tasks", lambda *args: results)
    tiny = as_loaded(wordy_llama(len(tokenizer)), tokenizer)
    objective = TaskObjective(tiny, make_plan(tiny, PAIR), TUNE, LIMITS, DATA)
    assert objective.accuracy(objective.plan) == (0.5, pytest.approx(0.25))
