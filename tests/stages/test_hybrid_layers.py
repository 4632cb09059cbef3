"""Layers with pages and a state (Falcon-H1, Zamba2): bytes, budgets, and what cannot take them."""

from pathlib import Path

import pytest
from cache_cases import model_plan
from listener import Listener
from profile_cases import data_of
from tiny_models import as_loaded, built

from kvcal.errors import UnsupportedModel
from kvcal.models.projections import kv_projections
from kvcal.plan.plan import Format, Workload, load_plan, save_plan
from kvcal.recipe import AllocateSpec, CacheSpec, ProfileSpec
from kvcal.recipe_files import load_recipe
from kvcal.stages.allocate.budget import compile_plan
from kvcal.stages.allocate.record import fixed_allocation
from kvcal.stages.allocate.stage import allocate
from kvcal.stages.profile import stage as profile_stage
from kvcal.stages.verify import verify_plan

STATE = 3328  # bytes of a layer of the tiny Falcon-H1
FORMATS = (Format(2, "channel", 32), Format(2, "token", 32))


def test_states_count_and_are_no_cached_values() -> None:
    plan = model_plan(built("falcon_h1"), *FORMATS)
    pages = [layer.nbytes("float32", (300, 300), 300) - 2 * STATE for layer in plan.layers]
    assert plan.nbytes([300, 300]) == sum(pages) + 3 * 2 * STATE
    assert plan.raw_nbytes([300, 300]) == 3 * 2 * (300 * 2 * 16 * 4 + STATE)
    assert plan.bits_per_value(Workload(2, 300)) == 8 * sum(pages) / (3 * 2 * 300 * 2 * 16)


def test_a_budget_takes_states_off_first(tmp_path: Path) -> None:
    loaded = as_loaded(built("falcon_h1"))
    spec = ProfileSpec(num_bits=(2, 4), group_sizes=(32,), kl_num_bits=(2, 4), kl_samples=1, kl_tokens=220)
    cache = CacheSpec(num_sink_tokens=2, k_recent_window=8, v_recent_window=8)
    found = profile_stage.run_profile(loaded, data_of(240), spec, cache, {}, tmp_path / "profile", Listener())
    assert all(bool((found.kl(index, side) > 0).all()) for index in range(3) for side in ("k", "v"))
    made = allocate(found, AllocateSpec(bits=20.0, batch=2, context=640), {})
    assert made.split.fixed == 3 * 2 * STATE and made.split.cache <= made.split.budget
    plan = compile_plan(made, made.layers)
    assert plan.predicted_bytes == made.split.cache and plan.bits_per_value() <= 20.0
    assert len(verify_plan(plan, loaded, 512, Listener())) == 5
    save_plan(plan, tmp_path / "plan.safetensors")
    assert load_plan(tmp_path / "plan.safetensors") == plan


def test_zamba2_is_served_by_fixed_formats() -> None:
    """One attention block in several layers has no weights of its own for KVmix's scores."""
    loaded = as_loaded(built("zamba2"))
    with pytest.raises(UnsupportedModel, match="several layers call the same attention module") as caught:
        kv_projections(loaded.model, loaded.geometry)
    assert "a recipe with [formats]" in str(caught.value.hint)
    formats = load_recipe("kivi-2").formats
    made = fixed_allocation(formats, loaded.identity, loaded.geometry, Workload(2, 300), {})
    assert len(verify_plan(compile_plan(made), loaded, 300, Listener())) == 5
