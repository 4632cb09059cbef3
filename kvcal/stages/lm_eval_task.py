"""Any task of EleutherAI's lm-evaluation-harness, as a measure of a plan.

The harness is not a dependency: it is imported when a task "lm-eval:NAME" is asked for. It poses the problems and
scores the answers, which come through the plan's packed cache (see packed_cache_lm). Its seeds are set, so that the
same plan gives the same accuracy.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from kvcal.errors import UsageError
from kvcal.models.load import LoadedModel
from kvcal.plan import Plan
from kvcal.specs import LM_EVAL
from kvcal.stages.packed_cache_lm import PackedCacheLM


def require_lm_eval() -> None:
    """UsageError unless the harness can be imported."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError(
            f"a task named {LM_EVAL}... needs the lm-evaluation-harness, which is not installed",
            hint="pip install lm-eval, or choose one of the embedded tasks",
        )


def measure_lm_eval(
    loaded: LoadedModel, plan: Plan, task: str, num_problems: int, batch: int, seed: int
) -> tuple[float, float | None]:
    """Accuracy of ``plan`` on the first ``num_problems`` problems of a task (or group) of the harness, and its standard
    error if the harness has one. ``task`` is NAME, or NAME:METRIC; without a metric, the task's first of which more is
    better.

    Raises:
        UsageError: the harness is not installed, does not know the task, or the task has no such metric.
        NonFiniteActivations, ArtifactError: see generation.measure_tasks.
    """
    require_lm_eval()
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class Answering(PackedCacheLM, LM):
        """What the harness takes for a model."""

    name, _, metric = task.partition(":")
    manager = TaskManager()
    if name not in manager.all_tasks:
        raise UsageError(f"lm-eval knows no task {name!r}", hint="lm-eval ls tasks prints their names")
    results = simple_evaluate(
        model=Answering(loaded, plan, batch),
        tasks=[name],
        task_manager=manager,
        limit=num_problems,
        log_samples=False,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
    )
    return read_accuracy(results, name, metric)


def read_accuracy(results: Mapping[str, Any], name: str, metric: str) -> tuple[float, float | None]:
    """The metric's value and standard error in what ``simple_evaluate`` gave; see measure_lm_eval."""
    values = results["results"].get(name, {})
    better = results.get("higher_is_better", {}).get(name, {})
    # Keys are "metric,filter" and "metric_stderr,filter", beside others.
    found = {key: value for key, value in values.items() if "," in key and "_stderr," not in key}
    for key, value in found.items():
        short, _, rule = key.partition(",")
        is_wanted = metric in (key, short) if metric else bool(better.get(short))
        if is_wanted and not better.get(short, True):
            raise UsageError(
                f"lm-eval's metric {key!r} of {name!r} is better when it is less: it cannot be an accuracy"
            )
        if is_wanted and isinstance(value, int | float):
            error = values.get(f"{short}_stderr,{rule}")
            return float(value), float(error) if isinstance(error, int | float) else None
    raise UsageError(
        f"lm-eval's task {name!r} has no metric {metric or 'of which more is better'}; it has {sorted(found)}",
        hint=f"name one: {LM_EVAL}{name}:METRIC",
    )
