"""The benchmarks' runs, on a CPU with the reference in place of the kernels and a clock that always says 10 µs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from bench_cases import CEILING, MACHINE, Clock, installed_clock, read_report, times
from cli_cases import ran_well, run_kvcal

from kvcal.bench import baselines, device, kernels
from kvcal.bench.device import Machine, Times
from kvcal.bench.kernels import Job, bench_kernels, bench_layer
from kvcal.bench.record import Interrupted, LayerReport, Row
from kvcal.bench.shape import PAIRS, Heads, Point, StepBytes, raw_bytes
from kvcal.errors import KernelError
from kvcal.progress import Silent

CPU, GPU = torch.device("cpu"), torch.device("cuda")
HEADS = Heads(num_kv_heads=2, head_dim=64, group=2)
POINTS = (Point(1, 256), Point(2, 384))
SOME = StepBytes(1000)
JOB_PAIRS = (PAIRS["2"], PAIRS["2-uneven"], PAIRS["higgs"], PAIRS["aqua"], PAIRS["16"])
KERNELS = ("decode", "decode_plain", "reconstruct + decode", "reconstruct + decode", "decode")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return installed_clock(monkeypatch)


def job(folder: Path, is_quick: bool = False) -> Job:
    return Job(CPU, JOB_PAIRS, POINTS, HEADS, folder, Silent(), is_quick)


def test_a_run_measures_every_size_and_format(clock: Clock, tmp_path: Path) -> None:
    report = bench_kernels(job(tmp_path))
    assert report.is_complete and report.formats == JOB_PAIRS
    assert [(row.point, row.format) for row in report.rows] == [(p, pair.name) for p in POINTS for pair in JOB_PAIRS]
    assert read_report(LayerReport, tmp_path / "kernels.json") == report
    for row, kernel in zip(report.rows, KERNELS * 2, strict=True):
        assert row.times is not None and row.times.calls == 2
        assert row.relative_error is not None and row.relative_error < 4e-3
        assert row.kernel is not None and row.kernel.name == kernel
        assert (row.nbytes.reconstructed > 0) == kernel.startswith("reconstruct")
        assert report.factor(row) == 1.0
    _, headers, cells = report.tables()[0].text()
    assert [line[headers.index("kernel")] for line in cells] == [*KERNELS * 2]


def test_heads_that_only_the_plain_kernel_takes_are_measured(clock: Clock, tmp_path: Path) -> None:
    report = bench_kernels(Job(CPU, JOB_PAIRS, POINTS[:1], Heads(2, 80, 2), tmp_path, Silent(), True))
    names = ["decode_plain", "decode_plain", *["reconstruct + decode_plain"] * 2, "decode_plain"]
    assert [row.kernel.name if row.kernel else None for row in report.rows] == names
    assert all(row.times is not None and row.reason is None for row in report.rows)


def test_what_is_measured_is_said_at_once(clock: Clock, tmp_path: Path) -> None:
    heard: list[str] = []

    class Listener(Silent):
        def say(self, message: str) -> None:
            heard.append(message)

    bench_kernels(Job(CPU, JOB_PAIRS[:3], POINTS[:1], HEADS, tmp_path, Listener(), True))
    assert heard[0] == "bench: read bandwidth"
    assert heard[1].startswith("1 x 256, 16 bits: SDPA ") and heard[1].endswith("10 (9 to 11) µs")
    assert heard[2:] == [f"1 x 256, {name}: 10 (9 to 11) µs" for name in ("2", "2-uneven", "higgs")]
    heard.clear()
    bench_layer(Job(CPU, JOB_PAIRS[:1], POINTS[:1], HEADS, tmp_path, Listener()))
    assert heard[1].startswith("1 x 256, StaticCache update + ") and heard[2] == "1 x 256, 2: 10 (9 to 11) µs"


def test_caches_that_are_reconstructed_are_as_many_as_their_bytes_ask_for(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, bool]] = []

    def count(nbytes: int, machine: Machine, is_quick: bool = False) -> int:
        asked.append((nbytes, is_quick))
        return 1

    monkeypatch.setattr(kernels, "num_caches", count)
    for bench in (bench_kernels, bench_layer):
        asked.clear()
        rows = bench(Job(CPU, JOB_PAIRS, POINTS[:1], HEADS, tmp_path, Silent())).rows
        expected = [(row.nbytes.total, row.nbytes.reconstructed > 0) for row in rows]
        assert asked[-len(rows) :] == expected and asked[0] == (raw_bytes(HEADS, POINTS[0]), False)


class PagedDecode:
    """In place of FlashInfer's wrapper."""

    def __init__(self, workspace: torch.Tensor, layout: str, use_tensor_cores: bool) -> None:
        self.layout = layout

    def plan(self, *args: object, **kwargs: object) -> None:
        pass

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        assert cache[0].shape[1:3] == ((2, 128) if self.layout == "HND" else (16, 2))
        return q


def test_flashinfer_is_asked_for_head_sizes_that_it_serves(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = PagedDecode  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    for head_dim in (64, 96):
        kv = baselines.Kv(Heads(2, head_dim, 2), Point(1, 256), 1, torch.device("cpu"))
        rows = baselines.flashinfer(kv, 2)
        assert len(rows) == 2 and all((row.times is not None) == (head_dim == 64) for row in rows)
        if head_dim == 96:
            assert all("head size 96; FlashInfer serves 64, 128, 256" in (row.reason or "") for row in rows)


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
    found = read_report(LayerReport, tmp_path / "kernels.json")
    assert not found.is_complete
    assert [row.format for row in found.rows][:5] == [pair.name for pair in JOB_PAIRS]
    assert [row.format for row in found.rows if row.point == POINTS[1]] == ["2", "2-uneven", "higgs"]


def test_a_wrong_result_has_no_time(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcal.bench.case.KernelCase.relative_error", lambda case: float("nan"))
    report = bench_kernels(job(tmp_path))
    assert all(row.times is None and row.reason for row in report.rows)
    assert "wrong result: relative error nan" in (report.rows[0].reason or "")


def test_a_kernel_that_does_not_compile_is_a_row(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise KernelError("NVRTC says no")

    monkeypatch.setattr(kernels, "kernel_case", refuse)
    report = bench_kernels(job(tmp_path))
    assert report.is_complete
    assert [row.reason for row in report.rows] == ["NVRTC says no"] * 10
    assert all(row.kernel is None for row in report.rows), "none ran"


def test_a_layer_is_timed_with_and_without_a_page_due(clock: Clock, tmp_path: Path) -> None:
    report = bench_layer(Job(CPU, JOB_PAIRS, POINTS, HEADS, tmp_path, Silent()))
    assert report.is_complete and report.formats == JOB_PAIRS
    assert read_report(LayerReport, tmp_path / "layer.json") == report
    for row, kernel in zip(report.rows, KERNELS * 2, strict=True):
        assert row.kernel is not None and row.kernel.name == kernel
        assert row.nbytes.total >= row.nbytes.stored > 0
        assert row.times is not None and row.append is not None
        assert len(row.packing) == 1
        assert row.mean_us == 10.0 and row.pack_share == 0.0
        assert report.factor(row) == 1.0
        assert row.prefill_bytes > 0
    assert report.baselines[0].name.startswith("StaticCache update + SDPA ")
    (_, headers, rows), (_, of_baselines, baselines) = (table.text() for table in report.tables())
    assert all(len(cells) == len(headers) for cells in rows)
    assert [cells[0] for cells in rows] == ["1 x 256"] * 5 + ["2 x 384"] * 5
    assert [cells[headers.index("kernel")] for cells in rows[:5]] == [*KERNELS]
    assert [cells[0] for cells in baselines] == ["1 x 256", "2 x 384"]
    assert all(cells[1].endswith(" *") and len(cells) == len(of_baselines) for cells in baselines)


def test_an_interrupted_layer_run_leaves_what_was_measured(clock: Clock, tmp_path: Path) -> None:
    bench_layer(Job(CPU, JOB_PAIRS, POINTS[:1], HEADS, tmp_path, Silent()))
    clock.count, clock.until = 0, clock.count - 1
    with pytest.raises(Interrupted):
        bench_layer(Job(CPU, JOB_PAIRS, POINTS[:1], HEADS, tmp_path, Silent()))
    found = read_report(LayerReport, tmp_path / "layer.json")
    assert not found.is_complete and [row.format for row in found.rows] == ["2", "2-uneven", "higgs", "aqua"]


def layer_row(batch: int = 32, **fields: Any) -> Row:
    return Row(Point(batch, 8192), "2", SOME, 2.25, **fields)


def test_packing_is_spread_over_the_steps_of_a_page() -> None:
    row = layer_row(times=times(100.0), packing=(times(228.0),))
    assert row.mean_us == 101.0
    assert row.pack_share == pytest.approx(1 / 101)
    assert layer_row(times=times(100.0), packing=(times(228.0), times(164.0))).mean_us == 101.5
    assert layer_row(reason="no").mean_us is None and layer_row(reason="no").pack_share is None
    prefill = layer_row(prefill=times(1000.0), prefill_bytes=2_000_000_000)
    assert prefill.prefill_gb_per_s == 2000.0


def test_the_target_of_packing_stands_at_large_batches_only() -> None:
    rows = tuple(layer_row(batch, times=times(1.0), packing=(times(2.0),)) for batch in (8, 32))
    report = LayerReport(kind="layer", machine=MACHINE, ceiling=CEILING, heads=Heads(), rows=rows)
    _, headers, cells = report.tables()[0].text()
    assert [line[headers.index("target")] for line in cells] == ["–", "0.2 %"]
    assert report.document()["derived"]["rows"][0]["factor"] is None


def test_the_drivers_version_is_nvidia_smis_or_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert device.driver_version() == device.UNKNOWN
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 580.65.06\necho 580.65.06\n")
    tool.chmod(0o755)
    assert device.driver_version() == "580.65.06"
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert device.driver_version() == device.UNKNOWN


@pytest.mark.parametrize("command", ["kernels", "layer", "e2e"])
def test_without_a_gpu_the_command_says_so(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    outcome = run_kvcal("bench", command, "--out", tmp_path / "out")
    assert outcome.code == 6
    assert f"kvcal bench {command} needs a CUDA device" in outcome.err and "hint:" in outcome.err
    assert not (tmp_path / "out").exists()


def test_the_command_writes_the_table_the_document_and_the_picture(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcal.bench.device.require_gpu", lambda what: torch.device("cpu"))
    arguments = ("bench", "kernels", "--format", "2", "--batch", 1, "--context", 256, "--heads", 2, "--head-dim", 64)
    outcome = ran_well(*arguments, "--out", tmp_path)
    assert "1 x 256" in outcome.out and "Baselines" in outcome.out and "1.00x" in outcome.out
    assert "decode_plain (every head size" in outcome.out
    assert (tmp_path / "kernels.png").exists()
    as_json = run_kvcal(*arguments, "--out", tmp_path, "--json")
    assert as_json.json == json.loads((tmp_path / "kernels.json").read_text())


def test_ctrl_c_ends_the_command_with_130_and_says_where_the_measurements_are(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcal.bench.device.require_gpu", lambda what: torch.device("cpu"))
    clock.until = 0
    outcome = run_kvcal("bench", "kernels", "--context", 256, "--out", tmp_path)
    assert outcome.code == 130
    assert "interrupted before anything was measured" in outcome.err and "goes on from there" not in outcome.err


@pytest.mark.gpu
def test_the_clock_of_the_gpu_sees_that_twice_the_bytes_take_longer() -> None:
    small, large = (torch.randn(1 << n, device="cuda") for n in (26, 28))
    first = device.graph_times([lambda: small.sum()])
    second = device.graph_times([lambda: large.sum()])
    assert isinstance(first, Times)
    assert 2 < second.median_us / first.median_us < 8


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [128, 80])
def test_a_quick_run_on_the_gpu_finds_the_kernels_right(head_dim: int, tmp_path: Path) -> None:
    pairs = (PAIRS["kitty"], *JOB_PAIRS, PAIRS["pre-rope"])
    report = bench_kernels(Job(GPU, pairs, (Point(2, 1024),), Heads(8, head_dim, 4), tmp_path, Silent(), True))
    assert [row.reason for row in report.rows] == [None] * len(pairs)
    assert report.fastest(Point(2, 1024)) is not None
    assert all(0 < (report.share(row) or 0) < 1 for row in report.rows)
    assert report.machine.driver and report.machine.nvrtc
    names = ["decode", *KERNELS, "reconstruct + decode"]
    for row, name in zip(report.rows, names, strict=True):
        assert row.kernel is not None
        assert row.kernel.name == (name if head_dim == 128 else name.removesuffix("_plain") + "_plain")
        assert row.kernel.grid is not None and row.kernel.grid >= report.machine.num_sms
        assert row.kernel.threads is not None and row.kernel.threads % 32 == 0
        assert row.kernel.registers is not None and 0 < row.kernel.registers <= 255


@pytest.mark.gpu
def test_a_layer_of_stored_forms_is_timed_on_the_gpu(tmp_path: Path) -> None:
    pairs = (PAIRS["higgs"], PAIRS["aqua"])
    report = bench_layer(Job(GPU, pairs, (Point(2, 1024),), Heads(), tmp_path, Silent()))
    assert [row.reason for row in report.rows] == [None] * 2
    for row in report.rows:
        assert row.times is not None and row.append is not None and row.append.median_us < row.times.median_us
        assert row.prefill is not None and row.prefill_gb_per_s is not None
