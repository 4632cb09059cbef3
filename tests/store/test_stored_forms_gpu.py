"""Dynamic caches on a GPU with pages that only they hold: the CPU's bytes, but for the rounding of
predictions."""

import pytest
import torch
from form_cases import NAMES, advance, dynamic_of, form_plan, states
from progressive_cases import fixed, transformed
from static_cases import assert_same_pages, pages_of

from kvcal import Plan, PlanCache
from kvcal.plan.page_format import SIDES

pytestmark = pytest.mark.gpu

TOTAL = 440
SHRINKING = {
    "one by one": fixed((140, 260, 300), (150, 270, 310), num_layers=3),
    "with the pages": fixed((128, 256, 384), (129, 257, 385), num_layers=3),
    "two at once, transformed": transformed(fixed((200, 200, 300), (140, 261, 261), num_layers=3)),
}


def share_of_other_bytes(one: PlanCache, other: PlanCache) -> float:
    """Of all bytes of the pages that both caches hold."""
    found = []
    for ours, theirs in zip(one.paged_layers, other.paged_layers, strict=True):
        for mine, part in zip(ours.parts, theirs.parts, strict=True):
            for row, length in enumerate(other.lengths):
                found.append(torch.ne(*(pages_of(x, row, length).cpu().flatten() for x in (mine, part))))
    return float(torch.cat(found).float().mean())


@pytest.mark.parametrize("name", [*NAMES, *SHRINKING])
def test_bytes_are_those_of_a_cpu(name: str) -> None:
    """Rows of 300, 130 and 3 tokens, padded on the left, in chunks and in steps over the boundaries of pages.
    Products of predictors round otherwise on a GPU, so that few codes are others."""
    plan: Plan = SHRINKING[name] if name in SHRINKING else form_plan(name)
    mask = torch.zeros(3, 300, dtype=torch.long)
    for row, length in enumerate((300, 130, 3)):
        mask[row, 300 - length :] = 1
    inputs = [states(layer, 3, TOTAL) for layer in range(3)]
    caches, start = {device: dynamic_of(plan, mask) for device in ("cpu", "cuda")}, 0
    for stop in (170, 299, 300, *range(301, 320), 380, *range(381, TOTAL)):
        for device, cache in caches.items():
            advance(cache, start, stop, inputs, device)
        start = stop
    assert caches["cuda"].nbytes == caches["cpu"].nbytes
    if any(layer.sources(side) for layer in plan.layers for side in SIDES):
        assert share_of_other_bytes(caches["cuda"], caches["cpu"]) < 0.01
    else:
        assert assert_same_pages(caches["cuda"], caches["cpu"]) > 0
