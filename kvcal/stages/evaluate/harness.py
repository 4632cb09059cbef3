"""Accuracy of a plan on tasks of the lm-evaluation-harness (lm-eval), through the packed cache.

``lm_eval`` is optional, and imported when a task needs it; its model is ``packed_lm.PackedCacheLM``. Each
task is run alone, with the harness's own number of shots, prompts and metric. Left out: chat templates.

An accuracy's standard error is the harness's. Where it has none, or 0, it is half the width of Wilson's
interval (see ``tasks``), which no metric between 0 and 1 exceeds. Problems are the task's first ones: a plan
that was tuned on a task has seen them.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcal.data.reading import LM_EVAL, READINGS, EvaluateSpec
from kvcal.data.tasks import TASKS
from kvcal.errors import UsageError
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import Plan
from kvcal.progress import Reporter
from kvcal.stages.evaluate.tasks import TaskResult, wilson_se

SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")


def require_lm_eval() -> None:
    """UsageError unless the harness can be imported."""
    missing = [name for name in ("lm_eval", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"a task named {LM_EVAL}... needs the lm-evaluation-harness, of which {', '.join(missing)} is not "
            "installed",
            hint="pip install 'kvcal[lm-eval]', or choose one of the embedded tasks",
        )


def require_tasks(spec: EvaluateSpec) -> None:
    """UsageError unless the harness is installed and has all its tasks of ``spec``."""
    require_lm_eval()
    if spec.include_path and not Path(spec.include_path).is_dir():
        raise UsageError(f"include_path {spec.include_path!r} is no folder", hint="name the folder of the task files")
    known = _task_manager(spec.include_path).all_tasks
    unknown = [task for task in spec.harness_tasks if task.partition(":")[0] not in known]
    if unknown:
        own = ", ".join((*TASKS, *(f"{name}:TOKENS" for name in READINGS)))
        raise UsageError(
            f"neither kvcal nor lm-eval has a task {unknown[0]!r}; kvcal's are {own}",
            hint="lm-eval ls tasks prints the names of lm-eval's; --include-path adds a folder of your own",
        )


@functools.cache
def _task_manager(include_path: str) -> Any:
    """The index of all tasks: made once, since it reads thousands of files."""
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every default
    return TaskManager(include_path=include_path or None)


def measure_harness(loaded: LoadedModel, plan: Plan, spec: EvaluateSpec, reporter: Reporter) -> tuple[TaskResult, ...]:
    """Accuracy of ``plan`` on the first ``spec.num_problems`` problems of each of the harness's tasks (or
    groups) in ``spec``; those of a folder of the user's are found in ``spec.include_path``. A task is NAME,
    or NAME:METRIC; without a metric, the task's first of which more is better."""
    if not spec.harness_tasks:
        return ()
    require_tasks(spec)
    results = []
    for done, task in enumerate(spec.harness_tasks):
        results.append(_measure(loaded, plan, task, spec))
        reporter(done + 1, len(spec.harness_tasks), "evaluate: tasks of lm-eval")
    return tuple(results)


def _measure(loaded: LoadedModel, plan: Plan, task: str, spec: EvaluateSpec) -> TaskResult:
    from lm_eval import simple_evaluate

    from kvcal.stages.evaluate.packed_lm import PackedCacheLM

    name, _, metric = task.partition(":")
    lm = PackedCacheLM(loaded, plan, batch_size=spec.batch)
    try:
        measured = simple_evaluate(
            model=lm, tasks=[name], task_manager=_task_manager(spec.include_path), limit=spec.num_problems,
            log_samples=False, **dict.fromkeys(SEEDS, spec.seed),
        )  # fmt: skip
    except (AssertionError, ValueError, OSError) as refused:  # a prompt beyond the context, no network, ...
        raise UsageError(f"lm-eval's task {name!r} cannot be posed to {loaded.source}: {refused}") from refused
    accuracy, error = read_accuracy(measured, name, metric)
    num_problems = sum(count["effective"] for count in measured["n-samples"].values())
    return TaskResult(
        task=task,
        accuracy=accuracy,
        accuracy_se=error or wilson_se(accuracy * num_problems, num_problems),
        num_problems=num_problems,
        num_correct=None,
        num_unfinished=None,
        generated_tokens=lm.generated_tokens,
        lengths=tuple(lm.lengths),
    )


def read_accuracy(results: Mapping[str, Any], name: str, metric: str) -> tuple[float, float | None]:
    """The metric's value and standard error in what ``simple_evaluate`` gave; see measure_harness."""
    values = results["results"].get(name, {})
    better = results.get("higher_is_better", {}).get(name, {})
    # Keys are "metric,filter" and "metric_stderr,filter", with others.
    found = {key: value for key, value in values.items() if "," in key and "_stderr," not in key}
    for key, value in found.items():
        short, _, rule = key.partition(",")
        is_wanted = metric in (key, short) if metric else bool(better.get(short))
        if is_wanted and not better.get(short, True):
            raise UsageError(
                f"lm-eval's metric {key!r} of {name!r} is better when it is less: it cannot be an accuracy"
            )
        if is_wanted and isinstance(value, int | float):
            if not 0 <= value <= 1:
                raise UsageError(f"lm-eval's metric {key!r} of {name!r} is {value:.6g}, expected a share from 0 to 1")
            error = values.get(f"{short}_stderr,{rule}")
            return float(value), float(error) if isinstance(error, int | float) else None
    raise UsageError(
        f"lm-eval's task {name!r} has no metric {metric or 'of which more is better'}; it has {sorted(found)}",
        hint=f"name one: {LM_EVAL}{name}:METRIC",
    )
