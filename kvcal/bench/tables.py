"""Reports as tables: title, headers, rows of text, as ``kvcal.console.print_table`` takes them."""

from __future__ import annotations

from collections.abc import Sequence

from kvcal.bench.e2e_record import StepReport
from kvcal.bench.kernel_use import KernelUse
from kvcal.bench.layer_record import PACK_SHARE_BATCH, PACK_SHARE_TARGET, LayerReport
from kvcal.bench.record import KernelReport
from kvcal.bench.timing import Times
from kvcal.quantities import format_bytes

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
NOTHING = "–"
# What kvcal.bench.kernel_use names, and kvcal.bench.step_bytes counts.
KERNELS = (
    "kernel: decode (tensor cores), decode_plain (every head size and pair of formats); reconstruct + (pages that are "
    "not read as they are stored become 16-bit ones first)"
)
BYTES = (
    "bytes: records and unquantized tokens; with reconstruct + also 16-bit pages, written and read, and what predictors"
    " read"
)


def kernel_table(report: KernelReport) -> Table:
    """The kernel under test: one row for each size and format."""
    heads, machine = report.heads, report.machine
    rows = []
    for row in report.rows:
        best = report.fastest(row.point)
        if row.times is None:
            cells = (row.point.name, row.format, kernel(row.kernel), number(row.bits_per_value))
            rows.append((*cells, *[NOTHING] * 7, row.reason or ""))
            continue
        rows.append(
            (
                row.point.name,
                row.format,
                kernel(row.kernel),
                number(row.bits_per_value),
                microseconds(row.times),
                format_bytes(row.nbytes.total),
                number(report.gb_per_s(row), 0),
                percent(report.share(row)),
                factor(report.factor(row)),
                factor(report.factor_ceiling(row)),
                factor(report.target(row)),
                NOTHING if best is None else best.name,
            )
        )
    title = (
        f"Decode attention, {heads.num_kv_heads} KV heads of {heads.head_dim}, {heads.group} query heads each, on "
        f"{machine.device}; read ceiling {report.ceiling.gb_per_s:.0f} GB/s{unfinished(report.is_complete)}\n"
        f"{KERNELS}\n{BYTES}"
    )
    headers = (
        "batch x context", "format", "kernel", "bits stored", "µs", "bytes", "GB/s", "of ceiling", "factor",
        "by bytes", "target", "against",
    )  # fmt: skip
    return title, headers, rows


def baseline_table(report: KernelReport) -> Table:
    """The baselines of the same run, those that refused with their reason; the fastest of a size is marked."""
    rows = []
    for entry in report.baselines:
        is_fastest = entry == report.fastest(entry.point)
        rows.append(
            (
                entry.point.name,
                entry.name + (" *" if is_fastest else ""),
                NOTHING if entry.times is None else microseconds(entry.times),
                NOTHING if entry.nbytes is None else format_bytes(entry.nbytes),
                number(report.gb_per_s(entry), 0),
                percent(report.share(entry)),
                entry.version,
                entry.reason or "",
            )
        )
    headers = ("batch x context", "baseline", "µs", "bytes", "GB/s", "of ceiling", "version", "reason")
    return "Baselines (* the fastest, which the factors are against)", headers, rows


def layer_table(report: LayerReport) -> Table:
    """A layer's cache work in a step, and a prompt's packing."""
    order = [entry.point.name for entry in report.baselines] + [row.point.name for row in report.rows]
    rows = []
    for entry in report.baselines:
        time = entry.reason if entry.times is None else microseconds(entry.times)
        rows.append((entry.point.name, entry.name, NOTHING, time or "", *[NOTHING] * 8))
    for row in report.rows:
        if row.plain is None:
            rows.append((row.point.name, row.format, kernel(row.kernel), row.reason or "", *[NOTHING] * 8))
            continue
        rows.append(
            (
                row.point.name,
                row.format,
                kernel(row.kernel),
                microseconds(row.plain),
                format_bytes(row.nbytes.total),
                NOTHING if row.append is None else microseconds(row.append),
                ", ".join(f"{times.median_us:.4g}" for times in row.packing) or NOTHING,
                number(row.amortised_us, 1),
                percent(row.pack_share, 3),
                percent(PACK_SHARE_TARGET if row.point.batch >= PACK_SHARE_BATCH else None, 1),
                factor(report.factor(row)),
                number(row.prefill_gb_per_s, 0),
            )
        )
    headers = (
        "batch x context", "cache", "kernel", "step µs", "bytes", "append alone µs", "packing step µs",
        "mean of 128 µs", "packing share", "target", "factor", "prompt packing GB/s",
    )  # fmt: skip
    rows.sort(key=lambda cells: order.index(cells[0]))
    title = f"One layer's cache work in a decode step on {report.machine.device}{unfinished(report.is_complete)}"
    return f"{title}\n{KERNELS}\n{BYTES}", headers, rows


def batch_table(report: StepReport) -> Table:
    """Every measurement of whole steps, with its factor at the same batch."""
    rows = []
    for row in report.rows:
        cells = [str(row.context), row.plan, kernel(row.kernel), str(row.batch)]
        if row.steps is None:
            rows.append((*cells, *[NOTHING] * 5, row.reason or ""))
            continue
        rows.append(
            (
                *cells,
                number(row.tokens_per_s, 0),
                f"{row.steps.median_us / 1000:.3f} ({row.steps.low_us / 1000:.3f} to {row.steps.high_us / 1000:.3f})",
                NOTHING if row.cache_bytes is None else format_bytes(row.cache_bytes),
                NOTHING if row.peak_bytes is None else format_bytes(row.peak_bytes),
                factor(report.same_batch(row)),
                "",
            )
        )
    title = (
        f"Decode of {report.shape} ({report.weights}) on {report.machine.device}, at the same batch; caches hold "
        f"random contents, which a step's time does not depend on{unfinished(report.is_complete)}\n{KERNELS}"
    )
    headers = (
        "context", "cache", "kernel", "batch", "tokens/s", "step ms", "cache bytes", "peak memory", "factor", "reason",
    )  # fmt: skip
    return title, headers, rows


def memory_table(report: StepReport) -> Table:
    """The most tokens a second of every plan in each memory."""
    rows = []
    for limit in report.memory:
        for context in report.contexts:
            for plan in report.plans:
                best = report.best(plan, context, limit)
                cells = (format_bytes(limit), str(context), plan)
                if best is None:
                    rows.append((*cells, *[NOTHING] * 5))
                    continue
                gain = report.same_memory(best, limit)
                peak = NOTHING if best.peak_bytes is None else format_bytes(best.peak_bytes)
                rows.append(
                    (*cells, kernel(best.kernel), str(best.batch), number(best.tokens_per_s, 0), peak, factor(gain))
                )
    headers = ("memory", "context", "cache", "kernel", "batch", "tokens/s", "peak memory", "factor")
    title = f"Decode of {report.shape} with the same memory: the batch that gives most tokens a second"
    return title, headers, rows


def kernel(use: KernelUse | None) -> str:
    return NOTHING if use is None else use.name


def microseconds(times: Times) -> str:
    """``14.9 (14.7 to 15.2)``: the median and the middle half."""
    return f"{times.median_us:.4g} ({times.low_us:.4g} to {times.high_us:.4g})"


def number(value: float | None, digits: int = 2) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def factor(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}x"


def percent(value: float | None, digits: int = 0) -> str:
    return NOTHING if value is None else f"{100 * value:.{digits}f} %"


def unfinished(is_complete: bool) -> str:
    return "" if is_complete else " (interrupted)"
