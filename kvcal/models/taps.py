"""Queries, keys and values of every attention layer, streamed to an observer during an ordinary forward.

Queries, post-RoPE keys and values are those that ``kvcal.models.attention`` hears; pre-RoPE keys are
``kvcal.models.rope``'s.

Nothing is kept: what the observer does not store is freed. Every forward must hand over every attention
layer, once and in order, or it ends with UnsupportedModel; ``check_taps`` compares with what is cached.

Left out: what ``kvcal.models.attention`` refuses, such as models that bypass AttentionInterface.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvcal.errors import UnsupportedModel, UsageError
from kvcal.geometry import AttentionGeometry, Geometry
from kvcal.models.attention import attention_modules, forward_of, listen, require_base
from kvcal.models.geometry import RecordingCache, attention_layers, geometry_of, probe_ids

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


@dataclass(frozen=True)
class Captured:
    """One attention layer's tensors in one forward, in the compute dtype and still in their autograd graph.

    ``layer`` is the cache index. ``q_post_BHTD``: queries after RoPE; ``k_pre_BNTD``, ``k_post_BNTD``: keys
    before and after RoPE; ``v_BNTD``: values; all before the GQA repeat. In a layer without RoPE, k_pre is
    k_post. k_pre is None where the model changes its keys between RoPE and the cache (the norm of Llama-4 and
    HunYuan) or rotates by unknown means: whoever needs it must refuse. Hooks on q_post, k_post and v receive
    the loss's gradients; so does k_pre, except where RoPE turns a slice of the key and k_pre is put together.
    """

    layer: int
    q_post_BHTD: torch.Tensor
    k_pre_BNTD: torch.Tensor | None
    k_post_BNTD: torch.Tensor
    v_BNTD: torch.Tensor


Observer = Callable[[Captured], None]


@contextmanager
def tap(model: PreTrainedModel, on_attention: Observer, geometry: Geometry | None = None) -> Iterator[None]:
    """Within the context, every ``model(..., use_cache=False)`` calls ``on_attention`` once per attention
    layer, in layer order, during the forward; logits are unchanged.

    ``geometry`` spares its measurement when it is known. Raises UnsupportedModel on entry for a model that
    bypasses the attention interface, and in the forward for a layer that is missing, of another shape, or one
    too many; UsageError for a forward with a cache, or a model that is tapped already. The attention
    implementation and the model file are restored on exit, also after an error. Contexts of two models of one
    family must be left in the reverse order of entry.
    """
    modules = attention_modules(model)
    require_base(model)
    layers = attention_layers(geometry or geometry_of(model))
    recorder = _Recorder(model, layers, on_attention, RotationWatch(model))
    with ExitStack() as restore:
        restore.enter_context(listen(model, recorder.observe))
        restore.enter_context(recorder.rotations.watching(forward_of(module) for module in modules))
        restore.callback(model.register_forward_pre_hook(recorder.start, with_kwargs=True).remove)
        restore.callback(model.register_forward_hook(recorder.finish).remove)
        yield


def check_taps(model: PreTrainedModel, geometry: Geometry | None = None) -> None:
    """Compare the taps with the model itself on two tiny sequences, the second left-padded: keys and values
    bitwise what the model hands to ``Cache.update``, logits equal to rounding. Raises UnsupportedModel.
    """
    geometry = geometry or geometry_of(model)
    ids = probe_ids(model, 2, 5)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    cache = RecordingCache(model.config.get_text_config(decoder=True))
    seen: list[Captured] = []
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True).logits
        with tap(model, seen.append, geometry):
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    for captured in seen:
        [(k_post_BNTD, v_BNTD)] = cache.new_kv[captured.layer]
        if not (_identical(captured.k_post_BNTD, k_post_BNTD) and _identical(captured.v_BNTD, v_BNTD)):
            raise UnsupportedModel(
                f"layer {captured.layer} of {geometry.model_type} caches other tensors than it attends to"
            )
    tolerance = 1e-4 if logits.dtype == torch.float32 else 5e-2
    # Rows of padding may hold anything; NaN is left to who measures, and can name the layer.
    change = (logits - expected)[mask.bool()].abs().max()
    size = expected[mask.bool()].abs().max()
    if torch.isfinite(size) and not change <= tolerance * size:
        raise UnsupportedModel(f"{geometry.model_type}: logits change when its attention is observed")


def _identical(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bitwise, but for the signs of zeros; NaN equals NaN."""
    return torch.allclose(found, expected, rtol=0, atol=0, equal_nan=True)


class _Recorder(threading.local):
    """One tap's state, of each thread: which layer comes next, and its rotations so far."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: tuple[AttentionGeometry, ...],
        on_attention: Observer,
        rotations: RotationWatch,
    ) -> None:
        self.rotations = rotations
        self._name = type(model).__name__
        self._layers = layers
        self._on_attention = on_attention
        self._next = 0

    def start(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        """Before a forward: only without a cache do the taps see new tokens alone."""
        if kwargs.get("use_cache") is not False or kwargs.get("past_key_values") is not None:
            raise UsageError("a tapped forward needs use_cache=False and no past_key_values")
        self._next = 0
        self.rotations.clear()

    def finish(self, model: nn.Module, args: tuple, output: object) -> None:
        """After a forward: every attention layer was seen."""
        if self._next != len(self._layers):
            raise UnsupportedModel(
                f"{self._name}: {self._next} of {len(self._layers)} attention layers were observed; layer "
                f"{self._layers[self._next].index} did not come through the attention interface"
            )

    def observe(
        self, module: nn.Module, q_post_BHTD: torch.Tensor, k_post_BNTD: torch.Tensor, v_BNTD: torch.Tensor
    ) -> None:
        """One attention call: check it against the geometry, hand it to the observer."""
        if self._next == len(self._layers):
            raise UnsupportedModel(f"{self._name} attends more often than its {self._next} caching layers")
        layer = self._layers[self._next]
        self._next += 1
        place = f"layer {layer.index} of {self._name}"
        B, _, T, _ = q_post_BHTD.shape
        shapes = tuple(tuple(tensor.shape) for tensor in (q_post_BHTD, k_post_BNTD, v_BNTD))
        expected = (
            (B, layer.num_query_heads, T, layer.k_head_dim),
            (B, layer.num_kv_heads, T, layer.k_head_dim),
            (B, layer.num_kv_heads, T, layer.v_head_dim),
        )
        if shapes != expected:
            raise UnsupportedModel(f"{place} attends with shapes {shapes}, its cache says {expected}")
        k_pre_BNTD = self.rotations.take_before(k_post_BNTD, forward_of(module))
        self._on_attention(Captured(layer.index, q_post_BHTD, k_pre_BNTD, k_post_BNTD, v_BNTD))
