"""Calibration at far positions: forwards of short texts at stretched positions, and what a record says of
them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor
from transformers import PreTrainedModel

from kvcal.errors import UsageError
from kvcal.geometry import Geometry, ModelIdentity
from kvcal.models.load import LoadedModel
from kvcal.models.rope import inputs_at
from kvcal.progress import Reporter
from kvcal.strict import STRICT, Amount, Count


@pydantic_dataclass(frozen=True, config=STRICT)
class CalibrationSubject:
    """The model and the data of a calibration at far positions; a stage adds its settings.
    ``position_scale``: the one used, which is the settings' within the model's context; ``num_tokens``: of
    the data."""

    identity: ModelIdentity
    geometry: Geometry
    position_scale: Amount
    data_fingerprint: str
    data_description: str
    num_tokens: Count


def calibration_inputs(loaded: LoadedModel, tokens_BT: Tensor, position_scale: float) -> dict[str, Any]:
    """Arguments of a forward of sequences at positions ``position_scale`` x 0, 1, 2, ..., rounded; at a scale
    of 1 the model counts itself, since some (BART, Whisper) take no positions, and others (RoBERTa) begin at
    another one."""
    others = {"use_cache": False, **few_logits(loaded.model)}
    if position_scale == 1:
        tokens_BT = tokens_BT.to(loaded.model.device)
        return {"input_ids": tokens_BT, "attention_mask": torch.ones_like(tokens_BT), **others}
    positions_T = calibration_positions(tokens_BT.shape[1], position_scale)
    return {**inputs_at(loaded.model, tokens_BT, positions_T), **others}


def few_logits(model: PreTrainedModel) -> dict[str, int]:
    """The last token's logits alone, where a model can: those of a long sequence can be larger than all its
    keys."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def calibration_positions(num_tokens: int, position_scale: float) -> Tensor:
    """``position_scale`` x 0, 1, 2, ..., rounded, int64 [num_tokens]."""
    return (torch.arange(num_tokens, dtype=torch.float64) * position_scale).round().long()


def fitting_scale(
    loaded: LoadedModel, sequences: Sequence[Tensor], wanted: float, reporter: Reporter, stage: str = "reparam"
) -> float:
    """``wanted``, or as much of it as takes the longest sequence to the end of the model's context: what lies
    beyond is never cached. UsageError for a sequence longer than the context."""
    context, longest = loaded.max_context, max(map(len, sequences))
    if context is None or round((longest - 1) * wanted) < context:
        return wanted
    if longest > context:
        raise UsageError(f"a sequence of {longest} tokens, and the model's context is {context}", hint="lower seq_len")
    scale = (context - 1) / (longest - 1)
    reporter.say(
        f"{stage}: positions x {scale:.3g} instead of x {wanted:g}, so that {longest} tokens end with the model's "
        f"context of {context}"
    )
    return scale
