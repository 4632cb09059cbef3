"""One decode step's work on one layer's packed cache, ready to be timed: several caches of random pages.

The only file of the benchmarks that knows how a static cache keeps its tensors. The caches are the layers of one
PlanCache: they share its control state (lengths, workspace) and differ in every byte of what is stored. On a CPU the
same calls run the reference, which is how the benchmarks themselves are tested.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import LlamaConfig

from kvcal.bench.random_pages import fill_pages
from kvcal.bench.shape import CACHE_DTYPE, Heads, Pair, Point
from kvcal.bench.timing import Call
from kvcal.formats import SIDES
from kvcal.geometry import CACHE_DTYPES, ModelIdentity
from kvcal.kernels import ops, reference
from kvcal.kernels.refusals import refusals
from kvcal.plan import Plan, Workload
from kvcal.quantizers.pages import PAGE_TOKENS
from kvcal.runtime.cache import PlanCache
from kvcal.runtime.layer_forms import form_reasons
from kvcal.runtime.static_state import StaticState
from kvcal.runtime.static_store import HeadStore

# Tokens that a cache has room for beyond its context: for the steps of a benchmark.
ROOM = 2 * PAGE_TOKENS
NOBODY = ModelIdentity("random caches", "llama", "", "", "")


@dataclass(frozen=True)
class KernelCase:
    """Caches of one format at one size, with the query and the token of a step."""

    point: Point
    stores: tuple[HeadStore, ...]
    state: StaticState
    q: Tensor  # [B, N G, D]
    k_new: Tensor  # [B, N, D]
    v_new: Tensor  # [B, N, D]

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.q.shape[-1])

    @property
    def decode_calls(self) -> list[Call]:
        """Attention over ``point.context`` + 1 tokens, in each cache."""
        return [partial(self.attend, store) for store in self.stores]

    @property
    def step_calls(self) -> list[Call]:
        """A step's token stored, the page that is due packed before, and attention over all, in each cache."""
        return [partial(self.step, store) for store in self.stores]

    @property
    def append_calls(self) -> list[Call]:
        return [partial(store.append, self.k_new, self.v_new, self.q) for store in self.stores]

    def attend(self, store: HeadStore) -> Tensor:
        return store.decode(self.q, None, self.scale, 0.0)

    def step(self, store: HeadStore) -> Tensor:
        store.append(self.k_new, self.v_new, self.q)
        return self.attend(store)

    def hold(self, num_tokens: int) -> None:
        """Every row holds so many tokens before the next step."""
        self.state.set_columns(num_tokens)

    def relative_error(self) -> float:
        """Of the first sequence's output in the first cache, against fp64 over its decoded tokens."""
        store, one = self.stores[0], slice(0, 1)
        held = int(self.state.lengths[0])
        keys, values = (
            reference.tokens(
                side, store.sinks[side][one], store.buffer[side][one], store.pages[side][one], held, store.rescale,
                store.offset, store.variant,
            )[0].double()
            for side in SIDES
        )  # fmt: skip
        grouped = self.q[0].double().unflatten(0, (keys.shape[0], -1))
        expected = ((grouped @ keys.transpose(-1, -2) * self.scale).softmax(-1) @ values).flatten(0, 1)
        return float((self.attend(store)[0].double() - expected).norm() / expected.norm())


def refusal(pair: Pair, heads: Heads) -> str | None:
    """Why the kernels do not serve this format, or not alone: what is reconstructed first is not theirs to be measured.
    None if they do."""
    layer = heads.layer(pair)
    return next(itertools.chain(form_reasons(layer, ()), refusals(layer, CACHE_DTYPE)), None)


def kernel_case(pair: Pair, heads: Heads, point: Point, count: int, device: torch.device, seed: int = 0) -> KernelCase:
    """``count`` caches of ``point``, every row with ``point.context`` tokens before the step."""
    generator = torch.Generator(device).manual_seed(seed)
    cache = layers_cache(pair, heads, count, point.context + ROOM)
    cache.allocate(point.batch, device)
    stores = tuple(store for layer in cache.static_layers for store in layer.stores if isinstance(store, HeadStore))
    for store in stores:
        fill_store(store, generator)
    dtype = CACHE_DTYPES[CACHE_DTYPE]

    def normal(num_heads: int) -> Tensor:
        shape = (point.batch, num_heads, heads.head_dim)
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

    case = KernelCase(
        point,
        stores,
        stores[0].state,
        normal(heads.num_query_heads),
        normal(heads.num_kv_heads),
        normal(heads.num_kv_heads),
    )
    case.hold(point.context)
    return case


def prefill_call(case: KernelCase, num_pages: int) -> tuple[Call, int]:
    """Packing the keys and the values of ``num_pages`` pages of every row at once, as after a prompt, and the bytes
    that it reads and writes."""
    store = case.stores[0]
    shape = (*case.k_new.shape[:2], num_pages * PAGE_TOKENS, case.k_new.shape[-1])
    x = torch.empty(shape, dtype=case.k_new.dtype, device=case.k_new.device).normal_()
    nothing = store.nothing
    pages = {side: min(num_pages, store.pages[side].shape[1]) for side in SIDES}
    # Query scores take the same statistic as a step would: ones.
    mean = store.query_sum if store.variant.k.needs_queries else nothing

    def call() -> None:
        for side in SIDES:
            ops.pack(
                x[:, :, : pages[side] * PAGE_TOKENS], store.pages[side], 0, mean if side == "k" else nothing, nothing,
                nothing, case.state.error, side, store.variant.key,
            )  # fmt: skip

    written = sum(store.pages[side][:, : pages[side]].nbytes for side in SIDES)
    read = sum(x[:, :, : pages[side] * PAGE_TOKENS].nbytes for side in SIDES)
    return call, read + written


def layers_cache(pair: Pair, heads: Heads, num_layers: int, max_tokens: int) -> PlanCache:
    """The static cache of a model with ``num_layers`` such layers; nothing else of the model matters here."""
    config = LlamaConfig(
        num_hidden_layers=num_layers,
        num_attention_heads=heads.num_query_heads,
        num_key_value_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        hidden_size=heads.num_query_heads * heads.head_dim,
    )
    layers = tuple(heads.layer(pair, index) for index in range(num_layers))
    plan = Plan(NOBODY, CACHE_DTYPE, layers, Workload(1, max_tokens), provenance={})
    return PlanCache(plan, config, max_tokens=max_tokens)


def fill_cache(cache: PlanCache, num_tokens: int) -> None:
    """Random tokens and pages in all of an allocated static cache, every sequence with ``num_tokens``."""
    for layer in cache.static_layers:
        for store in layer.stores:
            if isinstance(store, HeadStore):
                fill_store(store)
            else:  # a sliding window holds nothing but tokens
                for tensor in store.tensors:
                    tensor.normal_()
    hold(cache, num_tokens)


def hold(cache: PlanCache, num_tokens: int) -> None:
    """Every sequence of a static cache holds so many tokens before the next step."""
    assert cache.static is not None
    cache.static.set_columns(num_tokens)


def fill_store(store: HeadStore, generator: torch.Generator | None = None) -> None:
    """Random tokens and pages in all the room of a store, in place; its lengths stay as they are."""
    for side in SIDES:
        store.sinks[side].normal_(generator=generator)
        store.buffer[side].normal_(generator=generator)
        variant = store.variant
        fill_pages(store.pages[side], side, variant.format(side), variant.head_dim, variant.cache_dtype, generator)
    store.query_sum.fill_(1.0)


def stored_read_bytes(store: HeadStore, num_tokens: int) -> int:
    """Bytes that a step after ``num_tokens`` reads of a store, counted in its tensors: what ``read_bytes`` says."""
    total = 0
    for side in SIDES:
        pages = store.variant.format(side).num_pages(num_tokens)
        unquantized = num_tokens + 1 - pages * PAGE_TOKENS
        buffer = store.buffer[side]
        total += store.pages[side][:, :pages].nbytes
        total += buffer.shape[0] * buffer.shape[1] * unquantized * buffer.shape[3] * buffer.element_size()
    return total
