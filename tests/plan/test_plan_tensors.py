"""Tensors and predictors that do not fit a plan's layers are refused, each with its own words."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvcal.geometry import AttentionGeometry, ModelIdentity
from kvcal.plan.layer import LayerPlan, Predictor
from kvcal.plan.page_format import Format
from kvcal.plan.plan import Plan, Workload
from kvcal.plan.tensors import needed_tensors

IDENTITY = ModelIdentity("m", "llama", "a", "b", "c")
GEOMETRY = tuple(AttentionGeometry(index, 4, 2, 8, 8) for index in range(2))
LATTICE = Format(2, lattice_dim=2, num_sink_tokens=4)
PLAIN = Format(2, num_sink_tokens=4, group_size=64)
SHRINKING = replace(PLAIN, param_dtype="float32", shrink_at=(200,))
ROTARY = torch.tensor([[0, 4, 1.0, 1.0], [1, 5, 0.1, 1.0]], dtype=torch.float64)
VALUES_FROM_0 = Predictor("linear", 0)


def plan_of(
    layers: tuple[LayerPlan, ...], change: Callable[[dict[str, Tensor]], object] = lambda tensors: None
) -> Plan:
    """With tensors of ones and rotary tables, ``change`` applied."""
    tensors = {
        name: ROTARY.clone() if name.endswith("rotary") else torch.ones(spec.extents, dtype=getattr(torch, spec.dtype))
        for name, spec in needed_tensors(layers, "float32").items()
    }
    change(tensors)
    return Plan(IDENTITY, "float32", layers, Workload(1, 512), {}, tensors)


LAYERS = (
    LayerPlan(GEOMETRY[0], (LATTICE,), (LATTICE,), k_pages="pre"),
    LayerPlan(GEOMETRY[1], (LATTICE,), (LATTICE,), k_pages="pre", v_predictor=VALUES_FROM_0),
)
CHANGES: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "missing tensor 'layers.0.k_signs'": lambda tensors: tensors.pop("layers.0.k_signs"),
    "unknown tensor 'more'": lambda tensors: tensors.update(more=torch.ones(1)),
    r"'layers.0.v_signs' is int8 \[8\], expected int8 \[16\]": lambda tensors: tensors.update(
        {"layers.0.v_signs": tensors["layers.0.v_signs"][:8]}
    ),
    r"'lattice.d2.b2' is float64 \[16, 2\], expected float32": lambda tensors: tensors.update(
        {"lattice.d2.b2": tensors["lattice.d2.b2"].double()}
    ),
    r"'layers.1.rotary' is float64 \[2, 3\], expected float64 \[any, 4\]": lambda tensors: tensors.update(
        {"layers.1.rotary": ROTARY[:, :3]}
    ),
}


@pytest.mark.parametrize("message", CHANGES)
def test_tensors_that_are_not_those_needed(message: str) -> None:
    assert plan_of(LAYERS).tensors
    with pytest.raises(ValueError, match=message):
        plan_of(LAYERS, CHANGES[message])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v_predictor": Predictor("linear", 1)}, "predicts v from layer 1, which is not an earlier layer"),
        ({"v": (SHRINKING,)}, "and pages shrink: the prediction would change with them"),
    ],
)
def test_predictors_that_read_what_is_not_there(change: dict[str, object], message: str) -> None:
    first = LayerPlan(GEOMETRY[0], (PLAIN,), (PLAIN,))
    second = LayerPlan(GEOMETRY[1], (PLAIN,), (PLAIN,), v_predictor=VALUES_FROM_0)
    assert plan_of((first, second)).predicted_bytes
    with pytest.raises(ValueError, match=message):
        Plan(IDENTITY, "float32", (first, replace(second, **change)), Workload(1, 512), {})
