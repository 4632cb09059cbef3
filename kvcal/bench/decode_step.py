"""A whole decode step of a model as one CUDA graph, timed over as many steps as a page has tokens.

Three caches behind one interface: transformers' StaticCache as its SDPA reads it, StaticCache read by the fastest
SDPA backend without a mask (what a good 16-bit server does), and a plan's. They are filled with random contents at the
length in question instead of by a prompt: the time of a step does not depend on them, a prompt of 32K tokens for each
of a hundred sequences takes minutes.

Over 128 steps every sequence fills one page, so that packing is in the figures. Steps of a 16-bit cache are all alike;
where 128 of them would take long, fewer do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedModel, StaticCache

from kvcal.bench.baselines import Attention
from kvcal.bench.kernel_use import KernelUse
from kvcal.bench.timing import Times, event_ms, spread
from kvcal.pages.layout import PAGE_TOKENS

WARM_UP_STEPS = 3
ENOUGH_MS, FEWEST_STEPS = 5000.0, 16  # of steps that are all alike
# Room beyond the context: for the steps that are timed, and those that warm up.
ROOM = 2 * PAGE_TOKENS
MASKLESS = "kvcal_bench_sdpa"


class StepCache(Protocol):
    """A cache that a step can be timed with."""

    @property
    def has_equal_steps(self) -> bool:
        """Whether a few steps cost, one by one, what many do."""

    def cache(self) -> Cache:
        """As ``past_key_values``, still empty."""

    def nbytes(self, cache: Cache) -> int:
        """Of what is stored, once it is allocated."""

    def kernel(self, cache: Cache) -> KernelUse:
        """What attends to it, once it is allocated."""

    def fill(self, cache: Cache, num_tokens: int) -> None:
        """After a first step has allocated it: random contents, every sequence with ``num_tokens``."""

    def rewind(self, cache: Cache, num_tokens: int) -> None:
        """Every sequence back to ``num_tokens``."""

    def attention(self, model: PreTrainedModel) -> AbstractContextManager[Any]:
        """Within it, the model attends to this kind of cache."""


@dataclass(frozen=True)
class Static16:
    """StaticCache. ``sdpa``, called ``name``: None as transformers calls it, with a mask over the whole cache."""

    model: PreTrainedModel
    max_tokens: int
    sdpa: Attention | None = None
    name: str = "sdpa of transformers, with its mask"

    @property
    def has_equal_steps(self) -> bool:
        return True

    def cache(self) -> Cache:
        return StaticCache(config=self.model.config, max_cache_len=self.max_tokens)

    def nbytes(self, cache: Cache) -> int:
        return sum(tensor.nbytes for layer in _layers(cache) for tensor in (layer.keys, layer.values))

    def kernel(self, cache: Cache) -> KernelUse:
        return KernelUse(self.name)

    def fill(self, cache: Cache, num_tokens: int) -> None:
        for layer in _layers(cache):
            layer.keys.normal_()
            layer.values.normal_()
        self.rewind(cache, num_tokens)

    def rewind(self, cache: Cache, num_tokens: int) -> None:
        for layer in _layers(cache):
            layer.cumulative_length.fill_(num_tokens)

    @contextmanager
    def attention(self, model: PreTrainedModel) -> Iterator[None]:
        if self.sdpa is None:
            yield
            return
        before = model.config._attn_implementation
        AttentionInterface.register(MASKLESS, maskless(self.sdpa))
        # No mask function goes by this name, so transformers makes no mask.
        model.set_attn_implementation(MASKLESS)
        try:
            yield
        finally:
            model.set_attn_implementation(before)


def _layers(cache: Cache) -> list[Any]:
    """StaticLayers, after the first update: their tensors are there."""
    return list(cache.layers)


def maskless(sdpa: Attention) -> Any:
    """An attention function of transformers that attends to all columns, filled or not: of a cache of a few more
    tokens than are filled, which costs what it will cost once they are."""

    def attention(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        return sdpa(q, k, v).transpose(1, 2).contiguous(), None

    return attention


@dataclass(frozen=True)
class StepTimes:
    """``steps``: microseconds of single steps; ``total_ms``: of all together, packing included; ``peak_bytes``: most
    that torch's allocator had reserved on the device."""

    steps: Times
    total_ms: float
    peak_bytes: int
    cache_bytes: int
    kernel: KernelUse


def time_steps(model: PreTrainedModel, kind: StepCache, batch: int, context: int) -> StepTimes:
    """128 decode steps of ``batch`` sequences, from ``context`` tokens on; fewer of a slow cache with equal steps.

    Raises torch.OutOfMemoryError where memory does not suffice.
    """
    device = model.device
    torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode(), kind.attention(model):
        ids = torch.randint(0, model.config.get_text_config(decoder=True).vocab_size, (batch, 1), device=device)
        positions = torch.zeros_like(ids)
        cache = kind.cache()

        def step() -> None:
            logits = model(
                input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
            ).logits
            ids.copy_(logits[:, -1:].argmax(-1))
            positions.add_(1)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
            kind.fill(cache, context)
            positions.fill_(context)
            for _ in range(WARM_UP_STEPS):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        try:
            slowest = max(event_ms([graph.replay] * WARM_UP_STEPS))
            kind.rewind(cache, context)
            positions.fill_(context)
            torch.cuda.synchronize()
            milliseconds = event_ms([graph.replay] * num_steps(kind.has_equal_steps, slowest))
        finally:
            graph.reset()
    times = spread([1000 * duration for duration in milliseconds], 1)
    peak = torch.cuda.max_memory_reserved(device)
    return StepTimes(times, sum(milliseconds), peak, kind.nbytes(cache), kind.kernel(cache))


def num_steps(are_equal: bool, slowest_ms: float) -> int:
    """How many steps to time: a page of them, or where all are alike, as many of these as ENOUGH_MS holds."""
    return max(FEWEST_STEPS, min(PAGE_TOKENS, int(ENOUGH_MS / slowest_ms))) if are_equal else PAGE_TOKENS
