"""Which predictors are tried, which pay, and are kept while there is room, and the file that holds them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from predictor_runs import REST, WORKLOAD, aqua_layers, fit, fitted_llama, loaded_llama, plan_with, sequences

from kvcal.errors import InfeasibleBudget, UsageError
from kvcal.geometry import AttentionGeometry
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import RAW, Boost, Format, Tier
from kvcal.plan.plan import Workload
from kvcal.plan.tensors import needed_nbytes
from kvcal.progress import Silent
from kvcal.stages.allocate.budget import compile_plan
from kvcal.stages.allocate.record import Allocation, BudgetSplit, layer_bytes
from kvcal.systems.aqua_kv.fit import run_fit_predictors
from kvcal.systems.aqua_kv.recipe import PredictorSpec
from kvcal.systems.aqua_kv.record import (
    PredictorRecord,
    find_targets,
    load,
    save,
    saved_bits_per_value,
    table_rows,
    with_predictors,
)
from kvcal.systems.aqua_kv.transform import Predictor


def test_saved_bits() -> None:
    assert saved_bits_per_value(0.75) == 1.0 and saved_bits_per_value(1 - 4.0**-3) == pytest.approx(3.0)
    assert saved_bits_per_value(0.0) == saved_bits_per_value(-5.0) == 0.0
    assert saved_bits_per_value(1.0) == 16.0


def test_predictors_that_do_not_pay_are_left_out_with_the_reason() -> None:
    loaded = loaded_llama()
    layers, data = aqua_layers(loaded), sequences([140] * 4)
    short = fit(loaded, layers, data, PredictorSpec(min_explained=-1.0), Workload(1, 400))
    for finding in short.findings[2:]:
        # 3 pages of 128 tokens; 16 outputs; F x 16 weights and 16 biases of 4 bytes.
        assert finding.fit is not None
        assert finding.fit.saved_bytes == int(finding.fit.saved_bits * 16 * 384 / 8)
        assert finding.fit.nbytes == 4 * (16 * (16 if finding.side == "k" else 32) + 16)
        pays = finding.fit.saved_bytes >= finding.fit.nbytes
        assert finding.is_kept == pays and ("1 x 400 tokens and takes" in (finding.reason or "")) == (not pays)
    assert not all(f.is_kept for f in short.findings[2:])
    strict = fit(loaded, layers, data, PredictorSpec(min_explained=0.999999))
    assert not strict.kept and not strict.tensors() and strict.apply(layers) == layers
    assert all("of the variance, at most min_explained = 0.999999" in (f.reason or "") for f in strict.findings[2:])
    assert all(f.fit is not None and f.fit.error is None for f in strict.findings[2:])


def changed(layers: tuple[LayerPlan, ...], index: int, **changes) -> tuple[LayerPlan, ...]:
    return tuple(replace(layer, **changes) if layer.geometry.index == index else layer for layer in layers)


@pytest.mark.parametrize(
    "changes, refused",
    [
        ({1: {"k": RAW, "v": RAW}}, {(1, "k"): "16 bits", (1, "v"): "16 bits"}),
        ({1: {"k_rescale": True}}, {(1, "k"): "k_rescale"}),
        ({2: {"v": replace(REST, recent_window=64)}}, {}),
        ({2: {"k": Format(2, "channel", 32, 4, boost=Boost("query_magnitude", (Tier(4, 0.5),)))}},
         {(2, "k"): "query score"}),
        ({1: {"v": replace(REST, param_dtype="float32", shrink_at=(200, 300))}},
         {(1, "k"): "shrink", (1, "v"): "shrink", (2, "v"): "shrink"}),
    ],
)  # fmt: skip
def test_what_cannot_be_predicted_is_named(changes: dict, refused: dict) -> None:
    layers = aqua_layers(loaded_llama())
    for index, change in changes.items():
        layers = changed(layers, index, **change)
    targets = {(t.index, t.side): t for t in find_targets(layers, PredictorSpec(), "float32")}
    for key, message in {(0, "k"): "no layer before", (0, "v"): "no layer before", **refused}.items():
        assert targets[key].shape is None and message in (targets[key].reason or ""), (key, targets[key].reason)
    for key, target in targets.items():
        if key not in refused and key[0] > 0 and key != (2, "v"):
            assert target.reason is None, (key, target.reason)


def test_a_query_score_is_no_hindrance_for_the_source() -> None:
    """Layer 0 chooses channels by queries; its pages are read back with the queries of the sequence."""
    loaded = loaded_llama(2)
    boosted = Format(2, "channel", 32, 4, boost=Boost("query_magnitude", (Tier(4, 0.5),)))
    layers = changed(aqua_layers(loaded), 0, k=boosted)
    record = fit(loaded, layers, sequences([140] * 4))
    assert [f.is_kept for f in record.findings] == [False, False, True, True]
    plan_with(loaded, layers, record)


def test_a_rank_beyond_the_weight_is_refused() -> None:
    with pytest.raises(UsageError, match="layer 1: rank = 17: expected 1 to 16"):
        fit(loaded_llama(), aqua_layers(loaded_llama()), sequences([140] * 4), PredictorSpec("low_rank", 17))


# --- the record ---


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    layers, record = fitted_llama()
    save(record, {"a": 1}, tmp_path / "p.safetensors")
    again = load(tmp_path / "p.safetensors")
    assert again.subject == record.subject and again.findings == record.findings
    assert again.apply(layers) == record.apply(layers)
    assert all(torch.equal(again.tensors()[name], tensor) for name, tensor in record.tensors().items())
    headers, rows = table_rows(again)
    assert len(rows) == 6 and all(len(row) == len(headers) for row in rows)
    assert rows[0][-1] == "left out: there is no layer before it" and rows[3][-1] == ""


SPEC = PredictorSpec(min_explained=-1e9)


def allocated(room: int | None) -> Allocation:
    """Two bits on token groups, with ``room`` bytes of the budget left; None: without a budget."""
    loaded = loaded_llama()
    layers = aqua_layers(loaded)
    fixed, paged = layer_bytes(layers, loaded.geometry.cache_dtype, WORKLOAD)
    split = BudgetSplit(
        fixed + paged + (room or 0), None, None, fixed, paged, kind=None if room is None else "kv_budget"
    )
    return Allocation(loaded.identity, loaded.geometry.cache_dtype, layers, WORKLOAD, {}, split)


def fitted(folder: Path) -> PredictorRecord:
    loaded, layers = loaded_llama(), allocated(None).layers
    data = sequences([260] * 6)
    return run_fit_predictors(loaded, layers, {}, data, SPEC, WORKLOAD, {}, folder / "p.safetensors", Silent())


def test_a_plan_beyond_its_budget_is_refused_at_compilation(tmp_path: Path) -> None:
    record = fitted(tmp_path)
    assert len(record.kept) >= 3
    layers = with_predictors(allocated(0).layers, record.findings, SPEC)
    taken = needed_nbytes(layers, record.subject.cache_dtype)
    for room in (taken, taken - 1):
        allocation = allocated(room)
        applied = record.apply(allocation.layers), record.tensors()
        if room == taken:
            assert compile_plan(allocation, *applied).predicted_bytes == allocation.split.budget
            continue
        with pytest.raises(InfeasibleBudget) as caught:
            compile_plan(allocation, *applied)
        assert f"--reserve {taken}" in (caught.value.hint or "")


def test_transforms_that_do_not_go_with_a_predictor_are_refused() -> None:
    predictor = Predictor("linear", 0)
    layer = LayerPlan(AttentionGeometry(1, 4, 2, 16, 16), Format(2, "channel", 32), Format(2))
    with pytest.raises(ValueError, match="has a k_predictor, whose bias holds the mean"):
        replace(layer, k_predictor=predictor, k_offset=True, k_pages="pre")
    with pytest.raises(ValueError, match="has a k_predictor, which predicts keys before RoPE"):
        replace(layer, k_predictor=predictor)
    rotated = replace(layer, v=Format(2, quantizer="rotated"), v_basis=True)
    with pytest.raises(ValueError, match="has v_basis, which takes the place of other transforms"):
        replace(rotated, v_predictor=predictor)
