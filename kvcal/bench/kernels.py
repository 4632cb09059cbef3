"""One layer's work: ``kvcal bench kernels`` times its attention, ``kvcal bench layer`` all of its cache work in a step.

Size by size: first the baselines, then the formats, so that every row is written with its factor as soon as it is
measured. A format that no kernel serves is a row with the reason.

Kernels: decode attention over packed pages against that of every other library over 16 bits. A format's output is
compared with fp64 over the decoded pages before its time counts; a wrong one is a row without a time. What ran becomes
the table of step times, which a search reads.

Layer: a step stores its token, packs the page that is full, reconstructs pages that are not read as they are stored,
and attends. One of 128 steps packs a page; those steps and the others are timed apart, by the same graph replayed at
another length, and averaged. That all sequences fill their pages in the same step is the worst case for that step and
changes nothing in the mean. The baseline is transformers' StaticCache: its update, then SDPA by the fastest backend and
without a mask. What packing a whole prompt takes is timed beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers.cache_utils import StaticLayer

from kvcal.bench import baselines
from kvcal.bench.case import ROOM, KernelCase, kernel_case, kernel_use, prefill_call, refusal, set_length
from kvcal.bench.device import (
    QUICK_REPLAYS,
    REPLAYS,
    Call,
    Machine,
    Times,
    attempted,
    event_ms,
    graph_times,
    machine_of,
    measure_read_ceiling,
    num_caches,
    spread,
)
from kvcal.bench.plan_layers import TimedPlan
from kvcal.bench.record import RIVALS, Baseline, LayerReport, Row, Step, fastest, measure
from kvcal.bench.rivals import measured_rivals
from kvcal.bench.shape import Heads, Pair, Point, Stored, bits_per_value, raw_bytes, step_bytes
from kvcal.pages.record_layout import PAGE_TOKENS, RAW_BITS
from kvcal.plan.plan import Workload
from kvcal.progress import Reporter
from kvcal.stages.search import step_times

# Rounding the output to bf16 alone is about 0.002 of it; a wrong scale, page or slot is beyond a tenth.
LARGEST_ERROR = 0.02
QUANTIZED_CACHE_BITS = (4, 2)
PICTURE = "kernels.png"


@dataclass(frozen=True)
class Job:
    """Work of a measurement, and the folder of ``kernels.json`` or ``layer.json``. ``plan``: whose kinds of layers
    ``pairs`` are, if they are those of a plan."""

    device: torch.device
    pairs: Sequence[Stored]
    points: Sequence[Point]
    heads: Heads
    folder: Path
    reporter: Reporter
    is_quick: bool = False
    plan: TimedPlan | None = None

    @property
    def replays(self) -> int:
        return QUICK_REPLAYS if self.is_quick else REPLAYS


def bench_kernels(job: Job) -> LayerReport:
    """Measure attention, and write the step times that a search reads. Interrupted: on Ctrl-C."""
    report = _run(job, "kernels", measure_baselines, partial(measure_pair, measure_attention))
    times = step_times_of(job, report)
    if times.times:
        step_times.save(times, {"kvcal": report.machine.kvcal}, job.folder / step_times.FILE)
    return report


def step_times_of(job: Job, report: LayerReport) -> step_times.StepTimes:
    """The times of all layers at sizes where another library's 16 bits ran, and of 16 bits the fastest."""
    stored = {pair.name: pair for pair in job.pairs}
    found = []
    for row in report.rows:
        workload, best = Workload(row.point.batch, row.point.context), report.fastest(row.point)
        if row.times is not None and best is not None and best.times is not None:
            layer = step_times.timed_as(stored[row.format].layers(job.heads, 3)[1])
            found.append(step_times.StepTime(workload, layer, row.times.median_us))
            raw = step_times.unquantized(layer)
            found.append(step_times.StepTime(workload, raw, best.times.median_us))
    return step_times.merged(report.machine.device, found)


def bench_layer(job: Job) -> LayerReport:
    """Measure all of a step's cache work. Interrupted: on Ctrl-C."""
    return _run(job, "layer", measure_static_cache, partial(measure_pair, measure_step))


def _run(
    job: Job,
    kind: Literal["kernels", "layer"],
    of_point: Callable[[Job, Machine, Point], Step],
    of_pair: Callable[[Job, Machine, Stored, Point], Step],
) -> LayerReport:
    job.reporter.say("bench: read bandwidth")
    machine, ceiling = machine_of(job.device), measure_read_ceiling(job.device)
    formats = tuple(pair for pair in job.pairs if isinstance(pair, Pair))
    report = LayerReport(kind=kind, machine=machine, formats=formats, ceiling=ceiling, heads=job.heads, plan=job.plan)
    steps = [
        step
        for point in job.points
        for step in (of_point(job, machine, point), *(of_pair(job, machine, pair, point) for pair in job.pairs))
    ]
    return measure(report, job.folder, job.reporter, steps)


def measure_baselines(job: Job, machine: Machine, point: Point) -> Step:
    """All libraries on the same keys and values."""
    kv = baselines.Kv(job.heads, point, num_caches(raw_bytes(job.heads, point), machine, job.is_quick), job.device)
    entries = [baseline for baseline, _ in baselines.sdpa(kv, job.replays)]
    entries += [baselines.flex(kv, job.replays), *baselines.flashinfer(kv, job.replays)]
    entries += measured_rivals(kv, job.replays)
    if point == job.points[0]:  # its bytes grow with the tokens and nothing else
        entries += [baselines.quantized_cache(kv, num_bits) for num_bits in QUANTIZED_CACHE_BITS]
    best = {bits: fastest(entry for entry in entries if entry.bits == bits) for bits in (RAW_BITS, *RIVALS)}
    text = "; ".join(
        f"{bits} bits: {entry.name}, {entry.times} µs" for bits, entry in best.items() if entry is not None
    )
    yield entries, f"{point.name}, {text or 'no other library ran'}"


def measure_static_cache(job: Job, machine: Machine, point: Point) -> Step:
    """StaticCache's update of one layer, then the fastest SDPA over the tokens that are there."""
    count = num_caches(raw_bytes(job.heads, point), machine)
    name, version = "StaticCache update + SDPA", f"transformers {transformers.__version__}"
    best = baselines.fastest_sdpa(job.heads, point, job.device, count, REPLAYS)
    if best is None:
        entry = Baseline(point, name, version, reason="no backend of SDPA takes this input")
    else:
        sdpa, attention = best
        kv = baselines.Kv(job.heads, Point(point.batch, PAGE_TOKENS), 1, job.device)
        k_new, v_new = (x[:, :, :1] for x in kv.caches[0])
        layers: list[Any] = [StaticLayer(point.context + ROOM) for _ in range(count)]
        for layer in layers:
            layer.update(k_new, v_new)
            layer.keys.normal_()
            layer.values.normal_()
            layer.cumulative_length.fill_(point.context)

        def step(layer: StaticLayer) -> None:
            keys, values = layer.update(k_new, v_new)
            attention(kv.q, keys[:, :, : point.context], values[:, :, : point.context])

        calls: list[Call] = [partial(step, layer) for layer in layers]
        name, version = f"StaticCache update + {sdpa.name}", f"{version}, {sdpa.version}"
        entry = replace(
            kv.measured(name, version, lambda: calls, REPLAYS), point=point, nbytes=raw_bytes(job.heads, point)
        )
    yield [entry], f"{point.name}, {entry.name}: {entry.reason or f'{entry.times} µs'}"


def measure_pair(
    measured: Callable[[Job, KernelCase, Row], Row], job: Job, machine: Machine, pair: Stored, point: Point
) -> Step:
    """One format at one size; ``measured`` fills in the times of its row."""
    nbytes = step_bytes(pair, job.heads, point)
    row = Row(point, pair.name, nbytes, bits_per_value(pair, job.heads, point), reason=refusal(pair, job.heads))
    if row.reason is None:
        # Where pages are reconstructed, most bytes are those of a workspace that all caches share, as layers do, and a
        # call takes long: no more caches than its bytes ask for.
        count = num_caches(nbytes.total, machine, job.is_quick or nbytes.reconstructed > 0)

        def measure() -> Row:
            case = kernel_case(pair, job.heads, point, count, job.device)
            return measured(job, case, replace(row, kernel=kernel_use(case.layers)))

        found, reason = attempted(measure)
        row = found or replace(row, reason=reason)
    yield [row], f"{point.name}, {pair.name}: {row.reason or f'{row.times} µs'}"


def measure_attention(job: Job, case: KernelCase, row: Row) -> Row:
    error = case.relative_error()
    if not error <= LARGEST_ERROR:  # NaN is wrong, too
        return replace(row, reason=f"wrong result: relative error {error:.2g}, at most {LARGEST_ERROR} allowed")
    return replace(row, times=graph_times(case.calls(case.attend), job.replays), relative_error=error)


def measure_step(job: Job, case: KernelCase, row: Row) -> Row:
    """Steps are timed without advancing: each replay packs the same page again."""

    def times_at(num_tokens: int, work: Callable[[Any], object]) -> Times:
        set_length(case.cache, num_tokens)
        return graph_times(case.calls(work), REPLAYS)

    packing, plain = step_lengths(case.point.context)
    prefill, prefill_bytes = prefill_call(case, case.point.context // PAGE_TOKENS)
    return replace(
        row,
        times=times_at(plain, case.step),
        packing=(times_at(packing, case.step),),
        append=times_at(plain, case.append),
        prefill=spread([1000 * duration for duration in event_ms([prefill] * REPLAYS)], 1),
        prefill_bytes=prefill_bytes,
    )


def step_lengths(context: int) -> tuple[int, int]:
    """Two lengths near ``context``: the next token completes a page; and half a page before that."""
    packing = context // PAGE_TOKENS * PAGE_TOKENS + PAGE_TOKENS - 1
    return packing, packing - PAGE_TOKENS // 2
