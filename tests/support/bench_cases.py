"""What the tests of the benchmarks share: reports with known numbers, and a machine whose clock is a list."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from kvcal.bench import baselines, kernels
from kvcal.bench.case import KernelUse
from kvcal.bench.device import Call, Machine, ReadCeiling, Times
from kvcal.bench.record import SCHEMA, Baseline, LayerReport, Report, Row
from kvcal.bench.shape import PAIRS, Heads, Point, StepBytes, bits_per_value, raw_bytes, step_bytes
from kvcal.errors import ArtifactError
from kvcal.strict import parse

MACHINE = Machine("Test GPU", "9.0", 132, 80_000_000_000, 50 << 20, "2.11", "13.0", "5.17", "580.65", "13.0", "0.1.0")
CEILING = ReadCeiling(sum=3000.0, row_sum=4000.0, copy=3900.0)
DECODE = KernelUse("decode", (), 132, 384, 200_000, 168)
SMALL, LARGE = Point(1, 8192), Point(8, 32768)


AnyReport = TypeVar("AnyReport", bound=Report)


def read_report(record: type[AnyReport], path: Path) -> AnyReport:
    """The report that a document holds, by its strict record."""
    content = json.loads(path.read_text())
    assert content.keys() == {"kind", "schema", "measured", "derived"} and content["schema"] == SCHEMA
    report = parse(record, content["measured"], str(path), ArtifactError)
    assert content == json.loads(json.dumps(report.document()))
    return report


def times(median: float) -> Times:
    return Times(median, 0.9 * median, 1.2 * median, 30, 32)


def kernel_row(name: str, point: Point, median: float) -> Row:
    pair, heads = PAIRS[name], Heads()
    return Row(
        point, name, step_bytes(pair, heads, point), bits_per_value(pair, heads, point), DECODE, times(median), 0.002
    )


def baseline(name: str, point: Point, median: float) -> Baseline:
    return Baseline(point, name, "torch 2.11", raw_bytes(Heads(), point), times(median))


def kernel_report() -> LayerReport:
    """Two sizes; FLASH is the fastest at the small one, CUDNN at the large one; 3 bits are refused."""
    refused = Row(SMALL, "3", StepBytes(1), 3.25, reason="the compiler says no")
    absent = Baseline(SMALL, "FlashInfer", "flashinfer absent", reason="ModuleNotFoundError: no flashinfer")
    return LayerReport(
        kind="kernels",
        machine=MACHINE,
        ceiling=CEILING,
        heads=Heads(),
        rows=(
            kernel_row("2", SMALL, 10.0),
            refused,
            kernel_row("16", SMALL, 25.0),
            kernel_row("2", LARGE, 60.0),
        ),
        baselines=(
            baseline("SDPA FLASH", SMALL, 20.0),
            baseline("SDPA CUDNN", SMALL, 22.0),
            absent,
            Baseline(SMALL, "QuantizedCache, 4 bits", "transformers 5.17", 1 << 20, reason="bytes only"),
            baseline("SDPA FLASH", LARGE, 320.0),
            baseline("SDPA CUDNN", LARGE, 300.0),
        ),
        is_complete=True,
    )


class Clock:
    """In place of ``graph_times``: runs every call once, and says that each took 10 µs. ``until``: measurements before
    Ctrl-C."""

    def __init__(self, until: int | None = None) -> None:
        self.until = until
        self.count = 0

    def __call__(self, calls: Sequence[Call], replays: int = 30) -> Times:
        if self.count == self.until:
            raise KeyboardInterrupt
        self.count += 1
        for call in calls:
            call()
        return Times(10.0, 9.0, 11.0, replays, len(calls))


def installed_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """No GPU and no compiler: FlexAttention refuses, FlashInfer is absent, QuantizedCache has no device to count."""
    found = Clock()
    monkeypatch.setattr(kernels, "machine_of", lambda device: MACHINE)
    monkeypatch.setattr(kernels, "measure_read_ceiling", lambda device: CEILING)
    monkeypatch.setattr(kernels, "num_caches", lambda *args: 2)
    for module in (kernels, baselines):
        monkeypatch.setattr(module, "graph_times", found)
    monkeypatch.setattr(kernels, "event_ms", lambda calls: [0.01 for call in calls if call() is None])
    monkeypatch.setattr(
        baselines, "flex", lambda kv, replays: Baseline(kv.point, "FlexAttention", "torch", reason="no compiler")
    )
    return found
