"""The evaluation of several plans of one model: text quality, task accuracy and acceptance of drafts next to
exact bytes, saved row by row.

Every number comes through the packed cache (text, tasks, drafts).

The file is rewritten after each plan, so an interrupted run loses one row at most. A row is kept if its plan
(formats, workload and model, not its name or provenance) and the evaluation's inputs are the same; other
inputs start the file anew. Plans that are equal under two names are measured once. Of several processes, each
measures a plan at a time.

A plan is priced at its workload, and measured on sequences that are mostly shorter, of which sinks, windows
and unfilled pages are a larger part. So each row states the bits at the measured lengths, too:

    sum_i nbytes(batch x n_i) / sum_i batch n_i,  in bits per cached value,  n_i: tokens of sequence i at its
    end

with the workload's batch, which shares the plan's tensors as the price does, and bytes as in
``Plan.bits_per_value``.

Gates are limits that a row is held against, such as those of a CI job: of KL, of accuracy, and of bytes. A
measured value is compared as it stands. Its standard error is told next to it; a limit should leave room for
it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor

from kvcal.artifact import differing_input
from kvcal.data.pools import require_unseen
from kvcal.data.reading import EvaluateSpec
from kvcal.data.sequences import TokenDataset
from kvcal.distributed import gather, map_over_ranks, world_size
from kvcal.errors import GateFailed, UsageError
from kvcal.folder import compute_dtype, model_inputs, require_model
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import Plan, Workload
from kvcal.progress import Reporter
from kvcal.quantities import format_bytes
from kvcal.records import read_json, write_json
from kvcal.stages.evaluate.drafts import DraftQuality, Drafts, measure_drafts, propose
from kvcal.stages.evaluate.harness import measure_harness
from kvcal.stages.evaluate.tasks import TaskResult, mean_accuracy, mean_interval, measure_reading, measure_tasks
from kvcal.stages.evaluate.text import TEXT, TextQuality, measure_text, reference_logits
from kvcal.stages.verify import require_same_model
from kvcal.strict import STRICT, Amount, NumBytes, flat_records

KIND = "evaluation"
SCHEMA = 3
ALL_TASKS = "all"  # the mean over tasks
FEW = 20  # problems, below which a share of them is told as "3 of 4"


@pydantic_dataclass(frozen=True, config=STRICT)
class MeasuredBits:
    """All-in bits per cached value at the lengths that were measured, whose mean is ``mean_tokens``."""

    bits_per_value: Amount
    mean_tokens: Amount

    @property
    def header(self) -> str:
        """Of a table's column."""
        return f"bits at {self.mean_tokens:.0f} tokens"

    @property
    def cell(self) -> str:
        """In a column of other lengths in every row."""
        return f"{self.bits_per_value:.3f} ({self.mean_tokens:.0f} tokens)"


@pydantic_dataclass(frozen=True, config=STRICT)
class Row:
    """One plan. ``bits_per_value`` counts everything and ``total_bytes`` is the whole cache, both at
    ``workload``; ``text_bits`` and ``task_bits`` are at the texts' and at the solved problems' lengths,
    prompt and completion; ``seconds`` is what measuring took, on whatever else the machine was doing;
    ``drafts``: None without a draft."""

    name: str
    plan_sha256: str
    workload: Workload
    bits_per_value: Amount
    total_bytes: NumBytes
    text: TextQuality
    text_bits: MeasuredBits
    tasks: tuple[TaskResult, ...]
    task_bits: MeasuredBits | None
    seconds: Amount
    drafts: DraftQuality | None = None

    @property
    def accuracy(self) -> float | None:
        return mean_accuracy(self.tasks)[0] if self.tasks else None

    @property
    def accuracy_se(self) -> float | None:
        return mean_accuracy(self.tasks)[1] if self.tasks else None


@pydantic_dataclass(frozen=True, config=STRICT)
class Evaluation:
    """``inputs``: what it was measured with (model, data and settings), flat. ``data`` describes the text for
    people; ``task_seed`` seeds the problems. ``rows`` in the order the plans were given."""

    inputs: dict[str, Any]
    data: str
    data_fingerprint: str
    task_seed: int
    rows: tuple[Row, ...]


def measured_bits(plan: Plan, lengths: Sequence[int]) -> MeasuredBits:
    """The bits of sequences of these lengths, in tokens, at least one: see the module's docstring."""
    bits = sum(n * plan.bits_per_value(Workload(plan.workload.batch, n)) for n in lengths) / sum(lengths)
    return MeasuredBits(bits, sum(lengths) / len(lengths))


def table_columns(rows: Sequence[Row]) -> list[tuple[str, tuple[str, ...]]]:
    """The rows as (header, one cell a row) columns, those first that say most: text, ready to print. None
    without rows."""
    if not rows:
        return []
    workload = rows[0].workload
    columns = [
        ("plan", [row.name for row in rows]),
        (f"bits at {workload.batch} x {workload.context}", [f"{row.bits_per_value:.3f}" for row in rows]),
        ("KL to 16 bits", [_with_error(row.text.kl, row.text.kl_se, 5) for row in rows]),
    ]
    if all(row.text.kl_99 is not None for row in rows):
        tails = [f"{row.text.kl_99:.4f}, {row.text.kl_999:.4f}" for row in rows]
        columns.append(("99 and 99.9 % of KL below", tails))
    if len(rows[0].tasks) > 1:
        means = [percent(*mean_accuracy(row.tasks), mean_interval(row.tasks)) for row in rows]
        columns.append(("all tasks %", means))
    columns.append(("top-1 %", [percent(row.text.top1_agreement, row.text.top1_se) for row in rows]))
    if drafts := [row.drafts for row in rows if row.drafts is not None]:
        shares = [percent(one.accepted, one.accepted_se, (0.0, 1.0)) for one in drafts]
        columns.append(("drafts accepted %", shares))
        changes = [_with_error(100 * one.change, one.change_se and 100 * one.change_se, 1) for one in drafts]
        columns.append(("change from 16 bits", changes))
    columns.append(("cache", [format_bytes(row.total_bytes) for row in rows]))
    for results in zip(*(row.tasks for row in rows), strict=True):
        columns.append((task_header(results[0]), [task_cell(task) for task in results]))
    perplexities = [_with_error(row.text.perplexity, row.text.perplexity_se, 4) for row in rows]
    columns.append(("perplexity", perplexities))
    columns.append((rows[0].text_bits.header, [f"{row.text_bits.bits_per_value:.3f}" for row in rows]))
    if rows[0].tasks:
        columns.append(("bits at tasks' lengths", [row.task_bits.cell if row.task_bits else "" for row in rows]))
        columns.append(("generated", [str(sum(task.generated_tokens for task in row.tasks)) for row in rows]))
    return [(header, tuple(cells)) for header, cells in columns]


def _with_error(value: float, error: float | None, digits: int) -> str:
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def percent(share: float, error: float | None, interval: tuple[float, float] | None = None) -> str:
    """A cell: a share and its standard error, None if unknown, in %; or its interval, where the error would
    lead out of 0 to 100 %: the error's own, cut there, unless given."""
    if error is None or 0 <= share - error <= share + error <= 1:
        return _with_error(100 * share, None if error is None else 100 * error, 1)
    low, high = interval or (max(0.0, share - error), min(1.0, share + error))
    return f"{100 * share:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def _is_counted(task: TaskResult) -> bool:
    return task.num_correct is not None and task.num_problems < FEW


def task_header(task: TaskResult) -> str:
    header = task.task if _is_counted(task) else f"{task.task} %"
    return header if task.lost is None else f"{header}; nats lost"


def task_cell(task: TaskResult) -> str:
    """A task's accuracy, in % with its error; of few problems, how many were solved; and the nats that an
    answer loses."""
    solved = (
        f"{task.num_correct} of {task.num_problems}"
        if _is_counted(task)
        else percent(task.accuracy, task.accuracy_se, task.interval)
    )
    return solved if task.lost is None else f"{solved}; {_with_error(task.lost, task.lost_se, 3)}"


def save_evaluation(evaluation: Evaluation, path: str | Path) -> None:
    """Write the JSON file whole or not at all; ArtifactError when it cannot be written."""
    write_json(path, KIND, SCHEMA, evaluation)


def load_evaluation(path: str | Path) -> Evaluation:
    """Read what ``save_evaluation`` wrote. ArtifactError: missing, unreadable, not JSON, of another kind or
    version, corrupt, or values out of range."""
    return read_json(path, KIND, SCHEMA, Evaluation, "delete the file and run the evaluation again")


@dataclass(frozen=True)
class GateResult:
    """One limit and what was measured; ``standard_error`` is None where there is none."""

    gate: str
    limit: float
    measured: float
    standard_error: float | None
    passed: bool


@dataclass(frozen=True)
class Gates:
    """Limits of one plan: ``max_kl`` in nats per token, ``min_accuracy`` as a share by task or "all" for
    their mean, ``max_bytes`` of the cache at the plan's workload; what is None or not named is not
    limited."""

    max_kl: float | None = None
    min_accuracy: Mapping[str, float] = field(default_factory=dict)
    max_bytes: int | None = None

    def require_measured(self, tasks: Sequence[str]) -> None:
        """UsageError for a limit out of range, or for a task that is not among ``tasks``, those to be
        measured."""
        if self.max_kl is not None and not (math.isfinite(self.max_kl) and self.max_kl >= 0):
            raise UsageError(f"--max-kl {self.max_kl}; expected a number from 0 on, in nats per token")
        allowed = (*tasks, ALL_TASKS) if tasks else ()
        for task, share in self.min_accuracy.items():
            if not 0 <= share <= 1:
                raise UsageError(f"--min-accuracy {task}={share}; expected a share from 0 to 1")
            if task not in allowed:
                raise UsageError(
                    f"--min-accuracy {task}={share}: {task!r} is not measured; allowed: {', '.join(allowed) or 'none'}",
                    hint=f"add it to the tasks: --tasks {task}",
                )

    def results(self, row: Row) -> Iterator[GateResult]:
        """The verdict of each limit on the plan of ``row``."""
        if self.max_kl is not None:
            kl = row.text.kl
            yield GateResult("max_kl", self.max_kl, kl, row.text.kl_se, kl <= self.max_kl)
        by_task = {one.task: (one.accuracy, one.accuracy_se) for one in row.tasks}
        for task, share in self.min_accuracy.items():
            measured, error = by_task.get(task, (row.accuracy, row.accuracy_se))
            assert measured is not None
            yield GateResult(f"min_accuracy {task}", share, measured, error, measured >= share)
        if self.max_bytes is not None:
            yield GateResult("max_bytes", self.max_bytes, row.total_bytes, None, row.total_bytes <= self.max_bytes)


def read_accuracies(texts: Sequence[str]) -> dict[str, float]:
    """Least shares by task, of ``task=share`` texts; a share alone is of all tasks together. UsageError for
    others."""
    found = {}
    for text in texts:
        task, equals, share = text.rpartition("=")
        try:
            found[task if equals else ALL_TASKS] = float(share)
        except ValueError:
            raise UsageError(
                f"--min-accuracy {text}: {share!r} is no number", hint="for example --min-accuracy chain=0.9"
            ) from None
    return found


def require_passed(name: str, results: Sequence[GateResult]) -> None:
    """GateFailed, naming every limit that the plan ``name`` is beyond."""
    failed = [f"{one.gate}: {one.measured:.6g}, limit {one.limit:.6g}" for one in results if not one.passed]
    if failed:
        raise GateFailed(
            f"{name} fails {len(failed)} of {len(results)} gates: {'; '.join(failed)}",
            hint="give the plan more bytes, or raise the limit",
        )


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

    ``inputs`` must name everything but the plans that the numbers depend on; fields of the model begin with
    "model."."""
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
    logits = reference_logits(loaded, data, spec.batch, reporter) if len(numbers) > 1 else []
    drafts = propose(loaded, spec.draft, data, spec.batch, reporter) if spec.draft and numbers else None

    progress = _AllPlans(reporter, math.ceil(len(numbers) / world_size()))

    def measure(number: int) -> Row:
        name, plan = plans[number]
        reporter.say(f"evaluate: {name} ({number + 1} of {len(plans)})")
        progress.num_begun += 1
        return _measure(loaded, name, plan, spec, data, logits, drafts, progress)

    gather(None)  # all ranks have read the rows that are kept
    for digest, row in zip(numbers, map_over_ranks(list(numbers.values()), measure), strict=True):
        measured[digest] = row
        save()
    evaluation = save()
    gather(None)  # until rank 0 has written the file
    return evaluation


class _AllPlans:
    """A Reporter for ``num_plans`` measurements of one text after the other, whose progress it shows as
    one."""

    def __init__(self, reporter: Reporter, num_plans: int) -> None:
        self.say, self._reporter, self._num_plans, self.num_begun = reporter.say, reporter, num_plans, 0

    def __call__(self, done: int, total: int, label: str) -> None:
        if label == TEXT:
            before = (self.num_begun - 1) * total
            self._reporter(before + done, self._num_plans * total, f"{TEXT} of all plans")
        else:
            self._reporter(done, total, label)


def scheduled_batch(spec: EvaluateSpec, plans: Iterable[tuple[str, Plan]], reporter: Reporter) -> EvaluateSpec:
    """``spec`` with a batch that every (name, plan) can hold: plans on a schedule hold for
    ``workload.batch`` sequences. All plans are measured alike."""
    limits = {name: plan.workload.batch for name, plan in plans if plan.is_progressive}
    name = min(limits, key=limits.__getitem__, default="")
    if not limits or spec.batch <= limits[name]:
        return spec
    reporter.say(f"evaluate: {limits[name]} sequences at a time: the bits of {name} are scheduled for no more")
    return replace(spec, batch=limits[name])


def require_scheduled_texts(plans: Iterable[tuple[str, Plan]], data: TokenDataset) -> None:
    """UsageError where a text of ``data`` is longer than the schedule of a (name, plan) that has
    one."""
    longest = max(sequence.numel() for sequence in data.sequences)
    for name, plan in plans:
        if plan.is_progressive and longest > plan.workload.context:
            raise UsageError(
                f"a text of {longest} tokens, and the bits of {name} are scheduled for {plan.workload.context}",
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
    logits: Sequence[Tensor],
    drafts: Drafts | None,
    reporter: Reporter,
) -> Row:
    started = time.monotonic()
    require_unseen(plan.provenance, data)
    text = measure_text(loaded, plan, data, spec.batch, reporter, logits)
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
        drafts=None if drafts is None else measure_drafts(loaded, plan, drafts, reporter),
    )
