"""Observers: the statistics of a profile that one backward of a batch of sequences gives, sequence by
sequence.

The loss is the ordinary next-token cross-entropy, its labels shifted once, as a mean over a sequence's loss
tokens; the backward is of the sum over the batch, so that each sequence's gradients are those of its own
loss. During the forward, the taps hand over each layer's keys and values; a hook on each takes its own
gradient in the backward, so that a layer's error is weighted by its own gradient alone (collecting errors and
gradients in two lists that fill in opposite orders pairs layer i with layer N - 1 - i, and the ranking of
layers comes out inverted).

No weight is trained: the backward makes gradients of activations alone. The norm of a projection's weight
gradient is taken in the same backward, from the projection's inputs and the gradients of its outputs, while
both are there; only so can the sequences of a batch be told apart. Beyond the autograd graph and these inputs
nothing is kept.

Layers with a sliding window are not measured: they stay at 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from transformers import PreTrainedModel

from kvcal.errors import NonFiniteActivations, UnsupportedModel, naming
from kvcal.geometry import Geometry
from kvcal.models.attention import repeatable_attention
from kvcal.models.forwards import side_by_side
from kvcal.models.projections import KVProjection, kv_projections
from kvcal.models.supported_layers import attention_layers
from kvcal.models.taps import Captured, tap
from kvcal.plan.page_format import SIDES, Side
from kvcal.recipe import CacheSpec
from kvcal.stages.checkpoint import Batch
from kvcal.stages.profile.sensitivity import Candidate, Errors, quantization_errors, range_refusal

LayerSide = tuple[int, Side]  # the layer's cache index first
NAMES = {"k": "the keys", "v": "the values"}
# Logits whose loss is taken at once: bounds the fp32 scratch to 512 MiB a tensor.
MAX_LOGITS = 1 << 27


@dataclass(frozen=True, eq=False)
class BatchGradients:
    """The contribution of B sequences, fp64 on the CPU. ``loss_B`` in nats per loss token; ``errors``: of the
    side's candidates; ``weight_grad_norms`` [B]: of the projection's weight."""

    loss_B: Tensor
    errors: Mapping[LayerSide, Errors]
    weight_grad_norms: Mapping[LayerSide, Tensor]


class Observer(NamedTuple):
    """One statistic of a layer's keys or values. The profile keeps its ``checkpoint.Mean`` over sequences
    (update, merge, result) under the tensor name "OBSERVER.SIDE.LAYER".

    ``shape``: of an observation, for N KV heads and C candidates; ``observe``: a batch's, [B, *shape] fp64 on
    the CPU."""

    shape: Callable[[int, int], tuple[int, ...]]
    observe: Callable[[BatchGradients, LayerSide], Tensor]


OBSERVERS: dict[str, Observer] = {
    # PM-KVQ's Eq. 5, per KV head and candidate.
    "sensitivity": Observer(lambda N, C: (N, C), lambda found, place: found.errors[place].weighted_BNC),
    # KVmix's score: the norm of the projection weight's gradient.
    "grad_norm": Observer(lambda N, C: (), lambda found, place: found.weight_grad_norms[place]),
    # ‖X − Q(X)‖² of every candidate, and ‖X‖².
    "squared_error": Observer(lambda N, C: (C,), lambda found, place: found.errors[place].squared_BC),
    "energy": Observer(lambda N, C: (), lambda found, place: found.errors[place].energy_B),
}


def next_token_losses(logits_BTV: Tensor, tokens_BT: Tensor, loss_mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats, the mean over the tokens that a sequence's mask marks, each predicted from the
    one before it: fp64 [B]; NaN for a sequence that has none. And the gradient of their sum with respect to
    the logits, in their dtype and shape, computed a part at a time: autograd would hold four fp32 tensors as
    large as the logits. No sum is taken by atomics: the same input gives the same bits."""
    B, T, V = logits_BTV.shape
    row_n, position_n = loss_mask_BT[:, 1:].nonzero().unbind(1)
    count_B = loss_mask_BT[:, 1:].sum(1)
    losses_BT = logits_BTV.new_zeros(B, T, dtype=torch.float64)
    gradient_BTV = torch.zeros_like(logits_BTV)
    for row_m, position_m in zip(*(x_n.split(max(1, MAX_LOGITS // V)) for x_n in (row_n, position_n)), strict=True):
        target_m1 = tokens_BT[row_m, position_m + 1].unsqueeze(1)
        log_p_mV = logits_BTV[row_m, position_m].float().log_softmax(-1)
        losses_BT[row_m, position_m] = -log_p_mV.gather(1, target_m1).squeeze(1).double()
        slope_mV = log_p_mV.exp_().scatter_add_(1, target_m1, -torch.ones_like(target_m1, dtype=torch.float32))
        gradient_BTV[row_m, position_m] = slope_mV.div_(count_B[row_m].unsqueeze(1)).to(gradient_BTV.dtype)
    return losses_BT.sum(1) / count_B, gradient_BTV


@dataclass(eq=False)
class _Pass:
    """Findings of one forward and backward of ``batch``. ``lengths_B`` int64, on the model's device;
    ``loss_B`` fp64 on the CPU; ``finite`` [B] bool: of keys or values, then of their gradients, in the order
    of the hooks."""

    batch: Batch
    lengths_B: Tensor
    finite: list[tuple[LayerSide, Tensor]] = field(default_factory=list)
    finite_gradients: list[tuple[LayerSide, Tensor]] = field(default_factory=list)
    errors: dict[LayerSide, Errors] = field(default_factory=dict)
    norms: dict[LayerSide, Tensor] = field(default_factory=dict)
    loss_B: Tensor = field(default_factory=lambda: torch.empty(0))

    def require_finite(self, flags: Sequence[tuple[LayerSide, Tensor]], message: str) -> None:
        """NonFiniteActivations for the first flag that is False. Waits for the device, once."""
        if flags:
            all_FB = torch.stack([flag_B for _, flag_B in flags]).cpu()
            for ((layer, side), _), flag_B in zip(flags, all_FB, strict=True):
                if not flag_B.all():
                    sample = self.batch.numbers[int((~flag_B).nonzero()[0])]
                    place = f"{NAMES[side]} of layer {layer}"
                    raise NonFiniteActivations(message.format(place=place, sample=sample))


# Of the batch whose forward runs, or runs again in the backward of a streamed layer.
_PASS: ContextVar[_Pass] = ContextVar("pass")


class GradientPass:
    """Forward and backward of batches; between two calls the model is as it was."""

    def __init__(
        self,
        model: PreTrainedModel,
        geometry: Geometry,
        candidates: Mapping[Side, Sequence[Candidate]],
        cache: CacheSpec,
    ) -> None:
        """``candidates``: of "k" and of "v". UnsupportedModel where a layer's projections are not found."""
        self._model = model
        self._geometry = geometry
        self._candidates = candidates
        self._cache = cache
        self._layers = {layer.index for layer in attention_layers(geometry) if layer.window is None}
        self._projections: dict[nn.Module, list[KVProjection]] = {}  # fused weights are both K's and V's
        for projection in kv_projections(model, geometry) if self._layers else ():
            if projection.layer in self._layers:
                self._projections.setdefault(projection.module, []).append(projection)

    def measure_together(self, batches: Sequence[Batch]) -> list[BatchGradients]:
        """Errors and norms of each sequence, which has at least one loss token after position 0, of batches
        side by side. All gradients of their logits are held at once."""
        device = self._model.device
        passes = [_Pass(batch, torch.tensor(batch.lengths, device=device)) for batch in batches]
        with ExitStack() as stack:
            stack.enter_context(_untrained(self._model))
            stack.enter_context(repeatable_attention(self._model))
            for module, projections in self._projections.items():
                watch = partial(self._watch_projection, projections)
                stack.callback(module.register_forward_hook(watch).remove)
            stack.enter_context(tap(self._model, self._watch, self._geometry))
            forwards = [partial(self._forward, found) for found in passes]
            ends = list(side_by_side(forwards, device)) if len(passes) > 1 else [forwards[0]()]
            with_graph = [end for end in ends if end is not None]
            if with_graph:
                torch.autograd.backward([edge for edge, _ in with_graph], [gradient for _, gradient in with_graph])
        return [self._gradients(found) for found in passes]

    def _forward(self, found: _Pass) -> tuple[GradientEdge, Tensor] | None:
        """The end of a batch's graph and the gradient of its logits; None without a graph."""
        batch, device = found.batch, self._model.device
        tokens_BT, loss_mask_BT = batch.tokens_BT.to(device), batch.loss_mask_BT.to(device)
        token = _PASS.set(found)
        try:
            with torch.enable_grad():
                logits_BTV = self._model(input_ids=tokens_BT, use_cache=False).logits
        finally:
            _PASS.reset(token)
        with torch.no_grad():
            loss_B, gradient_BTV = next_token_losses(logits_BTV, tokens_BT, loss_mask_BT)
        found.require_finite(found.finite, "{place} are not finite in sample {sample}")
        found.loss_B = loss_B.cpu()
        for number, loss in zip(batch.numbers, found.loss_B.tolist(), strict=True):
            if not math.isfinite(loss):
                raise NonFiniteActivations(f"the loss of sample {number} is {loss}")
        return (get_gradient_edge(logits_BTV), gradient_BTV) if logits_BTV.requires_grad else None

    def _gradients(self, found: _Pass) -> BatchGradients:
        """The findings of a backward."""
        found.require_finite(found.finite_gradients, "the gradient of {place} is not finite in sample {sample}")
        expected = set(product(self._layers, SIDES))
        if missing := sorted((expected - found.errors.keys()) | (expected - found.norms.keys())):
            raise UnsupportedModel(f"the loss does not depend on these keys and values: {missing}")
        errors = {place: Errors(*(tensor.cpu() for tensor in found.errors[place])) for place in sorted(found.errors)}
        norms = {place: norm_B.cpu() for place, norm_B in found.norms.items()}
        self._require_sums(found.batch, errors, norms)
        return BatchGradients(found.loss_B, errors, norms)

    def _watch(self, captured: Captured) -> None:
        """In the forward: hook one layer's keys and values."""
        found = _PASS.get()
        if captured.layer not in self._layers:
            return
        for side, x_BNTD in zip(SIDES, (captured.k_post_BNTD, captured.v_BNTD), strict=True):
            place: LayerSide = (captured.layer, side)
            found.finite.append((place, x_BNTD.isfinite().flatten(1).all(1)))
            if x_BNTD.requires_grad:
                x_BNTD.register_hook(partial(self._take_errors, found, place, x_BNTD.detach()))

    def _take_errors(self, found: _Pass, place: LayerSide, x_BNTD: Tensor, g_BNTD: Tensor) -> None:
        """In the backward: the errors of one layer's keys or values, weighted by their gradient."""
        found.finite_gradients.append((place, g_BNTD.isfinite().flatten(1).all(1)))
        layer, side = place
        settings = self._candidates[side], self._cache, self._geometry.cache_dtype, side
        with naming(f"{NAMES[side]} of layer {layer} in samples {list(found.batch.numbers)}"):
            found.errors[place] = quantization_errors(x_BNTD, g_BNTD, found.lengths_B, *settings)

    def _watch_projection(
        self, projections: Sequence[KVProjection], module: nn.Module, args: tuple[Any, ...], out: Tensor
    ) -> None:
        """In the forward: hook a projection's output, which begins the autograd graph where none has
        begun."""
        if not out.requires_grad:
            out.requires_grad_()
        out.register_hook(partial(self._take_norms, _PASS.get(), projections, args[0].detach()))

    def _take_norms(self, found: _Pass, projections: Sequence[KVProjection], x: Tensor, g: Tensor) -> None:
        """In the backward: the norms of a projection's weight gradient."""
        batch = len(found.lengths_B)
        x_BTF, g_BTO = (tensor.reshape(batch, -1, tensor.shape[-1]) for tensor in (x, g))
        for projection in projections:
            found.norms[projection.layer, projection.side] = projection.weight_grad_norms(x_BTF, g_BTO)

    def _require_sums(
        self, batch: Batch, errors: Mapping[LayerSide, Errors], norms: Mapping[LayerSide, Tensor]
    ) -> None:
        """NonFiniteActivations for an error or a norm that is not finite."""
        for (layer, side), of_place in errors.items():
            for row, column in (~of_place.squared_BC.isfinite()).nonzero().tolist():
                reason = range_refusal(self._candidates[side][column], self._cache.param_dtype)
                place = f"{NAMES[side]} of layer {layer} in sample {batch.numbers[row]}"
                raise NonFiniteActivations(f"{place}: {reason.message}", reason.hint)
        for (layer, side), norm_B in norms.items():
            for row in (~norm_B.isfinite()).nonzero().flatten().tolist():
                place = f"the {side} projection of layer {layer}"
                raise NonFiniteActivations(f"{place} has a gradient that is not finite in sample {batch.numbers[row]}")


@contextmanager
def _untrained(model: PreTrainedModel) -> Iterator[None]:
    """No parameter requires a gradient; on exit, requires_grad is as before."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)
