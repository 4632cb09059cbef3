"""Forwards of several plans: they load a streamed layer once for all, and begin where the first one had the
same input.

Side by side: forwards of several plans could each run from the first layer to the last; a streamed model
would load all its layers for each. So every call has a thread of its own, which stops where it comes to a
layer. One thread runs at a time: of those that have come to the earliest layer, the first. A call does what
it would do alone, on the same stream, with the same shapes and so the same bits; and what an earlier call
leaves at a layer, a later one finds there. Threads rather than a forward that is cut at its layers: masks,
positions, caches and hooks stay the model's own.

From a later layer: two plans that store their first L layers alike give the same hidden states in front of
layer L. So the second one's forward takes what the first one kept. The decoder's list of layers is replaced,
within the context, by modules which pass on what they are given until the forward's first layer, and run the
model's own layers from there on. Embeddings, masks and positions are made anew; nothing else that layers hand
to one another may matter, so that models run as a whole whose layers return more than hidden states, or read
another layer's keys.

Left out: backwards, which autograd runs in a thread of the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcal.models.attention import attention_modules, layer_index
from kvcal.models.supported_layers import sharing_layers

Result = TypeVar("Result")


class _Ended(BaseException):
    """Ends a call whose result is not asked for any more; no stage catches it."""


class _Current(threading.local):
    turn: _Turn[Any] | None = None


_CURRENT = _Current()


def reach(layer: int) -> None:
    """Wait for the turn, as a call comes to a layer. Nothing for a call that is not side by side with
    others."""
    if _CURRENT.turn is not None:
        _CURRENT.turn.stop_at(layer)


def side_by_side(calls: Sequence[Callable[[], Result]], device: torch.device) -> Generator[Result]:
    """The results of calls that come to layers of a model on ``device``, in their order. The next call ends
    when the next result is asked for: no more than one is held here."""
    turns = [_Turn(call, device) for call in calls]
    try:
        for turn in turns:
            while not turn.is_done:
                min((other for other in turns if not other.is_done), key=lambda other: other.layer).go_on()
            yield turn.take()
    finally:
        for turn in turns:
            turn.end()


class _Turn(Generic[Result]):
    """A call in a thread that runs within ``go_on`` alone. ``layer``: where it has stopped; ``is_done``: or
    ended."""

    def __init__(self, call: Callable[[], Result], device: torch.device) -> None:
        self.layer, self.is_done = -1, False
        self._found: list[Result] = []
        self._errors: list[BaseException] = []
        self._is_unwanted = False
        self._may_run, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(call, device), daemon=True)

    def go_on(self) -> None:
        """Run to the next layer, or to the end. Raises what the call raises."""
        if self._thread.ident is None:
            self._thread.start()
        self._may_run.release()
        self._has_stopped.acquire()
        if self._errors:
            raise self._errors.pop()  # kept nowhere: its traceback holds the call's tensors

    def take(self) -> Result:
        """The result of a call that is done."""
        return self._found.pop()

    def end(self) -> None:
        """Stop a call that is not done for good."""
        self._is_unwanted = True
        if self._thread.ident is not None and not self.is_done:
            self._may_run.release()
            self._thread.join()

    def stop_at(self, layer: int) -> None:
        """In the call's thread."""
        self.layer = layer
        self._has_stopped.release()
        self._may_run.acquire()
        if self._is_unwanted:
            raise _Ended

    def _run(self, call: Callable[[], Result], device: torch.device) -> None:
        _CURRENT.turn = self
        self._may_run.acquire()
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                self._found.append(call())
        except BaseException as error:  # raised again in the thread that waits
            self._errors.append(error)
        self.is_done = True
        self._has_stopped.release()


# What layers returned besides hidden states, if that was a tuple: also for forwards of a later context.
_OTHERS: WeakKeyDictionary[nn.Module, tuple[None, ...]] = WeakKeyDictionary()


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """The decoder's list of layers, in which each attention module stands at its cache index; None where
    there is no such list."""
    for layers in model.get_decoder().children():
        if isinstance(layers, nn.ModuleList):
            index_of = {module: index for index, layer in enumerate(layers) for module in layer.modules()}
            found = attention_modules(model)
            if all(module in index_of and index_of[module] == layer_index(module) for module in found):
                return layers
    return None


@dataclass(eq=False)
class Forward:
    """A forward that begins at layer ``first``, with what ``parent`` has kept there; without one, at layer 0.
    It puts inputs of the layers ``wanted`` into ``kept``."""

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
    """State that layers share within ``kept_inputs``. ``can_begin_later``: whether layers returned hidden
    states alone so far."""

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
            others = _OTHERS.get(self.layer)
            return hidden_states if others is None else (hidden_states, *others)
        if self.index == forward.first and forward.parent:
            reach(self.index)  # the parent, side by side with this forward, may not have come here
            hidden_states = forward.parent.kept[self.index]
        if self.index in forward.wanted:
            forward.kept[self.index] = hidden_states
        output = self.layer(hidden_states, *args, **kwargs)
        if isinstance(output, tuple):
            _OTHERS[self.layer] = (None,) * (len(output) - 1)
            self.inputs.can_begin_later &= all(part is None for part in output[1:])
        return output


@contextmanager
def kept_inputs(model: PreTrainedModel) -> Iterator[LayerInputs]:
    """Within the context, forwards of ``model`` keep inputs of its layers and begin at a layer, as
    ``forward`` of the yielded object says for each thread. The list of layers is restored on exit, also after
    an error."""
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
