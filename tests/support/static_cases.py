"""What the tests of static caches share: formats, caches and ways to compare them with the dynamic cache."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from cache_cases import (
    HEAD_DIM,
    KIVI_2,
    SINKS_3,
    llama_plan,
    per_head,
    random_ids,
    recipe_formats,
    tiny_llama,
)
from torch import Tensor

from kvcal import Plan, PlanCache
from kvcal.cache.paged_layer import PagedLayer
from kvcal.cache.queries import serving
from kvcal.cache.static_layer import StaticLayer
from kvcal.plan.format import RAW, Boost, Format, Side, Tier, WindowRule
from kvcal.store.static_store import HeadStore

RECIPES = recipe_formats()
V = Format(2, "token", 32, recent_window=33)
QUERY = Format(2, "channel", 32, 5, boost=Boost("query_range", (Tier(16, 0.25, 1.5), Tier(4, 0.25, 0.5))))
FORMATS: dict[str, tuple] = {
    "uniform": RECIPES["uniform-2"],
    "kivi": KIVI_2,
    "kitty": RECIPES["kitty"],
    "queries": (QUERY, replace(V, num_sink_tokens=5)),
    "query magnitude": (replace(QUERY, boost=Boost("query_magnitude", (Tier(4, 0.5),)), recent_window=9), V),
    "random": (replace(QUERY, boost=Boost("random", (Tier(4, 0.5),))), V),
    "different sinks": SINKS_3,
    "clamped window": (
        Format(3, "channel", 64, window_rule=WindowRule("clamped", 0.25, 100, 10)),
        Format(2, "token", 32, window_rule=WindowRule("clamped", 0.3, 80)),
    ),
    "paged window": (
        Format(2, "channel", 32, 4, window_rule=WindowRule("paged", 0.4, 200)),
        Format(2, "token", 32, 4, window_rule=WindowRule("paged", 0.2, 200)),
    ),
    "16-bit values": (Format(2, "channel", 32), RAW),
    "16 bits": (RAW, RAW),
}


def plan_for(name: str, num_kv_heads: int = 2, num_layers: int = 1, cache_dtype: str = "bfloat16") -> Plan:
    """For ``tiny_llama(num_kv_heads, num_layers)``; "per head": every head another format; "transformed": λ and offset.

    With one layer, keys, values and queries depend on the tokens alone, so both caches store the very same bytes.
    """
    if name == "per head":
        return llama_plan(*per_head(num_kv_heads), num_kv_heads, cache_dtype, num_layers)
    if name != "transformed":
        return llama_plan(*FORMATS[name], num_kv_heads, cache_dtype, num_layers)
    plan = llama_plan(*FORMATS["queries"], num_kv_heads, cache_dtype, num_layers)
    generator, tensors = torch.Generator().manual_seed(0), {}
    for index in range(num_layers):
        shape = (num_kv_heads, HEAD_DIM)
        tensors[f"layers.{index}.k_rescale"] = torch.rand(shape, generator=generator) + 0.5
        tensors[f"layers.{index}.k_offset"] = torch.randn(shape, generator=generator)
    layers = tuple(replace(layer, k_rescale=True, k_offset=True) for layer in plan.layers)
    return replace(plan, layers=layers, tensors=tensors)


def listened(num_kv_heads: int, num_layers: int, plan: Plan) -> AbstractContextManager[None]:
    """What the dynamic cache must be called within."""
    return serving(tiny_llama(num_kv_heads, num_layers), plan)


def drifting_ids(batch: int, length: int) -> Tensor:
    """Tokens whose queries change with the text: each 32 of them repeat two."""
    pairs = random_ids(batch, 2 * -(-length // 32)).unflatten(1, (-1, 2))
    return pairs.repeat(1, 1, 16).flatten(1)[:, :length]


def assert_same_pages(static: PlanCache, dynamic: PlanCache, num_layers: int | None = None) -> int:
    """Every page that is due is stored with the same bytes, in every row and head of all layers, or of the first ones,
    and the queries since the last one were counted alike; how many pages there are."""
    count = 0
    lengths = dynamic.lengths
    assert static.lengths == lengths
    for ours, theirs in list(zip(static.layers, dynamic.layers, strict=True))[:num_layers]:
        assert isinstance(ours, StaticLayer) and isinstance(theirs, PagedLayer)
        for store in ours.stores:
            assert_same_queries(store, theirs, lengths)
            for row, length in enumerate(lengths):
                for side in ("k", "v"):
                    if length:
                        store.pack_due(side, slice(row, row + 1), length)
                    for head in range(store.heads.start, store.heads.stop):
                        expected = pages_of(theirs, side, row, head)
                        found = store.pages[side][row, : len(expected), head - store.heads.start]
                        assert torch.equal(found, expected), (side, row, head)
                        count += len(expected)
    return count


def assert_same_queries(store: HeadStore, layer: PagedLayer, lengths: list[int]) -> None:
    """The running query statistic, but where it waits for a page that is due: on a GPU to the last bit but one, as
    torch adds the queries of a group there in an order of its own."""
    fmt = store.variant.k
    for row, length in enumerate(lengths):
        if not fmt.needs_queries or not length or fmt.num_pages(length) > fmt.num_pages(length - 1):
            continue
        (part,) = [part for part in layer.sides["k"] if part.heads.start <= store.heads.start < part.heads.stop]
        heads = slice(store.heads.start - part.heads.start, store.heads.stop - part.heads.start)
        counts = store.variant.group_heads * (length - store.query_since[row])
        assert counts.tolist() == [part.query_count[row]] * len(counts)
        found, expected = store.query_sum[row], part.query_sum[row, heads]
        assert torch.allclose(found, expected, rtol=1e-6) if found.is_cuda else torch.equal(found, expected)


def pages_of(layer: PagedLayer, side: Side, row: int, head: int) -> Tensor:
    """[pages, record_bytes]: what the dynamic cache stores of one head of one row."""
    (part,) = [part for part in layer.sides[side] if part.heads.start <= head < part.heads.stop]
    return part.pages.split(part.num_pages)[row][:, head - part.heads.start]
