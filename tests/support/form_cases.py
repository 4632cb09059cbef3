"""Shared by the tests of stored forms: plans with lattices, predictors and keys before RoPE, and a way to
feed queries, keys and values to a dynamic cache, layer by layer, without a model."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from cache_cases import HEAD_DIM, NUM_HEADS, llama_plan, tiny_llama
from static_cases import QUERY
from torch import Tensor

from kvcal import Plan, PlanCache
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import RAW, Boost, Format, Tier
from kvcal.plan.tensors import needed_tensors
from kvcal.systems.aqua_kv.transform import Predictor
from kvcal.systems.kvmix.window_rule import WindowRule

Change = Callable[[LayerPlan], LayerPlan]

K, V = Format(2, "channel", 32, 4), Format(2, "token", 32, 4)
RULE = WindowRule("clamped", 0.25, 100, 10)
LATTICE_2, LATTICE_4 = Format(3, lattice_dim=2, num_sink_tokens=3), Format(2, lattice_dim=4, recent_window=33)
ROTATED = Format(3, num_sink_tokens=4, quantizer="rotated")
KITTY = Format(2, "channel", 64, 4, boost=Boost("magnitude", (Tier(4, 0.25),)))


def _formats(k: Format, v: Format, **changes) -> Change:
    return lambda layer: replace(layer, k=k, v=v, **changes)


def _predicted(kind: str, k: Format, v: Format, source: int, **size) -> Change:
    found = Predictor(kind, source, **size)
    return _formats(k, v, k_pages="pre", k_predictor=found, v_predictor=found)


# Of three layers each; the last one stays for those that are not named.
LAYERS: dict[str, list[Change]] = {
    "lattice d=2": [_formats(LATTICE_2, replace(LATTICE_2, num_bits=4, recent_window=17))],
    "lattice d=4": [_formats(LATTICE_4, LATTICE_4), _formats(LATTICE_2, V)],
    "lattice, keys with λ and offset": [_formats(LATTICE_2, V, k_rescale=True, k_offset=True)],
    "lattice, queries choose channels of keys": [_formats(QUERY, replace(LATTICE_2, num_sink_tokens=5))],
    "lattice, windows that grow": [_formats(replace(LATTICE_2, window_rule=RULE), replace(V, window_rule=RULE))],
    "before RoPE": [_formats(K, V, k_pages="pre"), _formats(K, RAW, k_pages="pre")],
    "before RoPE, boosted": [_formats(KITTY, V, k_pages="pre")],
    "before RoPE, on a lattice": [_formats(LATTICE_2, LATTICE_4, k_pages="pre")],
    "rotated residuals": [_formats(K, V), _predicted("linear", ROTATED, ROTATED, 0), _predicted("linear", K, V, 1)],
    "before RoPE, less a constant": [
        _formats(LATTICE_2, V, k_pages="pre", k_offset=True),
        _formats(ROTATED, V, k_pages="pre", k_offset=True),
    ],
    "linear, from keys before RoPE less a constant": [
        _formats(LATTICE_2, V, k_pages="pre", k_offset=True),
        _predicted("linear", K, V, 0),
    ],
    "linear": [_formats(K, V), _predicted("linear", K, V, 0), _predicted("linear", K, V, 1)],
    "low rank": [_formats(RAW, RAW), *(_predicted("low_rank", Format(2), Format(3), n, rank=3) for n in (0, 1))],
    "int4, lattice": [
        _formats(replace(LATTICE_2, num_bits=4), LATTICE_2),
        *(_predicted("int4", LATTICE_2, LATTICE_2, n, group_size=8) for n in (0, 1)),
    ],
    "one source of two layers, λ": [
        _formats(K, V, k_rescale=True, k_offset=True),
        _predicted("linear", K, V, 0),
        _predicted("linear", K, V, 0),
    ],
    "values alone, from keys that queries chose": [
        _formats(QUERY, replace(V, num_sink_tokens=5)),
        _formats(QUERY, replace(V, num_sink_tokens=5), v_predictor=Predictor("linear", 0)),
    ],
    "predicted, sinks and windows of other sides": [
        _formats(RAW, replace(V, recent_window=40)),
        _predicted("linear", replace(K, num_sink_tokens=9, recent_window=20), replace(V, window_rule=RULE), 0),
        _predicted("linear", LATTICE_4, LATTICE_2, 1),
    ],
    "predicted, windows that grow": [
        _formats(replace(K, window_rule=RULE), replace(V, window_rule=RULE)),
        _predicted("linear", replace(K, window_rule=RULE), replace(V, window_rule=RULE), 0),
    ],
}
NAMES = list(LAYERS)


def with_tensors(plan: Plan, layers: Sequence[LayerPlan]) -> Plan:
    """The plan with other layers, and random tensors for their transforms; RoPE of all channels."""
    generator, tensors = torch.Generator().manual_seed(1), {}
    for name, spec in needed_tensors(layers, plan.cache_dtype).items():
        normal = torch.randn([extent or 1 for extent in spec.shape], generator=generator)
        dtype = getattr(torch, spec.dtype)
        if name.endswith("rotary"):
            index = int(name.split(".")[1])
            (dim,) = {layer.attention.k_head_dim for layer in layers if layer.geometry.index == index}
            tensors[name] = rotary_table(dim)
        elif name.endswith("signs"):
            tensors[name] = (2 * (normal > 0).to(torch.int8) - 1).contiguous()
        elif dtype == torch.uint8:
            tensors[name] = (normal * 50).to(torch.int16).remainder(256).to(torch.uint8)
        elif name.endswith(("rescale", "scale")):
            tensors[name] = (normal.abs() * (0.02 if "predictor" in name else 1.0) + 0.01).to(dtype)
        elif "predictor" in name:
            tensors[name] = (normal * 0.2).to(dtype)
        else:
            tensors[name] = normal.to(dtype)
    return replace(plan, layers=tuple(layers), tensors=tensors)


def rotary_table(dim: int, pairs: int | None = None) -> Tensor:
    """Llama's: the first ``pairs`` of dim / 2 (all if None), neighbours dim / 2 apart."""
    a = torch.arange(dim // 2 if pairs is None else pairs, dtype=torch.float64)
    return torch.stack([a, a + dim // 2, 1e4 ** (-2 * a / dim), torch.ones_like(a)], dim=1)


def form_plan(name: str, cache_dtype: str = "bfloat16") -> Plan:
    """For ``tiny_llama(2, 3)``: three layers with two KV heads."""
    plan = llama_plan(K, V, 2, cache_dtype, 3)
    changes = itertools.chain(LAYERS[name], itertools.repeat(lambda layer: layer))
    layers = [change(layer) for change, layer in zip(changes, plan.layers, strict=False)]
    return with_tensors(plan, layers)


def dynamic_of(plan: Plan, mask: Tensor | None = None) -> PlanCache:
    return PlanCache(plan, tiny_llama(2, 3).config, mask)


def states(layer: int, batch: int, tokens: int, dim: int = HEAD_DIM, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, 8, T, D], keys and values [B, 2, T, D] of a layer, that bf16 holds."""
    generator = torch.Generator().manual_seed(1000 * seed + layer)
    q, k, v = (torch.randn(batch, n, tokens, dim, generator=generator).bfloat16().float() for n in (NUM_HEADS, 2, 2))
    k[..., 1] *= 20.0
    return q, k, v


def advance(
    cache: PlanCache, start: int, stop: int, all_states: Sequence[tuple[Tensor, ...]], device: str = "cpu"
) -> list[tuple[Tensor, Tensor]]:
    """Columns [start, stop) of every layer's queries, keys and values; (K, V) that it hands to attention."""
    found = []
    for layer, states_of_layer in zip(cache.layers, all_states, strict=True):
        q, k, v = (x[:, :, start:stop].to(device) for x in states_of_layer)
        found.append(layer.update(k, v))
        layer.observe(q)
    return found
