"""``kvcal bench`` on a CPU, where the kernels' reference runs and a clock says 10 µs; and the scripts that use it."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cache_cases import KIVI_2
from cli_cases import ran_well, run_kvcal

from kvcal import bench, save_plan
from kvcal.geometry import AttentionGeometry, ModelIdentity
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import Format
from kvcal.plan.plan import Plan, Workload

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
WORKLOAD = Workload(2, 300)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two layers that are alike, of which the kernels take both."""
    layers = tuple(LayerPlan(AttentionGeometry(n, 4, 2, 64, 64), (KIVI_2[0],), (KIVI_2[1],)) for n in range(2))
    return Plan(ModelIdentity("m", "llama", "a" * 64, "b" * 64, "c" * 64), "bfloat16", layers, WORKLOAD, {})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What calls returned; every call takes 10 µs on a device that is the CPU."""
    found: list[torch.Tensor] = []

    def graph_us(calls: bench.Calls) -> float:
        found.extend(call() for call in calls)
        return 10.0

    gpu = SimpleNamespace(L2_cache_size=10, total_memory=1 << 40, name="Test GPU")
    monkeypatch.setattr(bench, "graph_us", graph_us)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu.name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "device", lambda *name, of=torch.device: of("cpu"))
    return found


def test_attention_is_over_the_tokens_that_were_stored(plan: Plan) -> None:
    """Each call equals fp64 attention over what the layer reads back as dense keys and values."""
    layers = bench.filled_layers(plan, plan.layers[0], WORKLOAD, 2, torch.device("cpu"))
    torch.manual_seed(1)
    outputs = [call() for call in bench.attention_calls(layers)]
    torch.manual_seed(1)
    heads, dtype = plan.layers[0].attention, layers[0].parts[0].ring.dtype
    q = (
        torch.randn(2, heads.num_query_heads, heads.k_head_dim, dtype=dtype)
        .double()
        .unflatten(1, (heads.num_kv_heads, -1))
    )
    for layer, output in zip(layers, outputs, strict=True):
        assert layer.static is not None
        k, v = (layer.store.read(side, layer.static.rows, 300, 0, dtype).double() for side in ("k", "v"))
        expected = (q @ k.transpose(-1, -2) * heads.k_head_dim**-0.5).softmax(-1) @ v
        assert (output.double() - expected.flatten(1, 2)).norm() < 0.005 * expected.norm()
    assert not torch.equal(outputs[0], outputs[1])


def test_layers_alike_share_a_row_and_refusals_have_a_reason(plan: Plan, clock: list[torch.Tensor]) -> None:
    first, *others = plan.layers
    lattice = LayerPlan(first.geometry, (Format(2, lattice_dim=2),), (Format(2),))
    rows = bench.time_layers(plan, WORKLOAD, torch.device("cpu"))
    assert [row.layers for row in rows] == [tuple(layer.geometry.index for layer in (first, *others))]
    assert (rows[0].us, rows[0].sdpa_us, rows[0].nbytes) == (10.0, 10.0, first.nbytes("bfloat16", (300, 300), 300))
    assert clock and all(output.isfinite().all() for output in clock)
    with pytest.raises(bench.UnsupportedModel, match="lattice"):
        bench.filled_layers(plan, lattice, WORKLOAD, 2, torch.device("cpu"))


def test_the_command_prints_a_row_for_each_kind_of_layer(plan: Plan, clock: list[torch.Tensor], tmp_path: Path) -> None:
    save_plan(plan, tmp_path / "plan.safetensors")
    found = ran_well("bench", tmp_path / "plan.safetensors", "--batch", 2, "--context", 300, "--json").json
    assert found["device"] == "Test GPU" and found["workload"] == {"batch": 2, "context": 300}
    assert [(layer["us"], layer["sdpa_us"]) for layer in found["layers"]] == [(10.0, 10.0)]
    assert "1.00x" in ran_well("bench", tmp_path / "plan.safetensors").out


def test_without_a_gpu_it_ends_with_code_6(plan: Plan, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    save_plan(plan, tmp_path / "plan.safetensors")
    done = run_kvcal("bench", tmp_path / "plan.safetensors")
    assert done.code == 6 and "needs a CUDA device" in done.err


@pytest.mark.gpu
def test_on_a_gpu_times_are_times(plan: Plan, tmp_path: Path) -> None:
    save_plan(plan, tmp_path / "plan.safetensors")
    (row,) = ran_well("bench", tmp_path / "plan.safetensors", "--batch", 2, "--context", 4096, "--json").json["layers"]
    assert row["reason"] or 1 < row["us"] < 10_000


def test_the_script_of_formats(clock: list[torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "decode.json"
    words = "--format 2 --format kitty --format 3-rotated --batch 1 --context 300 --heads 2 --head-dim 64 --out"
    monkeypatch.setattr(sys, "argv", ["bench_decode", *words.split(), str(out)])
    runpy.run_path(str(EXPERIMENTS / "bench_decode.py"), run_name="__main__")
    rows = json.loads(out.read_text())["rows"]
    assert [(row["format"], row["us"], row["reason"]) for row in rows] == [
        (name, 10.0, "") for name in ("2", "kitty", "3-rotated")
    ]


@pytest.mark.gpu
def test_the_script_of_whole_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "end_to_end.json"
    monkeypatch.syspath_prepend(EXPERIMENTS)
    words = f"--tiny --format 2 --context 1024 --memory 4 --out {out}".split()
    monkeypatch.setattr(sys, "argv", ["bench_end_to_end", *words])
    runpy.run_path(str(EXPERIMENTS / "bench_end_to_end.py"), run_name="__main__")
    assert {row["cache"] for row in json.loads(out.read_text())["rows"]} == {"16, transformers", "16, no mask", "2"}
