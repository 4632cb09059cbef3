"""``kvcal bench kernels``: decode attention over packed pages, and everybody else's over 16 bits, in one run.

Size by size: first all baselines, then the formats, so that every row is written with its factor as soon as it is
measured. A format's output is compared with fp64 over the decoded pages before its time counts; a wrong one is a row
without a time. What a kernel refuses is a row with the reason, as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvcal.bench import baselines
from kvcal.bench.device import machine, measure_read_ceiling, require_gpu
from kvcal.bench.kernel_case import kernel_case, refusal
from kvcal.bench.record import Baseline, Interrupted, KernelReport, KernelRow, kernel_json, save_json
from kvcal.bench.shape import Heads, Pair, Point, raw_bytes
from kvcal.bench.step_bytes import bits_per_value, step_bytes
from kvcal.bench.tables import microseconds
from kvcal.bench.timing import QUICK_REPLAYS, REPLAYS, graph_times, num_caches
from kvcal.errors import KvcalError
from kvcal.progress import Reporter

FILE, PICTURE = "kernels.json", "kernels.png"
# Rounding the output to bf16 alone is about 0.002 of it; a wrong scale, page or slot is beyond a tenth.
LARGEST_ERROR = 0.02
QUANTIZED_CACHE_BITS = (4, 2)


@dataclass(frozen=True)
class Job:
    """What to measure, and where to."""

    pairs: Sequence[Pair]
    points: Sequence[Point]
    heads: Heads
    folder: Path
    is_quick: bool
    reporter: Reporter

    @property
    def replays(self) -> int:
        return QUICK_REPLAYS if self.is_quick else REPLAYS


def bench_kernels(job: Job) -> KernelReport:
    """Measure everything; the document in the folder is rewritten after every measurement.

    Raises:
        KernelError: no CUDA device.
        Interrupted: on Ctrl-C.
    """
    device = require_gpu("kernels")
    job.reporter.say("bench: read bandwidth")
    report = KernelReport(machine(device), measure_read_ceiling(device), job.heads, tuple(job.pairs))
    path = job.folder / FILE
    steps = len(job.points) * (len(job.pairs) + 1)
    try:
        for number, point in enumerate(job.points):
            job.reporter(number * (len(job.pairs) + 1), steps, "bench kernels")
            report = report.with_baselines(*measure_baselines(job, report, point, device))
            save_json(path, kernel_json(report))
            job.reporter.say(f"{point.name}, 16 bits: {_fastest(report, point)}")
            for index, pair in enumerate(job.pairs):
                job.reporter(number * (len(job.pairs) + 1) + index + 1, steps, "bench kernels")
                row = measure_pair(job, report, pair, point, device)
                report = report.with_row(row)
                save_json(path, kernel_json(report))
                time = row.reason if row.times is None else f"{microseconds(row.times)} µs"
                job.reporter.say(f"{point.name}, {pair.name}: {time}")
    except KeyboardInterrupt:
        raise interrupted(path, len(report.rows) + len(report.baselines)) from None
    report = replace(report, is_complete=True)
    save_json(path, kernel_json(report))
    return report


def measure_baselines(job: Job, report: KernelReport, point: Point, device: torch.device) -> list[Baseline]:
    """All of them on the same keys and values."""
    kv = baselines.Kv(job.heads, point, caches(report, raw_bytes(job.heads, point), job.is_quick), device)
    found = [baseline for baseline, _ in baselines.sdpa(kv, job.replays)]
    found.append(baselines.flex(kv, job.replays))
    found += baselines.flashinfer(kv, job.replays)
    if point == job.points[0]:  # its bytes grow with the tokens and nothing else
        found += [baselines.quantized_cache(kv, num_bits) for num_bits in QUANTIZED_CACHE_BITS]
    return found


def measure_pair(job: Job, report: KernelReport, pair: Pair, point: Point, device: torch.device) -> KernelRow:
    """One format at one size."""
    nbytes = step_bytes(pair, job.heads, point)
    row = KernelRow(point, pair.name, nbytes, bits_per_value(pair, job.heads, point))
    reason = refusal(pair, job.heads)
    if reason is not None:
        return replace(row, reason=reason)
    # Where pages are reconstructed, most bytes are those of a workspace that all caches share, as layers do, and a call
    # takes long: no more caches than its bytes ask for.
    count = caches(report, nbytes.total, job.is_quick or nbytes.reconstructed > 0)
    try:
        case = kernel_case(pair, job.heads, point, count, device)
        error = case.relative_error()
        row = replace(row, kernel=case.kernel)
        if not error <= LARGEST_ERROR:  # NaN is wrong, too
            return replace(row, reason=f"wrong result: relative error {error:.2g}, at most {LARGEST_ERROR} allowed")
        return replace(row, times=graph_times(case.decode_calls, job.replays), relative_error=error)
    except KvcalError as refused:  # not compiled, or not for this GPU: the other formats go on
        return replace(row, reason=refused.message)


def caches(report: KernelReport, nbytes: int, is_quick: bool) -> int:
    return num_caches(nbytes, report.machine.l2_bytes, report.machine.memory_bytes, is_quick)


def _fastest(report: KernelReport, point: Point) -> str:
    best = report.fastest(point)
    return "nothing ran" if best is None or best.times is None else f"{best.name}, {microseconds(best.times)} µs"


def interrupted(path: Path, count: int) -> Interrupted:
    """What to say after Ctrl-C: times of two runs are not mixed, so nothing goes on from there."""
    return Interrupted(
        f"interrupted: {count} measurements are in {path}" if count else "interrupted before anything was measured",
        hint="the next run measures everything again: a factor needs both of its times from one run",
    )
