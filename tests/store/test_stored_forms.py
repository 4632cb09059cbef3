"""Stored forms (lattices, predicted pages, keys before RoPE) in a dynamic cache: chunks store what single
steps store, tokens are removed and moved with their pages, and each token is near what it was."""

from collections.abc import Sequence

import pytest
import torch
from cache_cases import HEAD_DIM
from form_cases import NAMES, advance, dynamic_of, form_plan, states
from static_cases import assert_same_pages
from torch import Tensor

from kvcal import Plan, PlanCache
from kvcal.errors import NonFiniteActivations
from kvcal.kernels.choice import not_served
from kvcal.store.workspace import FLOAT_BYTES, kept_slots, step_workspace

LAYERS = range(3)
# Pages are packed at 128 and 256, and read where the widest window has left them, 33 tokens later.
STEPS = (126, *range(127, 131), 160, *range(161, 164), 255, *range(256, 259), 287, *range(288, 291), 300)
CHUNKS = (64, 127, 129, 132, 140, 255, 264, 300)


def fed(plan: Plan, cuts: Sequence[int], inputs: list[tuple[Tensor, ...]]) -> PlanCache:
    cache, start = dynamic_of(plan), 0
    for stop in cuts:
        advance(cache, start, stop, inputs)
        start = stop
    return cache


@pytest.mark.parametrize("name", NAMES)
def test_chunks_store_what_steps_store(name: str) -> None:
    """But where queries choose channels, which know the chunk."""
    plan, inputs = form_plan(name), [states(layer, 2, 300) for layer in LAYERS]
    assert any(any(not_served(layer, "static")) for layer in plan.layers)
    steps = fed(plan, STEPS, inputs)
    assert steps.nbytes == plan.nbytes([300] * 2, 300)
    others = (CHUNKS, (300,)) if not any(layer.k.needs_queries for layer in plan.layers) else (STEPS,)
    for cuts in others:
        assert assert_same_pages(fed(plan, cuts, inputs), steps) >= 12


@pytest.mark.parametrize(
    ("name", "kept", "held"), [("lattice d=2", 162, 170), ("lattice d=2", 125, 260), ("linear", 140, 290)]
)
def test_tokens_can_be_removed(name: str, kept: int, held: int) -> None:
    """Within the ring, and into pages: the pages that stay, and those after them, are as if nothing had been
    there."""
    plan, inputs = form_plan(name), [states(layer, 2, 300) for layer in LAYERS]
    cache = fed(plan, (kept,), inputs)
    advance(cache, kept, held, [states(layer, 2, 300, seed=7) for layer in LAYERS])
    cache.crop(kept - held)
    expected = fed(plan, (kept,), inputs)
    assert cache.lengths == [kept] * 2 and cache.nbytes == expected.nbytes
    if kept >= 128:
        assert assert_same_pages(cache, expected) >= 12


@pytest.mark.parametrize("name", ["lattice d=4", "linear", "before RoPE"])
def test_rows_change_places_with_their_pages(name: str) -> None:
    plan, inputs = form_plan(name), [states(layer, 3, 300) for layer in LAYERS]
    cache, rows = fed(plan, (150,), inputs), torch.tensor([2, 0, 0])
    cache.reorder_cache(rows)
    moved = [tuple(x[rows] for x in of_layer) for of_layer in inputs]
    advance(cache, 150, 300, moved)
    assert assert_same_pages(cache, fed(plan, (150, 300), moved)) >= 12


@pytest.mark.parametrize(("name", "layer"), [("lattice d=2", 0), ("before RoPE, on a lattice", 0), ("linear", 1)])
@pytest.mark.parametrize("side", ["k", "v"])
def test_what_is_not_finite_is_refused(name: str, layer: int, side: str) -> None:
    inputs = [states(index, 2, 128) for index in LAYERS]
    inputs[layer][1 if side == "k" else 2][1, 1, 60, 2] = torch.nan
    cache = fed(form_plan(name), (127,), inputs)  # nothing is packed
    with pytest.raises(NonFiniteActivations, match="cannot be"):
        advance(cache, 127, 128, inputs)


@pytest.mark.parametrize(
    ("name", "slots"), [("linear", 2), ("low rank", 2), ("int4, lattice", 2), ("lattice d=2", 0), ("before RoPE", 0)]
)
def test_two_layers_are_kept_where_each_is_predicted_from_the_one_before(name: str, slots: int) -> None:
    """Keys and values of each, in fp32."""
    plan = form_plan(name)
    found = step_workspace(plan.layers, plan.cache_dtype, 3, 133)
    assert found.kept == slots * 2 * (3 * 128 * 2 * HEAD_DIM) * FLOAT_BYTES  # one page of two heads in 133 tokens
    assert found.nbytes >= found.kept + found.unpacked + found.packing


def test_a_source_of_many_stays_and_others_share() -> None:
    """Layer 0 until layer 2 has read it; keys of layers 1 and 2, for their own values, in one slot."""
    layers = form_plan("one source of two layers, λ").layers
    assert len(kept_slots(layers, 1, 300)) == 3
