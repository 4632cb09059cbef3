"""``kvcal bench e2e``: decode tokens per second of a whole model, with the batch grown until the memory is full.

For every plan and context the batches are 1, 4, 16, ... and the largest that fits into each of the given memories.
That largest is computed (weights, cache, reserve) and then enforced: torch's allocator is not given more than the
memory less what CUDA itself holds, and a batch that does run out is tried again a tenth smaller. Peak memory is read
off the allocator.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import Cache, PreTrainedModel

from kvcal.bench import baselines
from kvcal.bench.decode_step import ROOM, Static16, StepCache, time_steps
from kvcal.bench.device import machine, require_gpu
from kvcal.bench.e2e_record import FASTEST_16, TRANSFORMERS_16, StepReport, StepRow, step_json
from kvcal.bench.kernel_case import refusal
from kvcal.bench.kernel_use import KernelUse, kernel_use
from kvcal.bench.kernels import interrupted
from kvcal.bench.random_cache import fill_cache, hold
from kvcal.bench.record import save_json
from kvcal.bench.shape import RAW_PAIR, Pair, Point, raw_bytes
from kvcal.bench.shapes import heads_of, model_plan
from kvcal.bench.timing import QUICK_REPLAYS, num_caches
from kvcal.cache.paged_attention import paged_attention
from kvcal.cache.plan_cache import PlanCache
from kvcal.errors import KvcalError, SlowPath, UsageError
from kvcal.plan.plan import Plan
from kvcal.progress import Reporter
from kvcal.quantities import format_bytes, parse_bytes
from kvcal.store.step_workspace import step_workspace

FILE = "e2e.json"
GROWTH = 4
# Beside weights and cache: activations, logits and the graph's own memory, fixed and for every sequence.
RESERVE, RESERVE_PER_SEQUENCE = 512 << 20, 4 << 20
# Sequences of a batch beyond which what a step computes with on the way (StepWorkspace.passing) grows no more.
MANY = 1024
TRIES, SMALLER = 4, 0.9
WHOLE_DEVICE = "all"  # as a limit
USUAL_MEMORY = (24 * 10**9, 80 * 10**9)
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class StepJob:
    """What to measure, and where to. ``memory``: bytes of device memory, each a limit of its own."""

    model: PreTrainedModel
    shape: str
    weights: str
    pairs: Sequence[Pair]
    contexts: Sequence[int]
    memory: Sequence[int]
    folder: Path
    reporter: Reporter


@dataclass(frozen=True)
class StaticPlan:
    """A plan's static cache, as ``time_steps`` takes it."""

    plan: Plan
    model: PreTrainedModel
    max_tokens: int

    @property
    def has_equal_steps(self) -> bool:
        return False  # one in 128 packs

    def cache(self) -> Cache:
        return PlanCache(self.plan, self.model.config, max_tokens=self.max_tokens)

    def nbytes(self, cache: Cache) -> int:
        assert isinstance(cache, PlanCache)
        return cache.nbytes

    def kernel(self, cache: Cache) -> KernelUse:
        assert isinstance(cache, PlanCache)
        return kernel_use(cache.static_layers)

    def fill(self, cache: Cache, num_tokens: int) -> None:
        assert isinstance(cache, PlanCache)
        fill_cache(cache, num_tokens)

    def rewind(self, cache: Cache, num_tokens: int) -> None:
        assert isinstance(cache, PlanCache)
        hold(cache, num_tokens)

    @contextmanager
    def attention(self, model: PreTrainedModel) -> Iterator[None]:
        with warnings.catch_warnings(), paged_attention(model):
            warnings.simplefilter("ignore", SlowPath)  # every row names its kernel
            yield


def bench_e2e(job: StepJob) -> StepReport:
    """Measure everything; the document in the folder is rewritten after every measurement.

    Raises:
        KernelError: no CUDA device.
        UsageError: one with less memory than asked for, or than the weights take.
        Interrupted: on Ctrl-C.
    """
    device = require_gpu("e2e")
    weight_bytes = sum(parameter.nbytes for parameter in {*job.model.parameters(), *job.model.buffers()})
    memory = tuple(sorted(set(job.memory)))
    report = StepReport(
        machine(device), job.shape, job.weights, weight_bytes, context_bytes(device), memory, tuple(job.pairs)
    )
    require_memory(report)
    path, number = job.folder / FILE, 0
    names = [TRANSFORMERS_16, FASTEST_16, *(pair.name for pair in job.pairs)]
    try:
        for context in job.contexts:
            for name in names:
                job.reporter(number, len(names) * len(job.contexts), "bench e2e")
                number += 1
                for row in measure(job, report, name, context):
                    report = report.with_row(row)
                    save_json(path, step_json(report))
                    rate = row.reason if row.steps is None else f"{row.tokens_per_s:.0f} tokens a second"
                    job.reporter.say(f"{Point(row.batch, context).name}, {name}: {rate}")
    except KeyboardInterrupt:
        raise interrupted(path, len(report.rows)) from None
    report = replace(report, is_complete=True)
    save_json(path, step_json(report))
    return report


def measure(job: StepJob, report: StepReport, name: str, context: int) -> Iterator[StepRow]:
    """One plan at one context, at growing batches."""
    pair = next((pair for pair in job.pairs if pair.name == name), RAW_PAIR)
    if name not in (TRANSFORMERS_16, FASTEST_16):
        reason = refusal(pair, heads_of(job.model.config))
        if reason is not None:
            yield StepRow(name, context, 1, report.memory[-1], reason=reason)
            return
    fixed, per_sequence = cache_bytes(job.shape, job.model, pair, context)
    if name == TRANSFORMERS_16:  # which may repeat one layer's keys and values for every query head
        per_sequence += per_sequence * heads_of(job.model.config).group // job.model.config.num_hidden_layers
    done: set[int] = set()
    for limit in report.memory:
        room = limit - report.context_bytes - report.weight_bytes - fixed
        most = largest_batch(room, per_sequence)
        for batch in batches(most):
            if batch in done:
                continue
            for _ in range(TRIES):
                row = attempt(job, report, name, pair, context, batch, limit)
                if row.reason != OUT_OF_MEMORY or batch < most or batch == 1:
                    break
                batch = most = int(SMALLER * batch)
            if row.steps is not None:
                done.add(row.batch)
            yield row


def attempt(job: StepJob, report: StepReport, name: str, pair: Pair, context: int, batch: int, limit: int) -> StepRow:
    """Measure one batch within ``limit`` bytes of the device; out of memory is a row with that reason."""
    row = StepRow(name, context, batch, limit)
    device, max_tokens = job.model.device, context + ROOM
    share = (limit - report.context_bytes) / report.machine.memory_bytes
    collect()
    torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
    try:
        kind = _kind(job, report, name, pair, Point(batch, context), max_tokens)
        collect()
        found = time_steps(job.model, kind, batch, context)
    except KvcalError as refused:  # not compiled, or not for this GPU: the other plans go on
        return replace(row, reason=refused.message)
    except RuntimeError as failed:
        if not ran_out(failed):
            raise
        return replace(row, reason=OUT_OF_MEMORY)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    return replace(
        row,
        kernel=found.kernel,
        steps=found.steps,
        tokens_per_s=1000 * batch * found.steps.replays / found.total_ms,
        peak_bytes=found.peak_bytes + report.context_bytes,
        cache_bytes=found.cache_bytes,
    )


def _kind(job: StepJob, report: StepReport, name: str, pair: Pair, point: Point, max_tokens: int) -> StepCache:
    """The cache of one plan."""
    heads = heads_of(job.model.config)
    if name == TRANSFORMERS_16:
        return Static16(job.model, max_tokens)
    if name == FASTEST_16:
        device, nbytes = job.model.device, raw_bytes(heads, point)
        count = num_caches(nbytes, report.machine.l2_bytes, report.machine.memory_bytes, is_quick=True)
        best = baselines.fastest_sdpa(heads, point, device, count, QUICK_REPLAYS)
        if best is None:
            raise UsageError(f"no backend of SDPA takes {heads} at {point.name}")
        return Static16(job.model, max_tokens, best[1], best[0].name)
    plan = model_plan(job.shape, job.model.config, pair, point.batch, max_tokens)
    return StaticPlan(plan, job.model, max_tokens)


def batches(most: int) -> list[int]:
    """1, 4, 16, ... below ``most``, and ``most`` itself; none without room for one sequence."""
    found, batch = [], 1
    while batch < most:
        found.append(batch)
        batch *= GROWTH
    return [*found, most] if most else []


def largest_batch(room: int, per_sequence: int) -> int:
    """Sequences whose caches, with the reserve, fit into ``room`` bytes."""
    return max(0, (room - RESERVE) // (per_sequence + RESERVE_PER_SEQUENCE))


def cache_bytes(shape: str, model: PreTrainedModel, pair: Pair, context: int) -> tuple[int, int]:
    """(bytes of a static cache however many sequences it has: the tensors of transforms, temporaries of stored forms;
    bytes of each sequence, the workspace of stored forms included)."""
    tokens = context + ROOM
    plan = model_plan(shape, model.config, pair, 1, tokens)
    scratch = {
        count: step_workspace(plan.layers, plan.cache_dtype, count, tokens, plan.tensors) for count in (1, 2, MANY)
    }
    one, two = (plan.nbytes((tokens,) * count) + scratch[count].forms for count in (1, 2))
    return 2 * one - two + scratch[MANY].passing, two - one


def memory_limits(texts: Sequence[str], memory_bytes: int) -> list[int]:
    """Bytes of ``--memory``, on a device with ``memory_bytes``; without any, the usual ones that it has, and all of it.

    Raises:
        UsageError: a text that is neither a quantity nor "all".
    """
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


def context_bytes(device: torch.device) -> int:
    """What the device's memory holds beside torch's allocator."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def ran_out(failed: BaseException) -> bool:
    """Whether memory ran out; within a capture that is the cause of another error."""
    chain: BaseException | None = failed
    while chain is not None:
        if isinstance(chain, torch.OutOfMemoryError):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def collect() -> None:
    """Give back what the last measurement held."""
    gc.collect()
    torch.cuda.empty_cache()
