"""The KL meter: each plan is measured once, told apart by its content, and each tensor is hashed once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from predictor_runs import loaded_llama, plan_of_random_predictors, sequences
from torch import Tensor

from kvcal.plan.page_format import Format
from kvcal.plan.tensors import lattice_tensors
from kvcal.progress import Silent
from kvcal.stages import divergence as kl_meter
from kvcal.stages.checkpoint import Checkpoint, State
from kvcal.stages.divergence import PHASE, KLMeter, Text, declare_kls


def test_plans_are_measured_once_by_content_and_tensors_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, hashed, original = loaded_llama(), [], kl_meter.tensors_sha256

    def counted(tensors: dict[str, Tensor]) -> str:
        hashed.extend(tensors.values())
        return original(tensors)

    monkeypatch.setattr(kl_meter, "tensors_sha256", counted)
    k, v = Format(2, "channel", 32), Format(2, "token", 32)
    plan = plan_of_random_predictors(loaded, k, v)
    others = [
        replace(plan_of_random_predictors(loaded, fmt, v), tensors=plan.tensors) for fmt in (Format(3), Format(4))
    ]
    same = replace(plan, tensors={name: x.clone() for name, x in plan.tensors.items()}, provenance={"recipe": "other"})
    name = "layers.1.v_predictor.bias"
    changed = replace(plan, tensors={**plan.tensors, name: plan.tensors[name] + 1.0})
    [tokens_T] = sequences([140]).sequences
    text = Text(0, tokens_T, torch.arange(140) > 130)
    with Checkpoint(tmp_path / "search", "search", {}, State({}, {PHASE: 0}), declare_kls, Silent()) as checkpoint:
        meter = KLMeter(loaded, [text], 1, checkpoint, Silent())
        kls = meter.kl([plan, *others, plan, same, changed], "plans")
        assert len(checkpoint.state.means) == 4 and kls[0] == kls[3] == kls[4]
        assert len({*kls[:3], kls[5]}) == 4
        assert meter.kl([changed, plan], "plans again") == [kls[5], kls[0]]
    assert len(plan.tensors) >= 5 and len(hashed) == 2 * len(plan.tensors) + 1


def test_plans_share_the_tensors_of_their_lattices() -> None:
    layers = plan_of_random_predictors(loaded_llama(), Format(2), Format(2)).layers
    layers = tuple(replace(layer, k=(Format(2, lattice_dim=2),), v=(Format(2, lattice_dim=2),)) for layer in layers)
    one, other = lattice_tensors(layers), lattice_tensors(layers[:2])
    assert other.keys() < one.keys() and all(one[name] is other[name] for name in other)


def test_every_layers_side_has_random_signs_of_its_own() -> None:
    """Without signs, a row of equal values becomes a spike; with the same ones, layers err alike."""
    layers = plan_of_random_predictors(loaded_llama(), Format(2), Format(2)).layers
    layers = tuple(replace(layer, k=(Format(2, lattice_dim=2),), v=(Format(2, lattice_dim=2),)) for layer in layers)
    signs = {name: tuple(x.tolist()) for name, x in lattice_tensors(layers).items() if name.endswith("_signs")}
    assert sorted(signs) == [f"layers.{index}.{side}_signs" for index in range(3) for side in "kv"]
    assert len(set(signs.values())) == 6 and all(set(row) == {-1, 1} and len(row) == 16 for row in signs.values())
