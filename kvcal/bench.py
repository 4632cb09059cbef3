"""Time of decode attention over a plan's packed pages, next to dense attention at 16 bits: ``kvcal bench``.

Copies of a layer are the layers of one static cache: so many that the GPU's L2 cache holds none of them. Random keys
and values are stored as a prompt's are, by the plan's formats and tensors. One CUDA graph holds one attention of each
copy; the time is the median of its replays, divided by the number of copies. The baseline is the fastest backend of
torch's SDPA, with the query heads of a group as rows of one query.
"""

from __future__ import annotations

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

from kvcal.cache.paged_layer import PagedLayer
from kvcal.cache.plan_cache import PlanCache
from kvcal.errors import KvcalError, SlowPath, UnsupportedModel
from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels.choice import refusals
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES
from kvcal.plan.plan import Plan, Workload
from kvcal.plan.tensors import needed_tensors
from kvcal.store.dequantize import form_reasons
from kvcal.store.layer_store import NewTokens

Calls = Sequence[Callable[[], Tensor]]
WARM_UP, REPLAYS = 5, 30
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


@dataclass(frozen=True)
class LayerTime:
    """``layers``: indices of layers that are alike; ``nbytes``: of the cache of one. Microseconds of one layer's
    attention, None with a ``reason``; ``sdpa_us`` None where no backend takes the shape."""

    layers: tuple[int, ...]
    k: str
    v: str
    nbytes: int
    us: float | None = None
    sdpa_us: float | None = None
    reason: str = ""


def time_layers(plan: Plan, workload: Workload, device: torch.device) -> list[LayerTime]:
    """A row for each distinct layer with pages; layers that differ in nothing but their index are alike."""
    alike: dict[LayerPlan, list[LayerPlan]] = {}
    for layer in plan.layers:
        if layer.is_paged:
            alike.setdefault(replace(layer, geometry=replace(layer.attention, index=0)), []).append(layer)
    gpu, rows = torch.cuda.get_device_properties(device), []
    for first, *others in alike.values():
        nbytes = first.nbytes(plan.cache_dtype, workload.lengths, workload.context)
        copies = max(2, min(32, math.ceil(4 * gpu.L2_cache_size / nbytes), gpu.total_memory // (4 * nbytes)))
        k, v = (" + ".join(dict.fromkeys(fmt.label for fmt in first.formats(side))) for side in SIDES)
        row = LayerTime(tuple(layer.geometry.index for layer in (first, *others)), k, v, nbytes)
        try:
            row = replace(row, us=graph_us(attention_calls(filled_layers(plan, first, workload, copies, device))))
        except (KvcalError, torch.OutOfMemoryError) as refused:
            row = replace(row, reason=refused.message if isinstance(refused, KvcalError) else "out of memory")
        torch.cuda.empty_cache()
        rows.append(replace(row, sdpa_us=time_sdpa(first, workload, CACHE_DTYPES[plan.cache_dtype], copies, device)))
    return rows


def filled_layers(
    plan: Plan, layer: LayerPlan, workload: Workload, copies: int, device: torch.device
) -> list[PagedLayer]:
    """The layers of a static cache, all like ``layer``, filled to ``workload``. UnsupportedModel: no kernel reads their
    pages as they are stored, or pages shrink."""
    heads = layer.attention
    refused = [*refusals(layer, plan.cache_dtype), *form_reasons(layer, ())]
    refused += ["its pages shrink"] if any(fmt.shrink_at for fmt in (*layer.k, *layer.v)) else []
    if refused:
        raise UnsupportedModel("; ".join(refused))
    layers = tuple(replace(layer, geometry=replace(heads, index=index)) for index in range(copies))
    own = f"layers.{heads.index}."
    tensors = {
        name: plan.tensors[own + name.split(".", 2)[2] if name.startswith("layers.") else name]
        for name in needed_tensors(layers, plan.cache_dtype)
    }
    model, size = replace(plan.model, model_type="llama"), heads.num_query_heads * heads.k_head_dim
    config = LlamaConfig(
        num_hidden_layers=copies, num_attention_heads=heads.num_query_heads, num_key_value_heads=heads.num_kv_heads,
        head_dim=heads.k_head_dim, hidden_size=size,
    )  # fmt: skip
    copied = Plan(model, plan.cache_dtype, layers, workload, {}, tensors)
    cache = PlanCache(copied, config, max_tokens=workload.context + PAGE_TOKENS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowPath)
        cache.allocate(workload.batch, device)
    fill(cache, workload)
    return cache.paged_layers


def fill(cache: PlanCache, workload: Workload) -> None:
    """Random tokens in every paged layer of an allocated static cache, stored as a prompt's are. Attention
    takes the last for the token of its step."""
    static, dtype = cache.static, CACHE_DTYPES[cache.plan.cache_dtype]
    assert static is not None
    for stored in cache.paged_layers:
        heads, device = stored.plan.attention, stored.parts[0].ring.device
        shape = (workload.batch, heads.num_kv_heads, workload.context)
        keys, values = (torch.randn(*shape, stored.plan.head_dim(s), dtype=dtype, device=device) for s in SIDES)
        query_sum = torch.ones(*shape[:2], heads.k_head_dim, device=device)
        stored.store.write(NewTokens(keys, values, static.rows, 0), query_sum)
    static.set_columns(workload.context - 1)


def attention_calls(layers: Sequence[PagedLayer]) -> Calls:
    """One attention of a random query to each layer, without storing a token: [B, query heads, D]."""
    heads, ring = layers[0].plan.attention, layers[0].parts[0].ring
    q = torch.randn(ring.shape[0], heads.num_query_heads, heads.k_head_dim, dtype=ring.dtype, device=ring.device)

    def attend(layer: PagedLayer) -> Tensor:
        return layer.store.step.attend(q, layer.store.place, heads.k_head_dim**-0.5, 0.0, None)

    return [partial(attend, layer) for layer in layers]


def time_sdpa(
    layer: LayerPlan, workload: Workload, dtype: torch.dtype, copies: int, device: torch.device
) -> float | None:
    """Microseconds of the fastest backend over dense keys and values; None where none takes the shape."""
    heads, found = layer.attention, []
    shape = (workload.batch, heads.num_kv_heads)
    sizes = ((heads.group_heads, heads.k_head_dim), *((workload.context, layer.head_dim(side)) for side in SIDES))
    for backend in BACKENDS:
        with sdpa_kernel(backend), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # why a backend refuses
            try:
                dense = [[torch.randn(*shape, *s, dtype=dtype, device=device) for s in sizes] for _ in range(copies)]
                found.append(graph_us([partial(scaled_dot_product_attention, q, k, v) for q, k, v in dense]))
            except RuntimeError:  # the shape, or out of memory
                continue
    return min(found, default=None)


def graph_us(calls: Calls) -> float:
    """Median microseconds of one call, from replays of one CUDA graph of all ``calls``."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(WARM_UP + REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = [1000 * first.elapsed_time(last) for first, last in zip(marks, marks[1:], strict=False)]
    return statistics.median(times[WARM_UP:]) / len(calls)
