"""What an allocation holds: the formats whose losses were added up, within the bytes that its budget leaves."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvcal.geometry import AttentionGeometry, Geometry, ModelIdentity, StateGeometry
from kvcal.plan.layer import LayerPlan, bare_layers, fixed_layers
from kvcal.plan.page_format import RAW, SIDES, Side
from kvcal.plan.plan import Workload
from kvcal.recipe import AllocateSpec, CacheSpec, ProfileSpec
from kvcal.recipe_files import load_recipe
from kvcal.stages.allocate.budget import resolve_budget, workspace_bytes
from kvcal.stages.allocate.record import Allocation, layer_bytes
from kvcal.stages.allocate.stage import allocate, pareto
from kvcal.stages.checkpoint import Mean
from kvcal.stages.profile.record import Profile, ProfileSetup
from kvcal.stages.profile.sensitivity import Candidate

IDENTITY = ModelIdentity("tests/tiny", "llama", "a" * 64, "b" * 64, "c" * 64)
PAGED = tuple(AttentionGeometry(index, 4, 2, 32, 32) for index in (1, 2))
GEOMETRY = Geometry("llama", "bfloat16", (AttentionGeometry(0, 4, 2, 32, 32, window=64), *PAGED, StateGeometry(3, 640)))
PER_TOKEN = ProfileSpec(num_bits=(2, 4), k_axes=("token",), group_sizes=(32,), kl_samples=0)
CACHE = CacheSpec(num_sink_tokens=2, k_recent_window=0, v_recent_window=0)
LENGTHS = {"batch": 2, "context": 4000, "objective": "sensitivity"}
LOUD = {(1, "k"): 90.0, (1, "v"): 3.0, (2, "k"): 1.0, (2, "v"): 40.0}


def profile_of(loudness: dict[tuple[int, Side], float]) -> Profile:
    """Losses that 2 bits more divide by 16; the second head's are twice the first's."""
    subject = ProfileSetup(IDENTITY, GEOMETRY, 10**6, 500, PER_TOKEN, CACHE, "f", "none", 1, 10, 9)
    heads_N1, bits_C = torch.tensor([[1.0], [2.0]], dtype=torch.float64), torch.tensor([2.0, 4.0], dtype=torch.float64)
    means = {
        f"sensitivity.{side}.{index}": Mean(loud * heads_N1 * 4.0**-bits_C, 1)
        for (index, side), loud in loudness.items()
    }
    return Profile(subject, means)


def loss_of(profile: Profile, allocation: Allocation) -> float:
    """The loss of the formats that the layers hold."""
    total = 0.0
    for layer, side in itertools.product((layer for layer in allocation.layers if layer.is_paged), SIDES):
        losses = profile.losses("sensitivity", layer.geometry.index, side)
        fmt = layer.format(side)
        total += 0.0 if fmt == RAW else sum(losses[Candidate(fmt.num_bits, fmt.axis, fmt.group_size)])
    return total


@pytest.mark.parametrize("granularity", ["layer", "block"])
def test_layers_hold_the_formats_whose_losses_were_added_up(granularity) -> None:
    """Keys per token, as values are: nothing but their losses tells them apart."""
    profile = profile_of(LOUD)
    for bits in (4.0, 4.8, 5.8):
        found = allocate(profile, AllocateSpec(bits=bits, granularity=granularity, **LENGTHS), {})
        assert loss_of(profile, found) == pytest.approx(found.loss, rel=1e-12)
    found = allocate(profile, AllocateSpec(bits=4.6, **LENGTHS), {})
    assert [(layer.k[0].num_bits, layer.v[0].num_bits) for layer in found.layers[1:3]] == [(4, 2), (2, 4)]


def test_every_point_of_a_sweep_is_the_allocation_of_its_bytes() -> None:
    profile = profile_of(LOUD)
    rows = pareto(profile, AllocateSpec(bits=4.0, **LENGTHS), 8)
    assert len(rows) > 3
    for point in rows:
        found = allocate(profile, AllocateSpec(kv_budget=f"{point['cache_bytes']}B", **LENGTHS), {})
        assert found.split.cache == point["cache_bytes"] and found.loss == pytest.approx(point["loss"], rel=1e-9)
        assert point["bits_per_value"] == 8 * found.split.paged / (2 * 2 * 64 * 8000)


def test_what_a_budget_leaves_for_the_cache() -> None:
    """The device's without weights and workspace; bits per value without the layers that are not paged."""
    layers, workload = bare_layers(GEOMETRY), Workload(2, 4000)
    fixed, _ = layer_bytes(layers, "bfloat16", workload)
    assert fixed > 0

    def left(**budget: object) -> int:
        return resolve_budget(AllocateSpec(**budget, **LENGTHS), layers, "bfloat16", 10**6, vocab_size=500).for_cache

    assert left(budget="9MB") == 9_000_000 - 10**6 - 2 * 4 * 2 * 500 - workspace_bytes(layers, "bfloat16", workload)
    assert left(bits=3.0) == 3 * 2 * 2 * 64 * 8000 // 8 + fixed
    kivi_2 = fixed_layers(load_recipe("kivi-2").formats, layers)
    assert left(same_bytes_as="kivi-2") == sum(layer_bytes(kivi_2, "bfloat16", workload))
    assert left(kv_budget="5KB") == 5000


def test_the_first_paged_layer_has_the_first_formats() -> None:
    """AQUA-KV: 4 bits in the first layer, 2 in the others; layers that are not paged are not counted."""
    formats = load_recipe("aqua-kv").formats
    layers = fixed_layers(formats, (LayerPlan(GEOMETRY.layers[0]), *(LayerPlan(one, (RAW,), (RAW,)) for one in PAGED)))
    assert [[fmt.num_bits for fmt in (*layer.k, *layer.v)] for layer in layers] == [[], [4, 4], [2, 2]]
