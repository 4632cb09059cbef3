"""Plans that are timed: kinds of layers, their sum, the table of step times that comes of it, and prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_cases import MACHINE, Clock, installed_clock, read_report, times
from cli_cases import ran_well

from kvcal.bench import plan_layers
from kvcal.bench.case import NOBODY, random_plan
from kvcal.bench.e2e import StepReport
from kvcal.bench.kernels import Job, bench_kernels, bench_layer
from kvcal.bench.model import DYNAMIC_16, PrefillRow
from kvcal.bench.plan_layers import search_pairs, timed_plan, whole_plan
from kvcal.bench.record import LayerReport
from kvcal.bench.shape import PAIRS, Heads, Pair, Point, bits_per_value
from kvcal.errors import UsageError
from kvcal.plan.layer import LayerPlan
from kvcal.plan.plan import Workload, save_plan
from kvcal.progress import Silent
from kvcal.stages.search import step_times
from kvcal.store.dequantize import form_reasons

HEADS, CPU = Heads(2, 64, 2), torch.device("cpu")
K2, V2 = PAIRS["2"].k, PAIRS["2"].v
K4, V4 = PAIRS["4"].k, PAIRS["4"].v


def layers() -> tuple[LayerPlan, ...]:
    """2 bits in layers 0, 2 and 3 (with λ in 3); heads of 2 and 4 bits in 1; a lattice on a prediction in 4."""
    two = PAIRS["2"].layers(HEADS, 4)
    per_head = replace(two[1], k=(K2, K4), v=(V4, V2))
    return (two[0], per_head, two[2], replace(two[3], k_rescale=True), HEADS.layer(PAIRS["aqua"], 4))


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "some.safetensors"
    save_plan(random_plan(NOBODY, layers(), 1, 256), path)
    return path


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return installed_clock(monkeypatch)


def test_layers_alike_are_one_kind_in_the_order_of_the_plan(plan_file: Path) -> None:
    plan = timed_plan(plan_file)
    assert (plan.name, plan.heads, plan.points) == ("some.safetensors", HEADS, (Point(1, 256),))
    assert [kind.indices for kind in plan.kinds] == [(0, 2), (1,), (3,), (4,)]
    assert plan.kinds[0].name == "2 layers from 0: K 2 channel g128, V 2 token g128"
    assert plan.kinds[1].name.startswith("1 layer from 1: K 2 channel g128 (1 heads) + 4 channel g128 (1 heads), V 4 ")
    assert "λ" in plan.kinds[2].name and "predicted" in plan.kinds[3].name
    assert [kind.num_ends for kind in plan.kinds] == [0, 0, 0, 1]
    first, second, third = plan.kinds[3].layers(HEADS, 3)
    assert first.k_predictor is None and second.k_predictor is not None and third.k_predictor is not None
    assert (second.k_predictor.source, third.k_predictor.source, third.geometry.index) == (0, 1, 2)


def test_bytes_of_heads_with_formats_of_their_own_lie_between(plan_file: Path) -> None:
    kind, point = timed_plan(plan_file).kinds[1], Point(1, 1024)
    bits = [bits_per_value(stored, HEADS, point) for stored in (PAIRS["2"], kind, PAIRS["4"])]
    assert bits[1] == pytest.approx((bits[0] + bits[2]) / 2)


@pytest.mark.parametrize("bench", [bench_kernels, bench_layer])
def test_a_plans_step_is_the_sum_of_its_layers(clock: Clock, plan_file: Path, tmp_path: Path, bench) -> None:
    plan = timed_plan(plan_file)
    report = bench(Job(CPU, plan.kinds, plan.points, plan.heads, tmp_path, Silent(), True, plan))
    assert read_report(LayerReport, tmp_path / report.file) == report and report.plan == plan
    assert [row.format for row in report.rows] == [kind.name for kind in plan.kinds]
    assert all(row.reason is None for row in report.rows), [row.reason for row in report.rows]
    assert report.plan_us(Point(1, 256)) == pytest.approx(5 * 10.0)
    assert report.plan_factor(Point(1, 256)) == pytest.approx(1.0), "all take 10 µs here"
    title, headers, rows = report.tables()[-1].text()
    shown = dict(zip(headers, rows[0], strict=True))
    assert title.startswith("All 5 layers of some.safetensors")
    assert (shown["layers"], shown["step µs"], shown["factor"], shown["over fp8"]) == ("5", "50.0", "1.00x", "–")


def test_counts_weigh_the_kinds(clock: Clock, plan_file: Path, tmp_path: Path) -> None:
    plan = timed_plan(plan_file)
    report = bench_kernels(Job(CPU, plan.kinds, plan.points, plan.heads, tmp_path, Silent(), True, plan))
    slow = replace(report.rows[0], times=times(30.0))
    changed = replace(report, rows=(slow, *report.rows[1:]))
    assert changed.plan_us(Point(1, 256)) == pytest.approx(2 * 30.0 + 3 * 10.0)
    assert changed.plan_factor(Point(1, 256)) == pytest.approx(50 / 90)
    lacking = replace(report, rows=report.rows[1:])
    assert lacking.plan_us(Point(1, 256)) is None and lacking.plan_factor(Point(1, 256)) is None


def test_what_ran_becomes_the_table_of_step_times(clock: Clock, plan_file: Path, tmp_path: Path) -> None:
    plan, pairs = timed_plan(plan_file), [PAIRS["2"], PAIRS["higgs"], PAIRS["16"]]
    bench_kernels(Job(CPU, [*pairs, *plan.kinds], plan.points, plan.heads, tmp_path, Silent(), True))
    table = step_times.load(tmp_path / step_times.FILE)
    assert table.device == "Test GPU"
    found = table.at(Workload(1, 256), layers()[0])
    assert set(found.values()) == {10.0}
    assert step_times.timed_as(layers()[0]) in found and step_times.timed_as(layers()[3]) in found
    assert step_times.unquantized(step_times.timed_as(layers()[0])) in found
    assert any(form_reasons(layer, ()) for layer in found), "the lattice, too"
    assert len(found) == 5, "2 bits with and without λ are one layer"


def test_a_recipes_search_gives_all_pairs_that_attention_reads_as_stored() -> None:
    pairs = search_pairs("best", Heads())
    assert len({(pair.k, pair.v) for pair in pairs}) == len({pair.name for pair in pairs}) == len(pairs) > 100
    assert {2, 3, 4} <= {pair.k.num_bits for pair in pairs} & {pair.v.num_bits for pair in pairs}
    assert all(not form_reasons(HEADS.layer(pair, 1), ()) for pair in pairs)
    with pytest.raises(UsageError, match="the recipe has no .search."):
        search_pairs("kitty", Heads())


def test_the_command_times_a_recipes_search(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which two pairs are enough here."""
    monkeypatch.setattr("kvcal.bench.device.require_gpu", lambda what: CPU)
    monkeypatch.setattr(plan_layers, "search_pairs", lambda name, heads: search_pairs(name, heads)[:2])
    size = ["--batch", "1", "--context", "256", "--heads", "2", "--head-dim", "64"]
    ran_well("bench", "kernels", "--search", "best", *size, "--quick", "--out", str(tmp_path))
    assert len(step_times.load(tmp_path / step_times.FILE).times) == 3 and not (tmp_path / "kernels.png").exists()


def test_a_plan_of_other_heads_is_refused(tmp_path: Path) -> None:
    wide = PAIRS["2"].layers(Heads(4, 64, 2), 2)
    path = tmp_path / "two.safetensors"
    save_plan(random_plan(NOBODY, (PAIRS["2"].layers(HEADS, 1)[0], wide[1]), 1, 256), path)
    with pytest.raises(UsageError, match="expected one number of heads"):
        timed_plan(path)
    with pytest.raises(UsageError, match="it is for 2 layers, the shape has 3 of"):
        whole_plan(path).layers(HEADS, 3)


def test_a_whole_plan_stands_for_the_models_layers(plan_file: Path) -> None:
    found = whole_plan(plan_file)
    assert found.name == "some" and found.layers(HEADS, 5) == layers()


def test_the_command_times_a_plan_at_its_workload(
    clock: Clock, plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcal.bench.device.require_gpu", lambda what: CPU)
    found = ran_well("bench", "kernels", "--plan", str(plan_file), "--quick", "--out", str(tmp_path / "out"))
    assert "All 5 layers of some.safetensors" in found.out
    assert "step times, for `kvcal search --step-times`" in found.err


def test_prompts_are_held_against_16_bits() -> None:
    rows = (PrefillRow(DYNAMIC_16, 1024, times(100.0)), PrefillRow("2", 1024, times(103.0)), PrefillRow("3", 1024))
    report = StepReport(
        machine=MACHINE, shape="tiny", weights="random weights", weight_bytes=1, context_bytes=1, memory=(1,),
        prompts=rows,
    )  # fmt: skip
    assert [report.to_first_token(row) for row in rows] == [1.0, pytest.approx(1.03), None]
    _, headers, cells = report.tables()[2].text()
    assert dict(zip(headers, cells[1], strict=True))["of 16 bits"] == "1.030x"


def test_pairs_stay_in_the_report(clock: Clock, plan_file: Path, tmp_path: Path) -> None:
    plan = timed_plan(plan_file)
    mixed = [PAIRS["2"], plan.kinds[1]]
    report = bench_kernels(Job(CPU, mixed, plan.points, plan.heads, tmp_path, Silent(), True))
    assert report.formats == (PAIRS["2"],) and all(isinstance(pair, Pair) for pair in report.formats)
