"""``kvcal bench e2e``: decode tokens per second of a whole model, with the batch grown until the memory is full.

For every plan and context the batches are 1, 4, 16, ... and the largest that fits into each of the given memories.
That largest is computed (weights, cache, reserve) and then enforced: torch's allocator is not given more than the
memory less what CUDA itself holds, and a batch that does run out is tried again a tenth smaller. Peak memory is read
off the allocator.

Three questions are kept apart. At the same batch: how much faster is a step? With the same memory: how many tokens a
second does a device of so many bytes give, when each plan takes as many sequences as fit? And what does packing add to
the time of a prompt (kvcal.bench.model)?
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import dataclasses as pydantic
from transformers import PreTrainedModel

from kvcal.bench import baselines
from kvcal.bench.case import KernelUse, refusal
from kvcal.bench.device import (
    OUT_OF_MEMORY,
    QUICK_REPLAYS,
    Times,
    attempted,
    collect,
    context_bytes,
    machine_of,
    num_caches,
)  # fmt: skip
from kvcal.bench.model import (
    DYNAMIC_16,
    ROOM,
    PrefillRow,
    Static16,
    StaticPlan,
    heads_of,
    measure_prefill,
    model_plan,
    time_steps,
)  # fmt: skip
from kvcal.bench.plan_layers import TimedPlan
from kvcal.bench.record import KERNELS, Column, Report, Step, Table, measure
from kvcal.bench.shape import RAW_PAIR, Pair, Point, Stored, raw_bytes
from kvcal.errors import UsageError
from kvcal.progress import Reporter
from kvcal.quantities import format_bytes, parse_bytes
from kvcal.store.workspace import step_workspace
from kvcal.strict import STRICT

# Plans in 16 bits; the factors of whole steps are against the faster of the two.
BASELINES = TRANSFORMERS_16, FASTEST_16 = "16, transformers", "16, fastest SDPA"
GROWTH = 4
# Beside weights and cache: activations, logits and the graph's own memory, fixed and for every sequence.
RESERVE, RESERVE_PER_SEQUENCE = 512 << 20, 4 << 20
# Sequences of a batch beyond which what a step computes with on the way (StepWorkspace.passing) grows no more.
MANY = 1024
TRIES, SMALLER = 4, 0.9
WHOLE_DEVICE = "all"  # as a limit
USUAL_MEMORY = (24 * 10**9, 80 * 10**9)


@dataclass(frozen=True)
class StepJob:
    """Work of a measurement, and its folder. ``memory``: bytes of device memory, each a limit of its own; ``plan``: the
    plan that ``pairs`` holds."""

    model: PreTrainedModel
    shape: str
    weights: str
    pairs: Sequence[Stored]
    contexts: Sequence[int]
    memory: Sequence[int]
    folder: Path
    reporter: Reporter
    plan: TimedPlan | None = None


@pydantic.dataclass(frozen=True, config=STRICT)
class StepRow:
    """One plan at one batch. ``limit_bytes``: device memory that the run was held to; ``peak_bytes``: taken of it, the
    CUDA context included; ``kernel``: of attention. Without ``steps`` there is a ``reason``."""

    plan: str
    context: int
    batch: int
    limit_bytes: int
    kernel: KernelUse | None = None
    steps: Times | None = None
    tokens_per_s: float | None = None
    peak_bytes: int | None = None
    cache_bytes: int | None = None
    reason: str | None = None

    def fits(self, memory: int) -> bool:
        return self.peak_bytes is not None and self.peak_bytes <= memory


@pydantic.dataclass(frozen=True, config=STRICT, kw_only=True)
class StepReport(Report):
    """Results of ``bench e2e``. ``context_bytes``: of the device, held by CUDA itself and by other processes;
    ``memory``: the limits in bytes."""

    kind: str = "e2e"
    shape: str
    weights: str
    weight_bytes: int
    context_bytes: int
    memory: tuple[int, ...]
    rows: tuple[StepRow, ...] = ()
    prompts: tuple[PrefillRow, ...] = ()

    def with_entries(self, entries: Sequence[Any]) -> Self:
        prompts = [entry for entry in entries if isinstance(entry, PrefillRow)]
        others = [entry for entry in entries if not isinstance(entry, PrefillRow)]
        return replace(super().with_entries(others), prompts=(*self.prompts, *prompts))

    def to_first_token(self, row: PrefillRow) -> float | None:
        """Time of the prompt over that of the 16-bit cache; above 1 is slower."""
        raw = [other.times for other in self.prompts if (other.plan, other.context) == (DYNAMIC_16, row.context)]
        if row.times is None or not raw or raw[0] is None:
            return None
        return row.times.median_us / raw[0].median_us

    def same_batch(self, row: StepRow) -> float | None:
        """Tokens a second over those of the fastest 16-bit cache at the same context and batch; None where that does
        not fit, or was not measured."""
        return self._factor(row, lambda raw: raw.batch == row.batch)

    def same_memory(self, row: StepRow) -> float | None:
        """Tokens a second over the best of the 16-bit caches within ``row.limit_bytes``."""
        return self._factor(row, lambda raw: raw.fits(row.limit_bytes))

    def _factor(self, row: StepRow, is_comparable: Callable[[StepRow], bool]) -> float | None:
        raw = [other for other in self.rows if other.plan in BASELINES]
        raw = [other for other in raw if other.context == row.context and is_comparable(other)]
        rates = [other.tokens_per_s for other in raw if other.tokens_per_s is not None]
        return None if row.tokens_per_s is None or not rates else row.tokens_per_s / max(rates)

    def best(self, plan: str, context: int, memory: int) -> StepRow | None:
        """The plan's most tokens a second within so many bytes of device memory."""
        rows = [row for row in self.rows if (row.plan, row.context) == (plan, context) and row.fits(memory)]
        return max(rows, key=lambda row: row.tokens_per_s or 0.0, default=None)

    def by_memory(self) -> list[StepRow]:
        """Every plan's best row in each memory (``limit_bytes``), in the order measured; batch 0 where none fits."""
        contexts, plans = dict.fromkeys(row.context for row in self.rows), dict.fromkeys(row.plan for row in self.rows)
        rows = []
        for memory, context, plan in itertools.product(self.memory, contexts, plans):
            best = self.best(plan, context, memory) or StepRow(plan, context, 0, memory)
            rows.append(replace(best, limit_bytes=memory))
        return rows

    def tables(self) -> list[Table]:
        shared = (
            Column("context", lambda row: row.context, "d"),
            Column("cache", lambda row: row.plan),
            Column("kernel", lambda row: row.kernel),
            Column("batch", lambda row: row.batch or None, "d"),
            Column("tokens/s", lambda row: row.tokens_per_s, ".0f"),
        )
        peak = Column("peak memory", lambda row: row.peak_bytes, "bytes")
        same_batch = (
            *shared,
            Column("step µs", lambda row: row.steps),
            Column("cache bytes", lambda row: row.cache_bytes, "bytes"),
            peak,
            Column("factor", self.same_batch, ".2f", "x"),
            Column("reason", lambda row: row.reason or ""),
        )
        same_memory = (
            Column("memory", lambda row: row.limit_bytes, "bytes"),
            *shared,
            peak,
            Column("factor", self.same_memory, ".2f", "x"),
        )
        title = (
            f"Decode of {self.shape} ({self.weights}) on {self.machine.device}, at the same batch; caches hold "
            f"random contents, which a step's time does not depend on{self.unfinished}\n{KERNELS}"
        )
        best = f"Decode of {self.shape} with the same memory: the batch that gives most tokens a second"
        prefill = (
            Column("context", lambda row: row.context, "d"),
            Column("cache", lambda row: row.plan),
            Column("prompt µs", lambda row: row.times),
            Column("of 16 bits", self.to_first_token, ".3f", "x"),
            Column("reason", lambda row: row.reason or ""),
        )
        return [
            Table("same_batch", title, same_batch, self.rows),
            Table("same_memory", best, same_memory, self.by_memory()),
            Table("prompts", "Time to the first token: one prompt, packed as it is taken in", prefill, self.prompts),
        ]


def bench_e2e(job: StepJob) -> StepReport:
    """Measure everything.

    Raises:
        UsageError: a device with less memory than asked for, or than the weights take.
        Interrupted: on Ctrl-C.
    """
    device = job.model.device
    report = StepReport(
        machine=machine_of(device),
        formats=tuple(pair for pair in job.pairs if isinstance(pair, Pair)),
        plan=job.plan,
        shape=job.shape,
        weights=job.weights,
        weight_bytes=sum(tensor.nbytes for tensor in {*job.model.parameters(), *job.model.buffers()}),
        context_bytes=context_bytes(device),
        memory=tuple(sorted(set(job.memory))),
    )
    require_memory(report)
    names = [TRANSFORMERS_16, FASTEST_16, *(pair.name for pair in job.pairs)]
    steps = [measure_plan(job, report, name, context) for context in job.contexts for name in names]
    prompts = [
        measure_prefill(job.model, job.shape, pair, context) for context in job.contexts for pair in (None, *job.pairs)
    ]
    return measure(report, job.folder, job.reporter, [*steps, *prompts])


def measure_plan(job: StepJob, report: StepReport, name: str, context: int) -> Step:
    """One plan at one context, at growing batches."""
    heads, pair = heads_of(job.model.config), {pair.name: pair for pair in job.pairs}.get(name, RAW_PAIR)
    reason = None if name in BASELINES else refusal(pair, heads, job.model.config.num_hidden_layers)
    if reason is not None:
        yield [StepRow(name, context, 1, report.memory[-1], reason=reason)], f"{name}: {reason}"
        return
    fixed, per_sequence = cache_bytes(job.shape, job.model, pair, context)
    if name == TRANSFORMERS_16:  # which may repeat one layer's keys and values for every query head
        per_sequence += per_sequence * heads.group // job.model.config.num_hidden_layers
    done: set[int] = set()
    for limit in report.memory:
        most = largest_batch(limit - report.context_bytes - report.weight_bytes - fixed, per_sequence)
        for batch in batches(most):
            if batch in done:
                continue
            for _ in range(TRIES):
                row = attempt(job, report, StepRow(name, context, batch, limit), pair)
                if row.reason != OUT_OF_MEMORY or batch < most or batch == 1:
                    break
                batch = most = int(SMALLER * batch)
            if row.steps is not None:
                done.add(row.batch)
            rate = row.reason or f"{row.tokens_per_s:.0f} tokens a second"
            yield [row], f"{Point(row.batch, context).name}, {name}: {rate}"


def attempt(job: StepJob, report: StepReport, row: StepRow, pair: Stored) -> StepRow:
    """The row measured within its limit of the device's bytes; out of memory is a reason."""
    device = job.model.device
    share = (row.limit_bytes - report.context_bytes) / report.machine.memory_bytes

    def measure() -> StepRow:
        timed = _cache(job, report, row, pair)
        collect()
        times = time_steps(job.model, timed, row.batch, row.context)
        return replace(
            row,
            kernel=timed.kernel,
            steps=times.steps,
            tokens_per_s=1000 * row.batch * times.steps.replays / times.total_ms,
            peak_bytes=times.peak_bytes + report.context_bytes,
            cache_bytes=timed.nbytes,
        )

    collect()
    torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
    try:
        found, reason = attempted(measure)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    return found or replace(row, reason=reason)


def _cache(job: StepJob, report: StepReport, row: StepRow, pair: Stored) -> Static16 | StaticPlan:
    """The cache of one plan."""
    model, max_tokens = job.model, row.context + ROOM
    if row.plan == TRANSFORMERS_16:
        return Static16(model, max_tokens)
    if row.plan == FASTEST_16:
        heads, point = heads_of(model.config), Point(row.batch, row.context)
        count = num_caches(raw_bytes(heads, point), report.machine, is_quick=True)
        best = baselines.fastest_sdpa(heads, point, model.device, count, QUICK_REPLAYS)
        if best is None:
            raise UsageError(f"no backend of SDPA takes {heads} at {point.name}")
        return Static16(model, max_tokens, best[1], best[0].name)
    return StaticPlan(model_plan(job.shape, model.config, pair, row.batch, max_tokens), model, max_tokens)


def batches(most: int) -> list[int]:
    """1, 4, 16, ... below ``most``, and ``most`` itself; none without room for one sequence."""
    powers = [GROWTH**exponent for exponent in range(most.bit_length())]
    return [*(power for power in powers if power < most), most] if most else []


def largest_batch(room: int, per_sequence: int) -> int:
    """Sequences whose caches, with the reserve, fit into ``room`` bytes."""
    return max(0, (room - RESERVE) // (per_sequence + RESERVE_PER_SEQUENCE))


def cache_bytes(shape: str, model: PreTrainedModel, pair: Stored, context: int) -> tuple[int, int]:
    """(bytes of a static cache however many sequences it has: the tensors of transforms, temporaries of stored forms;
    bytes of each sequence, the workspace of stored forms included)."""
    tokens = context + ROOM
    plan = model_plan(shape, model.config, pair, 1, tokens)
    one, two, many = (step_workspace(plan.layers, plan.cache_dtype, n, tokens) for n in (1, 2, MANY))
    first, both = (plan.nbytes((tokens,) * n) + workspace.forms for n, workspace in ((1, one), (2, two)))
    return 2 * first - both + many.passing, both - first


def memory_limits(texts: Sequence[str], memory_bytes: int) -> list[int]:
    """Bytes of ``--memory``, on a device with ``memory_bytes``; without any, the usual ones that it has, and all of it.
    UsageError: a text that is neither a quantity nor "all"."""
    if not texts:
        return [*(limit for limit in USUAL_MEMORY if limit < memory_bytes), memory_bytes]
    try:
        return [memory_bytes if text.strip() == WHOLE_DEVICE else parse_bytes(text) for text in texts]
    except UsageError as refused:
        raise UsageError(f"--memory: {refused.message}", hint=f"{refused.hint}; {WHOLE_DEVICE}: the device's") from None


def require_memory(report: StepReport) -> None:
    """UsageError for a limit that the device does not have, or that the weights alone exceed."""
    for limit in report.memory:
        if limit > report.machine.memory_bytes:
            raise UsageError(
                f"--memory {format_bytes(limit)}: {report.machine.device} has {report.machine.memory_bytes} bytes",
                hint="give a limit that this device has",
            )
        if report.weight_bytes + report.context_bytes + RESERVE > limit:
            raise UsageError(
                f"--memory {format_bytes(limit)}: the weights of {report.shape} take "
                f"{format_bytes(report.weight_bytes)}, CUDA {format_bytes(report.context_bytes)}",
                hint="give more memory, or a smaller --shape",
            )
