"""Keys before RoPE: the only place that tells pre from post.

Transformers has no hook before the rotation, so for the duration of a context, and only then, the
``apply_rotary*`` function in a model file's namespace is wrapped with one that notes (before, after). The
tensor that was turned into the layer's key is its pre-RoPE key, after QK-norm where a model has one.
Rotations are never undone or derived again: cos, sin, scaling and pairing stay the model's own.

Left out: models that change keys after RoPE (Llama-4's and HunYuan's norm) and models that rotate by other
means have no pre-RoPE key here: None, never a guess.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from transformers import PreTrainedModel

_ROTARY_NAME = re.compile(r"_?apply_\w*(rotary|rope)")


class RotationWatch(threading.local):
    """Notes the rotations of one attention layer at a time, by thread; holds a few tensors until ``take_before``."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config(decoder=True).to_dict()
        self._has_rope = bool(config.get("rope_parameters")) or any(
            "Rotary" in type(module).__name__ for module in model.get_decoder().modules()
        )
        self._rotations: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=8)

    @contextmanager
    def watching(self, forwards: Iterable[FunctionType]) -> Iterator[None]:
        """Within the context, the rotary functions that ``forwards`` call are noted; restored on exit."""
        with ExitStack() as restore:
            for namespace, name in rotary_functions(forwards):
                restore.callback(namespace.__setitem__, name, namespace[name])
                namespace[name] = self._noting(namespace[name])
            yield

    def clear(self) -> None:
        """Forget what an aborted forward left."""
        self._rotations.clear()

    def take_before(self, k_post_BNTD: torch.Tensor, forward: FunctionType) -> torch.Tensor | None:
        """The pre-RoPE key of the layer whose attention (``forward``) now reads ``k_post_BNTD``: the same
        shape, and the very same tensor in a layer without RoPE. None if it cannot be told."""
        rotations = tuple(self._rotations)
        self._rotations.clear()
        for before, after in rotations:
            if after is k_post_BNTD:
                return before
        for before, after in rotations:
            k_pre_BNTD = _match(before, after, k_post_BNTD)
            if k_pre_BNTD is not None:
                return k_pre_BNTD
        could_rotate = any(_ROTARY_NAME.match(name) for name in forward.__code__.co_names)
        if rotations or (self._has_rope and not could_rotate):
            return None
        return k_post_BNTD  # a layer that could rotate and did not (NoPE), or a model without RoPE

    def _noting(self, rotary: Callable) -> Callable:
        """``rotary`` itself, noting (before, after): its outputs pair with its leading arguments, whether it
        takes query and key together or one tensor."""
        signature = inspect.signature(rotary)

        @wraps(rotary)
        def noted(*args: Any, **kwargs: Any) -> Any:
            after = rotary(*args, **kwargs)
            before = signature.bind(*args, **kwargs).arguments.values()
            outputs = after if isinstance(after, tuple) else (after,)
            self._rotations.extend(zip(before, outputs, strict=False))
            return after

        return noted


def rotary_functions(forwards: Iterable[FunctionType]) -> list[tuple[dict, str]]:
    """(namespace, name) of each rotary function that one of the forwards calls, once each."""
    found = {
        (id(forward.__globals__), name): (forward.__globals__, name)
        for forward in forwards
        for name in forward.__code__.co_names
        if _ROTARY_NAME.match(name) and name in forward.__globals__
    }
    return list(found.values())


def _match(before: torch.Tensor, after: torch.Tensor, k_post_BNTD: torch.Tensor) -> torch.Tensor | None:
    """The pre-RoPE key if ``after`` equals the key, or its first or last channels (partial RoPE on a slice),
    in the layout (B, N, T, R) or (B, T, N, R); None otherwise."""
    if after.ndim != 4 or before.shape != after.shape:
        return None
    for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
        before_BNTR, after_BNTR = before.permute(order), after.permute(order)
        rotary_dim = after_BNTR.shape[-1]
        rest_dim = k_post_BNTD.shape[-1] - rotary_dim
        if rest_dim < 0 or after_BNTR.shape[:3] != k_post_BNTD.shape[:3]:
            continue
        if torch.equal(after_BNTR, k_post_BNTD[..., :rotary_dim]):
            rest_BNTR = k_post_BNTD[..., rotary_dim:]
            return torch.cat([before_BNTR, rest_BNTR], dim=-1) if rest_dim else before_BNTR
        if torch.equal(after_BNTR, k_post_BNTD[..., rest_dim:]):
            return torch.cat([k_post_BNTD[..., :rest_dim], before_BNTR], dim=-1)
    return None
