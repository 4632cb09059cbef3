"""The comparison's table and picture: cells, equal bytes, and labels that stand on nothing."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from kvcal.charts import Panel, quality
from kvcal.charts.quality import baselines_of, draw_comparison, systems_of
from kvcal.plan.plan import Workload
from kvcal.stages.compare.record import (
    Calibration,
    Comparison,
    Entry,
    Refusal,
    StageTime,
    comparison_columns,
    with_shares,
)
from kvcal.stages.evaluate import MeasuredBits, Row
from kvcal.stages.evaluate.tasks import TaskResult, wilson_se
from kvcal.stages.evaluate.text import TextQuality

WORKLOAD = Workload(8, 4096)


def row(name: str, bits: float, kl: float, correct: int | None, of: int = 20) -> Row:
    quality = TextQuality(1.25, 0.02, kl, kl / 10, 0.975, 0.01, 8, 4000, 3500)
    tasks = (
        ()
        if correct is None
        else (TaskResult("chain", correct / of, wilson_se(correct, of), of, correct, 0, 9, (800,)),)
    )
    at_text, at_tasks = MeasuredBits(bits + 0.5, 1000.0), MeasuredBits(bits + 0.75, 800.0) if tasks else None
    return Row(name, name, WORKLOAD, bits, int(bits * 100_000), quality, at_text, tasks, at_tasks, 1.0)


def entry(name: str, found: Row | None, bits: float | None = None, seconds: float | None = 2.5) -> Entry:
    refusal = Refusal("build", "too small a budget", None, 3) if found is None else None
    calibration = Calibration(seconds, (StageTime("plan.safetensors", "d", seconds),))
    recipe = name.split(" @ ")[0]
    return Entry(name, recipe, "r", bits, recipe in ("16-bit", "kivi-2", "kivi-4"), calibration, refusal, found)


def comparison(*more: Entry, has_tasks: bool = True) -> Comparison:
    raw = entry("16-bit", row("16-bit", 16.1, 1e-7, 19 if has_tasks else None))
    worst = entry("kivi-2", row("kivi-2", 2.9, 0.05, 9 if has_tasks else None))
    other = entry("kivi-4", row("kivi-4", 4.9, 0.002, 18 if has_tasks else None))
    entries = with_shares((raw, worst, other, *more))
    return Comparison("a-model", {}, "text", "f", 1, WORKLOAD, {}, entries)


def many() -> Comparison:
    """Six systems at three budgets nearly on top of each other, and some without numbers."""
    entries = [
        entry(f"system {i} @ {b:g}", row(f"{i}{b}", b - 0.01 * i, 0.06 / b + 0.0004 * i, 9 + i), b)
        for i in range(6)
        for b in (2.25, 2.5, 3.0)
    ]
    return comparison(*entries, entry("refused", None))


def test_table() -> None:
    """KIVI-2 misses 11 of 20 and 16 bits 1: a plan that misses 6 recovers half; a KL of 0.0125 of 0.05, 75 %."""
    found = comparison(entry("small @ 1", None, 1, None), entry("fixed", row("fixed", 2.5, 0.0125, 14)))
    columns = dict(comparison_columns(found))
    assert columns["plan"] == ("16-bit", "kivi-2", "kivi-4", "small @ 1", "fixed")
    assert columns["bits at 8 x 4096"][2:] == ("4.900", "-", "2.500")
    assert columns["bits at measured length (mean 1000 tokens)"][2:] == ("5.400", "-", "3.000")
    assert columns["bits at the tasks' lengths"][3:] == ("-", "3.250 (800 tokens)")
    assert columns["cache"][2:] == ("490 KB", "-", "250 KB")
    assert columns["KL to 16 bits"][3:] == ("-", "0.01250 ± 0.00125")
    assert columns["perplexity"][3:] == ("-", "1.2500 ± 0.0200")
    assert columns["chain %"][3:] == columns["all tasks %"][3:] == ("-", f"70.0 ± {100 * wilson_se(14, 20):.1f}")
    by_kl, by_tasks = columns["KL recovered %"], columns["tasks recovered %"]
    assert by_kl[:2] == ("100.0", "0.0") and by_kl[3] == "-" and by_kl[4].startswith("75.0 ± ")
    assert by_tasks[:2] == ("100.0", "0.0") and by_tasks[3] == "-" and by_tasks[4].startswith("50.0 ± ")
    assert columns["calibration s"] == ("2.5", "2.5", "2.5", "-", "2.5")
    assert columns["refused"] == ("", "", "", "too small a budget", "")


def test_table_without_tasks_and_refusals() -> None:
    headers = [header for header, _ in comparison_columns(comparison(has_tasks=False))]
    assert headers == [
        "plan", "bits at 8 x 4096", "cache", "KL to 16 bits", "perplexity",
        "bits at measured length (mean 1000 tokens)", "KL recovered %", "calibration s",
    ]  # fmt: skip


@pytest.mark.parametrize("found", [many(), comparison(entry("refused", None), has_tasks=False)])
def test_picture_is_a_png_of_equal_bytes(tmp_path: Path, found: Comparison) -> None:
    paths = [tmp_path / name for name in ("a.png", "b.png")]
    for path in paths:
        draw_comparison(found, path)
    first, second = (path.read_bytes() for path in paths)
    assert first[:8] == b"\x89PNG\r\n\x1a\n" and first == second
    assert b"Software" not in first and b"Creation" not in first
    width, height = struct.unpack(">II", first[16:24])
    assert (width > 1400) == any(r.tasks for _, r in found.measured) and 600 <= height <= 900
    assert sorted(tmp_path.iterdir()) == paths


def test_systems_follow_the_recipes() -> None:
    systems = systems_of(many())
    assert [system.name for system in systems] == [f"system {i}" for i in range(6)]
    assert len({(system.colour, system.marker) for system in systems}) == 6
    assert all([mark.x for mark in system.kl] == sorted(mark.x for mark in system.kl) for system in systems)
    assert systems[1].accuracy[0].y == 50.0 and systems[1].accuracy[0].above == pytest.approx(100 * wilson_se(10, 20))
    assert [system.name for system in baselines_of(many())] == ["16-bit", "kivi-2", "kivi-4"]


@pytest.mark.parametrize("panel", ["kl", "accuracy"])
def test_labels_do_not_overlap(panel: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 6.5), dpi=110)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw = {"kl": quality.draw_systems_kl, "accuracy": quality.draw_systems_accuracy}[panel]
    drawn = Panel(axes)
    draw(drawn, systems_of(many()), baselines_of(many()))
    drawn.place_labels()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert {text.get_text() for text in axes.texts} == {"kivi-2", *(f"system {i}" for i in range(6))}
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    lines = {str(line.get_label()).split(" (")[0]: line.get_linestyle() for line in axes.lines}
    names = ["kivi-2", "kivi-4"] + (["16-bit"] if panel == "accuracy" else [])
    assert {name: lines.get(name) for name in names} == {name: quality.BASELINE_DASHES[name] for name in names}
    assert panel == "accuracy" or "16-bit" not in lines
