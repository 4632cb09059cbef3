"""A model larger than its device: decoder layers take turns on the device, streamed from the safetensors
files.

transformers loads the model as ever, on the CPU, where its parameters are memory maps of the safetensors
files. What is no decoder layer (embeddings, final norm, head) then goes to the device, and so do the vectors
of all layers (norms, biases). A layer's matrices stay in the files: its parameters have their shapes, and the
value NaN, until the layer is called. Then threads copy its matrices from the files to pinned memory, piece by
piece, and a stream of its own copies each piece on, to one of ``Residence.num_places`` places on the device;
the next layer is fetched while one computes. Layers that fit besides them stay on the device for good. So a
stage needs no change, and its results are the same bits.

With gradients, a layer runs without a graph in the forward, and its input is kept in (pinned) host memory; in
the backward, the last layer first, the layer runs again with a graph. Hooks on modules and parameters are
those of the model, so that what a layer's backward gives is measured and freed before the layer before it
runs. A tapped layer (``kvcal.models.taps``) is observed in both runs: without a graph, then with one, both in
the forward's context (``contextvars``).

Each forward, and each backward, loads every layer once. So batches should be large, and calls that could be
made side by side should be (``kvcal.models.forwards``): they load a layer once for all. So does one backward
of them all: autograd takes the nodes that a thread made last first, so that it comes to a layer of every call
before the one below.

Weights that transformers converts (experts merged, another dtype than the files') lie in host memory
instead of a map.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import Cache, PreTrainedModel

from kvcal.distributed import size_on_node
from kvcal.errors import UnsupportedModel, UsageError
from kvcal.models.forwards import reach
from kvcal.models.residence import NUM_TOKENS, Residence, Shapes, residence
from kvcal.models.supported_layers import sharing_layers

ALIGNMENT = 256  # bytes: of a matrix in a layer's place
# Bytes that a thread copies at once.
PIECE_BYTES = 1 << 24
# Threads of a process at most: 8 brought 30.7 GB/s from one host's memory, 16 brought 43.7, 24 brought 47.9.
MAX_COPY_THREADS = 16

# The values of parameters that are streamed, in host memory.
_STORED = WeakTensorKeyDictionary()


class _Running(threading.local):
    is_again = False


_RUNNING = _Running()


def runs_again() -> bool:
    """Whether this thread runs a streamed layer a second time, with a graph, in a backward."""
    return _RUNNING.is_again


def stored(parameter: Tensor) -> Tensor:
    """The parameter's values, detached: those in host memory for one that is streamed."""
    return _STORED.get(parameter, parameter).detach()


def is_streamed(model: PreTrainedModel) -> bool:
    return any(parameter in _STORED for parameter in model.parameters())


def stream(model: PreTrainedModel, device: torch.device, memory: int, num_tokens: int = NUM_TOKENS) -> Residence:
    """Stream the layers of ``model``, which lies on the CPU as transformers loaded it, to ``device``, within
    ``memory`` bytes, for sequences of ``num_tokens``. On a CUDA device, torch allocates no more than that
    from now on."""
    sharing = sharing_layers(model.config)
    if sharing:
        raise UnsupportedModel(
            f"layer {sharing[0]} of {type(model).__name__} reads another layer's keys and values: where layers are "
            "streamed, gradients would not reach them",
            hint="leave out --memory: the model has to fit the device",
        )
    layers = _decoder_layers(model)
    matrices = [_matrices(model, layer) for layer in layers]
    plan = residence(_shapes(model, layers, matrices, num_tokens), memory)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory / total), device.index)
    for parameter in (parameter for of_layer in matrices[plan.num_kept :] for parameter in of_layer):
        _STORED[parameter] = parameter.data.contiguous()
        parameter.data = _absent(parameter, device)
    nn.Module.to(model, device)
    streamer = _Streamer(layers, matrices, plan, device)
    for number, layer in enumerate(layers):
        run = partial(streamer.run, number, layer.forward)
        layer.forward = run  # hooks stay around it, as in a call
    return plan


def _decoder_layers(model: PreTrainedModel) -> Sequence[nn.Module]:
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return list(module)
    raise UnsupportedModel(
        f"{type(model).__name__} has no list of {num_layers} decoder layers: it cannot be streamed",
        hint="leave --memory out",
    )


def _matrices(model: PreTrainedModel, layer: nn.Module) -> list[nn.Parameter]:
    """The layer's own floating-point parameters of two dimensions or more, each once."""
    mine = [p for p in layer.parameters() if p.ndim > 1 and p.is_floating_point()]
    inside = set(layer.modules())
    others = {p for module in model.modules() if module not in inside for p in module.parameters(recurse=False)}
    return [parameter for parameter in dict.fromkeys(mine) if parameter not in others]


def _absent(parameter: nn.Parameter, device: torch.device) -> Tensor:
    """A tensor of the parameter's shape that takes one element, NaN: read by mistake, it shows."""
    return torch.full((), torch.nan, dtype=parameter.dtype, device=device).expand(parameter.shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _shapes(
    model: PreTrainedModel, layers: Sequence[nn.Module], matrices: Sequence[Sequence[nn.Parameter]], num_tokens: int
) -> Shapes:
    """The model's, as transformers loaded it. Activations are an estimate: every matrix's input and output,
    and the gradients of both, of as many experts as a token takes, and eight fp32 copies of hidden states
    (norms). Eager attention has a score, in fp32 and the compute dtype, and both gradients, for each query
    head and token."""
    config, itemsize = model.config.get_text_config(decoder=True), model.dtype.itemsize
    own = {parameter for of_layer in matrices for parameter in of_layer}
    num_experts = int(config.to_dict().get("num_experts_per_tok") or 1)

    def channels(layer: nn.Module) -> int:
        large = (parameter.shape for parameter in layer.parameters() if parameter.ndim > 1)
        return sum((num_experts if len(shape) > 2 else 1) * sum(shape[-2:]) for shape in large)

    is_eager = config._attn_implementation == "eager"
    return Shapes(
        num_layers=len(layers),
        num_tokens=num_tokens,
        fixed=sum(tensor.nbytes for tensor in [*(p for p in model.parameters() if p not in own), *model.buffers()]),
        layer=max(sum(_aligned(parameter.nbytes) for parameter in of_layer) for of_layer in matrices),
        activations=2 * itemsize * max(map(channels, layers)) + 8 * 4 * config.hidden_size,
        scores=config.num_attention_heads * 2 * (4 + itemsize) if is_eager else 0,
        hidden=config.hidden_size * itemsize,
        logits=config.vocab_size * itemsize,
        vocab_size=config.vocab_size,
    )


def copy_threads() -> int:
    """Threads that copy matrices: as many as this process has cores, of those that the processes of a node
    share."""
    return max(1, min(MAX_COPY_THREADS, len(os.sched_getaffinity(0)) // size_on_node()))


class _Place:
    """Room for one layer's matrices on the device, and as much pinned host memory for a CUDA device."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.on_device = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.layer: int | None = None
        self.arriving: Future[None] | None = None
        if device.type == "cuda":
            self.pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            self.arrived, self.left = torch.cuda.Event(), torch.cuda.Event()
            self.left.record(torch.cuda.current_stream(device))  # by what had this memory before


def _views(buffer: Tensor, matrices: Sequence[nn.Parameter]) -> Iterator[Tensor]:
    """The matrices' parts of a buffer of bytes."""
    start = 0
    for matrix in matrices:
        yield buffer[start : start + matrix.numel() * matrix.itemsize].view(matrix.dtype).view(matrix.shape)
        start += _aligned(matrix.numel() * matrix.itemsize)


def _bytes(matrix: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, one after the other."""
    return matrix.view(-1).view(torch.uint8)


class _Streamer:
    """Runs the layers of one model, one call at a time."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        matrices: Sequence[Sequence[nn.Parameter]],
        residence: Residence,
        device: torch.device,
    ) -> None:
        self._layers, self._matrices, self._residence, self._device = layers, matrices, residence, device
        self._is_cuda = device.type == "cuda"
        self._places = [_Place(residence.shapes.layer, device) for _ in range(residence.num_places)]  # last used last
        self._reader, self._copiers = ThreadPoolExecutor(1, "layers"), ThreadPoolExecutor(copy_threads(), "pieces")
        self._copies = torch.cuda.Stream(device) if self._is_cuda else None

    def run(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A layer's call: run again in the backward if there may be one."""
        reach(number)
        hidden_BTC, *others = args or (kwargs.pop("hidden_states"),)
        call = _Call(forward, others, kwargs)
        if not torch.is_grad_enabled():
            following = number + 1 if number + 1 < len(self._layers) else 0  # of the next forward
            return self.forward(number, call, hidden_BTC, max(following, self._residence.num_kept))
        if any(isinstance(value, Tensor) and value.requires_grad for value in tree_leaves((others, kwargs))):
            name = type(self._layers[number]).__name__
            message = f"{name} takes several inputs that need gradients: it cannot be streamed"
            raise UnsupportedModel(message, hint="leave --memory out")
        # A hook may begin the graph within the layer: only the anchor makes sure that its backward is called.
        anchor = torch.empty(0, device=self._device, requires_grad=True)
        return _Rerun.apply(self, number, call, hidden_BTC, anchor)

    def forward(self, number: int, call: _Call, hidden_BTC: Tensor, following: int) -> Any:
        """The layer's output without a graph. ``following``: the layer to be fetched meanwhile, if there is
        one."""
        with self._present(number, following), torch.no_grad():
            return call(hidden_BTC)

    def backward(
        self, number: int, call: _Call, kept_BTC: Tensor, output_grad_BTC: Tensor, needs_grad: bool
    ) -> Tensor | None:
        """The gradient of the layer's input, ``kept_BTC`` in host memory; parameters accumulate theirs."""
        with self._present(number, number - 1):
            hidden_BTC = kept_BTC.to(self._device, non_blocking=True).detach().requires_grad_(needs_grad)
            _RUNNING.is_again = True
            try:
                with torch.enable_grad():
                    output = call(hidden_BTC)
            finally:
                _RUNNING.is_again = False
            output_BTC = output[0] if isinstance(output, tuple) else output
            if output_BTC.requires_grad:
                torch.autograd.backward(output_BTC, output_grad_BTC)
            return hidden_BTC.grad

    def kept(self, hidden_BTC: Tensor) -> Tensor:
        """A layer's input in host memory."""
        if not self._is_cuda:
            return hidden_BTC.detach()
        kept_BTC = torch.empty(hidden_BTC.shape, dtype=hidden_BTC.dtype, pin_memory=True)
        return kept_BTC.copy_(hidden_BTC, non_blocking=True)  # read in the order of this stream

    @contextmanager
    def _present(self, number: int, following: int) -> Iterator[None]:
        """Within the context, the layer is on the device; ``following`` is fetched, if it has a place of its
        own."""
        if number < self._residence.num_kept:
            if self._places and self._residence.num_kept <= following < len(self._layers):
                self._fetch(following)
            yield
            return
        place = self._fetch(number)
        assert place.arriving is not None
        place.arriving.result()
        if self._is_cuda:
            torch.cuda.current_stream(self._device).wait_event(place.arrived)
        for matrix, view in zip(self._matrices[number], _views(place.on_device, self._matrices[number]), strict=True):
            matrix.data = view
        if len(self._places) > 1 and self._residence.num_kept <= following < len(self._layers):
            self._fetch(following)
        try:
            yield
        finally:
            if self._is_cuda:
                place.left.record(torch.cuda.current_stream(self._device))

    def _fetch(self, number: int) -> _Place:
        """The place that holds the layer, or will: otherwise the one whose layer was used longest ago."""
        place = next((place for place in self._places if place.layer == number), self._places[0])
        self._places.remove(place)
        self._places.append(place)
        if place.layer != number:
            for matrix in self._matrices[place.layer] if place.layer is not None else ():
                matrix.data = _absent(matrix, self._device)
            place.layer, place.arriving = number, self._reader.submit(self._copy, place, number)
        return place

    def _copy(self, place: _Place, number: int) -> None:
        """In the reader's thread: from the files to the place."""
        if self._copies is None:
            for copied in self._copied(number, place.on_device):
                copied.result()
            return
        place.arrived.synchronize()  # the layer that was here has left pinned memory
        self._copies.wait_event(place.left)
        with torch.cuda.stream(self._copies):
            pieces = zip(*(self._pieces(number, buffer) for buffer in (place.pinned, place.on_device)), strict=True)
            for copied, (pinned, on_device) in zip(self._copied(number, place.pinned), pieces, strict=True):
                copied.result()
                on_device.copy_(pinned, non_blocking=True)
            place.arrived.record(self._copies)

    def _copied(self, number: int, buffer: Tensor) -> list[Future[None]]:
        """The copies of a layer's pieces to a buffer in host memory, which threads make in their order."""
        stored = (piece for matrix in self._matrices[number] for piece in _bytes(_STORED[matrix]).split(PIECE_BYTES))
        pairs = zip(stored, self._pieces(number, buffer), strict=True)
        return [self._copiers.submit(np.copyto, to.numpy(), piece.numpy()) for piece, to in pairs]

    def _pieces(self, number: int, buffer: Tensor) -> Iterator[Tensor]:
        """A layer's matrices in a buffer, as bytes, ``PIECE_BYTES`` at most."""
        for view in _views(buffer, self._matrices[number]):
            yield from _bytes(view).split(PIECE_BYTES)


@dataclass(frozen=True, eq=False)
class _Call:
    """A layer's forward with all arguments but the first, its input, in the context in which it was called
    first."""

    forward: Callable[..., Any]
    others: Sequence[Any]
    kwargs: dict[str, Any]
    context: Context = field(default_factory=copy_context)

    def __call__(self, hidden_BTC: Tensor) -> Any:
        return self.context.run(self.forward, hidden_BTC, *self.others, **self.kwargs)

    @property
    def has_cache(self) -> bool:
        return any(isinstance(value, Cache) for value in (*self.others, *self.kwargs.values()))


class _Rerun(torch.autograd.Function):
    """A layer that keeps nothing but its input, in host memory, and runs again in the backward."""

    @staticmethod
    def forward(ctx: Any, streamer: _Streamer, number: int, call: _Call, hidden_BTC: Tensor, anchor: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.streamer, ctx.number, ctx.call, ctx.kept_BTC = streamer, number, call, streamer.kept(hidden_BTC)
        return streamer.forward(number, call, hidden_BTC, number + 1)

    @staticmethod
    def backward(ctx: Any, output_grad_BTC: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        if any(other is not None for other in others):
            raise UnsupportedModel("a layer with several outputs cannot be streamed", hint="leave --memory out")
        if ctx.call.has_cache:  # which would be fed again
            raise UsageError("a streamed model has no backward through a cache", hint="call it with use_cache=False")
        gradient = None
        if output_grad_BTC is not None:
            gradient = ctx.streamer.backward(
                ctx.number, ctx.call, ctx.kept_BTC, output_grad_BTC, ctx.needs_input_grad[3]
            )
        ctx.kept_BTC = None
        return None, None, None, gradient, None
