"""The evaluation of several plans of one model: text quality and task accuracy beside exact bytes, saved row by row.

Every number comes through the packed cache (text, tasks).

The file is rewritten after each plan, so an interrupted run loses one row at most. A row is kept if its plan (formats,
workload and model, not its name or provenance) and the evaluation's inputs are the same; other inputs start the file
anew. Plans that are equal under two names are measured once. Of several processes, each measures a plan at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcal.artifact import differing_input
from kvcal.data.pools import require_unseen
from kvcal.data.sequences import TokenDataset
from kvcal.distributed import gather, map_over_ranks
from kvcal.errors import UsageError
from kvcal.folder import compute_dtype, model_inputs, require_model
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import Plan
from kvcal.progress import Reporter
from kvcal.recipe import EvaluateSpec
from kvcal.stages.evaluate.harness import measure_harness
from kvcal.stages.evaluate.record import Evaluation, Row, load_evaluation, measured_bits, save_evaluation
from kvcal.stages.evaluate.tasks import measure_reading, measure_tasks
from kvcal.stages.evaluate.text import measure_text
from kvcal.stages.verify import require_same_model
from kvcal.strict import flat_records


def evaluation_inputs(loaded: LoadedModel, spec: EvaluateSpec, data: TokenDataset) -> dict[str, Any]:
    """Everything but the plans that the rows of an evaluation depend on, flat; rows are kept one by one."""
    settings = flat_records(evaluate=replace(spec, against=()))
    return {**model_inputs(loaded), **settings, "data.fingerprint": data.fingerprint, **compute_dtype(loaded)}


def evaluate(
    loaded: LoadedModel,
    plans: Sequence[tuple[str, Plan]],
    spec: EvaluateSpec,
    data: TokenDataset,
    inputs: dict[str, Any],
    path: str | Path,
    reporter: Reporter,
) -> Evaluation:
    """Measure every (name, plan) that ``path`` does not hold yet, saving after each.

    ``inputs`` must name everything but the plans that the numbers depend on; fields of the model begin with "model.".

    Raises:
        ArtifactError: ``path`` is corrupt, another model's, or cannot be written; a plan is another model's; a cache
            whose bytes are not the predicted ones.
        NonFiniteActivations, UsageError: see measure_text and measure_tasks.
        UsageError: a plan was made from a sequence of ``data``.
    """
    path = Path(path)
    for _, plan in plans:
        require_same_model(plan, loaded)
    digests = [plan.sha256 for _, plan in plans]
    measured = kept_rows(path, inputs, reporter)

    def save() -> Evaluation:
        named = zip(plans, digests, strict=True)
        rows = tuple(replace(measured[digest], name=name) for (name, _), digest in named if digest in measured)
        evaluation = Evaluation(inputs, data.description, data.fingerprint, spec.seed, rows)
        save_evaluation(evaluation, path)
        return evaluation

    numbers: dict[str, int] = {}  # by digest, of the plans to measure: equal ones once
    for number, digest in enumerate(digests):
        if digest in measured or digest in numbers:
            reporter.say(f"evaluate: {plans[number][0]} is measured already, kept")
        else:
            numbers[digest] = number

    def measure(number: int) -> Row:
        name, plan = plans[number]
        reporter.say(f"evaluate: {name} ({number + 1} of {len(plans)})")
        reporter(number, len(plans), "evaluate: plans")
        return _measure(loaded, name, plan, spec, data, reporter)

    gather(None)  # all ranks have read the rows that are kept
    for digest, row in zip(numbers, map_over_ranks(list(numbers.values()), measure), strict=True):
        measured[digest] = row
        save()
    evaluation = save()
    gather(None)  # until rank 0 has written the file
    return evaluation


def scheduled_batch(spec: EvaluateSpec, plans: Iterable[tuple[str, Plan]], reporter: Reporter) -> EvaluateSpec:
    """``spec`` with a batch that every (name, plan) can hold: plans whose pages shrink are scheduled for
    ``workload.batch`` sequences. All plans are measured alike."""
    limits = {name: plan.workload.batch for name, plan in plans if plan.is_progressive}
    name = min(limits, key=limits.__getitem__, default="")
    if not limits or spec.batch <= limits[name]:
        return spec
    reporter.say(f"evaluate: {limits[name]} sequences at a time: the pages of {name} shrink on a schedule for no more")
    return replace(spec, batch=limits[name])


def require_scheduled_texts(plans: Iterable[tuple[str, Plan]], data: TokenDataset) -> None:
    """UsageError where a text of ``data`` is longer than the schedule of a (name, plan) whose pages shrink."""
    longest = max(sequence.numel() for sequence in data.sequences)
    for name, plan in plans:
        if plan.is_progressive and longest > plan.workload.context:
            raise UsageError(
                f"a text of {longest} tokens, and the pages of {name} shrink on a schedule for {plan.workload.context}",
                hint="lower seq_len in [evaluate], or allocate with a longer --context",
            )


def kept_rows(path: Path, inputs: dict[str, Any], reporter: Reporter) -> dict[str, Row]:
    """Rows of an earlier run with the same inputs, by plan; the reporter is told why there are none."""
    if not path.exists():
        return {}
    earlier = load_evaluation(path)
    require_model(path, inputs, earlier.inputs)
    if (difference := differing_input(inputs, earlier.inputs)) is not None:
        reporter.say(f"evaluate: starts anew, {difference}")
        return {}
    return {row.plan_sha256: row for row in earlier.rows}


def _measure(
    loaded: LoadedModel,
    name: str,
    plan: Plan,
    spec: EvaluateSpec,
    data: TokenDataset,
    reporter: Reporter,
) -> Row:
    started = time.monotonic()
    require_unseen(plan.provenance, data)
    text = measure_text(loaded, plan, data, spec.batch, reporter)
    tasks = tuple(
        result
        for measure in (measure_tasks, measure_reading, measure_harness)
        for result in measure(loaded, plan, spec, reporter)
    )
    return Row(
        name=name,
        plan_sha256=plan.sha256,
        workload=plan.workload,
        bits_per_value=plan.bits_per_value(),
        total_bytes=plan.predicted_bytes,
        text=text,
        text_bits=measured_bits(plan, [tokens_T.numel() for tokens_T in data.sequences]),
        tasks=tasks,
        task_bits=measured_bits(plan, [length for task in tasks for length in task.lengths]) if tasks else None,
        seconds=round(time.monotonic() - started, 3),
    )
