"""Forwards that begin at a later layer, with the hidden states that an earlier forward brought there.

Two plans that store their first L layers alike give the same hidden states in front of layer L. So the second one's
forward need not run these layers: it takes what the first one kept. The decoder's list of layers is replaced, within
the context, by modules which pass on what they are given until the forward's first layer, and run the model's own
layers from there on. Embeddings, masks and positions are made anew; nothing else that layers hand to one another may
matter, so that models run as a whole whose layers return more than hidden states, or read another layer's keys.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcal.models.attention import attention_modules, layer_index
from kvcal.models.geometry import sharing_layers
from kvcal.models.turns import reach

# What layers returned beside hidden states, if that was a tuple: also for forwards of a later context.
_BESIDE: WeakKeyDictionary[nn.Module, tuple[None, ...]] = WeakKeyDictionary()


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """The decoder's list of layers, in which each attention module stands at its cache index; None where there is no
    such list."""
    for layers in model.get_decoder().children():
        if isinstance(layers, nn.ModuleList):
            index_of = {module: index for index, layer in enumerate(layers) for module in layer.modules()}
            found = attention_modules(model)
            if all(module in index_of and index_of[module] == layer_index(module) for module in found):
                return layers
    return None


@dataclass(eq=False)
class Forward:
    """A forward that begins at layer ``first``, with what ``parent`` has kept there; without one, at layer 0. It puts
    inputs of the layers ``wanted`` into ``kept``."""

    first: int = 0
    parent: Forward | None = None
    wanted: Collection[int] = ()
    kept: dict[int, Tensor] = field(default_factory=dict)

    def begin(self, layer: int, parent: Forward) -> None:
        """Begin at ``layer``, whose input the parent keeps; at layer 0 as a whole one."""
        self.first, self.parent = layer, parent if layer else None


class _Thread(threading.local):
    forward = Forward()


class LayerInputs:
    """State that layers share within ``kept_inputs``. ``can_begin_later``: whether layers returned hidden states alone
    so far."""

    def __init__(self, can_begin_later: bool) -> None:
        self.can_begin_later = can_begin_later
        self._thread = _Thread()

    @property
    def forward(self) -> Forward:
        """The next one of this thread, or the one that runs: a whole one where none was set."""
        return self._thread.forward

    @forward.setter
    def forward(self, forward: Forward) -> None:
        self._thread.forward = forward


class _Layer(nn.Module):
    """A decoder layer, or nothing, as ``inputs`` say. Attributes are the layer's own."""

    def __init__(self, layer: nn.Module, index: int, inputs: LayerInputs) -> None:
        super().__init__()
        self.layer, self.index, self.inputs = layer, index, inputs

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.layer, name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        forward = self.inputs.forward
        if self.index < forward.first:
            beside = _BESIDE.get(self.layer)
            return hidden_states if beside is None else (hidden_states, *beside)
        if self.index == forward.first and forward.parent:
            reach(self.index)  # the parent, side by side with this forward, may not have come here
            hidden_states = forward.parent.kept[self.index]
        if self.index in forward.wanted:
            forward.kept[self.index] = hidden_states
        output = self.layer(hidden_states, *args, **kwargs)
        if isinstance(output, tuple):
            _BESIDE[self.layer] = (None,) * (len(output) - 1)
            self.inputs.can_begin_later &= all(part is None for part in output[1:])
        return output


@contextmanager
def kept_inputs(model: PreTrainedModel) -> Iterator[LayerInputs]:
    """Within the context, forwards of ``model`` keep inputs of its layers and begin at a layer, as ``forward`` of the
    yielded object says for each thread. The list of layers is restored on exit, also after an error."""
    layers = decoder_layers(model)
    inputs = LayerInputs(can_begin_later=layers is not None and not sharing_layers(model.config))
    own = list(layers or ())
    try:
        for index, layer in enumerate(own):
            assert layers is not None
            layers[index] = _Layer(layer, index, inputs).train(layer.training)
        yield inputs
    finally:
        for index, layer in enumerate(own):
            assert layers is not None
            layers[index] = layer
