"""Forwards that begin at a later layer, with the hidden states that an earlier forward brought there.

Two plans that store their first L layers alike give the same hidden states in front of layer L. So the second one's
forward need not run these layers: it takes what the first one kept. The decoder's list of layers is replaced, within
the context, by modules which pass on what they are given until the forward's first layer, and run the model's own
layers from there on. Embeddings, masks and positions are made anew; nothing else that layers hand to one another may
matter, so that models run as a whole whose layers return more than hidden states, or read another layer's keys.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcal.models.attention import attention_modules, layer_index
from kvcal.models.geometry import sharing_layers


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


class LayerInputs:
    """State that layers share within ``kept_inputs``. ``first``: the layer at which the next forward begins,
    with ``hidden``; 0 for a whole one. ``wanted``: layers whose inputs the next forward puts into ``kept``;
    ``can_begin_later``: whether layers returned hidden states alone so far."""

    def __init__(self, can_begin_later: bool) -> None:
        self.first, self.hidden = 0, torch.empty(0)
        self.wanted: Collection[int] = ()
        self.kept: dict[int, Tensor] = {}
        self.can_begin_later = can_begin_later


class _Layer(nn.Module):
    """A decoder layer, or nothing, as ``inputs`` say. Attributes are the layer's own."""

    def __init__(self, layer: nn.Module, index: int, inputs: LayerInputs) -> None:
        super().__init__()
        self.layer, self.index, self.inputs = layer, index, inputs
        self.returns_tuple = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.layer, name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.index < self.inputs.first:
            return (hidden_states,) if self.returns_tuple else hidden_states
        if self.index == self.inputs.first > 0:
            hidden_states = self.inputs.hidden
        if self.index in self.inputs.wanted:
            self.inputs.kept[self.index] = hidden_states
        output = self.layer(hidden_states, *args, **kwargs)
        self.returns_tuple = isinstance(output, tuple)
        if self.returns_tuple and any(part is not None for part in output[1:]):
            self.inputs.can_begin_later = False
        return output


@contextmanager
def kept_inputs(model: PreTrainedModel) -> Iterator[LayerInputs]:
    """Within the context, forwards of ``model`` keep inputs of its layers and begin at the layer that the yielded
    object says. The list of layers is restored on exit, also after an error."""
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
