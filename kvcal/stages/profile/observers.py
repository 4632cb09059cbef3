"""Observers: the statistics of a profile that one backward per sequence gives.

The loss is the ordinary next-token cross-entropy, its labels shifted once, as a mean over the loss tokens. During the
forward, the taps hand over each layer's keys and values; a hook on each takes its own gradient in the backward, so
that a layer's error is weighted by its own gradient alone (collecting errors and gradients in two lists that fill in
opposite orders pairs layer i with layer N - 1 - i, and the ranking of layers comes out inverted). Only the key and
value projections are trained, and their gradients are freed as soon as their norms are taken: beyond the autograd
graph itself nothing is kept.

Layers with a sliding window are not measured: they stay at 16 bits. Left out: gradient checkpointing, and backwards
through layers that do not fit on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcal.errors import NonFiniteActivations, UnsupportedModel
from kvcal.geometry import CACHE_DTYPES, Geometry
from kvcal.models.geometry import attention_layers
from kvcal.models.projections import KVProjection, kv_projections
from kvcal.models.taps import Captured, tap
from kvcal.pages.record_layout import PARAM_DTYPES
from kvcal.plan.page_format import SIDES, Side
from kvcal.stages.profile.sensitivity import Candidate, Errors, quantization_errors

LayerSide = tuple[int, Side]  # the layer's cache index first
NAMES = {"k": "the keys", "v": "the values"}
HINT = "check the checkpoint; a model that overflows in float16 needs --dtype bfloat16 or float32"


@dataclass(frozen=True, eq=False)
class SampleGradients:
    """One sequence's contribution. ``errors``: of the side's candidates, on the CPU; ``weight_grad_norms``: of the
    projection's weight; ``loss`` in nats per loss token."""

    loss: float
    errors: Mapping[LayerSide, Errors]
    weight_grad_norms: Mapping[LayerSide, float]


class Observer(NamedTuple):
    """One statistic of a layer's keys or values. The profile keeps its ``checkpoint.Mean`` over sequences (update,
    merge, result) under the tensor name "OBSERVER.SIDE.LAYER".

    ``shape``: of an observation, for N KV heads and C candidates; ``observe``: one sequence's, fp64 on the CPU."""

    shape: Callable[[int, int], tuple[int, ...]]
    observe: Callable[[SampleGradients, LayerSide], Tensor]


def _grad_norm(sample: SampleGradients, place: LayerSide) -> Tensor:
    return torch.tensor(sample.weight_grad_norms[place], dtype=torch.float64)


OBSERVERS: dict[str, Observer] = {
    # PM-KVQ's Eq. 5, per KV head and candidate.
    "sensitivity": Observer(lambda N, C: (N, C), lambda sample, place: sample.errors[place].weighted_NC),
    # KVmix's score: the norm of the projection weight's gradient.
    "grad_norm": Observer(lambda N, C: (), _grad_norm),
    # ‖X − Q(X)‖² of every candidate, and ‖X‖².
    "squared_error": Observer(lambda N, C: (C,), lambda sample, place: sample.errors[place].squared_C),
    "energy": Observer(lambda N, C: (), lambda sample, place: sample.errors[place].energy),
}


def next_token_loss(logits_TV: Tensor, tokens_T: Tensor, loss_mask_T: Tensor) -> Tensor:
    """Mean cross-entropy in nats of the tokens that ``loss_mask_T`` marks, each predicted from the one before it."""
    predicted = loss_mask_T[1:].nonzero().squeeze(-1)
    targets = tokens_T[1:][predicted]
    return nn.functional.cross_entropy(logits_TV[predicted].float(), targets)


class GradientPass:
    """Forward and backward of one sequence at a time; between two calls the model is as it was."""

    def __init__(
        self,
        model: PreTrainedModel,
        geometry: Geometry,
        candidates: Mapping[Side, Sequence[Candidate]],
        num_sink_tokens: int,
        param_dtype: str,
    ) -> None:
        """``candidates``: of "k" and of "v". UnsupportedModel where a layer's projections are not found."""
        self._model = model
        self._geometry = geometry
        self._candidates = candidates
        self._num_sink_tokens = num_sink_tokens
        self._param_dtype = PARAM_DTYPES[param_dtype]
        self._layers = {layer.index for layer in attention_layers(geometry) if layer.window is None}
        self._projections: dict[nn.Parameter, list[KVProjection]] = {}  # fused weights are both K's and V's
        for projection in kv_projections(model, geometry) if self._layers else ():
            if projection.layer in self._layers:
                self._projections.setdefault(projection.parameter, []).append(projection)

    def measure(self, sample: int, tokens_T: Tensor, loss_mask_T: Tensor) -> SampleGradients:
        """Errors and norms of one sequence. ``sample`` is its number, for messages; tokens_T int64; loss_mask_T bool,
        at least one True behind position 0.

        Raises:
            NonFiniteActivations: in keys, values, the loss or gradients, naming layer and sample.
            UnsupportedModel: a layer's keys or values do not come through the taps, or do not reach the loss.
        """
        errors: dict[LayerSide, Errors] = {}
        norms: dict[LayerSide, float] = {}
        tokens_T, loss_mask_T = tokens_T.to(self._model.device), loss_mask_T.to(self._model.device)
        with ExitStack() as stack, torch.enable_grad():
            stack.enter_context(_only_trainable(self._model, self._projections))
            for parameter in self._projections:
                take = partial(self._take_norms, sample, norms)
                stack.callback(parameter.register_post_accumulate_grad_hook(take).remove)
            stack.enter_context(tap(self._model, partial(self._watch, sample, errors), self._geometry))
            logits_TV = self._model(input_ids=tokens_T.unsqueeze(0), use_cache=False).logits[0]
            loss = next_token_loss(logits_TV, tokens_T, loss_mask_T)
            del logits_TV
            if not torch.isfinite(loss):
                raise NonFiniteActivations(f"the loss of sample {sample} is {loss.item()}", HINT)
            if loss.requires_grad:
                loss.backward()
        expected = {(index, side) for index in self._layers for side in SIDES}
        if missing := sorted((expected - errors.keys()) | (expected - norms.keys())):
            raise UnsupportedModel(f"the loss does not depend on these keys and values: {missing}")
        on_cpu = {place: Errors(*(tensor.cpu() for tensor in errors[place])) for place in sorted(errors)}
        return SampleGradients(loss.item(), on_cpu, norms)

    def _watch(self, sample: int, errors: dict[LayerSide, Errors], captured: Captured) -> None:
        """In the forward: hook one layer's keys and values."""
        if captured.layer not in self._layers:
            return
        for side, x_BNTD in zip(SIDES, (captured.k_post_BNTD, captured.v_BNTD), strict=True):
            if not torch.isfinite(x_BNTD).all():
                place = f"{NAMES[side]} of layer {captured.layer}"
                raise NonFiniteActivations(f"{place} are not finite in sample {sample}", HINT)
            if x_BNTD.requires_grad:
                take = partial(self._take_errors, sample, errors, (captured.layer, side), x_BNTD.detach())
                x_BNTD.register_hook(take)

    def _take_errors(
        self, sample: int, errors: dict[LayerSide, Errors], place: LayerSide, x_BNTD: Tensor, g_BNTD: Tensor
    ) -> None:
        """In the backward: the errors of one layer's keys or values, weighted by their gradient."""
        layer, side = place
        name = f"{NAMES[side]} of layer {layer}"
        if not torch.isfinite(g_BNTD).all():
            raise NonFiniteActivations(f"the gradient of {name} is not finite in sample {sample}", HINT)
        cache_dtype = CACHE_DTYPES[self._geometry.cache_dtype]
        try:
            errors[place] = quantization_errors(
                x_BNTD[0],
                g_BNTD[0],
                self._candidates[side],
                self._num_sink_tokens,
                cache_dtype,
                self._param_dtype,
                side,
            )
        except NonFiniteActivations as error:
            raise NonFiniteActivations(f"{name} in sample {sample}: {error.message}", error.hint) from error

    def _take_norms(self, sample: int, norms: dict[LayerSide, float], parameter: nn.Parameter) -> None:
        """In the backward: the norm of a projection's gradient, which is then freed."""
        for projection in self._projections[parameter]:
            try:
                norms[projection.layer, projection.side] = projection.weight_grad_norm()
            except NonFiniteActivations as error:
                raise NonFiniteActivations(f"{error.message} in sample {sample}", HINT) from error
        parameter.grad = None


@contextmanager
def _only_trainable(model: PreTrainedModel, parameters: Mapping[nn.Parameter, object]) -> Iterator[None]:
    """Gradients for ``parameters`` alone; on exit, requires_grad is as before and these have no gradient."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.requires_grad_(parameter in parameters)
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)
        for parameter in parameters:
            parameter.grad = None
