"""Queries, keys (before and after RoPE) and values of every attention layer, streamed during an ordinary
forward.

Queries, post-RoPE keys and values are the arguments of the attention calls (``kvcal.models.attention``).
Pre-RoPE keys are the inputs of the model file's own rotary function, whose calls are recorded: the one whose
output is the layer's key made it. Nothing is kept: tensors that the observer does not store are freed. Every
forward must hand over every attention layer, once and in order, or it ends with UnsupportedModel;
``check_taps`` compares with what is cached.

Latent attention hands its latent and its rotary key to the cache, and attends to what it makes of them. So
its modules are called with a stand-in for a cache, which notes both and returns them.

``rereading`` runs attention blocks again with other keys. A calibration forward has exact keys; in decoding,
a query reads from pages what was packed before it. So the block's module is called again with the arguments
of the forward, and its attention call gets other keys for some (query, token) pairs; all else is the model's
own. Queries are taken in segments which read the same tokens from pages, so that all segments together cost
one attention.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcal.errors import WITHOUT_CALIBRATION, UnsupportedModel, UsageError
from kvcal.geometry import AttentionGeometry, Geometry
from kvcal.models.attention import (
    attention_modules,
    base_attention,
    forward_of,
    given_cache,
    layer_index,
    listen,
    require_base,
    substituted,
    with_cache,
)
from kvcal.models.streamed import runs_again
from kvcal.models.supported_layers import RecordingCache, attention_layers, geometry_of, probe_ids, sharing_layers

_ROTARY_NAME = re.compile(r"_?apply_\w*(rotary|rope)")
_AXES = ((0, 1, 2, 3), (0, 2, 1, 3))  # of keys (B, N, T, R) or (B, T, N, R), as (B, N, T, R)


@dataclass(frozen=True, eq=False)
class Rotation:
    """The call of a rotary function that made a layer's key: output ``number``, with its axes in the order
    ``axes`` of (B, N, T, R), is the key's channels ``start`` to ``start`` + R. Outputs pair with the leading
    arguments."""

    rotary: Callable[..., Any]
    bound: inspect.BoundArguments
    number: int
    axes: Sequence[int]
    start: int

    @property
    def k_pre(self) -> Tensor:
        """The call's input that was turned, in its own axes."""
        return list(self.bound.arguments.values())[self.number]

    def rotated(self, k_pre: Tensor) -> Tensor:
        """The output of the same call with ``k_pre`` instead."""
        name = list(self.bound.arguments)[self.number]
        bound = inspect.BoundArguments(self.bound.signature, {**self.bound.arguments, name: k_pre})
        after = self.rotary(*bound.args, **bound.kwargs)
        return after[self.number] if isinstance(after, tuple) else after


@dataclass(frozen=True)
class Captured:
    """One attention layer's tensors in one forward, in the compute dtype and still in their autograd graph.

    ``layer`` is the cache index. ``q_post_BHTD``: queries after RoPE; ``k_pre_BNTD``, ``k_post_BNTD``: keys
    before and after RoPE; ``v_BNTD``: values; all before the GQA repeat. In a layer without RoPE, k_pre is
    k_post and ``rotation`` is None. k_pre is None where the model changes its keys between RoPE and the cache
    (the norm of Llama-4 and HunYuan) or rotates by unknown means. Hooks on q_post, k_post and v receive the
    loss's gradients; so does k_pre, except where RoPE turns a slice of the key and k_pre is put together.

    Of latent attention, k_pre and k_post are the latent, which has no RoPE, and v is the rotary key after
    RoPE; queries are those of the expanded heads.
    """

    layer: int
    q_post_BHTD: Tensor
    k_pre_BNTD: Tensor | None
    k_post_BNTD: Tensor
    v_BNTD: Tensor
    rotation: Rotation | None = None


Observer = Callable[[Captured], None]


@contextmanager
def tap(
    model: PreTrainedModel, on_attention: Observer, geometry: Geometry | None = None, first: int = 0
) -> Iterator[None]:
    """Within the context, every ``model(..., use_cache=False)`` calls ``on_attention`` once per attention
    layer, in layer order, during the forward; logits are unchanged. With gradients, a streamed model's layers
    have no graph then, and are observed once more, with one, in the backward (``kvcal.models.streamed``).

    ``geometry`` spares its measurement when it is known; ``first``: the layer at which forwards begin
    (``kvcal.models.forwards``). Raises UnsupportedModel on entry for a model that bypasses the attention
    interface, and in the forward for a layer that is missing, of another shape, or one too many; UsageError
    for a forward with a cache, or a model that is tapped already. The attention implementation and the model
    file are restored on exit, also after an error. Contexts of two models of one family must be left in the
    reverse order of entry.
    """
    modules = attention_modules(model)
    require_base(model)
    layers = [layer for layer in attention_layers(geometry or geometry_of(model)) if layer.index >= first]
    recorder = _Recorder(model, layers, on_attention)
    with ExitStack() as hooks:
        hooks.enter_context(listen(model, recorder.observe))
        hooks.enter_context(recorder.recording(forward_of(module) for module in modules))
        hooks.callback(model.register_forward_pre_hook(recorder.start, with_kwargs=True).remove)
        hooks.callback(model.register_forward_hook(recorder.finish).remove)
        for module in modules:
            if recorder.is_latent(module):
                hooks.callback(module.register_forward_pre_hook(recorder.lend, with_kwargs=True).remove)
        yield


def check_taps(model: PreTrainedModel, geometry: Geometry | None = None) -> None:
    """Compare the taps with the model itself on two tiny sequences, the second left-padded: keys and values
    that the model hands to ``Cache.update``, and logits, equal to rounding. Raises UnsupportedModel."""
    geometry = geometry or geometry_of(model)
    ids = probe_ids(model, 2, 5)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    cache = RecordingCache(model.config.get_text_config(decoder=True))
    seen: list[Captured] = []
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, use_cache=True, **with_cache(model, cache)).logits
        with tap(model, seen.append, geometry):
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    tolerance = 1e-4 if logits.dtype == torch.float32 else 5e-2
    for captured in seen:
        [cached] = cache.new_kv[captured.layer]
        for tensor, expected_BNTD in zip((captured.k_post_BNTD, captured.v_BNTD), cached, strict=True):
            # Products of a CPU may depend on where their operands lie; NaN equals NaN.
            largest = float(expected_BNTD.nan_to_num(posinf=0.0, neginf=0.0).abs().max())
            if not torch.allclose(tensor, expected_BNTD, rtol=0, atol=tolerance * largest, equal_nan=True):
                raise UnsupportedModel(
                    f"layer {captured.layer} of {geometry.model_type} caches other tensors than it attends to",
                    hint=WITHOUT_CALIBRATION,
                )
    # Rows of padding may hold anything; NaN is left to the measurement, which can name the layer.
    change = (logits - expected)[mask.bool()].abs().max()
    size = expected[mask.bool()].abs().max()
    if torch.isfinite(size) and not change <= tolerance * size:
        text = f"{geometry.model_type}: logits change when its attention is observed"
        raise UnsupportedModel(text, hint=WITHOUT_CALIBRATION)


class _Recorder(threading.local):
    """The state of one tap, of each thread: the layer that comes next, and the rotary calls since the last
    attention call, which hold a few tensors until then."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[AttentionGeometry], on_attention: Observer) -> None:
        config = model.config.get_text_config(decoder=True).to_dict()
        self._has_rope = bool(config.get("rope_parameters")) or any(
            "Rotary" in type(module).__name__ for module in model.get_decoder().modules()
        )
        self._name, self._layers, self._on_attention = type(model).__name__, layers, on_attention
        self._next, self._sharing = 0, sharing_layers(model.config)
        # (rotary function, its arguments, number of an output, that output)
        self._rotated: deque[tuple[Callable, inspect.BoundArguments, int, Tensor]] = deque(maxlen=8)
        # What a layer of latent attention has handed to the cache since the last attention call.
        self._handed: tuple[Tensor, Tensor] | None = None

    def is_latent(self, module: nn.Module) -> bool:
        return any(layer.is_latent and layer.index == layer_index(module) for layer in self._layers)

    def lend(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Before a module of latent attention: itself in place of a cache."""
        return args, {**kwargs, **with_cache(module, self)}

    def update(self, latent_B1TD: Tensor, rotary_B1TD: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As ``Cache.update`` of a cache without tokens."""
        self._handed = latent_B1TD, rotary_B1TD
        return self._handed

    def start(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        """Before a forward: only without a cache are the attended tokens the new ones alone."""
        if kwargs.get("use_cache") is not False or given_cache(kwargs) is not None:
            raise UsageError("a tapped forward needs use_cache=False and no cache")
        self._next, self._handed = 0, None
        self._rotated.clear()  # what an aborted forward left

    def finish(self, model: nn.Module, args: tuple, output: object) -> None:
        """After a forward: every attention layer was observed."""
        if self._next != len(self._layers):
            raise UnsupportedModel(
                f"{self._name}: {self._next} of {len(self._layers)} attention layers were observed; layer "
                f"{self._layers[self._next].index} did not come through the attention interface",
                hint=WITHOUT_CALIBRATION,
            )

    def observe(self, module: nn.Module, q_post_BHTD: Tensor, k_post_BNTD: Tensor, v_BNTD: Tensor) -> None:
        """One attention call: check it against the geometry, hand it to the observer. That of a layer which
        reads what an earlier one has cached is passed over: its gradients reach the tensors of that one."""
        if layer_index(module) in self._sharing:
            return
        layer = self._layer_of(module)
        B, _, T, _ = q_post_BHTD.shape
        shapes = tuple(tuple(tensor.shape) for tensor in (q_post_BHTD, k_post_BNTD, v_BNTD))
        heads, k_dim, v_dim = layer.attended
        expected = ((B, layer.num_query_heads, T, k_dim), (B, heads, T, k_dim), (B, heads, T, v_dim))
        if shapes != expected:
            place = f"layer {layer.index} of {self._name}"
            raise UnsupportedModel(
                f"{place} attends with shapes {shapes}, its cache says {expected}", hint=WITHOUT_CALIBRATION
            )
        if layer.is_latent:
            if self._handed is None:
                text = f"layer {layer.index} of {self._name} attends without handing its latent over"
                raise UnsupportedModel(text, hint=WITHOUT_CALIBRATION)
            (latent_B1TD, rotary_B1TD), self._handed = self._handed, None
            self._rotated.clear()
            self._on_attention(Captured(layer.index, q_post_BHTD, latent_B1TD, latent_B1TD, rotary_B1TD))
            return
        k_pre_BNTD, rotation = self._take(k_post_BNTD, forward_of(module))
        self._on_attention(Captured(layer.index, q_post_BHTD, k_pre_BNTD, k_post_BNTD, v_BNTD, rotation))

    def _layer_of(self, module: nn.Module) -> AttentionGeometry:
        """The layer whose attention is called: the next one, but in a backward, where a streamed layer runs
        again."""
        if runs_again():
            return next(layer for layer in self._layers if layer.index == layer_index(module))
        if self._next == len(self._layers):
            raise UnsupportedModel(
                f"{self._name} attends more often than its {self._next} caching layers", hint=WITHOUT_CALIBRATION
            )
        self._next += 1
        return self._layers[self._next - 1]

    @contextmanager
    def recording(self, forwards: Iterable[FunctionType]) -> Iterator[None]:
        """Within the context, the rotary functions that ``forwards`` call are recorded; restored on exit."""
        functions = {(id(f.__globals__), name): f.__globals__ for f in forwards for name in f.__code__.co_names}
        with ExitStack() as hooks:
            for (_, name), namespace in functions.items():
                if _ROTARY_NAME.match(name) and name in namespace:
                    hooks.callback(namespace.__setitem__, name, namespace[name])
                    namespace[name] = self._recorded(namespace[name])
            yield

    def _recorded(self, rotary: Callable) -> Callable:
        signature = inspect.signature(rotary)

        @wraps(rotary)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            after = rotary(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            outputs = after if isinstance(after, tuple) else (after,)
            self._rotated.extend((rotary, bound, n, output) for n, output in enumerate(outputs[: len(bound.arguments)]))
            return after

        return recorded

    def _take(self, k_post_BNTD: Tensor, forward: FunctionType) -> tuple[Tensor | None, Rotation | None]:
        """The pre-RoPE key of the layer whose attention (``forward``) now reads ``k_post_BNTD``, and its
        rotation: the very same tensor and None in a layer without RoPE, (None, None) if it cannot be told."""
        outputs = sorted(self._rotated, key=lambda output: output[3] is not k_post_BNTD)  # itself first
        self._rotated.clear()
        for rotary, bound, number, after in outputs:
            before = list(bound.arguments.values())[number]
            for axes in _AXES if after.ndim == 4 and before.shape == after.shape else ():
                start = _part_of(k_post_BNTD, after.permute(axes))
                if start is not None:
                    stop = start + after.shape[-1]
                    parts = [k_post_BNTD[..., :start], before.permute(axes), k_post_BNTD[..., stop:]]
                    k_pre_BNTD = before if after is k_post_BNTD else torch.cat(parts, dim=-1)
                    return k_pre_BNTD, Rotation(rotary, bound, number, axes, start)
        could_rotate = any(_ROTARY_NAME.match(name) for name in forward.__code__.co_names)
        if outputs or (self._has_rope and not could_rotate):
            return None, None
        return k_post_BNTD, None  # a layer that could rotate and did not (NoPE), or a model without RoPE


def _part_of(k_post_BNTD: Tensor, after_BNTR: Tensor) -> int | None:
    """The first channel of the part of the key that is ``after_BNTR``: all channels, or the first or last
    ones (partial RoPE on a slice); None if it is no part."""
    rest_dim = k_post_BNTD.shape[-1] - after_BNTR.shape[-1]
    if rest_dim < 0 or after_BNTR.shape[:3] != k_post_BNTD.shape[:3]:
        return None
    for start in (0, rest_dim):
        part_BNTR = k_post_BNTD.narrow(-1, start, after_BNTR.shape[-1])
        # NaN equals NaN here: it is left to the measurement, which can name the sample.
        if torch.allclose(after_BNTR, part_BNTR, rtol=0, atol=0, equal_nan=True):
            return start
    return None


@dataclass(frozen=True, eq=False)
class Segment:
    """Queries ``start`` .. ``stop`` - 1 read from pages the tokens where ``is_stored_NT`` (bool [N, T]) is
    True."""

    start: int
    stop: int
    is_stored_NT: Tensor


# k_read_BNTD, segments that cover all T queries -> the block's output [B, T, hidden].
Reread = Callable[[Tensor, Sequence[Segment]], Tensor]
OnBlock = Callable[[Captured, Reread], None]


@contextmanager
def rereading(model: PreTrainedModel, on_block: OnBlock, geometry: Geometry) -> Iterator[None]:
    """Within the context, every ``model(..., use_cache=False)`` calls ``on_block`` once per attention layer,
    after the layer's block has run, with what was captured and a function that runs the block again. No
    gradients.

    Raises what ``tap`` raises; UnsupportedModel for a block that attends more than once.
    """
    base = model.config.get_text_config(decoder=True)._attn_implementation
    captured: list[Captured] = []

    def run_block(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: object) -> None:
        if len(captured) != 1:
            raise UnsupportedModel(f"{type(module).__name__} attends {len(captured)} times in one forward")

        def reread(k_read_BNTD: Tensor, segments: Sequence[Segment]) -> Tensor:
            def attend(_: nn.Module, *inputs: Any, **more: Any) -> tuple[Tensor, None]:
                return _attend_in_segments(base, module, k_read_BNTD, segments, *inputs, **more), None

            with substituted(module, attend):
                again = module.forward(*args, **kwargs)
            return again[0] if isinstance(again, tuple) else again

        on_block(captured.pop(), reread)

    with ExitStack() as hooks:
        hooks.enter_context(torch.no_grad())
        hooks.enter_context(tap(model, captured.append, geometry))
        sharing = sharing_layers(model.config)
        for module in attention_modules(model):
            if layer_index(module) not in sharing:
                hooks.callback(module.register_forward_hook(run_block, with_kwargs=True).remove)
        yield


def _attend_in_segments(
    base: str,
    module: nn.Module,
    k_read_BNTD: Tensor,
    segments: Sequence[Segment],
    q_BHTD: Tensor,
    k_BNTD: Tensor,
    v_BNTD: Tensor,
    attention_mask: Tensor | None,
    **more: Any,
) -> Tensor:
    """The attention's output, with keys from ``k_read_BNTD`` where the segments say so."""
    parts = []
    for segment in segments:
        until = slice(0, segment.stop)
        is_stored = segment.is_stored_NT[:, until, None].to(k_BNTD.device)
        keys = torch.where(is_stored, k_read_BNTD[:, :, until], k_BNTD[:, :, until])
        queries = q_BHTD[:, :, segment.start : segment.stop]
        mask = _mask_rows(attention_mask, segment, queries, base)
        parts.append(base_attention(base, module)(module, queries, keys, v_BNTD[:, :, until], mask, **more)[0])
    return torch.cat(parts, dim=1)


def _mask_rows(mask: Tensor | None, segment: Segment, queries: Tensor, base: str) -> Tensor:
    """The rows of a mask [B, 1, T, T] for a segment's queries; None stands for plain causality."""
    if mask is not None:
        return mask[:, :, segment.start : segment.stop, : segment.stop]
    tokens = torch.arange(segment.stop, device=queries.device)
    allowed = tokens <= tokens[segment.start :, None]
    if base == "sdpa":
        return allowed[None, None]
    blocked = torch.finfo(queries.dtype).min
    return torch.where(allowed, 0.0, blocked).to(queries.dtype)[None, None]
