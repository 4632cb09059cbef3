"""The two figures: PNGs of equal bytes for every shape of plan, with the points where their values are."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from report_cases import K3, UNIFORM, V2, V8, attention, plan_of, row

from kvcal import report as figures
from kvcal.errors import ArtifactError
from kvcal.geometry import StateGeometry
from kvcal.plan.plan import RAW, LayerPlan
from kvcal.report import SMALLEST_KL, Point, Series, draw_bits, draw_quality, rows_series

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


def test_full_disk_leaves_the_old_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArtifactError, match="No space left"):
        draw_quality("t", MANY, [], path)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
