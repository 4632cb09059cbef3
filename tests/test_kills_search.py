"""The search's refinement, the predictors and λ that its plan holds, and a tuning's plans and problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from cli_cases import save_llama
from evaluation_cases import as_loaded, make_plan
from test_packed_cache_lm import model as tiny_model
from test_run_search import forced_recipe
from test_search import GEOMETRY, SPEC, additive, brute_force, interacting, problem
from test_tune_command import DATA, LIMITS, PAIR
from test_tune_command import SPEC as TUNE
from transformers import PreTrainedTokenizerBase

from kvcal import pipeline
from kvcal.models.load import LoadedModel, load
from kvcal.plan import Plan
from kvcal.progress import Silent
from kvcal.recipe import EvaluateSpec
from kvcal.stages import run_search, tune_objective
from kvcal.stages.compositions import Materials, composed_layers
from kvcal.stages.generation import TaskResult
from kvcal.stages.search import Choice, search
from kvcal.stages.tune_objective import Origin, TaskObjective
from kvcal.tasks import problems


@pytest.mark.parametrize("seed", range(4))
def test_refinement_finds_the_best_plan_after_costs_that_misled_the_solver(seed: int) -> None:
    """The first costs rank options the wrong way round. With every option as a neighbour one round mends that."""
    small = problem(0.4)
    kl = additive(small, seed)

    def measure(choices: Sequence[Choice], what: str) -> list[float]:
        return [100.0 - kl(choice) if what == "compositions" else kl(choice) for choice in choices]

    spec = replace(SPEC, refine_rounds=1, neighbours=10)
    misled, refined = search(small, replace(spec, refine_rounds=0), measure), search(small, spec, measure)
    assert refined.kl == pytest.approx(brute_force(small, kl), abs=1e-12)
    assert refined.kl < misled.kl - 1e-3


def test_refinement_tries_few_moves_and_many_within_the_budget() -> None:
    """From none, where a unit that changes costs as much as the largest gain, to all that pay, where it is free."""
    small = problem(0.4)
    kl, batches = interacting(small, 10), dict[str, list[Choice]]()

    def measure(choices: Sequence[Choice], what: str) -> list[float]:
        batches[what] = list(choices)
        return [kl(choice) for choice in choices]

    best = search(small, replace(SPEC, refine_rounds=0), measure).choice
    search(small, replace(SPEC, refine_rounds=1, neighbours=10), measure)
    moves = [sum(a != b for a, b in zip(best, plan, strict=True)) for plan in batches["round 1, plans"]]
    assert moves == sorted(moves) and moves[0] == 0 and len(set(moves)) > 2
    for choice in (*batches["random plans"], *batches["round 1, plans"]):
        assert small.size(choice) <= small.capacity


def test_every_head_of_every_layer_has_its_own_lambda() -> None:
    small = problem(0.5, per_head=True)
    lambdas = {index: 1.0 + index + torch.arange(32.0).view(2, 16) / 32 for index in range(3)}
    choice = tuple(2 if unit.side == "k" else 0 for unit in small.units)
    _, tensors = composed_layers(GEOMETRY, small.chosen(choice), Materials({2: lambdas}, {}))
    assert len(tensors) == 3
    for index in range(3):
        assert torch.equal(tensors[f"layers.{index}.k_rescale"], lambdas[index])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> LoadedModel:
    return load(str(save_llama(tmp_path_factory.mktemp("model"), tokenizer, dtype=torch.float32)), device="cpu")


def test_the_plan_holds_the_predictors_of_the_chosen_layers(tmp_path, loaded, monkeypatch) -> None:
    fits: list[dict[str, torch.Tensor]] = []
    fitted = run_search._fitted

    def noted(*args):
        fits.append(fitted(*args))
        return fits[-1]

    monkeypatch.setattr(run_search, "_fitted", noted)
    recipe = forced_recipe(tmp_path, 5.0)
    plan = pipeline.build_plan(recipe, loaded, pipeline.Folder.create(tmp_path / "out"), None, Silent())
    first, last = fits
    names = [name for name in plan.tensors if name.endswith("_predictor.weight")]
    assert names and all(torch.equal(plan.tensors[name], last[name]) for name in names)
    assert not any(torch.equal(first[name], last[name]) for name in names)


def objective(tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> TaskObjective:
    spec = replace(TUNE, seed=seed, fit_capacity=False)
    tiny = as_loaded(tiny_model(len(tokenizer)), tokenizer)
    return TaskObjective(Origin("", "", ""), make_plan(tiny, PAIR), spec, LIMITS, DATA, tiny)


def test_a_trial_is_measured_with_the_plan_of_its_thresholds(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Plan] = []

    def measure_tasks(of: LoadedModel, plan: Plan, spec: EvaluateSpec, reporter: Silent) -> tuple[TaskResult, ...]:
        measured.append(plan)
        return TaskResult("chain", 0.75, 0.3, 4, 3, 0, 9), TaskResult("times", 0.25, 0.4, 4, 1, 0, 9)

    monkeypatch.setattr(tune_objective, "measure_tasks", measure_tasks)
    outcome = objective(tokenizer)({"tau_16": 0.02, "tau_4": 0.01})
    (plan,) = measured
    boosts = [layer.k[0].boost for layer in plan.layers]
    assert {tier.above for boost in boosts if boost is not None for tier in boost.tiers} == {0.02, 0.01}
    assert (outcome.accuracy, outcome.accuracy_se) == (0.5, pytest.approx(0.25))
    assert (outcome.total_bytes, outcome.bits_per_value) == (plan.predicted_bytes, plan.bits_per_value())


def prompts(spec: EvaluateSpec) -> set[str]:
    limits = {name: getattr(spec, name) for name in ("max_steps", "max_size", "max_hops", "max_digits")}
    return {one.prompt_text for task in spec.tasks for one in problems(task, 8, spec.seed, **limits)}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tuning_solves_none_of_the_evaluations_problems(tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
    evaluation = EvaluateSpec()
    tuning = replace(evaluation, seed=objective(tokenizer, seed).own_tasks.seed)
    assert len(prompts(evaluation)) == len(prompts(tuning)) == 8 * len(evaluation.tasks)
    assert prompts(evaluation).isdisjoint(prompts(tuning))
