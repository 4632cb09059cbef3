"""The plan that benchmarks make without a calibration: what the default recipe would store."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcal import Workload, load_plan, load_recipe, save_plan
from kvcal.geometry import AttentionGeometry, Geometry, StateGeometry

ATTENTION = tuple(AttentionGeometry(index, 4, 2, 64, 64) for index in range(6))
WINDOWED = AttentionGeometry(6, 4, 2, 64, 64, window=128)
MODEL = Geometry("llama", "bfloat16", (*ATTENTION, WINDOWED, StateGeometry(7, 4096)))


@pytest.mark.parametrize("bits", [2.5, 3.0])
def test_it_has_the_formats_and_the_bytes_of_the_recipe(
    bits: float, tmp_path: Path, lab_script: Callable[..., dict[str, Any]]
) -> None:
    shared = lab_script("shared")
    plan, recipe = shared["default_plan"](MODEL, bits), load_recipe(shared["RECIPE"])
    assert bits - 0.1 < plan.bits_per_value() <= bits and plan.workload == Workload(8, 32768)
    found = {(side, layer.format(side)) for layer in plan.layers if layer.is_paged for side in ("k", "v")}
    allowed = recipe.profile.num_bits
    assert {fmt for _, fmt in found} <= {recipe.cache.format("k", n, "token", 128, "rotated") for n in allowed}
    assert len(found) > 2, "sides of other bits"
    paged = [layer for layer in plan.layers if layer.is_paged]
    assert all(layer.k_feedback and layer.v_feedback and layer.k_basis and layer.v_basis for layer in paged)
    assert all(layer.v_gain == (layer.format("v").num_bits == 2) for layer in paged)
    assert plan.layers[6:] == shared["bare_layers"](MODEL)[6:]
    save_plan(plan, tmp_path / "plan.safetensors")
    assert load_plan(tmp_path / "plan.safetensors").sha256 == plan.sha256 == shared["default_plan"](MODEL, bits).sha256
    with pytest.raises(ValueError, match="at least"):
        shared["default_plan"](MODEL, 2.1)
