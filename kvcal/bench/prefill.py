"""Time to the first token: a prompt taken in by a model whose cache packs it, against one that keeps 16 bits.

Attention over the prompt is the model's own (SDPA) either way, and attends to the prompt's own keys and values; what a
plan adds is storing them as pages. 16 bits are transformers' DynamicCache, whose causal attention needs no mask. Calls
are not captured in graphs: a prompt is one long call, and the host keeps ahead of the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from pydantic.dataclasses import dataclass
from transformers import DynamicCache, PreTrainedModel

from kvcal.bench.device import Call, Times, collect, event_ms, ran_out, spread
from kvcal.bench.model import ROOM, model_plan
from kvcal.bench.record import Step
from kvcal.bench.shape import Stored
from kvcal.cache.attached import attached
from kvcal.cache.plan_cache import PlanCache
from kvcal.errors import KvcalError, SlowPath
from kvcal.strict import STRICT

DYNAMIC_16 = "16, DynamicCache"
PROMPTS = 3  # timed, after one that is not


@dataclass(frozen=True, config=STRICT)
class PrefillRow:
    """One prompt of ``context`` tokens. Without ``times`` there is a ``reason``."""

    plan: str
    context: int
    times: Times | None = None
    reason: str | None = None


def measure_prefill(model: PreTrainedModel, shape: str, stored_as: Stored | None, context: int) -> Step:
    """A prompt into a plan's cache; into that of 16 bits without ``stored_as``."""
    name = DYNAMIC_16 if stored_as is None else stored_as.name
    collect()
    try:
        row = PrefillRow(name, context, time_prefill(model, shape, stored_as, context))
    except KvcalError as refused:  # not compiled, or not for this GPU: the other plans go on
        row = PrefillRow(name, context, reason=refused.message)
    except RuntimeError as failed:
        if not ran_out(failed):
            raise
        row = PrefillRow(name, context, reason="out of memory")
    yield [row], f"prompt of {context}, {name}: {row.reason or f'{row.times} µs'}"


def time_prefill(model: PreTrainedModel, shape: str, stored_as: Stored | None, context: int) -> Times:
    """Microseconds from the call with a random prompt to its last logits."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(0, vocab_size, (1, context), device=model.device)
    new_cache = caches(model, shape, stored_as, context)

    def prompt(cache: Any) -> Call:
        return lambda: model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

    with torch.inference_mode(), warnings.catch_warnings(), attached(model) if stored_as else nullcontext():
        warnings.simplefilter("ignore", SlowPath)
        durations = [event_ms([prompt(new_cache())]) for _ in range(PROMPTS + 1)]
    return spread([1000 * duration for (duration,) in durations[1:]], 1)


def caches(model: PreTrainedModel, shape: str, stored_as: Stored | None, context: int) -> Callable[[], Any]:
    """An empty cache at every call; a plan's is one and the same, allocated once, as a server has it."""
    if stored_as is None:
        return lambda: DynamicCache(config=model.config)
    plan = model_plan(shape, model.config, stored_as, 1, context + ROOM)
    cache = PlanCache(plan, model.config, max_tokens=context + ROOM)

    def emptied() -> PlanCache:
        cache.reset()
        return cache

    return emptied
