"""Queries, keys and values of every attention layer, streamed to an observer during an ordinary forward.

Queries, post-RoPE keys and values come through the two official hooks: an attention function registered with
``AttentionInterface`` that looks, then calls what the model would have called, and the base implementation's
own mask function registered under the same name with ``AttentionMaskInterface`` (without it the mask would
silently be None). Pre-RoPE keys are ``kvcal.models.rope``'s.

Nothing is kept: what the observer does not store is freed. Every forward must hand over every attention
layer, once and in order, or it ends with UnsupportedModel; ``check_taps`` compares with what is cached.

Left out: models that bypass AttentionInterface (Falcon, GPT-J, Bloom, MPT), which are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from kvcal.errors import UnsupportedModel, UsageError
from kvcal.geometry import AttentionGeometry, Geometry
from kvcal.models.geometry import RecordingCache, attention_layers, geometry_of, probe_ids
from kvcal.models.rope import RotationWatch

# What the model files call the AttentionInterface and the function they fall back to.
_INTERFACE, _EAGER = "ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"
_BASE_IMPLEMENTATIONS = ("sdpa", "eager")


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
    forwards = _attention_forwards(model)
    if any(module in _LISTENING for module in forwards):
        raise UsageError(f"{type(model).__name__} is tapped already")
    base = model.config.get_text_config(decoder=True)._attn_implementation
    if base not in _BASE_IMPLEMENTATIONS:
        raise UsageError(
            f"attention implementation {base!r}; supported: {', '.join(_BASE_IMPLEMENTATIONS)}",
            hint="load the model with attn_implementation='sdpa'",
        )
    layers = attention_layers(geometry or geometry_of(model))
    recorder = _Recorder(model, forwards, layers, on_attention)
    with ExitStack() as restore:
        restore.enter_context(recorder.rotations.watching(forwards.values()))
        _LISTENING.update(dict.fromkeys(forwards, recorder))
        restore.callback(lambda: [_LISTENING.pop(module) for module in forwards])
        restore.callback(model.set_attn_implementation, _implementations(model.config))
        _use_tapped_attention(model, base)
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


def attention_modules(model: PreTrainedModel) -> tuple[nn.Module, ...]:
    """The decoder's modules whose forward uses the attention interface, in the order of the model's modules.

    Raises UnsupportedModel if there is none.
    """
    return tuple(_attention_forwards(model))


# Which recorder hears a module's attention; holds entries only within a tap.
_LISTENING: dict[nn.Module, _Recorder] = {}


def _tapped_attention(base: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The registered attention function: observe, then call what the model file would call under ``base``."""
    recorder = _LISTENING.get(module)  # None for an untapped model that shares the configuration object
    if recorder is not None:
        recorder.observe(module, *args[:3])
    namespace = _forward_of(module).__globals__
    attention = namespace[_INTERFACE].get_interface(base, namespace[_EAGER])
    return attention(module, *args, **kwargs)


def _use_tapped_attention(model: PreTrainedModel, base: str) -> None:
    name = f"kvcal_tap_{base}"
    AttentionInterface.register(name, partial(_tapped_attention, base))
    AttentionMaskInterface.register(name, AttentionMaskInterface()[base])
    model.set_attn_implementation(_implementations(model.config, name))
    if model.config.get_text_config(decoder=True)._attn_implementation != name:
        raise UnsupportedModel(f"{type(model).__name__} does not let its attention implementation be set")


def _implementations(config: PreTrainedConfig, replacement: str | None = None) -> str | dict:
    """The attention implementations of a configuration and its sub-configurations, as
    ``set_attn_implementation`` takes them; every one that is set becomes ``replacement`` if that is given."""
    own = replacement or config._attn_implementation
    subs = {name: getattr(config, name) for name in config.sub_configs}
    subs = {name: sub for name, sub in subs.items() if sub is not None and sub._attn_implementation}
    if not subs:
        return own
    return {"": own} | {name: _implementations(sub, replacement) for name, sub in subs.items()}


def _forward_of(module: nn.Module) -> FunctionType:
    """The forward as written in the model file: its globals are that file's namespace."""
    return inspect.unwrap(type(module).forward)


def _attention_forwards(model: PreTrainedModel) -> dict[nn.Module, FunctionType]:
    forwards = {module: _forward_of(module) for module in model.get_decoder().modules()}
    found = {
        module: forward
        for module, forward in forwards.items()
        if {_INTERFACE, _EAGER} <= set(forward.__code__.co_names)
    }
    if not found:
        classes = {type(module).__name__ for module in forwards}
        named = sorted(name for name in classes if "Attention" in name) or ["no attention class"]
        raise UnsupportedModel(
            f"{type(model).__name__} bypasses transformers' AttentionInterface ({', '.join(named)}): "
            "its queries, keys and values cannot be observed"
        )
    return found


class _Recorder:
    """One tap's state: which layer comes next, and its rotations so far."""

    def __init__(
        self,
        model: PreTrainedModel,
        forwards: dict[nn.Module, FunctionType],
        layers: tuple[AttentionGeometry, ...],
        on_attention: Observer,
    ) -> None:
        self.rotations = RotationWatch(model)
        self._name = type(model).__name__
        self._forwards = forwards
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
        k_pre_BNTD = self.rotations.take_before(k_post_BNTD, self._forwards[module])
        self._on_attention(Captured(layer.index, q_post_BHTD, k_pre_BNTD, k_post_BNTD, v_BNTD))
