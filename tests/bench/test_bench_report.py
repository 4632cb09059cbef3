"""Reports of the kernels: what is derived from the measurements, and the JSON, tables and picture that show it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from bench_cases import CEILING, LARGE, SMALL, baseline, kernel_report, kernel_row

from kvcal.bench.device import ReadCeiling
from kvcal.bench.grid import PAIRS
from kvcal.bench.record import KernelReport, kernel_json, load_report, save_json
from kvcal.bench.shape import Heads, raw_bytes
from kvcal.bench.step_bytes import step_bytes
from kvcal.bench.tables import baseline_table, kernel_table
from kvcal.charts.kernels import curves_of, draw_kernels
from kvcal.errors import ArtifactError
from kvcal.strict import dump

KIND = "bench-kernels"


def test_factors_are_against_the_fastest_baseline_of_the_same_size() -> None:
    report = kernel_report()
    small, refused, raw, large = report.rows
    assert report.fastest(SMALL) == baseline("SDPA FLASH", SMALL, 20.0)
    assert report.fastest(LARGE) == baseline("SDPA CUDNN", LARGE, 300.0)
    assert report.factor(small) == 2.0
    assert report.factor(large) == 5.0
    assert report.factor(raw) == 0.8, "a slower one stays slower"
    assert report.factor(refused) is None
    assert report.factor(replace(small, point=replace(SMALL, batch=2))) is None, "no baseline of that size"


def test_bandwidth_is_bytes_over_time_and_its_share_of_the_fastest_read() -> None:
    report = kernel_report()
    row = report.rows[0]
    nbytes = step_bytes(PAIRS["2"], Heads(), SMALL).total
    assert report.gb_per_s(row) == pytest.approx(nbytes / 10e-6 / 1e9)
    assert CEILING.gb_per_s == 4000.0
    assert report.share(row) == pytest.approx(nbytes / 10e-6 / 4000e9)
    assert report.share(report.rows[1]) is None
    assert report.gb_per_s(report.baselines[3]) is None, "bytes without a time"
    assert ReadCeiling(1.0, 2.0, 3.0).gb_per_s == 3.0


def test_the_ceiling_of_a_factor_is_the_ratio_of_bytes() -> None:
    report = kernel_report()
    row = report.rows[0]
    expected = raw_bytes(Heads(), SMALL) / row.nbytes.total
    assert report.factor_ceiling(row) == expected
    assert 7.0 < expected < 16 / 2.25
    assert report.target(row) == 2.1


def test_a_document_holds_the_measurements_and_what_follows(tmp_path: Path) -> None:
    report, path = kernel_report(), tmp_path / "kernels.json"
    save_json(path, kernel_json(report))
    assert load_report(KernelReport, KIND, path) == report
    derived = json.loads(path.read_text())["derived"]
    assert derived["read_ceiling_gb_per_s"] == 4000.0
    assert [row["factor"] for row in derived["rows"]] == [2.0, None, 0.8, 5.0]
    assert [row["baseline"] for row in derived["rows"]] == ["SDPA FLASH"] * 3 + ["SDPA CUDNN"]
    assert derived["rows"][0]["target"] == 2.1
    assert len(derived["baselines"]) == len(report.baselines)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "bench-layer"}, "no bench-kernels document"),
        ({"schema": 1}, "no bench-kernels document"),
        ({"measured": {}}, "missing key 'machine'"),
        ({"measured": dump(kernel_report()) | {"extra": 1}}, "unknown key 'extra'"),
        ({"measured": dump(kernel_report()) | {"is_complete": "yes"}}, "is_complete = 'yes'"),
    ],
)
def test_other_documents_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "kernels.json"
    save_json(path, kernel_json(kernel_report()) | change)
    with pytest.raises(ArtifactError, match=message):
        load_report(KernelReport, KIND, path)


def test_a_truncated_or_missing_document_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    with pytest.raises(ArtifactError, match="cannot be read"):
        load_report(KernelReport, KIND, path)
    save_json(path, kernel_json(kernel_report()))
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ArtifactError, match="cannot be read"):
        load_report(KernelReport, KIND, path)


def test_the_table_shows_every_row_with_its_share_factor_ceiling_and_target() -> None:
    report = kernel_report()
    title, headers, rows = kernel_table(report)
    assert all(len(row) == len(headers) for row in rows)
    assert "Test GPU" in title and "4000 GB/s" in title and "interrupted" not in title
    shown = dict(zip(headers, rows[0], strict=True))
    assert shown["batch x context"] == "1 x 8K" and shown["format"] == "2" and shown["bits stored"] == "2.25"
    assert shown["µs"] == "10 (9 to 12)"
    assert shown["factor"] == "2.00x" and shown["target"] == "2.10x" and shown["against"] == "SDPA FLASH"
    assert shown["by bytes"] == "7.10x" and shown["of ceiling"] == "12 %"
    assert shown["kernel"] == "decode" and "decode (tensor cores), decode_plain" in title
    assert rows[1][-1] == "the compiler says no" and rows[1][2] == rows[1][4] == "–", "nothing served it"
    assert "interrupted" in kernel_table(replace(report, is_complete=False))[0]


def test_the_table_of_baselines_marks_the_fastest_and_says_why_others_are_missing() -> None:
    _, headers, rows = baseline_table(kernel_report())
    assert all(len(row) == len(headers) for row in rows)
    marked = [(row[0], row[1]) for row in rows if row[1].endswith(" *")]
    assert marked == [("1 x 8K", "SDPA FLASH *"), ("8 x 32K", "SDPA CUDNN *")]
    assert rows[2][-1] == "ModuleNotFoundError: no flashinfer"
    assert rows[3][3] == "1.049 MB" and rows[3][2] == "–"


def test_the_picture_has_a_panel_for_each_batch_and_a_colour_for_each_format() -> None:
    report = kernel_report().with_row(kernel_row("2", replace(SMALL, context=32768), 20.0))
    report = report.with_baselines(baseline("SDPA FLASH", replace(SMALL, context=32768), 70.0))
    panels = curves_of(report)
    assert list(panels) == [1, 8]
    two, sixteen = panels[1]
    assert [mark.context for mark in two.marks] == [8192, 32768]
    assert [mark.factor for mark in two.marks] == [2.0, 3.5]
    assert (two.marks[0].ceiling, two.marks[0].target) == (report.factor_ceiling(report.rows[0]), 2.1)
    assert (sixteen.format, two.format) == ("16", "2") and sixteen.colour != two.colour
    assert panels[8][0].colour == two.colour and panels[8][0].marker == two.marker


def test_the_picture_is_the_same_bytes_for_the_same_report(tmp_path: Path) -> None:
    first, second = tmp_path / "a.png", tmp_path / "b.png"
    draw_kernels(kernel_report(), first)
    draw_kernels(kernel_report(), second)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes().startswith(b"\x89PNG")


def test_without_a_factor_there_is_no_picture(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    draw_kernels(replace(kernel_report(), baselines=()), path)
    assert not path.exists()
