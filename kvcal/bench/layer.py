"""``kvcal bench layer``: all that a decode step does with one layer's cache, and the packing of a prompt.

A step stores its token, packs the page that is due, reconstructs pages that are not read as they are stored, and
attends. In one of 128 steps a page is due; those steps and the others are timed apart, by the same graph replayed at
another length, and averaged. That all sequences fill their pages in the same step is the worst case for that step and
changes nothing in the mean. Against it stands what transformers does with a StaticCache, its update and then SDPA, read
by the fastest backend and without a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.cache_utils import StaticLayer

from kvcal.bench import baselines
from kvcal.bench.device import machine, measure_read_ceiling, require_gpu
from kvcal.bench.kernel_case import ROOM, KernelCase, kernel_case, prefill_call, refusal
from kvcal.bench.kernels import interrupted
from kvcal.bench.layer_record import LayerReport, LayerRow, layer_json
from kvcal.bench.record import Baseline, save_json
from kvcal.bench.shape import Heads, Pair, Point, raw_bytes
from kvcal.bench.step_bytes import step_bytes
from kvcal.bench.tables import microseconds
from kvcal.bench.timing import REPLAYS, Call, Times, graph_times, num_caches
from kvcal.errors import KvcalError
from kvcal.pages.layout import PAGE_TOKENS
from kvcal.plan.format import SIDES
from kvcal.progress import Reporter

FILE = "layer.json"


@dataclass(frozen=True)
class LayerJob:
    """What to measure, and where to."""

    pairs: Sequence[Pair]
    points: Sequence[Point]
    heads: Heads
    folder: Path
    reporter: Reporter


def bench_layer(job: LayerJob) -> LayerReport:
    """Measure everything; the document in the folder is rewritten after every measurement.

    Raises:
        KernelError: no CUDA device.
        Interrupted: on Ctrl-C.
    """
    device = require_gpu("layer")
    job.reporter.say("bench: read bandwidth")
    report = LayerReport(machine(device), measure_read_ceiling(device), job.heads, tuple(job.pairs))
    path, per_point = job.folder / FILE, len(job.pairs) + 1
    steps = len(job.points) * per_point
    try:
        for number, point in enumerate(job.points):
            job.reporter(number * per_point, steps, "bench layer")
            base = measure_static(job, report, point, device)
            report = report.with_baseline(base)
            save_json(path, layer_json(report))
            time = base.reason if base.times is None else f"{microseconds(base.times)} µs"
            job.reporter.say(f"{point.name}, {base.name}: {time}")
            for index, pair in enumerate(job.pairs):
                job.reporter(number * per_point + index + 1, steps, "bench layer")
                row = measure_layer(job, report, pair, point, device)
                report = report.with_row(row)
                save_json(path, layer_json(report))
                time = row.reason if row.plain is None else f"{microseconds(row.plain)} µs a step"
                job.reporter.say(f"{point.name}, {pair.name}: {time}")
    except KeyboardInterrupt:
        raise interrupted(path, len(report.rows) + len(report.baselines)) from None
    report = replace(report, is_complete=True)
    save_json(path, layer_json(report))
    return report


def measure_layer(job: LayerJob, report: LayerReport, pair: Pair, point: Point, device: torch.device) -> LayerRow:
    """One format at one size."""
    nbytes = step_bytes(pair, job.heads, point)
    row, reason = LayerRow(point, pair.name, nbytes), refusal(pair, job.heads)
    if reason is not None:
        return replace(row, reason=reason)
    due, plain = packing_lengths(pair, point), plain_length(pair, point)
    # Where pages are reconstructed, most bytes are those of a workspace that all caches share, as layers do, and a call
    # takes long: no more caches than its bytes ask for.
    count = caches(report, nbytes.total, nbytes.reconstructed > 0)
    try:
        case = kernel_case(pair, job.heads, point, count, device)
        prefill, prefill_bytes = prefill_call(case, point.context // PAGE_TOKENS)
        return replace(
            row,
            kernel=case.kernel,
            plain=times_at(case, plain, case.step_calls),
            packing=tuple(times_at(case, held, case.step_calls) for held in due),
            append=times_at(case, plain, case.append_calls),
            prefill=graph_times([prefill], REPLAYS),
            prefill_bytes=prefill_bytes,
        )
    except KvcalError as refused:  # not compiled, or not for this GPU: the other formats go on
        return replace(row, reason=refused.message)


def times_at(case: KernelCase, held: int, calls: Sequence[Call]) -> Times:
    """Time ``calls`` with every row at ``held`` tokens. Nothing advances: each replay packs the same page again."""
    case.hold(held)
    return graph_times(calls, REPLAYS)


def packing_lengths(pair: Pair, point: Point) -> tuple[int, ...]:
    """Of PAGE_TOKENS successive lengths from ``point.context`` on, those with which the next step packs a page of keys,
    of values, or of both."""
    span = range(point.context, point.context + PAGE_TOKENS)
    return tuple(held for held in span if _is_due(pair, held))


def plain_length(pair: Pair, point: Point) -> int:
    """The middle one of the other lengths: its buffers are as full as on average."""
    span = range(point.context, point.context + PAGE_TOKENS)
    plain = [held for held in span if not _is_due(pair, held)]
    return plain[len(plain) // 2]


def measure_static(job: LayerJob, report: LayerReport, point: Point, device: torch.device) -> Baseline:
    """StaticCache's update of one layer, then the fastest SDPA over the tokens that are there."""
    heads, count = job.heads, caches(report, raw_bytes(job.heads, point), False)
    fastest = baselines.fastest_sdpa(heads, point, device, count, REPLAYS)
    name, version = "StaticCache update + SDPA", f"transformers {transformers.__version__}"
    if fastest is None:
        return Baseline(point, name, version, reason="no backend of SDPA takes this input")
    found, attention = fastest
    name, version = f"StaticCache update + {found.name}", f"{version}, {found.version}"
    kv = baselines.Kv(heads, Point(point.batch, PAGE_TOKENS), 1, device)
    k_new, v_new = (x[:, :, :1] for x in kv.caches[0])
    layers: list[Any] = [StaticLayer(point.context + ROOM) for _ in range(count)]

    def step(layer: StaticLayer) -> None:
        keys, values = layer.update(k_new, v_new)
        attention(kv.q, keys[:, :, : point.context], values[:, :, : point.context])

    for layer in layers:
        layer.update(k_new, v_new)
        layer.keys.normal_()
        layer.values.normal_()
        layer.cumulative_length.fill_(point.context)
    calls: list[Call] = [partial(step, layer) for layer in layers]
    return baselines.measured(point, raw_bytes(heads, point), name, version, lambda: calls, REPLAYS)


def caches(report: LayerReport, nbytes: int, is_quick: bool) -> int:
    return num_caches(nbytes, report.machine.l2_bytes, report.machine.memory_bytes, is_quick)


def _is_due(pair: Pair, held: int) -> bool:
    return any(pair.format(side).num_pages(held) > pair.format(side).num_pages(held - 1) for side in SIDES)
