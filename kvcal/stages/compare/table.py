"""The comparison as a table: a row for each plan, text, ready to print."""

from __future__ import annotations

from kvcal.quantities import format_bytes
from kvcal.stages.compare.record import RAW_RECIPE, WORST_RECIPE, Calibration, Comparison, Entry, Share
from kvcal.stages.evaluate.stage import Row, priced_header

NOTHING = "-"
Columns = list[tuple[str, tuple[str, ...]]]


def comparison_columns(comparison: Comparison) -> Columns:
    """(header, one cell an entry) columns. Reasons of refusals are in a last column, where there are any."""
    rows = [_cells(entry, comparison) for entry in comparison.entries]
    headers = ["plan", priced_header(comparison.workload), "cache", _measured_header(comparison)]
    headers += ["KL to 16 bits", "perplexity"]
    tasks = _tasks(comparison)
    headers += [f"{name} %" for name in tasks] + (["all tasks %", "bits at the tasks' lengths"] if tasks else [])
    headers += ["KL recovered %"] + (["tasks recovered %"] if tasks else [])
    headers += ["calibration s"]
    if any(entry.refusal for entry in comparison.entries):
        headers += ["refused"]
        for cells, entry in zip(rows, comparison.entries, strict=True):
            cells.append(entry.refusal.message if entry.refusal else "")
    return [(header, tuple(cells[number] for cells in rows)) for number, header in enumerate(headers)]


def comparison_title(comparison: Comparison) -> str:
    """What the table's numbers are."""
    workload = comparison.workload
    return (
        f"{comparison.data}; bytes at batch {workload.batch} x {workload.context} tokens; ± standard errors; "
        f"recovered: share of {WORST_RECIPE}'s loss against {RAW_RECIPE}"
    )


def _tasks(comparison: Comparison) -> list[str]:
    return [task.task for _, row in comparison.measured[:1] for task in row.tasks]


def _measured_header(comparison: Comparison) -> str:
    return next((row.text_bits.header for _, row in comparison.measured), "bits at measured length")


def _cells(entry: Entry, comparison: Comparison) -> list[str]:
    tasks = _tasks(comparison)
    recovered = [_share(entry.kl_recovered)] + ([_share(entry.accuracy_recovered)] if tasks else [])
    numbers = [NOTHING] * (5 + len(tasks) + 2 * bool(tasks)) if entry.row is None else _numbers(entry.row)
    return [entry.name, *numbers, *recovered, _calibration(entry.calibration)]


def _numbers(row: Row) -> list[str]:
    text = row.text
    cells = [f"{row.bits_per_value:.3f}", format_bytes(row.total_bytes), f"{row.text_bits.bits_per_value:.3f}"]
    cells += [_with_error(text.kl, text.kl_se, 5), _with_error(text.perplexity, text.perplexity_se, 4)]
    cells += [_with_error(100 * task.accuracy, 100 * task.accuracy_se, 1) for task in row.tasks]
    if row.accuracy is not None and row.accuracy_se is not None and row.task_bits is not None:
        cells += [_with_error(100 * row.accuracy, 100 * row.accuracy_se, 1), row.task_bits.cell]
    return cells


def _share(share: Share | None) -> str:
    if share is None:
        return NOTHING
    return _with_error(100 * share.value, None if share.se is None else 100 * share.se, 1)


def _calibration(calibration: Calibration) -> str:
    seconds = NOTHING if calibration.seconds is None else f"{calibration.seconds:.1f}"
    return f"{seconds} (kept)" if calibration.is_kept else seconds


def _with_error(value: float, error: float | None, digits: int) -> str:
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")
