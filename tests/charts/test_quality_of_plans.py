"""The table's cells, and the picture: a PNG, the same bytes every time, for every shape of plan."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pytest
from report_cases import K3, K4, UNIFORM, V2, V8, attention, evaluation, plan_of, row

from kvcal.charts import Panel
from kvcal.charts.quality import draw_evaluation, draw_plans_kl
from kvcal.errors import ArtifactError
from kvcal.geometry import StateGeometry
from kvcal.plan.plan import RAW, LayerPlan, Plan
from kvcal.stages.evaluate import Row, measured_bits, table_columns

MIXED = plan_of(
    LayerPlan(attention(0), (RAW,), (V8,)),
    LayerPlan(attention(1), (K3, K4), (V2, V2)),
    LayerPlan(attention(2, window=128)),
    LayerPlan(StateGeometry(3, 4096)),
)
DEEP = plan_of(*(LayerPlan(attention(i), (K3, K4), (V2, V8)) for i in range(80)))


def test_table() -> None:
    columns = dict(table_columns([row("a", UNIFORM, 0.05, 6), row("b", MIXED, 1e-7, 0, None)]))
    assert columns["plan"] == ("a", "b")
    assert columns["bits at 8 x 4096"][0] == f"{UNIFORM.bits_per_value():.3f}"
    at_text = columns["bits at measured length (mean 500 tokens)"]
    assert at_text[0] == f"{measured_bits(UNIFORM, [400, 600]).bits_per_value:.3f}" > columns["bits at 8 x 4096"][0]
    assert columns["bits at the tasks' lengths"][0].endswith(" (600 tokens)")
    assert columns["KL to 16 bits"] == ("0.05000 ± 0.01000", "0.00000")
    assert columns["top-1 %"] == ("97.5 ± 1.0", "97.5")
    assert columns["perplexity"] == ("1.2500 ± 0.0100", "1.2500")
    assert columns["chain %"] == ("75.0 ± 14.7", "0.0 ± 5.6")
    assert columns["all tasks %"] == columns["chain %"]
    assert columns["generated"] == ("900", "900")


def test_table_without_tasks_and_without_rows() -> None:
    headers = [header for header, _ in table_columns([row("a", UNIFORM, 0.05, None)])]
    measured = "bits at measured length (mean 500 tokens)"
    assert headers == ["plan", "bits at 8 x 4096", "cache", "KL to 16 bits", "top-1 %", "perplexity", measured]
    assert table_columns([]) == []


@pytest.mark.parametrize(
    ("plan", "rows"),
    [
        (UNIFORM, (row("a", UNIFORM, 0.05, 6), row("b", MIXED, 1e-7, 8))),
        (MIXED, (row("a", UNIFORM, 0.05, None, None),)),
        (DEEP, (row("a", DEEP, 0.05, 3), row("same size", DEEP, 0.06, 3))),
        (UNIFORM, ()),
    ],
)
def test_picture_is_a_png_of_equal_bytes(tmp_path: Path, plan: Plan, rows: tuple[Row, ...]) -> None:
    paths = [tmp_path / name for name in ("a.png", "b.png")]
    for path in paths:
        draw_evaluation(evaluation(*rows), plan, path)
    first, second = (path.read_bytes() for path in paths)
    assert first[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", first[16:24])
    assert 1200 <= width <= 2000 and 600 <= height <= 1200
    assert b"Software" not in first and b"Creation" not in first
    assert first == second
    assert sorted(tmp_path.iterdir()) == paths


def test_picture_shows_the_plan(tmp_path: Path) -> None:
    rows = (row("a", UNIFORM, 0.05, 6), row("b", MIXED, 0.01, 8))
    paths = [tmp_path / name for name in ("uniform.png", "mixed.png")]
    for path, plan in zip(paths, (UNIFORM, MIXED), strict=True):
        draw_evaluation(evaluation(*rows), plan, path)
    assert paths[0].read_bytes() != paths[1].read_bytes()


def test_labels_do_not_overlap() -> None:
    """Rows at nearly the same place, as plans of equal bytes are."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row(f"plan number {i}", UNIFORM, 0.05 + 0.002 * i, 4) for i in range(6)]
    figure = Figure(figsize=(9, 4))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    panel = Panel(axes)
    draw_plans_kl(panel, rows, "")
    panel.place_labels()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert [text.get_text() for text in axes.texts] == [r.name for r in rows]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_full_disk_leaves_the_old_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArtifactError, match="No space left"):
        draw_evaluation(evaluation(row("a", UNIFORM, 0.05, 6)), UNIFORM, path)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
