"""One decode step's work on one layer's cache, ready to be timed: several caches of random contents.

The only file of the benchmarks that does what a step of the attention does (``StaticLayer.attend``) piece by piece. The
caches are layers of one PlanCache: they share its control state (lengths, workspace) and differ in every byte of what
is stored. On a CPU the same calls run the reference, which is how the benchmarks themselves are tested.

Where layers are predicted from one another they are timed in their order, each behind the one that it is predicted
from, as in a model; the layers at both ends, which are unlike the others, are there and are not timed.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import LlamaConfig

from kvcal.bench.expected_pages import ExpectedPages, forms_of
from kvcal.bench.kernel_use import KernelUse, kernel_use
from kvcal.bench.random_cache import fill_cache, hold
from kvcal.bench.random_plan import uniform_plan
from kvcal.bench.shape import CACHE_DTYPE, Heads, Pair, Point
from kvcal.bench.step_bytes import MIDDLE
from kvcal.bench.timing import Call
from kvcal.cache.plan_cache import PlanCache
from kvcal.cache.static_layer import StaticLayer
from kvcal.errors import SlowPath
from kvcal.geometry import CACHE_DTYPES, ModelIdentity
from kvcal.kernels import ops, reference
from kvcal.kernels.refusals import refusals
from kvcal.pages.layout import PAGE_TOKENS
from kvcal.plan.format import SIDES, Side
from kvcal.store.static_store import HeadStore

# Tokens that a cache has room for beyond its context: for the steps of a benchmark.
ROOM = 2 * PAGE_TOKENS
# Random contents have scores of some 0.05 around their mean, which attend to all tokens alike, and a wrong key would
# hardly show. So many times as sharp, a few tokens count.
SHARPNESS = 50.0
NOBODY = ModelIdentity("random caches", "llama", "", "", "")


@dataclass(frozen=True)
class KernelCase:
    """Caches of one format at one size, with the query and the token of a step. ``layers`` are timed; ``before`` holds
    what the first of them is predicted from."""

    point: Point
    cache: PlanCache
    before: tuple[StaticLayer, ...]
    layers: tuple[StaticLayer, ...]
    q: Tensor  # [B, N G, D]
    k_new: Tensor  # [B, N, D]
    v_new: Tensor  # [B, N, D]

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.q.shape[-1])

    @property
    def kernel(self) -> KernelUse:
        return kernel_use(self.layers)

    @property
    def decode_calls(self) -> list[Call]:
        """Attention over ``point.context`` + 1 tokens, in each cache: what is stored made readable, and read."""
        return [partial(self.attend, layer) for layer in self.layers]

    @property
    def step_calls(self) -> list[Call]:
        """A step's token stored, the page that is due packed before, and attention over all, in each cache."""
        return [partial(self.step, layer) for layer in self.layers]

    @property
    def append_calls(self) -> list[Call]:
        return [partial(self.append, layer) for layer in self.layers]

    def attend(self, layer: StaticLayer, sharpness: float = 1.0) -> Tensor:
        if layer.forms is not None:
            layer.forms.step()
        parts = [store.decode(self.q, None, sharpness * self.scale, 0.0) for store in layer.stores]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def append(self, layer: StaticLayer) -> None:
        for store in layer.stores:
            store.append(self.k_new, self.v_new, self.q)

    def step(self, layer: StaticLayer) -> Tensor:
        self.append(layer)
        return self.attend(layer)

    def hold(self, num_tokens: int) -> None:
        """Every row holds so many tokens before the next step."""
        hold(self.cache, num_tokens)

    def relative_error(self) -> float:
        """Of the first sequence's output in the first cache, against fp64 over its tokens as they are stored."""
        for layer in self.before:
            if layer.forms is not None:
                layer.forms.step()
        layer = self.layers[0]
        found = self.attend(layer, SHARPNESS)[0].double()
        keys, values = (self._tokens(layer, side) for side in SIDES)
        grouped = self.q[0].double().unflatten(0, (keys.shape[0], -1))
        scores = grouped @ keys.transpose(-1, -2) * (SHARPNESS * self.scale)
        expected = (scores.softmax(-1) @ values).flatten(0, 1)
        return float((found - expected).norm() / expected.norm())

    def _tokens(self, layer: StaticLayer, side: Side) -> Tensor:
        """fp64 [N, S, D]: of the first sequence, all that the step attended to."""
        parts, one = [], slice(0, 1)
        expected = ExpectedPages(dict(enumerate((*self.before, layer))))
        for store in stores_of(layer):
            is_form = side in store.reconstructed
            pages = expected.of(layer, store, side) if is_form else store.pages[side][one]
            sinks, buffer, held = store.sinks[side][one], store.buffer[side][one], int(store.state.lengths[0])
            parts.append(reference.tokens(side, sinks, buffer, pages, held, store.rescale, store.offset, store.variant))
        return torch.cat(parts, dim=1)[0].double()


def stores_of(layer: StaticLayer) -> list[HeadStore]:
    """Its head ranges: no layer of a benchmark has a sliding window."""
    return [store for store in layer.stores if isinstance(store, HeadStore)]


def refusal(pair: Pair, heads: Heads) -> str | None:
    """Why no kernel serves this format; None if one does."""
    return next(refusals(heads.layer(pair, MIDDLE), CACHE_DTYPE), None)


def kernel_case(pair: Pair, heads: Heads, point: Point, count: int, device: torch.device, seed: int = 0) -> KernelCase:
    """``count`` caches of ``point``, every row with ``point.context`` tokens before the step."""
    generator = torch.Generator(device).manual_seed(seed)
    cache = layers_cache(pair, heads, count + 2 * pair.num_ends, point.context + ROOM)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowPath)  # every row names its kernel
        cache.allocate(point.batch, device)
    fill_cache(cache, point.context, generator)
    dtype, layers = CACHE_DTYPES[CACHE_DTYPE], tuple(cache.static_layers)

    def normal(num_heads: int) -> Tensor:
        shape = (point.batch, num_heads, heads.head_dim)
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

    return KernelCase(
        point,
        cache,
        layers[: pair.num_ends],
        layers[pair.num_ends : pair.num_ends + count],
        normal(heads.num_query_heads),
        normal(heads.num_kv_heads),
        normal(heads.num_kv_heads),
    )


def prefill_call(case: KernelCase, num_pages: int) -> tuple[Call, int]:
    """Packing the keys and the values of ``num_pages`` pages of every row at once, as after a prompt, and the bytes
    that it reads and writes: the tokens, the records, and between them, twice, pages of 16 bits of a stored form."""
    layer = case.layers[0]
    (store,) = stores_of(layer)
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
                nothing, store.state.error, side, store.variant.key,
            )  # fmt: skip
        if layer.forms is not None:
            layer.forms.extend(slice(0, case.point.batch), 0, num_pages * PAGE_TOKENS + 1)

    nbytes = sum(x[:, :, : pages[side] * PAGE_TOKENS].nbytes for side in SIDES)
    nbytes += sum(store.pages[side][:, : pages[side]].nbytes for side in SIDES)
    for form in forms_of(layer):
        if form.tokens:  # read once more, and stored
            encoded = form.format.num_pages(num_pages * PAGE_TOKENS)
            nbytes += sum(part[:, :encoded].nbytes for part in (store.pages[form.codec.side], form.records[0]))
    return call, nbytes


def layers_cache(pair: Pair, heads: Heads, num_layers: int, max_tokens: int) -> PlanCache:
    """The static cache of a model with ``num_layers`` such layers; nothing else of the model matters here."""
    config = LlamaConfig(
        num_hidden_layers=num_layers,
        num_attention_heads=heads.num_query_heads,
        num_key_value_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        hidden_size=heads.num_query_heads * heads.head_dim,
    )
    plan = uniform_plan(NOBODY, pair, heads, num_layers, 1, max_tokens)
    return PlanCache(plan, config, max_tokens=max_tokens)
