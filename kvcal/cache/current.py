"""The cache that a thread is calling a model with: attention functions are not handed it.

One context serves all threads that call its model, each with a cache of its own. So the cache is noted by thread,
before every forward pass of the decoder, and a forward pass stays in its thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvcal.cache.plan_cache import PlanCache
from kvcal.store.static_state import Serving


class CurrentCache(threading.local):
    """``cache``: the one of this thread's last forward pass; None if that was no PlanCache."""

    cache: PlanCache | None = None


@contextmanager
def noting_cache(model: PreTrainedModel, serving: Serving | None = None) -> Iterator[CurrentCache]:
    """Within the context, the cache that each thread calls the decoder with. ``serving``: who computes the attention
    of static caches from then on."""
    current = CurrentCache()

    def note_cache(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("past_key_values")
        current.cache = cache if isinstance(cache, PlanCache) else None
        if serving is not None and isinstance(cache, PlanCache) and cache.static is not None:
            cache.static.serving = serving

    handle = model.get_decoder().register_forward_pre_hook(note_cache, with_kwargs=True)
    try:
        yield current
    finally:
        handle.remove()
