"""Times of steps on a CPU, where the kernels' reference runs and a clock says 10 µs; and the script that takes
them."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import step_times
import torch
from cache_cases import KIVI_2

from kvcal.geometry import AttentionGeometry, Geometry, ModelIdentity
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import Format
from kvcal.plan.plan import Plan, Workload

WORKLOAD = Workload(2, 300)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two layers that are alike, of which the kernels take both."""
    layers = tuple(LayerPlan(AttentionGeometry(n, 4, 2, 64, 64), KIVI_2[0], KIVI_2[1]) for n in range(2))
    return Plan(ModelIdentity("m", "llama", "a" * 64, "b" * 64, "c" * 64), "bfloat16", layers, WORKLOAD, {})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The results of calls; every call takes 10 µs on a device that is the CPU."""
    found: list[torch.Tensor] = []

    def replay_us(step: step_times.Call, prepared: Sequence[step_times.Call]) -> list[float]:
        """A replay for each call before it; of a cache, the first of them alone runs."""
        prepared[0]()
        made = step()
        found.extend(made if isinstance(made, list) else [])
        return [10.0] * len(prepared)

    gpu = SimpleNamespace(L2_cache_size=10, total_memory=1 << 40, name="Test GPU")
    monkeypatch.setattr(step_times, "replay_us", replay_us)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu.name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "device", lambda *name, of=torch.device: of("cpu"))
    return found


@pytest.mark.parametrize("workload", [WORKLOAD, Workload(2, 1500)])
def test_a_step_attends_to_all_tokens_and_its_own(plan: Plan, workload: Workload) -> None:
    """Each call equals fp64 attention over what the layer reads back as dense keys and values."""
    layers = step_times.filled_layers(plan, plan.layers, workload, torch.device("cpu"))
    context, (first, second) = workload.context, step_times.step_calls(layers)
    outputs = [first(), second()]
    assert isinstance(first, partial)
    q, k_new, v_new = first.args[:3]
    heads, layer = plan.layers[0].attention, layers[0]
    assert layer.static is not None
    rows, past = layer.static.rows, context - 1
    k, v = (
        torch.cat([layer.store.read(side, rows, past, 0, q.dtype), new.unsqueeze(2)], 2).double()
        for side, new in (("k", k_new), ("v", v_new))
    )
    assert bool((k.norm(dim=-1) > 0).all()), "tokens that nothing was stored for"
    grouped = q.double().unflatten(1, (heads.num_kv_heads, -1))
    expected = ((grouped @ k.transpose(-1, -2) * heads.k_head_dim**-0.5).softmax(-1) @ v).flatten(1, 2)
    assert (outputs[0].double() - expected).norm() < 0.005 * expected.norm()
    assert not torch.equal(outputs[0], outputs[1])


def test_times_are_of_rows_at_random_phases_and_of_rows_that_pack_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 40 µs, and 8 µs for each row that fills a page; the first round is disturbed."""
    lengths, workload, seen = torch.zeros(5, dtype=torch.int32), Workload(5, 4000), []

    def replay_us(step: step_times.Call, prepared: Sequence[step_times.Call]) -> list[float]:
        for prepare in prepared:
            prepare()
            seen.append(lengths.clone())
        full = [float((one % 128 == 127).sum()) for one in seen]
        return [40 + 8 * count + 99 * (n < 384) for n, count in enumerate(full)]

    monkeypatch.setattr(step_times, "replay_us", replay_us)
    times = step_times.step_times(lambda: None, lengths, workload, layers=4)
    assert (times.us, times.longest_us, times.in_phase_us) == (10, 12, 20) and 10 < times.us_99 <= 12
    mean = (40 * 128 + 8 * 5) / 128
    assert times.packing == pytest.approx(1 - 40 / mean)
    tokens = torch.stack(seen)
    assert int(tokens.min()) == 4000 - 128 and int(tokens.max()) == 3999
    assert len({tuple(row.tolist()) for row in tokens[:128]}) == 128, "each of the phases once"


def test_layers_that_kernels_do_not_read_are_refused(plan: Plan) -> None:
    lattice = LayerPlan(plan.layers[0].geometry, Format(2, lattice_dim=2), Format(2))
    with pytest.raises(step_times.UnsupportedModel, match="lattice"):
        step_times.filled_layers(plan, [lattice], WORKLOAD, torch.device("cpu"))


def test_a_step_in_a_basis_enters_and_leaves_it(lab_script: Callable[..., dict[str, Any]]) -> None:
    """The default plan: layers of other bits are other rows; steps store their token in the basis."""
    default_plan = lab_script("shared")["default_plan"]
    made = default_plan(Geometry("llama", "bfloat16", tuple(AttentionGeometry(n, 4, 2, 64, 64) for n in range(3))), 3.0)
    layers = step_times.filled_layers(made, made.layers, Workload(2, 300), torch.device("cpu"))
    (call, *_), store = step_times.step_calls(layers), layers[0].store
    assert isinstance(call, partial)
    basis, (_, k_new, v_new) = store.step.bases[0], call.args[:3]
    call()
    assert basis is not None and layers[0].static is not None
    place = 299 % store.sides["k"].ring.shape[2]
    assert torch.equal(store.sides["k"].ring[:, :, place], basis.enter(k_new))
    assert not torch.equal(store.sides["v"].ring[:, :, place], v_new)


@pytest.mark.gpu
def test_on_a_gpu_times_are_times(plan: Plan) -> None:
    workload, device = Workload(2, 4096), torch.device("cuda")
    step = step_times.layers_times(step_times.filled_layers(plan, plan.layers, workload, device), workload)
    dense = step_times.dense_us(plan.layers[0], workload, torch.bfloat16, device)
    assert 1 < step.us <= step.us_99 <= step.longest_us < 10_000 and dense is not None and 1 < dense < 10_000
    assert step.in_phase_us > step.us and 0 <= step.packing < 1


PRODUCT = "--tiny --shape 2x300 --prompt 300 --chunk 200 --context 300 --batch 1 --memory 0.001 --generate 2x300"
PRODUCT += " --steps 3 --text 300"


def test_the_script_of_the_product(
    clock: list[torch.Tensor], tmp_path: Path, lab_script: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Every part and cache, on a CPU: prompts are real, steps take what the clock says."""
    lab_script("bench_product", *f"{PRODUCT} --bits 3 --device cpu --out".split(), tmp_path / "product.json")
    rows = json.loads((tmp_path / "product.json").read_text())["rows"]
    assert list(dict.fromkeys((row["part"], row["case"]) for row in rows)) == [
        ("layers", "2x300"), ("prompts", "300 tokens, 300 at once"), ("prompts", "300 tokens, 200 at once"),
        ("generate", "2x300"), ("text", "300 tokens"), ("model", "1 x 300"), ("model", "0.001 GB of x 300"),
    ]  # fmt: skip
    assert not any("reason" in row for row in rows)
    caches = {"16 bits", "3 bits", "2 bits, no basis (reference)"}
    assert {row["cache"] for row in rows if row["part"] != "generate"} == caches
    generated = {row["cache"] for row in rows if row["part"] == "generate"}
    assert generated == caches | {f"{name}, not attached" for name in caches - {"16 bits"}}
    assert "layers: 3 bits of the shape of Llama-3.1-8B on Test GPU" in capsys.readouterr().out


@pytest.mark.gpu
def test_the_script_of_the_product_on_a_gpu(tmp_path: Path, lab_script: Callable[..., dict[str, Any]]) -> None:
    lab_script("bench_product", *f"{PRODUCT} --out".replace("300", "1024").split(), tmp_path / "product.json")
    rows = json.loads((tmp_path / "product.json").read_text())["rows"]
    assert len(rows) == 31 and not any("reason" in row for row in rows)
    assert all(row["of_16_bits"] > 0 for row in rows if row["cache"] != "16 bits")
