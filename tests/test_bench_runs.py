"""The benchmarks' runs, on a CPU with the reference in place of the kernels and a clock that always says 10 µs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bench_cases import CEILING, MACHINE, Clock, times
from cli_cases import run_kvcal

from kvcal.bench import baselines, kernels, layer
from kvcal.bench.grid import PAIRS
from kvcal.bench.kernels import Job, bench_kernels
from kvcal.bench.layer import LayerJob, bench_layer
from kvcal.bench.layer_record import LayerReport, LayerRow, layer_json
from kvcal.bench.record import Baseline, Interrupted, KernelReport, load_report
from kvcal.bench.shape import Heads, Pair, Point, raw_bytes
from kvcal.bench.tables import layer_table
from kvcal.bench.timing import Times
from kvcal.errors import KernelError
from kvcal.formats import Format
from kvcal.progress import Silent

HEADS = Heads(num_kv_heads=2, head_dim=64, group=2)
POINTS = (Point(1, 256), Point(2, 384))
LATTICE = Format(2, "token", 128, lattice_dim=2)
JOB_PAIRS = (PAIRS["2"], PAIRS["kitty"], Pair("lattice", LATTICE, LATTICE), PAIRS["16"])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """No GPU and no compiler: FlexAttention refuses, FlashInfer is absent, QuantizedCache has no device to count."""
    found = Clock()
    for module in (kernels, layer):
        monkeypatch.setattr(module, "require_gpu", lambda what: torch.device("cpu"))
        monkeypatch.setattr(module, "machine", lambda device: MACHINE)
        monkeypatch.setattr(module, "measure_read_ceiling", lambda device: CEILING)
        monkeypatch.setattr(module, "num_caches", lambda *args: 2)
    for module in (kernels, layer, baselines):
        monkeypatch.setattr(module, "graph_times", found)
    monkeypatch.setattr(
        baselines, "flex", lambda kv, replays: Baseline(kv.point, "FlexAttention", "torch", reason="no compiler")
    )
    return found


def job(folder: Path, is_quick: bool = False) -> Job:
    return Job(JOB_PAIRS, POINTS, HEADS, folder, is_quick, Silent())


def test_a_run_measures_every_size_and_format(clock: Clock, tmp_path: Path) -> None:
    report = bench_kernels(job(tmp_path))
    assert report.is_complete
    assert [(row.point, row.format) for row in report.rows] == [(p, pair.name) for p in POINTS for pair in JOB_PAIRS]
    assert load_report(KernelReport, "bench-kernels", tmp_path / "kernels.json") == report
    for row in report.rows:
        if row.format == "lattice":
            assert row.times is None and "lattice" in (row.reason or "")
        else:
            assert row.times is not None and row.times.calls == 2
            assert row.relative_error is not None and row.relative_error < 4e-3
            assert report.factor(row) == 1.0


def test_every_backend_of_sdpa_is_a_baseline_or_says_why_not(clock: Clock, tmp_path: Path) -> None:
    report = bench_kernels(job(tmp_path, is_quick=True))
    of_first = [entry for entry in report.baselines if entry.point == POINTS[0]]
    names = [entry.name for entry in of_first]
    assert len(names) == len(set(names))
    for backend in ("FLASH", "CUDNN", "EFFICIENT", "MATH"):
        for form in ("enable_gqa", "group as rows"):
            assert f"SDPA {backend}, {form}" in names
    assert {"FlexAttention", "FlashInfer HND, page 128", "QuantizedCache, 4 bits", "QuantizedCache, 2 bits"} <= {*names}
    for entry in of_first:
        assert (entry.times is None) == (entry.reason is not None)
        assert entry.version
    ran = {entry.name for entry in of_first if entry.times is not None}
    assert "SDPA MATH, group as rows" in ran, "the CPU has this one"
    assert not any("CUDNN" in name or "FlashInfer" in name for name in ran)
    bytes_only = [entry for entry in report.baselines if entry.name.startswith("QuantizedCache")]
    assert {entry.point for entry in bytes_only} == {POINTS[0]}


@pytest.mark.parametrize("form", ["enable_gqa", "group as rows"])
def test_both_forms_of_a_decode_step_are_the_same_attention(form: str) -> None:
    kv = baselines.Kv(HEADS, Point(2, 200), 1, torch.device("cpu"))
    k, v = kv.caches[0]
    out = baselines.sdpa_forms(torch.nn.attention.SDPBackend.MATH)[form](kv.q, k, v)
    keys, values = (x.repeat_interleave(HEADS.group, dim=1).double() for x in (k, v))
    expected = (kv.q.double() @ keys.transpose(-1, -2) / 8).softmax(-1) @ values
    assert out.shape == kv.q.shape
    assert (out.double() - expected).norm() < 1e-2 * expected.norm()
    assert kv.nbytes == raw_bytes(HEADS, kv.point) == 2 * k.nbytes


def test_an_interrupted_run_leaves_what_was_measured(clock: Clock, tmp_path: Path) -> None:
    bench_kernels(job(tmp_path))
    clock.count, clock.until = 0, clock.count - 2  # the last two formats of the last size
    with pytest.raises(Interrupted, match=r"measurements are in .*kernels\.json") as caught:
        bench_kernels(job(tmp_path))
    assert caught.value.exit_code == 130
    found = load_report(KernelReport, "bench-kernels", tmp_path / "kernels.json")
    assert not found.is_complete
    assert [row.format for row in found.rows][:4] == [pair.name for pair in JOB_PAIRS]
    assert [row.format for row in found.rows if row.point == POINTS[1]] == ["2"]


def test_a_wrong_result_has_no_time(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcal.bench.kernel_case.KernelCase.relative_error", lambda case: float("nan"))
    report = bench_kernels(job(tmp_path))
    assert all(row.times is None and row.reason for row in report.rows)
    assert "wrong result: relative error nan" in (report.rows[0].reason or "")


def test_a_kernel_that_does_not_compile_is_a_row(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise KernelError("NVRTC says no")

    monkeypatch.setattr(kernels, "kernel_case", refuse)
    report = bench_kernels(job(tmp_path))
    assert report.is_complete
    assert [row.reason for row in report.rows if row.format != "lattice"] == ["NVRTC says no"] * 6


def test_a_layer_is_timed_with_and_without_a_page_due(clock: Clock, tmp_path: Path) -> None:
    report = bench_layer(LayerJob(JOB_PAIRS, POINTS, HEADS, tmp_path, Silent()))
    assert report.is_complete
    assert load_report(LayerReport, "bench-layer", tmp_path / "layer.json") == report
    for row in report.rows:
        if row.format == "lattice":
            assert row.reason and row.plain is None
            continue
        assert row.plain is not None and len(row.packing) == 1 and row.append is not None
        assert row.amortised_us == 10.0 and row.pack_share == 0.0
        assert report.factor(row) == 1.0
        assert row.prefill_bytes > 0
    assert report.baselines[0].name.startswith("StaticCache update + SDPA ")
    _, headers, rows = layer_table(report)
    assert all(len(cells) == len(headers) for cells in rows)
    assert [cells[0] for cells in rows] == ["1 x 256"] * 5 + ["2 x 384"] * 5


def test_an_interrupted_layer_run_leaves_what_was_measured(clock: Clock, tmp_path: Path) -> None:
    bench_layer(LayerJob(JOB_PAIRS, POINTS[:1], HEADS, tmp_path, Silent()))
    clock.count, clock.until = 0, clock.count - 1
    with pytest.raises(Interrupted):
        bench_layer(LayerJob(JOB_PAIRS, POINTS[:1], HEADS, tmp_path, Silent()))
    found = load_report(LayerReport, "bench-layer", tmp_path / "layer.json")
    assert not found.is_complete and [row.format for row in found.rows] == ["2", "kitty", "lattice"]


def test_packing_is_spread_over_the_steps_of_a_page() -> None:
    row = LayerRow(Point(32, 8192), "2", plain=times(100.0), packing=(times(228.0),))
    assert row.amortised_us == 101.0
    assert row.pack_share == pytest.approx(1 / 101)
    twice = LayerRow(Point(32, 8192), "2", plain=times(100.0), packing=(times(228.0), times(164.0)))
    assert twice.amortised_us == 101.5
    assert LayerRow(Point(32, 8192), "2", reason="no").amortised_us is None
    prefill = LayerRow(Point(1, 8192), "2", prefill=times(1000.0), prefill_bytes=2_000_000_000)
    assert prefill.prefill_gb_per_s == 2000.0


def test_the_target_of_packing_stands_at_large_batches_only() -> None:
    rows = [LayerRow(Point(batch, 8192), "2", plain=times(1.0), packing=(times(2.0),)) for batch in (8, 32)]
    report = LayerReport(MACHINE, CEILING, Heads(), tuple(rows))
    _, headers, cells = layer_table(report)
    assert [line[headers.index("target")] for line in cells] == ["–", "0.2 %"]
    assert layer_json(report)["derived"]["rows"][0]["factor"] is None


@pytest.mark.parametrize("command", ["kernels", "layer", "e2e"])
def test_without_a_gpu_the_command_says_so(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    outcome = run_kvcal(capsys, "bench", command, "--out", tmp_path / "out")
    assert outcome.code == 6
    assert f"kvcal bench {command} needs a CUDA device" in outcome.err and "hint:" in outcome.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("kernels", "--format", "5"), "--format '5' is none of"),
        (("layer", "--recipe", "best"), "leaves its formats to a solver"),
        (("kernels", "--recipe", "nothing"), "recipe 'nothing'"),
        (("kernels", "--context", "64"), "--context 64: expected at least 128"),
        (("e2e", "--memory", "24gb"), "unknown unit 'gb'"),
    ],
)
def test_wrong_arguments_are_usage_errors(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run_kvcal(capsys, "bench", *arguments)
    assert outcome.code == 2
    assert message in outcome.err


def test_the_command_writes_the_table_the_document_and_the_picture(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvcal.bench.device.require_gpu", lambda what: torch.device("cpu"))
    arguments = ("bench", "kernels", "--format", "2", "--batch", 1, "--context", 256, "--heads", 2, "--head-dim", 64)
    outcome = run_kvcal(capsys, *arguments, "--out", tmp_path)
    assert outcome.code == 0, outcome.err
    assert "1 x 256" in outcome.out and "Baselines" in outcome.out and "1.00x" in outcome.out
    assert (tmp_path / "kernels.png").exists()
    as_json = run_kvcal(capsys, *arguments, "--out", tmp_path, "--json")
    assert json.loads(as_json.out) == json.loads((tmp_path / "kernels.json").read_text())


def test_ctrl_c_ends_the_command_with_130_and_says_where_the_measurements_are(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvcal.bench.device.require_gpu", lambda what: torch.device("cpu"))
    clock.until = 0
    outcome = run_kvcal(capsys, "bench", "kernels", "--context", 256, "--out", tmp_path)
    assert outcome.code == 130
    assert "interrupted before anything was measured" in outcome.err and "goes on from there" not in outcome.err


@pytest.mark.gpu
def test_the_clock_of_the_gpu_sees_that_twice_the_bytes_take_longer() -> None:
    from kvcal.bench.timing import graph_times

    small, large = (torch.randn(1 << n, device="cuda") for n in (26, 28))
    first = graph_times([lambda: small.sum()])
    second = graph_times([lambda: large.sum()])
    assert isinstance(first, Times)
    assert 2 < second.median_us / first.median_us < 8


@pytest.mark.gpu
def test_a_quick_run_on_the_gpu_finds_the_kernels_right(tmp_path: Path) -> None:
    pairs = (PAIRS["2"], PAIRS["kitty"], PAIRS["16"])
    report = bench_kernels(Job(pairs, (Point(2, 1024),), Heads(), tmp_path, True, Silent()))
    assert [row.reason for row in report.rows] == [None] * 3
    assert report.fastest(Point(2, 1024)) is not None
    assert all(0 < (report.share(row) or 0) < 1 for row in report.rows)
