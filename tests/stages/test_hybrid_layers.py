"""Layers with pages and a state (Falcon-H1, Zamba2): bytes, budgets, and what cannot take them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cache_cases import assert_exact_bytes, feed, model_plan, random_ids
from test_profile import Listener, data_of
from tiny_models import built, measured

from kvcal import PlanCache
from kvcal.errors import UnsupportedModel
from kvcal.geometry import ModelIdentity
from kvcal.models.load import LoadedModel
from kvcal.models.projections import kv_projections
from kvcal.plan.plan import Format, Workload, load_plan, save_plan
from kvcal.recipe import AllocateSpec, CacheSpec, ProfileSpec
from kvcal.recipe_files import load_recipe
from kvcal.stages.allocate.record import fixed_allocation
from kvcal.stages.allocate.stage import allocate
from kvcal.stages.compile import compile_plan
from kvcal.stages.profile import stage as profile_stage
from kvcal.stages.verify import verify_plan

STATE = 3328  # bytes of a layer of the tiny Falcon-H1
FORMATS = (Format(2, "channel", 32), Format(2, "token", 32))


def loaded_model(name: str) -> LoadedModel:
    return LoadedModel(built(name), None, ModelIdentity(name, name, "c", "w", "t"), measured(name), name)


def test_states_count_and_are_no_cached_values() -> None:
    plan = model_plan(built("falcon_h1"), *FORMATS)
    pages = [layer.nbytes("float32", (300, 300), 300) - 2 * STATE for layer in plan.layers]
    assert plan.nbytes([300, 300]) == sum(pages) + 3 * 2 * STATE
    assert plan.raw_nbytes([300, 300]) == 3 * 2 * (300 * 2 * 16 * 4 + STATE)
    assert plan.bits_per_value(Workload(2, 300)) == 8 * sum(pages) / (3 * 2 * 300 * 2 * 16)


def test_a_budget_takes_states_off_first(tmp_path: Path) -> None:
    loaded = loaded_model("falcon_h1")
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


@pytest.mark.parametrize("name", ["falcon_h1", "zamba2"])
def test_states_and_pages_go_on_together(name: str) -> None:
    """A prompt in pieces and steps: logits as with 8 bits of everything, far from those of a cache without a state."""
    model, ids = built(name), random_ids(2, 200)
    cache = PlanCache(model_plan(model, Format(8, "channel", 32), Format(8, "token", 32)), model.config)
    with torch.no_grad():
        exact = model(input_ids=ids, use_cache=False).logits
    logits = feed(model, cache, ids, (50, 130, 199))
    assert (logits - exact).abs().max() < 0.05 * exact.abs().max()
    assert_exact_bytes(cache, [200, 200])
    for layer in cache.layers:
        if hasattr(layer, "conv_states"):
            for state in layer.conv_states.values():
                state.zero_()
    step = random_ids(2, 1, seed=2)
    with torch.no_grad():
        expected = model(input_ids=torch.cat([ids, step], 1), use_cache=False).logits[:, -1:]
    assert (feed(model, cache, step) - expected).abs().max() > 0.05 * expected.abs().max()


def test_zamba2_is_served_by_fixed_formats() -> None:
    """One attention block in several layers has no weights of its own for KVmix's scores: calibration is refused."""
    loaded = loaded_model("zamba2")
    with pytest.raises(UnsupportedModel, match="several layers call the same attention module") as caught:
        kv_projections(loaded.model, loaded.geometry)
    assert "a recipe with [formats]" in str(caught.value.hint)
    formats = load_recipe("kivi-2").formats
    made = fixed_allocation(formats, loaded.identity, loaded.geometry, Workload(2, 300), {})
    assert len(verify_plan(compile_plan(made), loaded, 300, Listener())) == 5


@pytest.mark.parametrize("name", ["falcon_h1", "zamba2"])
def test_what_does_not_hold_states_refuses_them(name: str, tmp_path: Path) -> None:
    model = built(name)
    plan = model_plan(model, *FORMATS)
    with pytest.raises(UnsupportedModel, match="cannot hold layer .: it keeps a state beside its keys and values"):
        PlanCache(plan, model.config, max_tokens=64)
    cache = PlanCache(plan, model.config)
    feed(model, cache, random_ids(1, 10))
    with pytest.raises(UnsupportedModel, match="keeps a state of linear attention: no token can be taken back"):
        cache.crop(-1)
    with pytest.raises(UnsupportedModel, match="keep a state of linear attention, which no prefix file holds"):
        cache.save(tmp_path / "prefix", torch.arange(10))
