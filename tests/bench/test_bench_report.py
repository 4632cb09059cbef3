"""Reports of the kernels: what is derived from the measurements, and the JSON, tables and picture that show it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from bench_cases import CEILING, LARGE, SMALL, baseline, kernel_report, kernel_row, read_report

from kvcal.bench.device import ReadCeiling, Times
from kvcal.bench.record import LayerReport
from kvcal.bench.shape import PAIRS, Heads, raw_bytes, step_bytes
from kvcal.charts.kernels import curves_of, draw_kernels
from kvcal.errors import ArtifactError
from kvcal.strict import dump, parse


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


def test_a_document_holds_the_measurements_and_what_follows(tmp_path: Path) -> None:
    report, path = kernel_report(), tmp_path / "kernels.json"
    report.save(tmp_path)
    assert read_report(LayerReport, path) == report
    content = json.loads(path.read_text())
    assert content["kind"] == "bench-kernels"
    derived = content["derived"]
    assert [row["factor"] for row in derived["rows"]] == [2.0, None, 0.8, 5.0]
    assert [row["against"] for row in derived["rows"]] == [
        "SDPA FLASH", "the compiler says no", "SDPA FLASH", "SDPA CUDNN",
    ]  # fmt: skip
    assert derived["rows"][0]["target"] == 2.1 and derived["rows"][0]["of ceiling"] == report.share(report.rows[0])
    assert len(derived["baselines"]) == len(report.baselines)


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        ({}, "missing key 'kind'"),
        (dump(kernel_report()) | {"kind": "e2e"}, "kind = 'e2e'"),
        (dump(kernel_report()) | {"extra": 1}, "unknown key 'extra'"),
        (dump(kernel_report()) | {"is_complete": "yes"}, "is_complete = 'yes'"),
    ],
)
def test_other_reports_are_refused(measured: dict[str, object], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        parse(LayerReport, measured, "kernels.json", ArtifactError)


def test_an_interval_has_four_digits() -> None:
    assert str(Times(14.9333, 14.71, 15.2, 30, 1)) == "14.93 (14.71 to 15.2)"
    assert str(Times(1_234_567.0, 98_765.4, 2e6, 30, 1)) == "1235000 (98770 to 2000000)"


def test_the_table_shows_every_row_with_its_share_factor_ceiling_and_target() -> None:
    report = kernel_report()
    title, headers, rows = report.tables()[0].text()
    assert all(len(row) == len(headers) for row in rows)
    assert "Test GPU" in title and "4000 GB/s" in title and "interrupted" not in title
    shown = dict(zip(headers, rows[0], strict=True))
    assert shown["batch x context"] == "1 x 8K" and shown["format"] == "2" and shown["bits stored"] == "2.25"
    assert shown["µs"] == "10 (9 to 12)"
    assert shown["factor"] == "2.00x" and shown["target"] == "2.10x" and shown["against"] == "SDPA FLASH"
    assert shown["by bytes"] == "7.10x" and shown["of ceiling"] == "12 %"
    assert shown["kernel"] == "decode" and "decode (tensor cores), decode_plain" in title
    refused = dict(zip(headers, rows[1], strict=True))
    assert refused["against"] == "the compiler says no"
    assert refused["kernel"] == refused["µs"] == refused["factor"] == "–", "nothing served it"
    assert "interrupted" in replace(report, is_complete=False).tables()[0].title


def test_the_table_of_baselines_marks_the_fastest_and_says_why_others_are_missing() -> None:
    _, headers, rows = kernel_report().tables()[1].text()
    assert all(len(row) == len(headers) for row in rows)
    marked = [(row[0], row[1]) for row in rows if row[1].endswith(" *")]
    assert marked == [("1 x 8K", "SDPA FLASH *"), ("8 x 32K", "SDPA CUDNN *")]
    assert rows[2][-1] == "ModuleNotFoundError: no flashinfer"
    assert rows[3][3] == "1.049 MB" and rows[3][2] == "–"


def test_the_picture_has_a_panel_for_each_batch_and_a_colour_for_each_format() -> None:
    report, longer = kernel_report(), replace(SMALL, context=32768)
    report = replace(
        report,
        rows=(*report.rows, kernel_row("2", longer, 20.0)),
        baselines=(*report.baselines, baseline("SDPA FLASH", longer, 70.0)),
    )
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
