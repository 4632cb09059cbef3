"""Rivals of fewer than 16 bits: what counts as a right result, what stands where one is absent, and their factors.

Kernels of other libraries need a GPU; here a library of one class stands in for FlashInfer, and reads what it is given
as FlashInfer documents it.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from functools import partial
from types import ModuleType

import pytest
import torch
from bench_cases import SMALL, Clock, kernel_report, times
from torch import Tensor

from kvcal.bench import baselines
from kvcal.bench.baselines import Kv
from kvcal.bench.device import Call
from kvcal.bench.record import Baseline
from kvcal.bench.rivals import RIVALS, Rival, checked, expected_output, measured_rivals, pages_of, scaled
from kvcal.bench.shape import Heads, Point

HEADS, POINT = Heads(2, 64, 3), Point(2, 256)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(baselines, "graph_times", found)
    return found


def kv(point: Point = POINT) -> Kv:
    return Kv(HEADS, point, 2, torch.device("cpu"))


def attention(q_BHD: Tensor, k_BSND: Tensor, v_BSND: Tensor, scale: float) -> Tensor:
    """fp64 [B, H, D]."""
    q = q_BHD.double().unflatten(1, (k_BSND.shape[2], -1))
    weights = (torch.einsum("bngd,bsnd->bngs", q, k_BSND.double()) * scale).softmax(-1)
    return torch.einsum("bngs,bsnd->bngd", weights, v_BSND.double()).flatten(1, 2)


def oracle(factor: float = 1.0) -> Rival:
    """A rival over e4m3 with scales of each tensor, times ``factor``."""

    def calls(kv: Kv) -> list[Call]:
        def call(k: Tensor, v: Tensor) -> Tensor:
            tokens = [(x.values.float() * x.scale).view(kv.point.batch, -1, 2, 64) for x in (scaled(k), scaled(v))]
            return factor * attention(kv.q.squeeze(2), tokens[0], tokens[1], 1 / 8)

        return [partial(call, k, v) for k, v in pages_of(kv, 16)]

    return Rival("oracle", "torch", 8, lambda head_dim: 2 * head_dim, calls)


def test_a_right_rival_is_timed_over_its_own_bytes(clock: Clock) -> None:
    (entry,) = measured_rivals(kv(), 2, [oracle()])
    assert entry.times is not None and entry.times.median_us == 10.0 and entry.reason is None
    assert (entry.name, entry.bits) == ("oracle", 8) and entry.version.startswith("torch ")
    assert entry.nbytes == 2 * 256 * 2 * 2 * 64, "a byte for each key and value"


@pytest.mark.parametrize(("factor", "error"), [(2.0, "1"), (math.nan, "nan")])
def test_a_wrong_rival_has_no_time(clock: Clock, factor: float, error: str) -> None:
    (entry,) = measured_rivals(kv(), 2, [oracle(factor)])
    assert entry.times is None and f"wrong result: relative error {error}" in (entry.reason or "")


def test_the_error_of_e4m3_is_its_rounding() -> None:
    data = kv()
    expected = expected_output(data)
    output = oracle().calls(data)[0]()
    assert isinstance(output, Tensor)
    assert 0.01 < float((output[0] - expected).norm() / expected.norm()) < 0.08


def test_absent_libraries_are_rows_with_the_reason(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    entries = measured_rivals(kv(), 2)
    assert [entry.name for entry in entries] == [rival.name for rival in RIVALS]
    assert {entry.reason for entry in entries} == {"vllm is not installed", "flashinfer-python is not installed"}
    assert {entry.bits for entry in entries} == {16, 8, 4} and not any(entry.times for entry in entries)


def test_a_length_that_does_not_fill_its_pages_is_a_reason(clock: Clock) -> None:
    (entry,) = measured_rivals(kv(Point(1, 300)), 2, [oracle()])
    assert entry.reason == "ValueError: context 300 is no multiple of the page size 16"


class PagedDecode:
    """FlashInfer's wrapper: pages by ``indptr`` and ``indices``, e4m3 restored by the scales it is run with."""

    def __init__(self, workspace: Tensor, layout: str, use_tensor_cores: bool) -> None:
        assert layout == "NHD" and use_tensor_cores

    def plan(
        self, indptr: Tensor, indices: Tensor, last: Tensor, *sizes: int, q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert sizes == (6, 2, 64, 16) and kv_data_type == torch.float8_e4m3fn and last.tolist() == [16, 16]
        self.indptr, self.indices = indptr.tolist(), indices.long()

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor], k_scale: float, v_scale: float) -> Tensor:
        rows = []
        for row, (first, stop) in enumerate(zip(self.indptr, self.indptr[1:], strict=False)):
            k, v = (x[self.indices[first:stop]].flatten(0, 1)[None].double() for x in cache)
            rows.append(attention(q[row : row + 1], k * k_scale, v * v_scale, 1 / 8))
        return torch.cat(rows)


def test_flashinfer_is_given_its_pages_and_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = PagedDecode  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    data = kv()
    data.caches[0] = (3 * data.caches[0][0], 0.25 * data.caches[0][1])
    calls = checked(RIVALS[0], data, expected_output(data))
    assert len(calls) == 2


def test_factors_over_rivals_stand_beside_those_over_16_bits() -> None:
    report = kernel_report()
    fp8 = Baseline(SMALL, "XQA", "flashinfer 1", 1 << 20, times(12.0), bits=8)
    slower = Baseline(SMALL, "vLLM Triton e4m3", "vllm 1", 1 << 20, times(18.0), bits=8)
    report = replace(report, baselines=(*report.baselines, fp8, slower))
    row = report.rows[0]
    assert (report.factor(row), report.factor(row, 8), report.factor(row, 4)) == (2.0, 1.2, None)
    assert report.fastest(SMALL, 8) == fp8
    _, headers, rows = report.tables()[0].text()
    shown = dict(zip(headers, rows[0], strict=True))
    assert (shown["factor"], shown["over fp8"], shown["over int4"]) == ("2.00x", "1.20x", "–")
    starred = [line[1] for line in report.tables()[1].text()[2] if line[1].endswith(" *")]
    assert starred == ["SDPA FLASH *", "SDPA CUDNN *", "XQA *"]


@pytest.mark.gpu
@pytest.mark.parametrize("rival", RIVALS, ids=[rival.name for rival in RIVALS])
def test_a_rival_that_is_installed_is_right_on_the_gpu(rival: Rival) -> None:
    pytest.importorskip(rival.package.partition("-")[0], reason=f"{rival.package} is not installed")
    data = Kv(Heads(8, 128, 4), Point(2, 4096), 2, torch.device("cuda"))
    assert len(checked(rival, data, expected_output(data))) == 2
