"""Pictures: PNGs of equal bytes, points where their values are, and labels that can be read."""

import errno
import itertools
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pictures
import pytest
from pictures import COLOURS, SMALLEST_KL, Point, Series, draw_quality

from kvcal.errors import ArtifactError

SOME = [Series(f"system {i}", [Point(b - 0.01 * i, 0.06 / b, 0.01) for b in (2.25, 2.5, 3.0)]) for i in range(6)]


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.png", "b.png")]
    for path in paths:
        draw_quality("t", SOME, path)
    first, second = (path.read_bytes() for path in paths)
    assert first == second and first[:8] == b"\x89PNG\r\n\x1a\n"
    assert b"Software" not in first and b"Creation" not in first


def axes_of(series: list[Series], path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The panel that is drawn of ``series``."""
    drawn: list[Any] = []
    label = pictures._label_points
    monkeypatch.setattr(pictures, "_label_points", lambda axes, points: drawn.append(axes) or label(axes, points))
    draw_quality("t", series, path)
    return drawn[0]


def test_points_lie_where_their_values_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    series = [Series("a", [Point(3.5, -1e-9, 0.01)]), Series("b", [Point(3.1, 0.05, 0.06)])]
    kl = axes_of(series, tmp_path / "a.png", monkeypatch)
    of = {container.get_label(): container[0].get_xydata()[0].tolist() for container in kl.containers}
    assert of == {"a": [3.5, SMALLEST_KL], "b": [3.1, 0.05]}
    assert kl.get_ylabel() == "KL to 16 bits, nats per token"
    for container in kl.containers:  # no error bar leaves the logarithmic axis
        [bars] = container[2]
        assert all(end > 0 for _, end in bars.get_segments()[0])


def test_kvcal_and_its_rivals_are_labelled_at_their_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one colour, and black; others in grey, of which a crowd loses labels. No label is on another."""
    rivals = [Series(name, [Point(bits, kl)], "rival") for name, bits, kl in (("KIVI-2", 3.1, 0.2), ("fp8", 8, 0.01))]
    own = Series("kvcal", [Point(b, 0.05 / b, 0.0, f"{b} bits") for b in (2.5, 3, 4)], "kvcal")
    crowd = [Series(f"other {n}", [Point(3 + n / 400, 0.1 + n / 2000)]) for n in range(40)]
    axes = axes_of([*crowd, own, *rivals], tmp_path / "a.png", monkeypatch)
    texts = {text.get_text(): text for text in axes.texts}
    labels = {"kvcal 2.5 bits", "kvcal 3 bits", "kvcal 4 bits", "KIVI-2", "fp8"}
    assert labels <= texts.keys() and 0 < len(texts.keys() - labels) < 40
    colours = {name: texts[name].get_color() for name in texts}
    assert {colours[name] for name in labels} == {COLOURS["kvcal"], COLOURS["rival"]}
    assert {colours[name] for name in texts.keys() - labels} == {COLOURS["other"]}
    boxes = [text.get_window_extent() for text in texts.values()]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_full_disk_leaves_the_old_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(ArtifactError, match="No space left"):
        draw_quality("t", SOME, path)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
