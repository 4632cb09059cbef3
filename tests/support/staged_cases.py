"""What the tests of static caches of plans that shrink share: schedules, and both caches fed alike."""

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from cache_cases import HEAD_DIM, feed, llama_plan, tiny_llama
from static_cases import assert_same_pages, listened
from torch import Tensor

from kvcal import Plan, PlanCache, attached
from kvcal.plan.page_format import Boost, Format, Tier, WindowRule
from kvcal.plan.plan import Workload

# Pages are packed with 128, 256 and 384 tokens.
SCHEDULES = {
    "one by one": ((140, 260, 300), (150, 270, 310)), "unlike": ((140, 259, 262), (200, 300)),
    "with the pages": ((128, 256, 384), (129, 257, 385)), "two at once": ((200, 200, 300), (140, 261, 261)),
    "from the start": ((0, 200), (0, 0, 0)), "values alone": ((), (150, 280)),
}  # fmt: skip


def fmt(side: str, shrink_at: Sequence[int], **changes) -> Format:
    axis = "channel" if side == "k" else "token"
    bits = 16 >> len(shrink_at) if shrink_at else 4
    return Format(bits, axis, 32, 3, param_dtype="float32", shrink_at=tuple(shrink_at), **changes)


def staged_plan(k_at: Sequence[int], v_at: Sequence[int], num_layers: int = 1) -> Plan:
    """2 KV heads, fp32 (8 channels of 16 bits would be smaller than 8 bits with scales). One layer, so that all that is
    stored depends on the tokens alone."""
    plan = llama_plan(fmt("k", k_at), fmt("v", v_at), num_layers=num_layers)
    return dataclasses.replace(plan, workload=Workload(8, 2048))


def transformed(plan: Plan) -> Plan:
    generator, tensors = torch.Generator().manual_seed(0), {}
    for layer in plan.layers:
        index, shape = layer.geometry.index, (layer.attention.num_kv_heads, layer.attention.k_head_dim)
        tensors[f"layers.{index}.k_rescale"] = torch.rand(shape, generator=generator) + 0.5
        tensors[f"layers.{index}.k_offset"] = torch.randn(shape, generator=generator)
    layers = tuple(dataclasses.replace(layer, k_rescale=True, k_offset=True) for layer in plan.layers)
    return dataclasses.replace(plan, layers=layers, tensors=tensors)


def mixed_plan() -> Plan:
    """Values that shrink, with growing windows, besides keys that hear queries."""
    k = Format(2, "channel", 32, 3, boost=Boost("query_range", (Tier(16, 0.25, 1.5), Tier(4, 0.25))))
    v = dataclasses.replace(fmt("v", (140, 150, 290)), window_rule=WindowRule("clamped", 0.25, 60, 10))
    return dataclasses.replace(llama_plan(k, v, num_layers=1), workload=Workload(8, 2048))


def caches(plan: Plan, max_tokens: int, mask: Tensor | None = None) -> tuple[PlanCache, PlanCache]:
    """The static one and the dynamic one."""
    config = tiny_llama(2, len(plan.layers)).config
    return PlanCache(plan, config, mask, max_tokens=max_tokens), PlanCache(plan, config, mask)


def fed_alike(
    static: PlanCache, dynamic: PlanCache, ids: Tensor, cuts: Sequence[int], mask: Tensor | None = None
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Feeds ids [B, T] in chunks that end at ``cuts`` and at T; (columns, logits of the static, of the dynamic one)."""
    model, start = tiny_llama(2, len(static.plan.layers)), 0
    for stop in [*(cut for cut in cuts if cut < ids.shape[1]), ids.shape[1]]:
        chunk, seen = ids[:, start:stop], None if mask is None else mask[:, :stop]
        with listened(2, len(static.plan.layers), static.plan):
            expected = feed(model, dynamic, chunk, mask=seen)
        with attached(model):
            found = feed(model, static, chunk, mask=seen)
        yield stop, found, expected
        start = stop


def assert_same_bytes(static: PlanCache, dynamic: PlanCache) -> int:
    """As ``assert_same_pages``; pages have the bits of the columns."""
    for layer in static.paged_layers:
        for part in layer.parts:
            assert part.pool.num_bits == part.format.bits_at(int(static.get_seq_length()))
    return assert_same_pages(static, dynamic)


assert HEAD_DIM == 8
