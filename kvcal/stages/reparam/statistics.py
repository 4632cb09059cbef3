"""Statistics of keys at far positions: largest, smallest and mean K_post of every channel (PM-KVQ Eq. 10 and 12).

Positions are multiplied by a scale, so that a short sequence shows what RoPE makes of keys far behind it. Sinks are
left out: a cache never quantizes them, and their keys can be unlike all others.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcal.errors import NonFiniteActivations, UsageError
from kvcal.models.load import LoadedModel
from kvcal.models.rope import inputs_at
from kvcal.models.taps import Captured, tap
from kvcal.progress import Reporter
from kvcal.stages.checkpoint import Mean

_NAMES = ("largest", "smallest", "total", "square")


@dataclass(frozen=True, eq=False)
class KeyStatistics:
    """Of one layer's K_post over ``count`` tokens, per KV head and channel, fp64 on the CPU: ``largest``, ``smallest``
    and ``total`` (the sum) [N, D]; ``square`` []: the sum of all squares. Zeros before the first token."""

    largest: Tensor
    smallest: Tensor
    total: Tensor
    square: Tensor
    count: int

    @classmethod
    def empty(cls, num_heads: int, head_dim: int) -> KeyStatistics:
        """No token yet."""
        nothing = torch.zeros(num_heads, head_dim, dtype=torch.float64)
        return cls(nothing, nothing, nothing, torch.zeros((), dtype=torch.float64), 0)

    @classmethod
    def of(cls, k_post_NTD: Tensor) -> KeyStatistics:
        """Of one sequence's keys [N, T, D], T of 1 or more."""
        keys = k_post_NTD.to("cpu", torch.float64)
        return cls(keys.amax(1), keys.amin(1), keys.sum(1), keys.square().sum(), keys.shape[1])

    def merge(self, other: KeyStatistics) -> KeyStatistics:
        """Of both sets of tokens."""
        if 0 in (self.count, other.count):
            return other if self.count == 0 else self
        return KeyStatistics(
            torch.maximum(self.largest, other.largest),
            torch.minimum(self.smallest, other.smallest),
            self.total + other.total,
            self.square + other.square,
            self.count + other.count,
        )

    @property
    def offset(self) -> Tensor:
        """The mean key, fp32 [N, D]: what a cache may subtract."""
        return (self.total / max(self.count, 1)).float()

    def magnitude(self, offset_ND: Tensor) -> Tensor:
        """max|K_post - offset| fp64 [N, D]."""
        shift = offset_ND.double()
        return torch.maximum(self.largest - shift, shift - self.smallest)

    def stored(self, index: int) -> dict[str, Mean]:
        """As a checkpoint keeps them, by name: the tensors are a Mean's total, whether or not they are sums."""
        return {f"{name}.{index}": Mean(tensor, self.count) for name, tensor in zip(_NAMES, self._tensors, strict=True)}

    @classmethod
    def from_stored(cls, means: Mapping[str, Mean], index: int) -> KeyStatistics:
        """The inverse of ``stored``."""
        largest, smallest, total, square = (means[f"{name}.{index}"] for name in _NAMES)
        return cls(largest.total, smallest.total, total.total, square.total, total.count)

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return self.largest, self.smallest, self.total, self.square


def fitting_scale(loaded: LoadedModel, sequences: Sequence[Tensor], wanted: float, reporter: Reporter) -> float:
    """``wanted``, or as much of it as takes the longest sequence to the end of the model's context: what lies beyond is
    never cached. UsageError for a sequence longer than the context."""
    context = loaded.model.config.get_text_config(decoder=True).to_dict().get("max_position_embeddings")
    longest = max(len(tokens) for tokens in sequences)
    if context is None or round((longest - 1) * wanted) < context:
        return wanted
    if longest > context:
        raise UsageError(f"a sequence of {longest} tokens, and the model's context is {context}", hint="lower seq_len")
    scale = (context - 1) / (longest - 1)
    reporter.say(
        f"reparam: positions x {scale:.3g} instead of x {wanted:g}, so that {longest} tokens end with the model's "
        f"context of {context}"
    )
    return scale


def calibration_inputs(loaded: LoadedModel, tokens_T: Tensor, position_scale: float) -> dict[str, Any]:
    """Arguments of a forward of one sequence at positions ``position_scale`` x 0, 1, 2, ..., rounded."""
    positions_T = (torch.arange(len(tokens_T), dtype=torch.float64) * position_scale).round().long()
    inputs: dict[str, Any] = {**inputs_at(loaded.model, tokens_T[None], positions_T), "use_cache": False}
    if "logits_to_keep" in inspect.signature(loaded.model.forward).parameters:
        inputs["logits_to_keep"] = 1  # the logits of a long sequence can be larger than all its keys
    return inputs


def key_statistics(
    loaded: LoadedModel, tokens_T: Tensor, position_scale: float, num_sink_tokens: Mapping[int, int]
) -> dict[int, KeyStatistics]:
    """Of one sequence, {layer: statistics behind its sinks}, for the layers that ``num_sink_tokens`` names.

    Raises:
        NonFiniteActivations: NaN or infinity, naming the layer.
    """
    found: dict[int, KeyStatistics] = {}

    def measure(captured: Captured) -> None:
        if captured.layer not in num_sink_tokens:
            return
        k_post_NTD = captured.k_post_BNTD[0, :, num_sink_tokens[captured.layer] :]
        if not bool(torch.isfinite(k_post_NTD).all()):
            raise NonFiniteActivations(f"keys of layer {captured.layer} hold NaN or infinity")
        N, T, D = k_post_NTD.shape
        found[captured.layer] = KeyStatistics.of(k_post_NTD) if T else KeyStatistics.empty(N, D)

    with torch.no_grad(), tap(loaded.model, measure, loaded.geometry):
        loaded.model(**calibration_inputs(loaded, tokens_T, position_scale))
    return found
