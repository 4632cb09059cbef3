"""Sequences in a dynamic cache, as a prefix file has them, and the 16-bit cache that torch makes of what is read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from cache_cases import HEAD_DIM, tiny_llama
from form_cases import advance, dynamic_of, states
from torch import Tensor

from kvcal import Plan, PlanCache
from kvcal.cache.restored import CacheRestorer
from kvcal.stages.prefix import held_tensors, named_parts

CONFIG = tiny_llama(2, 3).config
LENGTHS = (3, 127, 128, 300, 520)


def filled(plan: Plan, num_tokens: int, dim: int = HEAD_DIM) -> PlanCache:
    """A dynamic cache of one sequence: a prompt, and three chunks behind it."""
    cache = dynamic_of(plan)
    inputs = [states(layer, 1, num_tokens, dim) for layer in range(len(plan.layers))]
    cuts = sorted({0, num_tokens // 2, num_tokens * 3 // 4, num_tokens - 1, num_tokens})
    for start, stop in zip(cuts, cuts[1:], strict=False):
        advance(cache, start, stop, inputs)
    return cache


def grouped(cache: PlanCache) -> list[dict[str, Tensor]]:
    """Tensors of every layer by their names there."""
    held = {name: tensor.contiguous() for name, tensor in held_tensors(cache)}
    places = [f"layers.{layer.geometry.index}." for layer in cache.plan.layers]
    return [{name.removeprefix(at): x for name, x in held.items() if name.startswith(at)} for at in places]


def read_and_stored(cache: PlanCache, into: Plan) -> PlanCache:
    """The oracle: all tokens, as the next chunk would read them, stored as ``into`` says."""
    made = PlanCache(into, CONFIG)
    for old, new in zip(cache.layers, made.layers, strict=True):
        dims = old.plan.head_dim("k"), old.plan.head_dim("v")
        new.update(*old.update(*(torch.zeros(1, 2, 0, dim) for dim in dims)))
    return made


def restored(plan: Plan, into: Plan, given: list[dict[str, Tensor]], num_tokens: int, device: str) -> PlanCache:
    return CacheRestorer(plan, into, CONFIG, torch.device(device)).cache(given, num_tokens)


def assert_same_bits(found: PlanCache, expected: PlanCache) -> None:
    """The two hold the same tokens and pages, and rings the same tokens that were packed, for crops."""
    assert found.lengths == expected.lengths
    ours, theirs = (dict(held_tensors(cache)) for cache in (found, expected))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(_bytes(tensor), _bytes(theirs[name])), name
    rings = dict(named_parts(expected))
    for name, part in named_parts(found):
        assert torch.equal(_bytes(part.ring), _bytes(rings[name].ring)), name


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


def spoiled(given: list[dict[str, Tensor]], layer: int, name: str) -> list[Mapping[str, Tensor]]:
    """The same with one tensor all ones."""
    copied = [dict(group) for group in given]
    copied[layer][name] = torch.full_like(copied[layer][name], 255)
    return copied
