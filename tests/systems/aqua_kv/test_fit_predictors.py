"""The predictor stage (AQUA-KV, Alg. 1) against numbers computed apart: quantizer by loops, regression by
least squares, keys before RoPE as the model has them."""

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cache_cases import assert_exact_bytes, feed
from cli_cases import run_kvcal, save_llama
from listener import Listener
from oracles import dequantize_code, quantize_group
from predictor_runs import (
    FIRST,
    REST,
    WORKLOAD,
    aqua_layers,
    as_loaded,
    fit,
    fitted_llama,
    loaded_llama,
    plan_with,
    sequences,
)
from tiny_models import VOCAB_SIZE as TINY_VOCAB
from tiny_models import built
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvcal import PlanCache, load_plan
from kvcal.errors import NonFiniteActivations, UnsupportedModel, UsageError
from kvcal.folder import Folder
from kvcal.models.load import load as load_model
from kvcal.models.taps import tap
from kvcal.progress import Silent
from kvcal.recipe_files import load_recipe
from kvcal.stages.checkpoint import host_bytes
from kvcal.stages.pipeline import build_plan
from kvcal.systems.aqua_kv import fit as fitting
from kvcal.systems.aqua_kv import reconstruct
from kvcal.systems.aqua_kv.fit import run_fit_predictors
from kvcal.systems.aqua_kv.recipe import PredictorSpec
from kvcal.systems.aqua_kv.reconstruct import FIT, HELD_OUT, split_sequences
from kvcal.systems.aqua_kv.record import PredictorRecord, load

SINKS = 4


def captured_rows(tokens_T: Tensor) -> list[dict[str, np.ndarray]]:
    """Per layer {"k", "v"}: fp64 [tokens of whole pages, N D], keys before RoPE as the model itself has them;
    sinks, as pages have them, by the first token after."""
    loaded, seen = loaded_llama(), []
    with torch.no_grad(), tap(loaded.model, seen.append, loaded.geometry):
        loaded.model(input_ids=tokens_T.unsqueeze(0), use_cache=False)
    stop = len(tokens_T) // 128 * 128
    theta = loaded.model.config.rope_parameters["rope_theta"]
    rows = []
    for captured in seen:
        k_NTD, v_NTD = (x[0, :, :stop].double().clone() for x in (captured.k_pre_BNTD, captured.v_BNTD))
        for sink in range(SINKS):
            v_NTD[:, sink] = v_NTD[:, SINKS]
            k_NTD[:, sink] = turned(k_NTD[:, SINKS], SINKS - sink, theta)
        rows.append({s: x.transpose(0, 1).flatten(1).numpy() for s, x in (("k", k_NTD), ("v", v_NTD))})
    return rows


def turned(k_ND: Tensor, positions: int, theta: float) -> Tensor:
    """Llama's RoPE by so many positions, fp64 [N, D]."""
    half = k_ND.shape[1] // 2
    angle = positions * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    first, second = k_ND.split(half, dim=1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=1)


def quantized(rows: np.ndarray, num_bits: int) -> np.ndarray:
    """Per token and head, one number after the other (a head of 8 is one group)."""
    result = np.empty_like(rows)
    for token, row in enumerate(rows.astype(np.float32).tolist()):
        for start in range(0, len(row), 8):
            codes, scale, zero = quantize_group(row[start : start + 8], num_bits, "float16")
            result[token, start : start + 8] = [dequantize_code(code, scale, zero) for code in codes]
    return result


def regress(x: np.ndarray, y: np.ndarray, ridge: float) -> tuple[np.ndarray, np.ndarray]:
    """Ridge regression by least squares on data with the penalty appended as rows. (W, b)."""
    x_mean, y_mean = x.mean(0), y.mean(0)
    penalty = ridge * (x - x_mean).var(0).mean() * len(x)
    stacked = np.vstack([x - x_mean, math.sqrt(penalty) * np.eye(x.shape[1])])
    weight = np.linalg.lstsq(stacked, np.vstack([y - y_mean, np.zeros((x.shape[1], y.shape[1]))]), rcond=None)[0].T
    return weight, y_mean - weight @ x_mean


def test_a_pass_begins_where_the_one_before_has_left_hidden_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes with room for no sequence's, for some, and for all; layers that are run are fewer."""
    loaded, calls, contents = loaded_llama(5), [], []
    spec, data = PredictorSpec(drop=False, min_explained=-1e9), sequences([260] * 4)
    hooks = [
        layer.register_forward_pre_hook(lambda *_: calls.append(len(contents))) for layer in loaded.model.model.layers
    ]
    memory = host_bytes()
    hidden_bytes = 4 * 260 * loaded.model.config.hidden_size
    monkeypatch.setitem(fitting.BATCH_TOKENS, "cpu", 1)
    for room in (0, 5 * hidden_bytes, 10**9):
        monkeypatch.setattr(reconstruct, "STARTS_SHARE", room / memory)
        path = tmp_path / f"{room}.safetensors"
        fit(loaded, aqua_layers(loaded), data, spec, path=path)
        contents.append(path.read_bytes())
    for hook in hooks:
        hook.remove()
    assert contents[0] == contents[1] == contents[2]
    none, some, every = (calls.count(number) for number in range(3))
    # Of 4 sequences, pass l ends in layer l, counted from 0, and begins at layer l - 2; the last two end in
    # layer 4.
    assert none - every == 4 * ((2 + 3 + 4 + 5 + 5) - (2 + 3 + 3 + 3 + 2))
    assert every < some < none


def test_sequences_of_a_batch_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any lengths, fitted on and held out: what each of them gives alone, to the rounding of forwards of
    other shapes, by which a code may flip."""
    loaded, data = loaded_llama(), sequences([260, 400, 140, 300, 260, 700])
    widths: list[list[int]] = []
    raw_pages, records = reconstruct._raw_pages, []

    def counted(*given: Any) -> Any:
        widths[-1].append(len(given[-1].numbers))
        return raw_pages(*given)

    monkeypatch.setattr(reconstruct, "_raw_pages", counted)
    for most_tokens in (1, 1200):
        widths.append([])
        monkeypatch.setitem(fitting.BATCH_TOKENS, "cpu", most_tokens)
        records.append(fit(loaded, aqua_layers(loaded), data))
    alone, together = records
    assert {*widths[0]} == {1} and {*widths[1]} == {2, 3, 1} and alone.subject == together.subject
    for finding, expected in zip(together.findings, alone.findings, strict=True):
        assert (finding.layer, finding.side, finding.is_kept) == (expected.layer, expected.side, expected.is_kept)
        if expected.fit is not None and finding.fit is not None:
            assert finding.fit.explained == pytest.approx(expected.fit.explained, rel=1e-3)
            assert finding.fit.error == pytest.approx(expected.fit.error, rel=1e-3)


def test_out_of_memory_halves_the_batch_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that holds three sequences: six, then three at a time."""
    loaded, data, spec = loaded_llama(), sequences([260] * 6), PredictorSpec(drop=False)
    layers, raw_pages, listener = aqua_layers(loaded), reconstruct._raw_pages, Listener()

    def run_in(most_tokens: int, most_sequences: int) -> bytes:
        def limited(*given: Any) -> Any:
            if len(given[-1].numbers) > most_sequences:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return raw_pages(*given)

        path = tmp_path / "predictors.safetensors"
        monkeypatch.setitem(fitting.BATCH_TOKENS, "cpu", most_tokens)
        monkeypatch.setattr(reconstruct, "_raw_pages", limited)
        run_fit_predictors(loaded, layers, {}, data, spec, WORKLOAD, {}, path, listener)
        return path.read_bytes()

    assert run_in(5000, 3) == run_in(780, 3)
    assert listener.said == ["predictors: pass 1 of 3: out of memory, goes on with at most 780 tokens in a batch"]
    with pytest.raises(UsageError, match="one sequence of 260 tokens does not fit into the device's memory"):
        run_in(5000, 0)


def test_every_layer_is_fitted_on_what_the_cache_reads_back() -> None:
    """Alg. 1 line by line, all pages before RoPE. Keys that go through RoPE and back, and weights that are
    stored in fp32, differ in the last bits, so a code may flip: weights agree to 3 % of the largest."""
    layers, record = fitted_llama("pre")
    data = sequences([260] * 6)
    splits = split_sequences(data)
    rows = {i: captured_rows(tokens) for i, tokens in enumerate(data.sequences)}
    kept = {(f.layer, f.side): f for f in record.findings}
    held_out = [i for i in rows if splits[i] == HELD_OUT]
    before = {i: {side: quantized(rows[i][0][side], FIRST.num_bits) for side in "kv"} for i in rows}
    for layer in (1, 2):
        read_back: dict[int, dict[str, np.ndarray]] = {i: {} for i in rows}
        for side in "kv":
            inputs = {
                i: before[i]["k"] if side == "k" else np.hstack([before[i]["v"], read_back[i]["k"]]) for i in rows
            }
            x = {s: np.vstack([inputs[i] for i in rows if splits[i] == s]) for s in (FIT, HELD_OUT)}
            y = {s: np.vstack([rows[i][layer][side] for i in rows if splits[i] == s]) for s in (FIT, HELD_OUT)}
            weight, bias = regress(x[FIT], y[FIT], 1e-3)
            found = record.stored[f"layers.{layer}.{side}_predictor.weight"].double().numpy()
            assert np.abs(found - weight).max() < 3e-2 * np.abs(weight).max()
            error = ((y[HELD_OUT] - x[HELD_OUT] @ weight.T - bias) ** 2).sum()
            spread = ((y[HELD_OUT] - y[HELD_OUT].mean(0)) ** 2).sum()
            measured = kept[layer, side].fit
            assert measured is not None and measured.explained == pytest.approx(1 - error / spread, abs=2e-3)
            for i in rows:
                predicted = inputs[i] @ weight.T + bias
                read_back[i][side] = predicted + quantized(rows[i][layer][side] - predicted, REST.num_bits)
            measured_error = sum(((read_back[i][side] - rows[i][layer][side]) ** 2).sum() for i in held_out) / spread
            assert measured.error == pytest.approx(measured_error, rel=0.02)
        before = read_back
    assert record.subject.num_fit_tokens == 256 * 4 and record.subject.num_held_out_tokens == 256 * 2


def test_predictors_lower_the_error_of_the_cache_as_foretold() -> None:
    """Keys and values read back err less with predictors, in every side of every layer; the plan is this model's."""
    loaded, (layers, record) = loaded_llama(), fitted_llama()
    assert [(f.layer, f.side) for f in record.kept] == [(1, "k"), (1, "v"), (2, "k"), (2, "v")]
    for finding in record.kept:
        assert finding.fit is not None and finding.fit.error is not None and finding.fit.plain_error is not None
        assert finding.fit.explained > 0.1 and finding.fit.error < finding.fit.plain_error
        assert finding.fit.measured_bits == 0.5 * math.log2(finding.fit.plain_error / finding.fit.error) > 0
    plan = plan_with(loaded, layers, record)
    assert [layer.k_pages for layer in plan.layers] == ["post", "pre", "pre"]
    assert record.nbytes == sum(f.fit.nbytes for f in record.kept if f.fit) + 3 * 4 * 4 * 8
    cache = PlanCache(plan, loaded.model.config)
    feed(loaded.model, cache, sequences([400]).sequences[0].unsqueeze(0), cuts=(100, 260, 261))
    assert_exact_bytes(cache, [400])


def test_another_kind() -> None:
    loaded = loaded_llama()
    layers, linear = fitted_llama()
    record = fit(loaded, layers, sequences([260] * 6), PredictorSpec("int4", None, 8, drop=False))
    plan = plan_with(loaded, layers, record)
    whole = {(f.layer, f.side): f.fit for f in linear.kept}
    for finding in record.kept:
        found, other = finding.fit, whole[finding.layer, finding.side]
        assert found is not None and other is not None
        assert 0 < found.explained < other.explained + 0.01 and found.nbytes < other.nbytes
    cache = PlanCache(plan, loaded.model.config)
    feed(loaded.model, cache, sequences([200]).sequences[0].unsqueeze(0))
    assert_exact_bytes(cache, [200])


def test_layers_behind_a_left_out_predictor_are_fitted_without_it() -> None:
    """With nothing kept, layer 2's keys are regressed on layer 1's as quantized by themselves."""
    loaded = loaded_llama()
    layers, data = aqua_layers(loaded, "pre"), sequences([260] * 6)
    record = fit(loaded, layers, data, PredictorSpec(min_explained=0.999999))
    kept = fitted_llama("pre")[1]
    found, other = (next(f.fit for f in r.findings if (f.layer, f.side) == (2, "k")) for r in (record, kept))
    splits = split_sequences(data)
    rows = {i: captured_rows(tokens) for i, tokens in enumerate(data.sequences)}
    x = {s: np.vstack([quantized(rows[i][1]["k"], 2) for i in rows if splits[i] == s]) for s in (FIT, HELD_OUT)}
    y = {s: np.vstack([rows[i][2]["k"] for i in rows if splits[i] == s]) for s in (FIT, HELD_OUT)}
    weight, bias = regress(x[FIT], y[FIT], 1e-3)
    explained = (
        1
        - ((y[HELD_OUT] - x[HELD_OUT] @ weight.T - bias) ** 2).sum() / ((y[HELD_OUT] - y[HELD_OUT].mean(0)) ** 2).sum()
    )
    assert found is not None and other is not None
    assert found.explained == pytest.approx(explained, abs=1e-3)
    assert abs(other.explained - found.explained) > 2e-3


@pytest.mark.parametrize("name", ["glm4", "smollm3"])
def test_other_families(name: str) -> None:
    """Partial and interleaved RoPE, layers without RoPE; bf16 caches."""
    loaded = as_loaded(built(name), cache_dtype="bfloat16")
    layers = aqua_layers(loaded)
    record = fit(loaded, layers, sequences([270] * 4, vocab_size=TINY_VOCAB))
    assert len(record.kept) == 4
    for finding in record.kept:
        assert finding.fit is not None and finding.fit.error is not None and finding.fit.plain_error is not None
        assert finding.fit.error < 1.5 * finding.fit.plain_error
    plan = plan_with(loaded, layers, record)
    cache = PlanCache(plan, loaded.model.config)
    feed(loaded.model, cache, sequences([300], vocab_size=TINY_VOCAB).sequences[0].unsqueeze(0), cuts=(140,))
    assert_exact_bytes(cache, [300])


def test_sliding_windows_are_passed_over() -> None:
    """One layer of full attention has nothing before it: no model is run, nothing is kept."""
    loaded = as_loaded(built("gemma3"))
    record = fit(loaded, aqua_layers(loaded), sequences([10]))
    assert [f.layer for f in record.findings] == [2, 2] and not record.kept and record.subject.num_fit_tokens == 0


def test_keys_changed_after_rope_are_refused() -> None:
    """Llama-4 normalizes its keys once they are rotated."""
    config = copy.deepcopy(built("llama4").config)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    loaded = as_loaded(type(built("llama4"))(config).eval())
    with pytest.raises(UnsupportedModel, match="layer 0 of llama4_text changes its keys after RoPE"):
        fit(loaded, aqua_layers(loaded), sequences([140] * 4, vocab_size=TINY_VOCAB))


def run(path: Path, reporter: Silent, lengths: list[int]) -> PredictorRecord:
    loaded, data = loaded_llama(), sequences(lengths)
    spec, inputs = PredictorSpec(drop=False), {"data": data.fingerprint}
    return run_fit_predictors(loaded, aqua_layers(loaded), {}, data, spec, WORKLOAD, inputs, path, reporter)


def test_an_interrupted_run_goes_on_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fitting.BATCH_TOKENS, "cpu", 1)
    whole, resumed = tmp_path / "whole.safetensors", tmp_path / "resumed.safetensors"
    run(whole, Silent(), [140] * 4)
    with pytest.raises(KeyboardInterrupt):
        run(resumed, Listener(at=("predictors: pass 3 of 3", 3)), [140] * 4)
    assert not resumed.exists() and (tmp_path / "resumed.partial.safetensors").exists()
    listener = Listener()
    run(resumed, listener, [140] * 4)
    assert resumed.read_bytes() == whole.read_bytes()
    assert any("goes on after 2 passes, 3 sequences" in line for line in listener.said)
    assert not (tmp_path / "resumed.partial.safetensors").exists()


def test_held_out_sequences_are_spread_and_whole() -> None:
    splits = split_sequences(sequences([140, 100, 140, 140, 260, 131, 140, 140, 140, 140]))
    assert sorted(splits) == [0, 2, 3, 4, 5, 6, 7, 8, 9]  # the others fill no page
    assert [i for i, split in splits.items() if split == HELD_OUT] == [3, 7]
    with pytest.raises(UsageError, match="1 of 2 sequences fill a page"):
        split_sequences(sequences([140, 127]))


def test_too_few_tokens_are_refused() -> None:
    loaded = as_loaded(built("olmo2"))  # 64 channels of keys, 128 inputs for values
    layers = aqua_layers(loaded)
    with pytest.raises(UsageError, match="128 calibration tokens are too few .* 128 inputs: at least 129"):
        fit(loaded, layers, sequences([140] * 2, vocab_size=TINY_VOCAB))


def test_keys_that_are_not_finite_name_layer_and_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, data = loaded_llama(), sequences([140] * 3)
    original = loaded.model.model.layers[1].self_attn.v_proj.forward
    calls = iter(range(100))

    def broken(x: Tensor) -> Tensor:
        return original(x) * (math.nan if next(calls) >= 2 else 1.0)

    monkeypatch.setattr(loaded.model.model.layers[1].self_attn.v_proj, "forward", broken)
    with pytest.raises(NonFiniteActivations, match=r"sequence \d: the values of layer 1 hold NaN"):
        fit(loaded, aqua_layers(loaded), data)


RECIPE = """
[data]
source = "tasks"
num_samples = 4
seq_len = 280
[formats]
first_k = { num_bits = 4, lattice_dim = 2, num_sink_tokens = 4 }
k = { num_bits = 2, lattice_dim = 2, num_sink_tokens = 4 }
v = { num_bits = 2, lattice_dim = 2, num_sink_tokens = 4 }
[predictors]
drop = false
"""


def test_a_recipe_and_the_command(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """From a recipe to a plan that holds its predictors; the command finds them current, then fits others."""
    model, recipe, folder = str(save_llama(tmp_path / "model", tokenizer)), tmp_path / "small.toml", tmp_path / "run"
    recipe.write_text(RECIPE)
    loaded = load_model(model, device="cpu")
    plan = build_plan(loaded, Folder.create(folder), load_recipe(str(recipe)), WORKLOAD)
    assert plan.layers[1].k_predictor is not None and plan.layers[1].v_predictor is not None
    assert plan.predicted_bytes == load_plan(folder / "plan.safetensors").predicted_bytes
    assert len(plan.provenance["calibration"]["predictors"]["sequences"]) == 4
    command = ("transform", folder, "--model", model, "--recipe", recipe, "--device", "cpu")
    shown = run_kvcal(*command)
    assert "is current, skipped" in shown.err and "2 of 4 kept" in shown.out
    command += ("--json", "--quiet", "--set", "predictors.drop=false", "--set", "predictors.rank=3")
    assert '"nbytes"' in run_kvcal(*command, "--set", "predictors.kind=low_rank").out
    assert load(folder / "predictors.safetensors").subject.spec == PredictorSpec("low_rank", 3, drop=False)
    refused = run_kvcal(*command, "--set", "predictors.kind=int4")
    assert refused.code == 2 and "low_rank takes a rank, other kinds none" in refused.err
