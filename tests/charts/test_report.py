"""The report: what the records say stands in it, it refers to nothing outside, hostile text stays text;
and its two figures are PNGs of equal bytes, with the points where their values are."""

import errno
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from html import unescape
from pathlib import Path
from unittest.mock import Mock

import pytest
from artifact_subjects import save_comparison, search_result
from report_cases import K3, UNIFORM, V2, V8, attention, evaluation, plan_of, row

from kvcal import report as figures
from kvcal.data.reading import TuneSpec
from kvcal.errors import ArtifactError
from kvcal.folder import Folder
from kvcal.geometry import StateGeometry
from kvcal.plan.plan import RAW, LayerPlan, Plan, save_plan
from kvcal.progress import SILENT
from kvcal.report import SMALLEST_KL, Point, Series, draw_bits, draw_quality, rows_series, write_report
from kvcal.stages.allocate.budget import compile_plan
from kvcal.stages.allocate.record import BudgetSplit, layer_bytes, unbudgeted
from kvcal.stages.allocate.record import save as save_allocation
from kvcal.stages.compare import Comparison, Entry
from kvcal.stages.evaluate.stage import save_evaluation
from kvcal.stages.search import save as save_search
from kvcal.stages.tune import Outcome, tune

HOSTILE = """</td></title><script>alert("1")</script><img src='http://x.example/a.png' onerror=alert(1)>&amp;"""
LOADS = r"<(script|link|iframe|object|embed|base|form|a|image|use)\b|\s(href|action|srcset|on\w+)=|url\(|@import"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def report(folder: Path) -> str:
    """A page that no browser would load anything for, and that runs nothing."""
    text = write_report(Folder(folder)).read_text()
    assert not re.search(LOADS, text) and POLICY in text
    assert set(re.findall(r'src="(.{22})', text)) <= {"data:image/png;base64,"}
    return text


def rows_of(text: str) -> list[list[str]]:
    """Cells of all tables."""
    rows = re.findall(r"<tr>(.*?)</tr>", text, re.S)
    return [[unescape(cell) for cell in re.findall(r"<t[dh]>(.*?)</t[dh]>", row, re.S)] for row in rows]


def sections_of(text: str) -> list[str]:
    return re.findall(r'<section id="(\w+)">', text)


def planned(folder: Path, name: str = "m") -> Plan:
    """A plan in a folder with its allocation (of fixed formats, within a stated budget) and its evaluation."""
    plan = replace(
        UNIFORM, model=replace(UNIFORM.model, id=name), provenance={"recipe": name, "nested": {"key": name, name: 3}}
    )
    allocation = unbudgeted(plan.layers, plan.model, plan.cache_dtype, plan.workload, plan.provenance)
    fixed, paged = layer_bytes(plan.layers, plan.cache_dtype, plan.workload)
    split = BudgetSplit(fixed + paged + 7_000_000, 3_000_000, 1_000_000, fixed, paged, kind="budget")
    paths = Folder(folder)
    save_plan(plan, paths.plan)
    save_allocation(replace(allocation, split=split), {}, paths.allocation)
    save_evaluation(evaluation(row("16-bit", UNIFORM, 1e-7, 8), row(name, plan, 0.05, 6)), paths.evaluation)
    return plan


def searched(folder: Path) -> None:
    result = search_result()
    paths = Folder(folder)
    save_search(result, {}, paths.search)
    save_allocation(
        result.allocation, {"search.sha256": hashlib.sha256(paths.search.read_bytes()).hexdigest()}, paths.allocation
    )
    save_plan(compile_plan(result.allocation, result.allocation.layers, result.plan_tensors), paths.plan)


def compared(folder: Path, name: str = "a-model") -> None:
    entries = tuple(
        Entry(n, n.split(" @")[0], "r", None, n in ("16-bit", "kivi-2"), None, row(n, UNIFORM, kl, correct))
        for n, kl, correct in (("16-bit", 1e-7, 8), ("kivi-2", 0.05, 3), (f"{name} @ 3", 0.01, 7))
    )
    save_comparison(Comparison(name, {}, "text", "f", 1, UNIFORM.workload, entries), folder / "compare.json")


def tuned(folder: Path) -> None:
    outcomes = iter([(0.5, 2.5), (0.75, 3.0), (0.6, 3.5)])

    def measured(thresholds: Mapping[str, float]) -> Outcome:
        accuracy, bits = next(outcomes)
        return Outcome(accuracy, 0.05, bits, int(1e6 * bits), {})

    tuning = tune({"tau_4": (0.1, 9.0)}, TuneSpec(num_trials=3), measured, {}, folder, SILENT)
    save_plan(replace(UNIFORM, provenance={"thresholds": tuning.trials[1].thresholds}), folder / "plan.safetensors")


MAKERS = {"planned": planned, "searched": searched, "compared": compared, "tuned": tuned}


@pytest.mark.parametrize("name", MAKERS)
def test_equal_records_give_equal_bytes_that_stand_alone(name: str, tmp_path: Path) -> None:
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        MAKERS[name](folder)
    first, second = (report(tmp_path / one) for one in "ab")
    assert first == second and str(tmp_path) not in first


def test_plan_budget_and_evaluation_state_the_records_figures(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    found = report(tmp_path)
    assert sections_of(found) == ["plan", "bits", "evaluation", "provenance"] and found.count("<img") == 2
    assert {path.name for path in tmp_path.glob("*.png")} == {"bits.png", "quality.png"}
    cells = {cells[0]: cells[1:] for cells in rows_of(found)}
    assert cells["budget"][1] == str(plan.predicted_bytes + 7_000_000)
    assert [cells[name][1] for name in ("weights", "workspace", "left over")] == ["3000000", "1000000", "3000000"]
    assert cells["0"][:3] == ["3", "2", "uniform"]
    assert "0.05000 ± 0.01000" in cells["m"] and "6 of 8" in cells["m"]
    assert cells["nested.key"] == ["m"] and cells["plan sha256"] == [plan.sha256]
    assert "allocation.safetensors: nothing was chosen" in found


def test_a_search_has_the_plans_of_all_systems(tmp_path: Path) -> None:
    searched(tmp_path)
    found = report(tmp_path)
    assert sections_of(found) == ["plan", "bits", "search", "provenance"]
    assert ["kitty (ships)", "2.500", "0.2 ± 0.01", "0.25 ± 0.02", "0 ± 0", ""] in rows_of(found)
    assert ["kivi-2", "3.100", "0.4 ± 0.03", "", "", ""] in rows_of(found)
    assert ["b", "", "", "", "", "too slow"] in rows_of(found)


def test_a_comparison_stands_for_its_evaluation(tmp_path: Path) -> None:
    compared(tmp_path)
    save_evaluation(evaluation(row("16-bit", UNIFORM, 1e-7, 8)), Folder(tmp_path).evaluation)
    found = report(tmp_path)
    assert sections_of(found) == ["comparison"] and found.count("<img") == 1
    [cells] = [cells for cells in rows_of(found) if cells[0] == "a-model @ 3"]
    assert cells[1] == "3.750" and "0.01000 ± 0.01000" in cells


def test_a_study_marks_the_chosen_trial(tmp_path: Path) -> None:
    tuned(tmp_path)
    [cells] = [cells for cells in rows_of(report(tmp_path)) if "(chosen)" in cells[0]]
    assert cells[0] == "1 (chosen)" and cells[1:4] == ["75.0 ± 5.0", "3.000", "3 MB"]


@pytest.mark.parametrize("make", [planned, compared])
def test_hostile_names_stay_text(make, tmp_path: Path) -> None:
    make(tmp_path, HOSTILE)
    text = write_report(Folder(tmp_path)).read_text()
    assert HOSTILE in unescape(text) and "<script" not in text and "<img src='http" not in text


def test_an_empty_folder_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="nothing to report"):
        write_report(Folder(tmp_path))
    assert not list(tmp_path.iterdir())


MIXED = plan_of(
    LayerPlan(attention(0), (RAW,), (V8,)),
    LayerPlan(attention(1), (K3,), (V2,)),
    LayerPlan(attention(2, window=128)),
    LayerPlan(StateGeometry(3, 4096)),
)
DEEP = plan_of(*(LayerPlan(attention(i), (K3,), (V8,)) for i in range(80)))
MANY = [Series(f"system {i}", [Point(b - 0.01 * i, 0.06 / b, 0.01) for b in (2.25, 2.5, 3.0)]) for i in range(40)]


@pytest.mark.parametrize(
    "draw",
    [
        lambda path: draw_bits(MIXED.layers, {"k": [0.1, 0.0], "v": [0.2, 0.3]}, path),
        lambda path: draw_bits(DEEP.layers, {}, path),
        lambda path: draw_quality("t", MANY, MANY, path),
        lambda path: draw_quality("t", [], [], path),
    ],
)
def test_equal_content_gives_equal_bytes(tmp_path: Path, draw: Callable[[Path], None]) -> None:
    paths = [tmp_path / name for name in ("a.png", "b.png")]
    for path in paths:
        draw(path)
    first, second = (path.read_bytes() for path in paths)
    assert first == second and first[:8] == b"\x89PNG\r\n\x1a\n"
    assert b"Software" not in first and b"Creation" not in first


def test_points_lie_where_their_values_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(figures, "_save", lambda figure, path: drawn.append(figure))
    rows = [("a", row("a @ 3", UNIFORM, 0.05, 6)), ("b", row("b", MIXED, -1e-9, 8))]
    draw_quality("t", *rows_series(rows), tmp_path / "a.png")
    kl, accuracy = drawn[0].axes
    assert [line.get_xydata()[0].tolist() for line in kl.lines[::3]] == [
        [UNIFORM.bits_per_value(), 0.05], [MIXED.bits_per_value(), SMALLEST_KL]
    ]  # fmt: skip
    assert [line.get_ydata()[0] for line in accuracy.lines[::3]] == [75.0, 100.0]
    assert [text.get_text() for text in drawn[0].legends[0].texts] == ["a", "b"]
    draw_bits(MIXED.layers, {"k": [0.1, 0.0], "v": [0.2, 0.3]}, tmp_path / "b.png")
    bits, sensitivity = drawn[1].axes
    assert [patch.get_height() for patch in bits.patches] == [16, 3, 8, 2]
    assert sensitivity.lines[1].get_ydata().tolist() == [0.2, 0.3] and sensitivity.get_yscale() == "log"
    draw_bits(MIXED.layers, {"k": [0.0, 0.0], "v": [0.0, 0.0]}, tmp_path / "c.png")
    assert len(drawn[2].axes) == 1  # nothing is lost anywhere: no logarithm to draw


def test_full_disk_leaves_the_old_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(ArtifactError, match="No space left"):
        draw_quality("t", MANY, [], path)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
