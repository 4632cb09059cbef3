"""Stored forms of a static cache on a GPU: the CPU's bytes, but for the rounding of predictions, steps that no host
takes part in, and captured ones."""

from collections.abc import Sequence

import pytest
import torch
from cache_cases import NUM_HEADS
from form_cases import (
    NAMES,
    advance,
    as_met,
    assert_same_records,
    attention,
    dynamic_of,
    form_plan,
    poison,
    score_spread,
    states,
    static_of,
)
from gpu_cases import graph_of
from static_cases import pages_of
from torch import Tensor

from kvcal import Plan, PlanCache
from kvcal.geometry import AttentionGeometry, Geometry
from kvcal.plan.page_format import SIDES

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::kvcal.errors.SlowPath")]

DIM = 64
CAPTURED = ["lattice d=2", "lattice d=4", "before RoPE, boosted", "linear", "int4, lattice"]
CAPTURED += ["predicted, windows that grow", "values alone, from keys that queries chose"]


def plan_for(name: str) -> Plan:
    attention = tuple(AttentionGeometry(index, NUM_HEADS, 2, DIM, DIM) for index in range(3))
    return form_plan(name, geometry=Geometry("llama", "bfloat16", attention))


def inputs_of(batch: int, tokens: int) -> list[tuple[Tensor, ...]]:
    return [states(layer, batch, tokens, DIM) for layer in range(3)]


def on_gpu(inputs: Sequence[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    return [tuple(x.cuda() for x in of_layer) for of_layer in inputs]


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_the_dynamic_cache_on_a_cpu(name: str) -> None:
    """Rows of 300, 130 and 3 tokens, padded on the left, in chunks and in steps over the boundaries of pages.
    Products of predictors round otherwise on a GPU, so that few codes are others."""
    plan, width, total = plan_for(name), 300, 440
    mask = torch.zeros(3, width, dtype=torch.long)
    for row, length in enumerate((300, 130, 3)):
        mask[row, width - length :] = 1
    real = torch.nn.functional.pad(mask, (0, total - width), value=1).bool()
    inputs = inputs_of(3, total)
    static, dynamic, given = static_of(plan, total, 3, mask, "cuda"), dynamic_of(plan, mask), on_gpu(inputs)
    is_predicted = any(layer.predictor(side) is not None for layer in plan.layers for side in SIDES)
    start = 0
    for stop in (170, 299, 300, *range(301, 320), 380, *range(381, total)):
        poison(static)
        found, expected = advance(static, start, stop, given), advance(dynamic, start, stop, inputs)
        for layer, ours, theirs, (q, _, _) in zip(static.layers, found, expected, inputs, strict=True):
            if isinstance(ours, Tensor):
                keys, values = as_met(layer, *theirs)
                q, seen = q[:, :, start:stop], real[:, :stop]
                bound = 2e-3 * max(1.0, score_spread(q, keys, seen)) * values.abs().max()  # operands have 11 bits
                error = (ours.cpu() - attention(q, keys, values, seen)).abs()
                assert (error.median() if is_predicted else error.max()) < bound
        start = stop
    static.check()
    if is_predicted:
        assert share_of_other_bytes(static, dynamic) < 0.01
    else:
        assert assert_same_records(static, dynamic) > 0
    assert static.nbytes == plan.nbytes([total] * 3, total)


def share_of_other_bytes(static: PlanCache, dynamic: PlanCache) -> float:
    """Of all bytes of the pages that both caches hold."""
    found = []
    for ours, theirs in zip(static.paged_layers, dynamic.paged_layers, strict=True):
        for mine, other in zip(ours.parts, theirs.parts, strict=True):
            for row, length in enumerate(dynamic.lengths):
                pages = (pages_of(part, row, length).cpu().flatten() for part in (mine, other))
                found.append(torch.ne(*pages))
    return float(torch.cat(found).float().mean())


class Step:
    """A step of three layers with inputs in fixed places, as a graph captures it."""

    def __init__(self, cache: PlanCache, batch: int) -> None:
        self.cache = cache
        self.inputs = on_gpu([tuple(torch.zeros_like(x) for x in of_layer) for of_layer in inputs_of(batch, 1)])
        self.outputs = torch.zeros(3, batch, NUM_HEADS, DIM, device="cuda")

    def __call__(self) -> None:
        for number, found in enumerate(advance(self.cache, 0, 1, self.inputs)):
            self.outputs[number].copy_(found)

    def run(self, call, given: Sequence[tuple[Tensor, ...]], start: int, stop: int) -> Tensor:
        """[steps, layers, B, H, D]."""
        found = []
        for column in range(start, stop):
            for places, values in zip(self.inputs, given, strict=True):
                for place, value in zip(places, values, strict=True):
                    place.copy_(value[:, :, column : column + 1])
            call()
            found.append(self.outputs.clone())
        return torch.stack(found)


@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_step_is_an_eager_one_as_lengths_grow(name: str) -> None:
    plan, given, found, caches = plan_for(name), on_gpu(inputs_of(2, 420)), [], []
    for is_captured in (False, True):
        cache = static_of(plan, 430, 2, device="cuda")
        step = Step(cache, 2)
        call = graph_of(step).replay if is_captured else step
        cache.reset()
        advance(cache, 0, 100, given)
        found.append(step.run(call, given, 100, 420))
        cache.check()
        caches.append(cache)
    assert torch.equal(*found)
    assert caches[0].lengths == caches[1].lengths == [420, 420]
    for ours, theirs in zip(*(cache.paged_layers for cache in caches), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours.tensors, theirs.tensors, strict=True))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_a_step_waits_for_nothing(name: str) -> None:
    """Also the one that packs a page."""
    cache, given = static_of(plan_for(name), 300, 2, device="cuda"), on_gpu(inputs_of(2, 150))
    advance(cache, 0, 122, given)
    step = Step(cache, 2)
    step.run(step, given, 122, 124)  # whatever is made once has been made
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.run(step, given, 124, 140)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    cache.check()
