"""Observes a model's attention: queries, keys and values of every attention call, while its logits stay bit
for bit.

Two official hooks: an attention function registered with ``AttentionInterface``, which hands the call to an
observer and then computes what the model file would have computed (its own eager function included), and the
base implementation's mask function, registered under the same name with ``AttentionMaskInterface`` (without
it the mask would silently be None). Measurements (``kvcal.models.taps``) and plans that score channels by
queries (MixKVQ, Eq. 6-8) both observe here.

A context belongs to a model, and serves every thread that calls it. So it keeps nothing of a request.

``repeatable_attention`` makes attention's backward give the same bits each time, on every GPU of a kind.
Backwards of ``scaled_dot_product_attention`` add up gradients by atomics. Under
``torch.use_deterministic_algorithms`` FlashAttention's and the memory-efficient one take an order instead;
cuDNN's has none, and is not chosen. The setting is made for these nodes of the graph alone: elsewhere it
would refuse operations that have no other way.

Left out: implementations other than sdpa and eager, whose masks have other forms, and models that bypass
AttentionInterface (Falcon, GPT-J, Bloom, MPT): both are errors.
"""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from kvcal.errors import WITHOUT_CALIBRATION, UnsupportedModel, UsageError

# The model files' names of the AttentionInterface and of the function that they fall back to.
INTERFACE, EAGER = "ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"
BASE_IMPLEMENTATIONS = ("sdpa", "eager")
# The argument that hands a cache over: its name since transformers 5.24, which renames the old one, with a
# warning.
CACHE_ARGUMENTS = ("cache", "past_key_values")
# The beginning of the names that are registered in their place.
OURS = "kvcal_"

# (attention module, q_post_BHTD, k_post_BNSD, v_BNSD): T new tokens' queries, after RoPE; keys and values of
# the S tokens attended to, T without a cache, before the GQA repeat. In the compute dtype, still in the
# autograd graph.
OnCall = Callable[[nn.Module, Tensor, Tensor, Tensor], None]

# (the base implementation's mask function, its arguments ...) -> a mask in the base implementation's form.
MaskWrapper = Callable[..., Tensor | None]

# Held while implementations are read and set: two threads must not both find a model free.
_ENTERING = threading.Lock()

# The observer of each module, within ``listen`` only.
_LISTENING: dict[nn.Module, OnCall] = {}
# The attention of each module, within ``substituted`` only.
_SUBSTITUTES: dict[nn.Module, Callable[..., Any]] = {}


@contextmanager
def listen(model: PreTrainedModel, on_call: OnCall) -> Iterator[None]:
    """Within the context, ``on_call`` observes every attention call of the decoder just before it is
    computed: keys and values as ``Cache.update`` returned them, if there is a cache. It is called in the
    thread of the forward, and may raise: the forward ends with its error. The attention implementation is
    restored on exit, also after an error."""
    modules = attention_modules(model)
    with replaced_attention(model, OURS, _observed_attention):
        _LISTENING.update(dict.fromkeys(modules, on_call))
        try:
            yield
        finally:
            for module in modules:
                del _LISTENING[module]


@contextmanager
def substituted(module: nn.Module, attention: Callable[..., Any]) -> Iterator[None]:
    """Within the context, which must be inside ``listen``, ``attention(module, q, k, v, ...)`` computes the
    module's attention, unobserved."""
    _SUBSTITUTES[module] = attention
    try:
        yield
    finally:
        del _SUBSTITUTES[module]


@contextmanager
def replaced_attention(
    model: PreTrainedModel, prefix: str, attention: Callable[..., Any], mask: MaskWrapper | None = None
) -> Iterator[None]:
    """Within the context, ``attention(base, module, q, k, v, ...)`` computes the decoder's attention, with
    masks of ``base``, the implementation that it had, made by ``mask(base's function, ...)`` if there is one.
    Restored on exit, also after an error."""
    with ExitStack() as hooks:
        with _ENTERING:
            base = require_base(model)
            hooks.callback(_set_implementations, model, implementations_of(model.config))
            name, base_mask = prefix + base, AttentionMaskInterface()[base]
            AttentionInterface.register(name, partial(attention, base))
            AttentionMaskInterface.register(name, base_mask if mask is None else partial(mask, base_mask))
            fixed = f"{type(model).__name__} does not let its attention implementation be set"
            try:
                model.set_attn_implementation(implementations_of(model.config, name))
            except ValueError as refused:  # of one of its parts, such as an encoder of sound
                raise UnsupportedModel(f"{fixed}: {str(refused).partition('. ')[0]}") from refused
            if model.config.get_text_config(decoder=True)._attn_implementation != name:
                raise UnsupportedModel(fixed)
        yield


def require_base(model: PreTrainedModel) -> str:
    """The attention implementation of a model that is as it was loaded. Raises UsageError: it is neither sdpa
    nor eager, or one of ours: there can be one at a time."""
    base = str(model.config.get_text_config(decoder=True)._attn_implementation)
    if base.startswith(OURS) or any(module in _LISTENING for module in attention_modules(model)):
        raise UsageError(
            f"the attention of {type(model).__name__} is tapped already",
            hint="leave the other context first; attached, entered once, serves all threads that call the model",
        )
    if base not in BASE_IMPLEMENTATIONS:
        supported = ", ".join(BASE_IMPLEMENTATIONS)
        raise UsageError(
            f"attention implementation {base!r} has masks of another form; supported: {supported}",
            hint="load the model with attn_implementation='sdpa'",
        )
    return base


def base_attention(base: str, module: nn.Module) -> Callable[..., Any]:
    """The function that the model file would call under the implementation ``base``."""
    namespace = forward_of(module).__globals__
    return namespace[INTERFACE].get_interface(base, namespace[EAGER])


def attention_modules(model: PreTrainedModel) -> tuple[nn.Module, ...]:
    """The decoder's modules whose forward uses the attention interface, in the order of the model's modules.

    Raises UnsupportedModel if there is none.
    """
    modules = tuple(model.get_decoder().modules())
    found = tuple(module for module in modules if {INTERFACE, EAGER} <= set(forward_of(module).__code__.co_names))
    if not found:
        classes = {type(module).__name__ for module in modules}
        named = sorted(name for name in classes if "Attention" in name) or ["no attention class"]
        raise UnsupportedModel(
            f"{type(model).__name__} bypasses transformers' AttentionInterface ({', '.join(named)}): "
            "its queries, keys and values cannot be observed",
            hint=WITHOUT_CALIBRATION,
        )
    return found


def forward_of(module: nn.Module) -> FunctionType:
    """The forward as written in the model file: its globals are that file's namespace."""
    return inspect.unwrap(type(module).forward)


def layer_index(module: nn.Module) -> int | None:
    """The cache index that an attention module carries; None if it carries none, as one that several layers
    call."""
    index = vars(module).get("layer_idx")
    return index if isinstance(index, int) and index >= 0 else None


def _observed_attention(base: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The registered attention function."""
    substitute = _SUBSTITUTES.get(module)
    if substitute is not None:
        return substitute(module, *args, **kwargs)
    on_call = _LISTENING.get(module)  # None for a model that shares the configuration object and is not observed
    if on_call is not None:
        on_call(module, *args[:3])
    return base_attention(base, module)(module, *args, **kwargs)


def _set_implementations(model: PreTrainedModel, implementations: str | dict) -> None:
    with _ENTERING:
        model.set_attn_implementation(implementations)


def implementations_of(config: PreTrainedConfig, replacement: str | None = None) -> str | dict:
    """The attention implementations of a configuration and its sub-configurations, as
    ``set_attn_implementation`` takes them; every one that is set becomes ``replacement`` if that is given."""
    own = replacement or config._attn_implementation
    subs = {name: getattr(config, name) for name in config.sub_configs}
    subs = {name: sub for name, sub in subs.items() if sub is not None and sub._attn_implementation}
    if not subs:
        return own
    return {"": own} | {name: implementations_of(sub, replacement) for name, sub in subs.items()}


def cache_argument(module: nn.Module) -> str | None:
    """The name in the signature of the module's forward; None where it takes no cache."""
    parameters = inspect.signature(module.forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), None)


def with_cache(module: nn.Module, cache: object) -> dict[str, Any]:
    """The argument of the module's forward, or of its ``generate``, that hands ``cache`` over."""
    return {cache_argument(module) or CACHE_ARGUMENTS[0]: cache}


def given_cache(kwargs: Mapping[str, Any]) -> Any:
    """The cache among a forward's arguments; None where there is none."""
    return next((kwargs[name] for name in CACHE_ARGUMENTS if kwargs.get(name) is not None), None)


# The beginning of the names of its nodes in a graph.
ATTENTION = "ScaledDotProduct"
# Nodes that are looked at, from a block's output on: the output projection, gates and reshapes come before
# attention's.
MAX_NODES = 64


@contextmanager
def repeatable_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within the context, graphs of the model's forwards have attention with a repeatable backward, which
    must be run within it, too. Settings of torch are restored on exit, also after an error. UnsupportedModel:
    as ``attention_modules``."""
    with ExitStack() as hooks:
        hooks.callback(torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled())
        torch.backends.cuda.enable_cudnn_sdp(False)
        settings = _Settings()
        hooks.callback(settings.put_back)
        for module in attention_modules(model):
            hooks.callback(module.register_forward_hook(settings.watch).remove)
        yield


class _Settings:
    """torch's setting of deterministic algorithms, as it was and for the backward of attention."""

    def __init__(self) -> None:
        self._mode = torch.get_deterministic_debug_mode()
        self._fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]

    def watch(self, module: nn.Module, args: object, output: object) -> None:
        """After a block's forward."""
        output_BTC = output[0] if isinstance(output, tuple) else output
        node = _attention_node(output_BTC.grad_fn) if isinstance(output_BTC, Tensor) else None
        if node is not None:
            node.register_prehook(lambda _: self.demand())
            node.register_hook(lambda *_: self.put_back())

    def demand(self) -> None:
        """Deterministic algorithms or an error, without the filling of all new memory that comes with
        them."""
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.set_deterministic_debug_mode("error")

    def put_back(self) -> None:
        torch.set_deterministic_debug_mode(self._mode)
        torch.utils.deterministic.fill_uninitialized_memory = self._fill  # type: ignore[attr-defined]


def _attention_node(output: Node | None) -> Node | None:
    """The nearest node of attention in the graph of a block's output; None for attention that is computed
    eagerly, by operations that repeat their bits, or without a graph."""
    waiting, seen = deque([output]), set[Node]()
    while waiting and len(seen) < MAX_NODES:
        node = waiting.popleft()
        if node is None or node in seen:
            continue
        if node.name().startswith(ATTENTION):
            return node
        seen.add(node)
        waiting.extend(following for following, _ in node.next_functions)
    return None
