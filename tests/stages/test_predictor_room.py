"""Predictors are kept while the budget has room for them, in the order of layers; without any, nothing is fitted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from predictor_runs import WORKLOAD, aqua_layers, loaded_llama, sequences

from kvcal.errors import InfeasibleBudget
from kvcal.plan.tensors import needed_nbytes
from kvcal.progress import Silent
from kvcal.recipe import PredictorSpec
from kvcal.stages.allocate.budget import compile_plan
from kvcal.stages.allocate.record import Allocation, Split, layer_bytes
from kvcal.stages.predictors.record import Finding, PredictorRecord, with_predictors
from kvcal.stages.predictors.stage import Room, run_fit_predictors

SPEC = PredictorSpec(min_explained=-1e9)


def allocated(room: int | None) -> Allocation:
    """Two bits on token groups, with ``room`` bytes of the budget left; None: without a budget."""
    loaded = loaded_llama()
    layers = aqua_layers(loaded)
    fixed, paged = layer_bytes(layers, loaded.geometry.cache_dtype, WORKLOAD)
    split = Split(fixed + paged + (room or 0), None, None, fixed, paged, kind=None if room is None else "kv_budget")
    return Allocation(loaded.identity, loaded.geometry.cache_dtype, layers, WORKLOAD, {}, split)


def fitted(room: int | None, folder: Path, spec: PredictorSpec = SPEC) -> PredictorRecord:
    loaded, allocation = loaded_llama(), allocated(room)
    data = sequences([260] * 6)
    left = None if room is None else Room(allocation, allocation.layers, spec)
    path = folder / f"{room}.safetensors"
    return run_fit_predictors(loaded, allocation.layers, {}, data, spec, WORKLOAD, {}, path, Silent(), left)


def kept(record: PredictorRecord) -> list[tuple[int, str]]:
    return [(finding.layer, finding.side) for finding in record.kept]


def taken(record: PredictorRecord, findings: tuple[Finding, ...]) -> int:
    layers = with_predictors(allocated(0).layers, findings, SPEC)
    return needed_nbytes(layers, record.subject.cache_dtype)


def test_predictors_that_pay_are_kept_while_there_is_room(tmp_path: Path) -> None:
    whole = fitted(None, tmp_path)
    every = kept(whole)
    assert len(every) >= 3
    for count in range(1, len(every) + 1):
        room = taken(whole, whole.kept[:count])
        some = fitted(room, tmp_path)
        assert kept(some) == every[:count]
        allocation = allocated(room)
        plan = compile_plan(allocation, some.apply(allocation.layers), some.tensors())
        assert plan.predicted_bytes == allocation.split.budget
        message = Room(allocation, allocation.layers, SPEC).message(some)
        if count < len(every):
            left_out = next(finding for finding in some.findings if (finding.layer, finding.side) == every[count])
            assert left_out.reason is not None and "bytes beyond the budget" in left_out.reason
            assert message is not None and f"{len(every) - count} of {len(every)} that pay" in message
            assert f"--reserve {taken(whole, whole.kept)}" in message
        else:
            assert message is None


def test_a_byte_less_keeps_one_less(tmp_path: Path) -> None:
    whole = fitted(None, tmp_path)
    record = fitted(taken(whole, whole.kept[:1]) - 1, tmp_path)
    assert kept(whole)[0] not in kept(record)


def test_without_room_for_any_nothing_is_fitted() -> None:
    allocation = allocated(10)
    with pytest.raises(InfeasibleBudget, match="no predictor fits") as caught:
        Room(allocation, allocation.layers, SPEC).require_some()
    enough = caught.value.smallest_bytes - allocation.split.budget + 10
    allocated_again = allocated(enough)
    Room(allocated_again, allocated_again.layers, SPEC).require_some()
    with pytest.raises(InfeasibleBudget, match="not all predictors fit") as all_of_them:
        Room(allocated_again, allocated_again.layers, replace(SPEC, drop=False)).require_some()
    hints = [found.value.hint or "" for found in (caught, all_of_them)]
    assert (
        hints[0] == hints[1] and f"--reserve {all_of_them.value.smallest_bytes - allocated(0).split.budget}" in hints[0]
    )
    nothing = allocated(0)
    layers = tuple(layer for layer in nothing.layers[:1])
    Room(replace(nothing, layers=layers), layers, SPEC).require_some()  # the first layer takes none
