"""Models of public shapes, the time of their whole decode steps, each step one CUDA graph, and of their prompts.

A step's time depends on sizes, not on what weights and caches hold. So a shape is filled with random weights on the GPU
itself (a machine without a network has no others), and a cache with random content at the length in question: a prompt
of 32K tokens for each of a hundred sequences takes minutes. Only models all of whose layers attend to everything are
taken: in others the cache is not what a step's time is about.

Two kinds of cache: transformers' StaticCache, read by its SDPA or by the fastest SDPA backend without a mask (what a
good 16-bit server does), and a plan's. Over 128 steps every sequence fills one page, so that packing is in the figures.

A prompt is taken in by a model whose cache packs it, or keeps 16 bits (transformers' DynamicCache, whose causal
attention needs no mask). Attention over the prompt is the model's own (SDPA) either way, over the prompt's own
keys and values; what a plan adds is storing them as pages. Prompts are not captured in graphs: one is a long call, and
the host keeps ahead of the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic.dataclasses import dataclass as record
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
    StaticCache,
)
from transformers.cache_utils import DynamicLayer

from kvcal.bench.baselines import Attention
from kvcal.bench.case import KernelUse, fill_cache, kernel_use, random_plan, set_length
from kvcal.bench.device import Call, Times, attempted, captured, collect, event_ms, spread
from kvcal.bench.record import Step
from kvcal.bench.shape import CACHE_DTYPE, Heads, Stored
from kvcal.cache.attached import attached
from kvcal.cache.plan_cache import PlanCache
from kvcal.errors import SlowPath, UnsupportedModel, UsageError
from kvcal.geometry import CACHE_DTYPES, ModelIdentity
from kvcal.models.cache_argument import with_cache
from kvcal.pages.record_layout import PAGE_TOKENS
from kvcal.plan.plan import Plan
from kvcal.strict import STRICT

_GQA: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _GQA | {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
    "qwen3-8b": _GQA | {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "vocab_size": 151936, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    },
    "qwen3-4b": _GQA | {
        "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "vocab_size": 151936, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    },
}  # fmt: skip
NO_DIGEST = "0" * 64  # random weights have no identity to check
WARM_UP_STEPS = 3
ENOUGH_MS, FEWEST_STEPS = 5000.0, 16  # of steps that are all alike
# Tokens that a cache has room for beyond its context: for the steps that are timed, and those that warm up.
ROOM = 2 * PAGE_TOKENS
MASKLESS = "kvcal_bench_sdpa"
DYNAMIC_16 = "16, DynamicCache"
PROMPTS = 3  # timed, after one that is not


def shape_config(shape: str) -> PreTrainedConfig:
    """The configuration of a name in SHAPES, or of a config.json: its path, or its folder's.

    Raises:
        UsageError: neither.
        UnsupportedModel: a layer that does not attend to everything.
    """
    if shape in SHAPES:
        config = AutoConfig.for_model(**SHAPES[shape])
    elif Path(shape).exists():
        try:
            config = AutoConfig.from_pretrained(shape)
        except (OSError, ValueError) as broken:
            raise UsageError(f"--shape {shape}: no configuration of a model: {broken}") from None
        config = config.get_text_config(decoder=True)
    else:
        raise UsageError(
            f"--shape {shape!r} is neither one of {', '.join(SHAPES)} nor a config.json",
            hint="give a name, the path of a config.json, or the folder that holds one",
        )
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    if kinds != {DynamicLayer}:
        others = ", ".join(sorted(kind.__name__ for kind in kinds - {DynamicLayer})) or "no layers"
        raise UnsupportedModel(f"--shape {shape}: its cache has {others}; bench e2e takes full attention alone")
    return config


def heads_of(config: PreTrainedConfig) -> Heads:
    """The heads of every layer."""
    queries, keys = config.num_attention_heads, config.num_key_value_heads
    return Heads(keys, getattr(config, "head_dim", None) or config.hidden_size // queries, queries // keys)


def random_model(config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    """A model of this shape with the library's random initialisation, made in bf16 on the device."""
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=CACHE_DTYPES[CACHE_DTYPE], attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def model_plan(name: str, config: PreTrainedConfig, stored_as: Stored, batch: int, num_tokens: int) -> Plan:
    """A plan of all of the model's layers."""
    identity = ModelIdentity(name, config.model_type, NO_DIGEST, NO_DIGEST, NO_DIGEST)
    return random_plan(identity, stored_as.layers(heads_of(config), config.num_hidden_layers), batch, num_tokens)


class Static16:
    """StaticCache, allocated by the first step. ``sdpa``, called ``name``: None as transformers calls it, with a mask
    over the whole cache."""

    has_equal_steps = True

    def __init__(
        self,
        model: PreTrainedModel,
        max_tokens: int,
        sdpa: Attention | None = None,
        name: str = "sdpa of transformers, with its mask",
    ) -> None:
        self.cache = StaticCache(config=model.config, max_cache_len=max_tokens)
        self.sdpa, self.kernel = sdpa, KernelUse(name)

    @property
    def layers(self) -> list[Any]:
        return list(self.cache.layers)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in (layer.keys, layer.values))

    def fill(self, num_tokens: int) -> None:
        for layer in self.layers:
            layer.keys.normal_()
            layer.values.normal_()
        self.set_length(num_tokens)

    def set_length(self, num_tokens: int) -> None:
        for layer in self.layers:
            layer.cumulative_length.fill_(num_tokens)

    @contextmanager
    def attention(self, model: PreTrainedModel) -> Iterator[None]:
        """Within it, the model attends to the cache by ``sdpa``: to all of it, filled or not, which costs what it will
        cost once the last tokens are there."""
        if self.sdpa is None:
            yield
            return
        sdpa, before = self.sdpa, model.config._attn_implementation

        def maskless(
            module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any
        ) -> tuple[Tensor, None]:
            return sdpa(q, k, v).transpose(1, 2).contiguous(), None

        AttentionInterface.register(MASKLESS, maskless)
        # No mask function goes by this name, so transformers makes no mask.
        model.set_attn_implementation(MASKLESS)
        try:
            yield
        finally:
            model.set_attn_implementation(before)


class StaticPlan:
    """A plan's static cache, allocated by the first step."""

    has_equal_steps = False  # one in 128 packs

    def __init__(self, plan: Plan, model: PreTrainedModel, max_tokens: int) -> None:
        self.cache = PlanCache(plan, model.config, max_tokens=max_tokens)

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes

    @property
    def kernel(self) -> KernelUse:
        return kernel_use(self.cache.paged_layers)

    def fill(self, num_tokens: int) -> None:
        fill_cache(self.cache, num_tokens)

    def set_length(self, num_tokens: int) -> None:
        set_length(self.cache, num_tokens)

    @contextmanager
    def attention(self, model: PreTrainedModel) -> Iterator[None]:
        """Within it, the model attends to the cache."""
        with warnings.catch_warnings(), attached(model):
            warnings.simplefilter("ignore", SlowPath)  # every row names its kernel
            yield


@dataclass(frozen=True)
class StepTimes:
    """``steps``: microseconds of single steps; ``total_ms``: of all together, packing included; ``peak_bytes``: most
    that torch's allocator had reserved on the device."""

    steps: Times
    total_ms: float
    peak_bytes: int


def time_steps(model: PreTrainedModel, timed: Static16 | StaticPlan, batch: int, context: int) -> StepTimes:
    """128 decode steps of ``batch`` sequences, from ``context`` tokens on; fewer of a slow cache with equal steps.

    Raises torch.OutOfMemoryError where memory does not suffice.
    """
    device = model.device
    torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode(), timed.attention(model):
        ids = torch.randint(0, model.config.get_text_config(decoder=True).vocab_size, (batch, 1), device=device)
        positions = torch.zeros_like(ids)

        def step() -> None:
            logits = model(
                input_ids=ids,
                position_ids=positions,
                use_cache=True,
                **with_cache(model, timed.cache),
                logits_to_keep=1,
            ).logits
            ids.copy_(logits[:, -1:].argmax(-1))
            positions.add_(1)

        def warm_up() -> None:
            step()
            timed.fill(context)
            positions.fill_(context)
            for _ in range(WARM_UP_STEPS):
                step()

        graph = captured(warm_up, step)
        try:
            slowest = max(event_ms([graph.replay] * WARM_UP_STEPS))
            timed.set_length(context)
            positions.fill_(context)
            torch.cuda.synchronize()
            milliseconds = event_ms([graph.replay] * num_steps(timed.has_equal_steps, slowest))
        finally:
            graph.reset()
    steps = spread([1000 * duration for duration in milliseconds], 1)
    return StepTimes(steps, sum(milliseconds), torch.cuda.max_memory_reserved(device))


def num_steps(are_equal: bool, slowest_ms: float) -> int:
    """Number of steps to time: a page of them, or where all are alike, as many of these as ENOUGH_MS holds."""
    return max(FEWEST_STEPS, min(PAGE_TOKENS, int(ENOUGH_MS / slowest_ms))) if are_equal else PAGE_TOKENS


@record(frozen=True, config=STRICT)
class PrefillRow:
    """One prompt of ``context`` tokens. Without ``times`` there is a ``reason``."""

    plan: str
    context: int
    times: Times | None = None
    reason: str | None = None


def measure_prefill(model: PreTrainedModel, shape: str, stored_as: Stored | None, context: int) -> Step:
    """A prompt into a plan's cache; into that of 16 bits without ``stored_as``."""
    collect()
    times, reason = attempted(lambda: time_prefill(model, shape, stored_as, context))
    row = PrefillRow(DYNAMIC_16 if stored_as is None else stored_as.name, context, times, reason)
    yield [row], f"prompt of {context}, {row.plan}: {row.reason or f'{row.times} µs'}"


def time_prefill(model: PreTrainedModel, shape: str, stored_as: Stored | None, context: int) -> Times:
    """Microseconds from the call with a random prompt to its last logits."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(0, vocab_size, (1, context), device=model.device)
    new_cache = prompt_caches(model, shape, stored_as, context)

    def prompt(cache: Any) -> Call:
        return lambda: model(input_ids=ids, use_cache=True, **with_cache(model, cache), logits_to_keep=1)

    with torch.inference_mode(), warnings.catch_warnings(), attached(model) if stored_as else nullcontext():
        warnings.simplefilter("ignore", SlowPath)
        durations = [event_ms([prompt(new_cache())]) for _ in range(PROMPTS + 1)]
    return spread([1000 * duration for (duration,) in durations[1:]], 1)


def prompt_caches(model: PreTrainedModel, shape: str, stored_as: Stored | None, context: int) -> Callable[[], Any]:
    """An empty cache at every call; a plan's is one and the same, allocated once, as a server has it."""
    if stored_as is None:
        return lambda: DynamicCache(config=model.config)
    plan = model_plan(shape, model.config, stored_as, 1, context + ROOM)
    cache = PlanCache(plan, model.config, max_tokens=context + ROOM)

    def emptied() -> PlanCache:
        cache.reset()
        return cache

    return emptied
