"""The error of a tuned accuracy."""

from __future__ import annotations

import pytest
from evaluation_cases import as_loaded, make_plan, wordy_llama
from transformers import PreTrainedTokenizerBase
from tune_cases import DATA, LIMITS, PAIR
from tune_cases import SPEC as TUNE

from kvcal.stages.evaluate.tasks import TaskResult
from kvcal.stages.tune import objective as tune_objective
from kvcal.stages.tune.objective import Origin, TaskObjective


def test_the_error_of_a_tuned_accuracy_is_that_of_a_mean(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = [TaskResult(name, 0.5, error, 4, 2, 0, 9, (9,) * 4) for name, error in (("chain", 0.3), ("times", 0.4))]
    monkeypatch.setattr(tune_objective, "measure_tasks", lambda *args: results)
    tiny = as_loaded(wordy_llama(len(tokenizer)), tokenizer)
    objective = TaskObjective(Origin("", "", ""), make_plan(tiny, PAIR), TUNE, LIMITS, DATA, tiny)
    assert objective.accuracy(objective.plan) == (0.5, pytest.approx(0.25))
