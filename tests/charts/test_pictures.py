"""Pictures: PNGs of equal bytes, points where their values are, and labels that can be read."""

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from report_cases import K3, UNIFORM, V2, V8, attention, evaluation, plan_of, row

from kvcal import pictures
from kvcal.errors import ArtifactError
from kvcal.geometry import StateGeometry
from kvcal.measured_rows import of_comparison, of_evaluation, series_of
from kvcal.pictures import COLOURS, SMALLEST_KL, Point, Series, draw_bits, draw_quality
from kvcal.plan.plan import RAW, LayerPlan
from kvcal.stages.compare import Comparison, Entry, verdict

MIXED = plan_of(
    LayerPlan(attention(0), RAW, V8),
    LayerPlan(attention(1), K3, V2),
    LayerPlan(attention(2, window=128)),
    LayerPlan(StateGeometry(3, 4096)),
)
COSTS = {"k": {0: 0.1, 1: 0.0}, "v": {0: 0.2, 1: 0.3}}
DEEP = plan_of(*(LayerPlan(attention(i), K3, V8) for i in range(80)))
MANY = [Series(f"system {i}", [Point(b - 0.01 * i, 0.06 / b, 0.01) for b in (2.25, 2.5, 3.0)]) for i in range(40)]


@pytest.mark.parametrize(
    "draw",
    [
        lambda path: draw_bits(MIXED.layers, COSTS, "t", path),
        lambda path: draw_bits(DEEP.layers, {}, "", path),
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


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Figures, instead of files."""
    figures: list[Any] = []
    monkeypatch.setattr(pictures, "_save", lambda figure, path: figures.append(figure))
    return figures


def texts_of(axes: Any) -> dict[str, Any]:
    return {text.get_text(): text for text in axes.texts}


def test_points_lie_where_their_values_are(drawn: list[Any], tmp_path: Path) -> None:
    rows = evaluation(row("a", MIXED, -1e-9, 8), row("b", UNIFORM, 0.05, 6))
    draw_quality("t", *series_of(of_evaluation(rows)), tmp_path / "a.png")
    kl, accuracy = drawn[0].axes
    points = {line.get_label(): line for line in kl.lines if not line.get_label().startswith("_")}
    of = {container.get_label(): container[0].get_xydata()[0].tolist() for container in kl.containers}
    assert not points and of == {"a": [MIXED.bits_per_value(), SMALLEST_KL], "b": [UNIFORM.bits_per_value(), 0.05]}
    assert sorted(container[0].get_ydata()[0] for container in accuracy.containers) == [75.0, 100.0]
    assert kl.get_ylabel() == "KL to 16 bits, nats per token" and not drawn[0].legends
    for container in accuracy.containers:  # no error bar leaves 0 to 100 %
        [bars] = container[2]
        assert all(0 <= end <= 100 for _, end in bars.get_segments()[0])
    draw_bits(MIXED.layers, COSTS, "what was measured", tmp_path / "b.png")
    bits, costs = drawn[1].axes
    numbers = [text.get_text() for text in bits.texts]
    assert numbers == ["16", "3", "16", "16", "8", "2", "16", "16"] and len(bits.patches) == 8
    assert costs.get_title() == "what was measured" and costs.get_yscale() == "log"
    assert [line.get_xydata().tolist() for line in costs.lines] == [[[0, 0.1]], [[0, 0.2], [1, 0.3]]]


@pytest.mark.parametrize("costs", [{}, {"k": {0: 0.0, 1: 0.0}, "v": {0: 0.0, 1: 0.0}}])
def test_costs_of_nothing_have_no_panel(costs: Any, drawn: list[Any], tmp_path: Path) -> None:
    draw_bits(MIXED.layers, costs, "t", tmp_path / "a.png")
    assert len(drawn[0].axes) == 1


def test_kvcal_and_its_rivals_are_labelled_at_their_points(drawn: list[Any], tmp_path: Path) -> None:
    """In one colour, and black; others in grey, of which a crowd loses labels. No label is on another."""
    rivals = [Series(name, [Point(bits, kl)], "rival") for name, bits, kl in (("KIVI-2", 3.1, 0.2), ("fp8", 8, 0.01))]
    own = Series("kvcal", [Point(b, 0.05 / b, 0.0, f"{b} bits") for b in (2.5, 3, 4)], "kvcal")
    crowd = [Series(f"other {n}", [Point(3 + n / 400, 0.1 + n / 2000)]) for n in range(40)]
    draw_quality("t", [*crowd, own, *rivals], [], tmp_path / "a.png")
    texts = texts_of(drawn[0].axes[0])
    labels = {"kvcal 2.5 bits", "kvcal 3 bits", "kvcal 4 bits", "KIVI-2", "fp8"}
    assert labels <= texts.keys() and 0 < len(texts.keys() - labels) < 40
    colours = {name: texts[name].get_color() for name in texts}
    assert {colours[name] for name in labels} == {COLOURS["kvcal"], COLOURS["rival"]}
    assert {colours[name] for name in texts.keys() - labels} == {COLOURS["other"]}
    boxes = [text.get_window_extent() for text in texts.values()]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_the_recipe_of_kvcal_plan_is_called_kvcal() -> None:
    entries = tuple(
        Entry(name, name.partition(" @")[0], "r", None, name == "kivi-2", None, row(name, UNIFORM, 0.1, 4))
        for name in ("kivi-2", "default @ 2.5", "default @ 3", "kitty")
    )
    comparison = Comparison("m", {}, "text", "f", 1, UNIFORM.workload, entries)
    kl, accuracy = series_of(of_comparison(comparison, verdict(comparison)))
    assert [(one.name, one.role, [p.label for p in one.points]) for one in kl] == [
        ("kivi-2", "rival", [""]), ("kvcal", "kvcal", ["2.5", "3"]), ("kitty", "other", [""])
    ]  # fmt: skip
    assert [point.value for one in accuracy for point in one.points] == [50.0] * 4


def test_full_disk_leaves_the_old_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(ArtifactError, match="No space left"):
        draw_quality("t", MANY, [], path)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
