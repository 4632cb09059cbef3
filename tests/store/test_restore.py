"""Stored pages that are reconstructed once: the bits of a 16-bit cache that is fed what the stored one reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cache_cases import plan_of
from form_cases import NAMES, form_plan, with_tensors
from restore_cases import LENGTHS, assert_same_bits, filled, grouped, read_and_stored, restored, spoiled
from static_cases import plan_for

from kvcal.plan.layer import LayerPlan, Predictor, bare_layers
from kvcal.plan.page_format import Format
from kvcal.plan.plan import Workload


@pytest.mark.parametrize("name", NAMES)
def test_restored_pages_are_the_tokens_that_are_read(name: str) -> None:
    plan = form_plan(name)
    for num_tokens in LENGTHS:
        cache = filled(plan, num_tokens)
        found = restored(plan, plan.unquantized(), grouped(cache), num_tokens, "cpu")
        assert_same_bits(found, read_and_stored(cache, plan.unquantized()))


@pytest.mark.parametrize("name", ["per head", "kitty", "paged window", "transformed", "rotated, feedback", "points"])
def test_pages_that_kernels_read_as_they_are(name: str) -> None:
    plan = plan_for(name, 2, 3)
    for num_tokens in LENGTHS:
        cache = filled(plan, num_tokens)
        found = restored(plan, plan.unquantized(), grouped(cache), num_tokens, "cpu")
        assert_same_bits(found, read_and_stored(cache, plan.unquantized()))


def test_another_plan_packs_what_is_restored() -> None:
    """With sinks, windows, and 16-bit heads beside packed ones."""
    plan = form_plan("int4, lattice")
    eight, four = Format(8, "channel", 64, 5), Format(4, "token", 32, 0, 40)
    layers = [LayerPlan(layer.geometry, (eight,), (four,)) for layer in plan.layers]
    layers[1] = replace(layers[1], k=(Format(16), eight))
    into = replace(plan, layers=tuple(layers), tensors={})
    for num_tokens in LENGTHS:
        cache = filled(plan, num_tokens)
        found = restored(plan, into, grouped(cache), num_tokens, "cpu")
        assert_same_bits(found, read_and_stored(cache, into))


@pytest.mark.parametrize("changed", [{"k_pages": "pre"}, {"v_predictor": Predictor("linear", 0)}])
def test_pages_of_16_bits_that_hold_other_than_the_tokens(changed: dict[str, Any]) -> None:
    """Keys before RoPE, or what a prediction leaves of values."""
    plan = form_plan("int4, lattice")
    first, *others = bare_layers(plan.geometry)
    into = with_tensors(plan, [first, *(replace(layer, **changed) for layer in others)])
    for num_tokens in LENGTHS:
        cache = filled(plan, num_tokens)
        found = restored(plan, into, grouped(cache), num_tokens, "cpu")
        assert_same_bits(found, read_and_stored(cache, into))


@pytest.mark.parametrize("num_tokens", [130, 140, 300, 600])
def test_pages_that_have_shrunk_so_far(num_tokens: int) -> None:
    """From 16 bits, which hold keys as the model made them, to 4 and 2, which hold them without λ and offset."""
    k = Format(2, "channel", 32, 3, param_dtype="float32", shrink_at=(135, 280, 590))
    v = Format(4, "token", 32, param_dtype="float32", shrink_at=(150, 400))
    geometry = form_plan("linear").geometry
    layers = [LayerPlan(layer, (k,), (v,), k_rescale=True, k_offset=True) for layer in geometry.layers]
    plan = with_tensors(replace(form_plan("linear"), workload=Workload(1, 4096)), layers)
    cache = filled(plan, num_tokens)
    found = restored(plan, plan.unquantized(), grouped(cache), num_tokens, "cpu")
    assert_same_bits(found, read_and_stored(cache, plan.unquantized()))


@pytest.mark.parametrize("is_plain", [True, False])
def test_pages_that_no_prompt_gives_are_refused(is_plain: bool) -> None:
    """Scales of NaN, in the first layer: predictions pass them on, and the first one is named."""
    plan = form_plan("linear")
    into = plan.unquantized() if is_plain else plan_of(plan.geometry, Format(8), Format(8))
    given = grouped(filled(plan, 300))
    with pytest.raises(ValueError, match=r"tensor 'layers.0.v.pages' holds NaN"):
        restored(plan, into, spoiled(given, 0, "v.0.pages"), 300, "cpu")
