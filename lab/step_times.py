"""Time of a decoding step over a plan's packed pages, next to a step at 16 bits.

A step of a layer is all that its cache does for one new token of every row: keys and values enter their
basis, are stored, and fill pages, which are packed; queries turn, attention reads sinks, pages and ring, and
its outputs leave the basis. Copies of a layer are the layers of one static cache: so many that the GPU's L2
cache holds none of them. Random keys and values are stored as a prompt's are, by the plan's formats and
tensors. One CUDA graph holds a step of each copy, and is replayed with rows at random phases of their pages,
so that as many rows pack as do when requests come at any time. The baseline stores a token in dense keys and
values, and attends by the fastest backend of torch's SDPA.
"""

from __future__ import annotations

import itertools
import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig

from kvcal.cache.plan_cache import PlanCache
from kvcal.cache.static_layer import StaticPages
from kvcal.errors import SlowPath, UnsupportedModel
from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels.choice import refusals
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES
from kvcal.plan.plan import Plan, Workload
from kvcal.plan.tensors import needed_tensors
from kvcal.store.layer_store import NewTokens

Call = Callable[[], object]
WARM_UP, REPLAYS = 5, 30
MOST_COPIES = 96
WRITTEN_TOKENS = 8 * PAGE_TOKENS  # of a prompt, whose pages are then repeated: time does not depend on what they hold
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


@dataclass(frozen=True)
class StepTimes:
    """Microseconds of a step whose rows begin at random phases of a page, of the 128 that follow: median,
    mean, 99th percentile and longest; the longest where all rows fill a page at once; and ``packing``, its
    share of the mean."""

    us: float
    mean_us: float
    us_99: float
    longest_us: float
    in_phase_us: float
    packing: float


def num_copies(nbytes: int, device: torch.device) -> int:
    """Copies of so many bytes that are four L2 caches, in at most a quarter of the memory."""
    gpu = torch.cuda.get_device_properties(device)
    return max(2, min(MOST_COPIES, math.ceil(4 * gpu.L2_cache_size / nbytes), gpu.total_memory // (4 * nbytes)))


def filled_layers(
    plan: Plan, chosen: Sequence[LayerPlan], workload: Workload, device: torch.device
) -> list[StaticPages]:
    """The layers of a static cache like these of ``plan``, which have equal heads, filled to ``workload``.
    UnsupportedModel: no kernel reads their pages as they are stored."""
    for layer in dict.fromkeys(chosen):
        refused = list(refusals(layer, plan.cache_dtype))
        if refused:
            raise UnsupportedModel("; ".join(refused))
    layers = tuple(replace(layer, geometry=replace(layer.attention, index=n)) for n, layer in enumerate(chosen))

    def origin(name: str) -> str:
        kind, number, *part = name.split(".")
        return ".".join((kind, str(chosen[int(number)].geometry.index), *part)) if kind == "layers" else name

    tensors = {name: plan.tensors[origin(name)] for name in needed_tensors(layers, plan.cache_dtype)}
    heads, model = chosen[0].attention, replace(plan.model, model_type="llama")
    config = LlamaConfig(
        num_hidden_layers=len(layers), num_attention_heads=heads.num_query_heads, head_dim=heads.k_head_dim,
        num_key_value_heads=heads.num_kv_heads, hidden_size=heads.num_query_heads * heads.k_head_dim,
    )  # fmt: skip
    cache = PlanCache(
        Plan(model, plan.cache_dtype, layers, workload, {}, tensors), config, max_tokens=workload.context + PAGE_TOKENS
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowPath)
        cache.allocate(workload.batch, device)
    fill(cache, workload)
    return [layer for layer in cache.paged_layers if isinstance(layer, StaticPages)]


def fill(cache: PlanCache, workload: Workload) -> None:
    """Random tokens in every paged layer of an allocated static cache, stored as a prompt's are. Attention
    takes the last for the token of its step."""
    static, dtype = cache.static, CACHE_DTYPES[cache.plan.cache_dtype]
    assert static is not None
    for stored in cache.paged_layers:
        heads, device = stored.plan.attention, stored.parts[0].ring.device
        shape = (workload.batch, heads.num_kv_heads, min(workload.context, WRITTEN_TOKENS))
        keys, values = (torch.randn(*shape, stored.plan.head_dim(s), dtype=dtype, device=device) for s in SIDES)
        query_sum = torch.ones(*shape[:2], heads.k_head_dim, device=device)
        stored.store.write(NewTokens(keys, values, static.rows, 0), query_sum)
        for part in stored.parts:
            part.ring.normal_()
            pages, written = part.pool.records.unflatten(0, static.table.shape), WRITTEN_TOKENS // PAGE_TOKENS
            for first in range(written, pages.shape[1], written):
                pages[:, first : first + written] = pages[:, : min(written, pages.shape[1] - first)]
    static.set_columns(workload.context - 1)


def layers_times(layers: Sequence[StaticPages], workload: Workload) -> StepTimes:
    """Of one layer, in the mean of these of a cache."""
    static, calls = layers[0].static, step_calls(layers)
    assert static is not None
    return step_times(lambda: [call() for call in calls], static.lengths, workload, len(calls))


def step_calls(layers: Sequence[StaticPages]) -> list[Callable[[], Tensor]]:
    """A step of each layer, of a random token in every row: attention [B, query heads, D]."""
    heads, ring = layers[0].plan.attention, layers[0].parts[0].ring
    counts = heads.num_query_heads, heads.num_kv_heads, heads.num_kv_heads
    q, k, v = (
        torch.randn(ring.shape[0], count, heads.k_head_dim, dtype=ring.dtype, device=ring.device) for count in counts
    )
    return [partial(layer.step, q, k, v, None, heads.k_head_dim**-0.5, 0.0) for layer in layers]


def step_times(step: Call, lengths: Tensor, workload: Workload, layers: int = 1, rounds: int = 2) -> StepTimes:
    """Of ``step`` on rows of ``lengths`` int32 [B], which each replay is given anew, divided by ``layers``. A
    replay is made ``rounds`` times, of which the shortest counts: they do the same."""
    phase = torch.randint(PAGE_TOKENS, (workload.batch,), generator=torch.Generator().manual_seed(0))
    number, first = torch.arange(PAGE_TOKENS).unsqueeze(1), max(0, workload.context - PAGE_TOKENS)
    spread = first + (phase + number) % min(PAGE_TOKENS, workload.context)
    unpacked = spread - ((spread + 1) % PAGE_TOKENS == 0).long()
    in_phase = first + number.expand_as(spread) % min(PAGE_TOKENS, workload.context)
    rows = torch.cat([spread, unpacked, in_phase]).to(lengths.device, lengths.dtype)
    found = replay_us(step, [partial(lengths.copy_, row) for _ in range(rounds) for row in rows])
    shortest = torch.tensor(found, dtype=torch.float64).view(rounds, 3, PAGE_TOKENS).amin(0) / layers
    spread_us, unpacked_us, in_phase_us = shortest[0].sort().values, shortest[1], shortest[2]
    mean, most = float(spread_us.mean()), float(spread_us[math.ceil(0.99 * PAGE_TOKENS) - 1])
    longest, packing = (float(spread_us[-1]), float(in_phase_us.max())), max(0.0, 1 - float(unpacked_us.mean()) / mean)
    return StepTimes(statistics.median(spread_us.tolist()), mean, most, *longest, packing)


def dense_us(layer: LayerPlan, workload: Workload, dtype: torch.dtype, device: torch.device) -> float | None:
    """Microseconds of a step at 16 bits by the fastest backend, which is given the query heads of a group as
    heads or as rows of one query; None where none takes the shape."""
    heads, found, batch = layer.attention, [], workload.batch
    made = partial(torch.randn, dtype=dtype, device=device)
    nbytes = batch * workload.context * heads.values_per_token * dtype.itemsize
    copies, tokens = num_copies(nbytes, device), (batch, heads.num_kv_heads, workload.context)
    try:
        dense = [tuple(made(*tokens, layer.head_dim(side)) for side in SIDES) for _ in range(copies)]
    except torch.OutOfMemoryError:
        return None
    new, last = [made(*tokens[:2], 1, layer.head_dim(side)) for side in SIDES], tokens[2] - 1
    q, at = made(batch, heads.num_query_heads, 1, heads.k_head_dim), torch.tensor([last], device=device)
    as_rows = q.view(batch, heads.num_kv_heads, heads.group_heads, heads.k_head_dim)

    def step(queries: Tensor) -> None:
        for k, v in dense:
            k.index_copy_(2, at, new[0])
            v.index_copy_(2, at, new[1])
            scaled_dot_product_attention(queries, k, v, enable_gqa=queries is q)

    for backend, queries in itertools.product(BACKENDS, (q, as_rows)):
        with sdpa_kernel(backend), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # why a backend refuses
            try:
                us = replay_us(partial(step, queries), [lambda: None] * REPLAYS)
            except RuntimeError:  # the shape, or out of memory
                continue
        found.append(statistics.median(us) / copies)
    return min(found, default=None)


def replay_us(step: Call, prepared: Sequence[Call]) -> list[float]:
    """Microseconds of a replay of one CUDA graph of ``step`` after each call of ``prepared``, which are not
    timed."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    prepared[0]()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    marks = []
    for prepare in [prepared[0]] * WARM_UP + list(prepared):
        prepare()
        marks.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
        marks[-1][0].record()
        graph.replay()
        marks[-1][1].record()
    torch.cuda.synchronize()
    return [1000 * first.elapsed_time(last) for first, last in marks[WARM_UP:]]
