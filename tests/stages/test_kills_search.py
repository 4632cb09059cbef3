"""The search's refinement, λ of the plan that it finds, and the error of a tuned accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from evaluation_cases import as_loaded, make_plan, wordy_llama
from test_search import GEOMETRY, SPEC, additive, brute_force, interacting, problem
from transformers import PreTrainedTokenizerBase
from tune_cases import DATA, LIMITS, PAIR
from tune_cases import SPEC as TUNE

from kvcal.stages.evaluate.tasks import TaskResult
from kvcal.stages.search.compositions import OptionTensors, composed_layers
from kvcal.stages.search.problem import Choice, search
from kvcal.stages.tune import objective as tune_objective
from kvcal.stages.tune.objective import Origin, TaskObjective


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
    _, tensors = composed_layers(GEOMETRY, small.chosen(choice), OptionTensors({2: lambdas}, {}))
    assert len(tensors) == 3
    for index in range(3):
        assert torch.equal(tensors[f"layers.{index}.k_rescale"], lambdas[index])


def test_the_error_of_a_tuned_accuracy_is_that_of_a_mean(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = [TaskResult(name, 0.5, error, 4, 2, 0, 9, (9,) * 4) for name, error in (("chain", 0.3), ("times", 0.4))]
    monkeypatch.setattr(tune_objective, "measure_tasks", lambda *args: results)
    tiny = as_loaded(wordy_llama(len(tokenizer)), tokenizer)
    objective = TaskObjective(Origin("", "", ""), make_plan(tiny, PAIR), TUNE, LIMITS, DATA, tiny)
    assert objective.accuracy(objective.plan) == (0.5, pytest.approx(0.25))
