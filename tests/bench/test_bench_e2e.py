"""Whole decode steps: shapes, plans, batches that fit, what is compared with what; steps themselves need a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_cases import DECODE, MACHINE, read_report, times
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedModel, StaticCache

from kvcal.bench import baselines, e2e
from kvcal.bench import model as bench_model
from kvcal.bench.case import NOBODY, random_plan
from kvcal.bench.device import OUT_OF_MEMORY, ran_out
from kvcal.bench.e2e import (
    FASTEST_16,
    MANY,
    TRANSFORMERS_16,
    StepJob,
    StepReport,
    StepRow,
    batches,
    bench_e2e,
    cache_bytes,
    largest_batch,
    measure_plan,
    memory_limits,
    require_memory,
)
from kvcal.bench.model import (
    SHAPES,
    Static16,
    StaticPlan,
    StepTimes,
    heads_of,
    model_plan,
    num_steps,
    random_model,
    shape_config,
    time_steps,
)
from kvcal.bench.plan_layers import timed_plan, whole_plan
from kvcal.bench.record import Interrupted
from kvcal.bench.shape import PAIRS, RAW_PAIR, Heads, Pair, recipe_pair
from kvcal.cache.plan_cache import PlanCache
from kvcal.commands.bench import _model
from kvcal.errors import SlowPath, UnsupportedModel, UsageError
from kvcal.pages.record_layout import PAGE_TOKENS
from kvcal.plan.plan import save_plan
from kvcal.progress import Silent
from kvcal.store.workspace import step_workspace

GB = 10**9
FORMS = (PAIRS["higgs"], PAIRS["pre-rope"], recipe_pair("aqua-kv-int4"), recipe_pair("aqua-kv-uniform"))


def tiny_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    return random_model(tiny_config(), torch.device("cpu"))


def row(plan: str, batch: int, rate: float | None, peak: int = GB, context: int = 8192) -> StepRow:
    if rate is None:
        return StepRow(plan, context, batch, 24 * GB, reason=OUT_OF_MEMORY)
    return StepRow(plan, context, batch, 24 * GB, DECODE, times(100.0), rate, peak, 1 << 20)


def report(*rows: StepRow, memory: tuple[int, ...] = (24 * GB, 80 * GB)) -> StepReport:
    return StepReport(
        machine=MACHINE, shape="llama-3.1-8b", weights="random weights", weight_bytes=16 * GB, context_bytes=GB // 2,
        memory=memory, rows=rows, is_complete=True,
    )  # fmt: skip


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_public_shapes_have_their_public_sizes(name: str) -> None:
    config = shape_config(name)
    assert heads_of(config) == Heads(8, 128, 4)
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    expected = {"llama-3.1-8b": 8_030_261_248, "qwen3-8b": 8_190_735_360, "qwen3-4b": 4_022_468_096}
    assert size == expected[name]


def test_a_shape_may_be_a_config_file_or_its_folder(tmp_path: Path) -> None:
    tiny_config().save_pretrained(tmp_path)
    assert heads_of(shape_config(str(tmp_path))) == Heads(2, 64, 2)
    assert heads_of(shape_config(str(tmp_path / "config.json"))) == Heads(2, 64, 2)


def test_other_shapes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither one of llama-3.1-8b, qwen3-8b, qwen3-4b nor a config.json"):
        shape_config("llama-9")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="no configuration of a model"):
        shape_config(str(tmp_path))
    sliding = Gemma3TextConfig(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    sliding.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="Sliding"):
        shape_config(str(tmp_path))
    with pytest.raises(UsageError, match="a shape without weights") as caught:
        _model("qwen3-4b", random_weights=False)
    assert "--random-weights" in (caught.value.hint or "")


def test_random_weights_are_finite_bf16_and_no_constants(model: PreTrainedModel) -> None:
    assert model.dtype == torch.bfloat16 and not model.training
    logits = model(torch.tensor([[1, 2, 3]])).logits
    assert torch.isfinite(logits).all() and logits.std() > 0


def test_a_plan_of_a_shape_has_the_bytes_of_its_formats() -> None:
    config = shape_config("llama-3.1-8b")
    raw = model_plan("llama-3.1-8b", config, RAW_PAIR, 4, 8192)
    two = model_plan("llama-3.1-8b", config, PAIRS["2"], 4, 8192)
    assert len(raw.layers) == 32 and raw.model.model_type == "llama"
    assert raw.bits_per_value() == pytest.approx(16, rel=0.02)
    assert two.bits_per_value() == pytest.approx(2.25 + 128 / 8192 * 16, rel=0.01)


def test_batches_grow_to_the_largest_that_fits() -> None:
    assert batches(0) == []
    assert batches(1) == [1]
    assert batches(4) == [1, 4]
    assert batches(30) == [1, 4, 16, 30]
    assert largest_batch(8 * GB, GB) == 7
    assert largest_batch(GB // 4, GB) == 0
    assert largest_batch(-GB, GB) == 0


def test_a_sequence_costs_what_the_plan_says(model: PreTrainedModel) -> None:
    (no_tensors, raw), (_, two) = (cache_bytes("tiny", model, PAIRS[name], 1024) for name in ("16", "2"))
    assert raw >= 2 * 2 * 2 * 64 * 2 * (1024 + 256) and no_tensors == 0
    assert raw / two > 3


@pytest.mark.parametrize("pair", FORMS, ids=lambda pair: pair.name)
def test_a_sequence_of_stored_forms_costs_its_workspace_too(model: PreTrainedModel, pair: Pair) -> None:
    """All that a cache holds, its control state of some bytes a row aside, is what was reckoned with, beside what
    steps compute with and the tables of angles that kernels take."""
    fixed, each = cache_bytes("tiny", model, pair, 1024)
    whole = model_plan("tiny", model.config, pair, 1, 1280)
    beside = step_workspace(whole.layers, whole.cache_dtype, MANY, 1280)
    assert beside.passing > 0
    for batch in (1, 3):
        plan = model_plan("tiny", model.config, pair, batch, 1280)
        cache = PlanCache(plan, model.config, max_tokens=1280)
        with pytest.warns(SlowPath):
            cache.allocate(batch, "cpu")
        held = cache.nbytes + cache.static.forms.nbytes
        assert held == fixed - beside.passing + batch * each


def test_memory_that_the_device_or_the_weights_do_not_leave_is_refused() -> None:
    require_memory(report())
    with pytest.raises(UsageError, match="--memory 90 GB: Test GPU has 80000000000 bytes"):
        require_memory(report(memory=(24 * GB, 90 * GB)))
    with pytest.raises(UsageError, match="--memory 16 GB: the weights of llama-3.1-8b take 16 GB"):
        require_memory(report(memory=(16 * GB,)))


def test_memory_is_a_quantity_or_all_of_the_device() -> None:
    assert memory_limits(("12GB", "all"), 90 * GB) == [12 * GB, 90 * GB]
    assert memory_limits((), 141 * GB) == [24 * GB, 80 * GB, 141 * GB]
    assert memory_limits((), 24 * GB) == [24 * GB]
    with pytest.raises(UsageError, match="--memory: cannot read 'most'") as caught:
        memory_limits(("most",), 90 * GB)
    assert caught.value.hint is not None and caught.value.hint.endswith("; all: the device's")


def test_a_plan_is_timed_over_a_page_of_steps_and_a_slow_16_bit_cache_over_fewer() -> None:
    assert num_steps(False, 1.0) == num_steps(False, 1e4) == num_steps(True, 1.0) == 128
    assert num_steps(True, 100.0) == 50 and num_steps(True, 1e4) == 16


def test_an_error_of_a_capture_that_ran_out_of_memory_is_known_as_such() -> None:
    try:
        try:
            raise torch.OutOfMemoryError("full")
        finally:
            raise RuntimeError("capture failed")  # noqa: B012
    except RuntimeError as failed:
        assert ran_out(failed)
    assert not ran_out(RuntimeError("something else"))


def test_at_the_same_batch_the_factor_is_against_the_faster_16_bit_cache() -> None:
    found = report(
        row(TRANSFORMERS_16, 4, 100.0), row(FASTEST_16, 4, 160.0), row("2", 4, 240.0), row("2", 16, 600.0),
        row(FASTEST_16, 16, None),
    )  # fmt: skip
    assert [found.same_batch(entry) for entry in found.rows] == [100 / 160, 1.0, 1.5, None, None]


def test_with_the_same_memory_every_plan_takes_its_best_batch() -> None:
    found = report(
        row(FASTEST_16, 1, 50.0, peak=20 * GB),
        row(FASTEST_16, 8, 300.0, peak=70 * GB),
        row("2", 8, 200.0, peak=22 * GB),
        row("2", 64, 900.0, peak=79 * GB),
        row("2", 66, None),
    )
    small, large = (found.best("2", 8192, limit) for limit in found.memory)
    assert small is not None and small.batch == 8 and large is not None and large.batch == 64
    by_memory = {(row.limit_bytes, row.plan): found.same_memory(row) for row in found.by_memory()}
    assert by_memory == {
        (24 * GB, FASTEST_16): 1.0, (24 * GB, "2"): 4.0, (80 * GB, FASTEST_16): 1.0, (80 * GB, "2"): 3.0,
    }  # fmt: skip
    assert found.best("2", 8192, 10 * GB) is None
    assert found.best("kitty", 8192, 80 * GB) is None


def test_the_tables_keep_same_batch_and_same_memory_apart() -> None:
    found = report(row(FASTEST_16, 4, 160.0), row("2", 4, 240.0), row("4", 4, None))
    title, headers, cells = found.tables()[0].text()
    assert "same batch" in title and "random" in title
    assert all(len(line) == len(headers) for line in cells)
    assert [line[headers.index("factor")] for line in cells] == ["1.00x", "1.50x", "–"]
    assert [line[headers.index("kernel")] for line in cells] == ["decode", "decode", "–"]
    assert cells[2][-1] == OUT_OF_MEMORY
    title, headers, cells = found.tables()[1].text()
    assert "same memory" in title
    assert all(len(line) == len(headers) for line in cells)
    assert [line[2:5] for line in cells[:3]] == [(FASTEST_16, "decode", "4"), ("2", "decode", "4"), ("4", "–", "–")]


def test_the_document_holds_both_views(tmp_path: Path) -> None:
    found = report(row(FASTEST_16, 4, 160.0), row("2", 4, 240.0))
    path = tmp_path / "e2e.json"
    found.save(tmp_path)
    assert read_report(StepReport, path) == found
    derived = json.loads(path.read_text())["derived"]
    assert [entry["factor"] for entry in derived["same_batch"]] == [1.0, 1.5]
    assert {(entry["memory"], entry["cache"]) for entry in derived["same_memory"]} == {
        (limit, plan) for limit in found.memory for plan in (FASTEST_16, "2")
    }


class Device:
    """In place of ``time_steps``: a device on which a batch fits if its bytes do."""

    def __init__(self, fits: int) -> None:
        self.fits = fits
        self.asked: list[int] = []

    def __call__(self, model: PreTrainedModel, timed: Static16 | StaticPlan, batch: int, context: int) -> StepTimes:
        self.asked.append(batch)
        if batch > self.fits:
            raise torch.OutOfMemoryError("full")
        steps = replace(times(1000.0), replays=PAGE_TOKENS)
        with torch.no_grad(), timed.attention(model):  # allocates
            model(torch.ones(1, 1, dtype=torch.long), past_key_values=timed.cache)
        return StepTimes(steps, 1.0 * PAGE_TOKENS, GB)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device(1000)
    monkeypatch.setattr(e2e, "machine_of", lambda device: MACHINE)
    monkeypatch.setattr(e2e, "context_bytes", lambda device: GB // 2)
    monkeypatch.setattr(e2e, "time_steps", found)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *args: None)
    for module in (e2e, bench_model):
        monkeypatch.setattr(module, "collect", lambda: None)
    monkeypatch.setattr(bench_model, "event_ms", lambda calls: [2.0 for call in calls if call() is not None])
    best = baselines.Baseline(e2e.Point(1, 1024), "SDPA FLASH, enable_gqa", "torch")
    monkeypatch.setattr(baselines, "fastest_sdpa", lambda *args: (best, lambda q, k, v: q))
    return found


def step_job(model: PreTrainedModel, folder: Path, pairs: tuple[Pair, ...] = (PAIRS["2"],)) -> StepJob:
    return StepJob(model, "tiny", "random weights", pairs, (1024,), (2 * GB, 4 * GB), folder, Silent())


def test_a_run_measures_each_batch_once_and_fills_each_memory(
    device: Device, model: PreTrainedModel, tmp_path: Path
) -> None:
    device.fits = 10**6
    found = bench_e2e(step_job(model, tmp_path))
    assert found.is_complete and found.formats == (PAIRS["2"],)
    assert read_report(StepReport, tmp_path / "e2e.json") == found
    for plan in (TRANSFORMERS_16, FASTEST_16, "2"):
        sizes = [entry.batch for entry in found.rows if entry.plan == plan]
        assert len(sizes) == len(set(sizes))
        assert set(sizes) >= {1, 4, 16, 64}
    two, raw = (max(e.batch for e in found.rows if e.plan == plan) for plan in ("2", FASTEST_16))
    assert two > raw
    assert found.rows[0].tokens_per_s == 1000.0, "128 steps of 1 sequence in 128 ms"
    assert [(entry.plan, entry.context) for entry in found.prompts] == [(bench_model.DYNAMIC_16, 1024), ("2", 1024)]
    assert [found.to_first_token(entry) for entry in found.prompts] == [1.0, 1.0], "2 ms each"
    kernels = {entry.plan: entry.kernel.name for entry in found.rows if entry.kernel is not None}
    assert kernels == {
        TRANSFORMERS_16: "sdpa of transformers, with its mask", FASTEST_16: "SDPA FLASH, enable_gqa", "2": "decode",
    }  # fmt: skip


def test_a_plan_file_is_timed_as_it_is(device: Device, model: PreTrainedModel, tmp_path: Path) -> None:
    heads = heads_of(model.config)
    layers = (PAIRS["2"].layers(heads, 2)[0], PAIRS["4"].layers(heads, 2)[1])
    save_plan(random_plan(NOBODY, layers, 1, 1024), tmp_path / "mixed.safetensors")
    job = replace(
        step_job(model, tmp_path, (whole_plan(tmp_path / "mixed.safetensors"),)),
        plan=timed_plan(tmp_path / "mixed.safetensors"),
    )
    found = bench_e2e(job)
    assert read_report(StepReport, tmp_path / "e2e.json") == found and found.plan == job.plan
    mine = [entry for entry in found.rows if entry.plan == "mixed"]
    assert mine and all(entry.kernel is not None and entry.kernel.name == "decode" for entry in mine)
    sizes = [cache_bytes("tiny", model, pair, 1024)[1] for pair in (PAIRS["2"], job.pairs[0], PAIRS["4"])]
    assert sizes[0] < sizes[1] < sizes[2] and 2 * sizes[1] == sizes[0] + sizes[2]


def test_a_prompt_fills_the_cache_that_it_is_timed_with(model: PreTrainedModel) -> None:
    for stored in (None, PAIRS["2"]):
        new_cache = bench_model.prompt_caches(model, "tiny", stored, 300)
        cache = new_cache()
        with bench_model.attached(model):
            model(input_ids=torch.randint(0, 64, (1, 300)), past_key_values=cache, use_cache=True, logits_to_keep=1)
        assert cache.get_seq_length() == 300
        if stored is not None:
            parts = [part for layer in cache.paged_layers for part in layer.parts]
            assert len(parts) == 4 and all(part.pool.records.flatten(1).any(1).sum() == 2 for part in parts), "packed"
        assert new_cache().get_seq_length() == 0


def test_a_prompt_that_runs_out_of_memory_is_a_row(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(bench_model, "collect", lambda: None)
    monkeypatch.setattr(bench_model, "time_prefill", full)
    ((row,), text) = next(iter(bench_model.measure_prefill(model, "tiny", PAIRS["2"], 1024)))
    assert (row.plan, row.times, row.reason) == ("2", None, "out of memory") and "out of memory" in text


def test_a_batch_that_runs_out_of_memory_is_tried_again_smaller(
    device: Device, model: PreTrainedModel, tmp_path: Path
) -> None:
    whole = bench_e2e(step_job(model, tmp_path))
    most = max(entry.batch for entry in whole.rows if entry.plan == "2" and entry.limit_bytes == 2 * GB)
    device.fits = int(0.85 * most)
    empty = replace(whole, rows=(), memory=(2 * GB,))
    rows = [row for (row,), _ in measure_plan(step_job(model, tmp_path), empty, "2", 1024)]
    assert 0 < rows[-1].batch <= device.fits and rows[-1].steps is not None
    device.fits = 0
    rows = [row for (row,), _ in measure_plan(step_job(model, tmp_path), empty, "2", 1024)]
    assert all(entry.reason == OUT_OF_MEMORY and entry.tokens_per_s is None for entry in rows)


def test_a_plan_that_the_kernels_refuse_is_a_row(
    device: Device, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(e2e, "refusal", lambda pair, heads, num_layers: "head size 100")
    found = bench_e2e(step_job(model, tmp_path))
    (refused,) = [entry for entry in found.rows if entry.plan == "2"]
    assert refused.reason == "head size 100" and refused.steps is None and refused.kernel is None


def test_stored_forms_are_timed_with_the_others(device: Device, model: PreTrainedModel, tmp_path: Path) -> None:
    found = bench_e2e(step_job(model, tmp_path, (PAIRS["higgs"], PAIRS["2"])))
    assert {entry.plan for entry in found.rows if entry.steps is not None} == {
        TRANSFORMERS_16,
        FASTEST_16,
        "higgs",
        "2",
    }
    first = next(entry for entry in found.rows if entry.plan == "higgs")
    assert (first.batch, first.tokens_per_s) == (1, 1000.0)


def test_ctrl_c_leaves_the_steps_that_were_timed(
    device: Device, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(model: PreTrainedModel, timed: Static16 | StaticPlan, batch: int, context: int) -> StepTimes:
        if len(device.asked) == 3:
            raise KeyboardInterrupt
        return device(model, timed, batch, context)

    monkeypatch.setattr(e2e, "time_steps", interrupt)
    with pytest.raises(Interrupted, match="3 measurements are in"):
        bench_e2e(step_job(model, tmp_path))
    found = read_report(StepReport, tmp_path / "e2e.json")
    assert not found.is_complete and len(found.rows) == 3


def test_attention_without_a_mask_over_a_full_cache_gives_the_same_logits(model: PreTrainedModel) -> None:
    """The strong 16-bit baseline computes what transformers computes, once every column is filled."""
    prompt = torch.arange(12).view(2, 6)
    logits = []
    for sdpa in (None, baselines.sdpa_forms(torch.nn.attention.SDPBackend.MATH)["group as rows"]):
        timed = Static16(model, 6, sdpa)
        with torch.no_grad():
            model(prompt[:, :5], past_key_values=timed.cache)
            with timed.attention(model):
                logits.append(
                    model(prompt[:, 5:], past_key_values=timed.cache, position_ids=torch.full((2, 1), 5)).logits
                )
    assert model.config._attn_implementation == "sdpa"
    assert torch.allclose(logits[0].float(), logits[1].float(), atol=0.02)


def test_a_16_bit_cache_is_filled_and_rewound(model: PreTrainedModel) -> None:
    timed = Static16(model, 64)
    cache = timed.cache
    assert isinstance(cache, StaticCache)
    with torch.no_grad():
        model(torch.tensor([[1], [2]]), past_key_values=cache)
        timed.fill(40)
        assert timed.nbytes == 2 * 2 * 2 * 2 * 64 * 64 * 2
        model(torch.tensor([[1], [2]]), past_key_values=cache)
    assert [int(layer.cumulative_length) for layer in cache.layers] == [41, 41]
    assert all(layer.keys.std() > 0.5 for layer in cache.layers)
    timed.set_length(40)
    assert [int(layer.cumulative_length) for layer in cache.layers] == [40, 40]


@pytest.mark.parametrize("pair", [PAIRS[n] for n in ("2", "kitty", "2-window", "16")] + [*FORMS], ids=lambda p: p.name)
def test_a_plans_cache_is_filled_and_rewound(model: PreTrainedModel, pair: Pair) -> None:
    plan = model_plan("tiny", model.config, pair, 2, 512)
    timed = StaticPlan(plan, model, 512)
    cache = timed.cache
    with torch.no_grad(), timed.attention(model):
        model(torch.tensor([[1], [2]]), past_key_values=cache)
        timed.fill(300)
        first = model(torch.tensor([[1], [2]]), past_key_values=cache, position_ids=torch.full((2, 1), 300)).logits
        assert torch.isfinite(first).all()
        assert cache.get_seq_length() == 301
        timed.set_length(300)
        again = model(torch.tensor([[1], [2]]), past_key_values=cache, position_ids=torch.full((2, 1), 300)).logits
    assert torch.equal(first, again)
    assert timed.nbytes == plan.nbytes((512, 512))
    assert timed.kernel.name == ("reconstruct + decode" if pair in FORMS else "decode")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [TRANSFORMERS_16, FASTEST_16, "2", "kitty", "2-uneven", "higgs", "aqua"])
def test_steps_are_timed_as_graphs(name: str) -> None:
    on_gpu = random_model(tiny_config(), torch.device("cuda"))
    sdpa = baselines.sdpa_forms(torch.nn.attention.SDPBackend.FLASH_ATTENTION)["enable_gqa"]
    raw = {TRANSFORMERS_16: Static16(on_gpu, 768), FASTEST_16: Static16(on_gpu, 768, sdpa)}
    timed = raw.get(name) or StaticPlan(model_plan("tiny", on_gpu.config, PAIRS[name], 2, 768), on_gpu, 768)
    found = time_steps(on_gpu, timed, 2, 512)
    assert found.steps.replays == 128 and found.total_ms > 0
    kernels = {"2": "decode", "kitty": "decode", "2-uneven": "decode_plain"}
    if name in raw:
        assert timed.kernel.grid is None
    else:
        assert timed.kernel.name == kernels.get(name, "reconstruct + decode")
        assert timed.kernel.grid is not None and timed.kernel.registers is not None
    assert timed.nbytes <= found.peak_bytes
