"""The centre stage: the mean of keys before RoPE, which is taken out of keys that are scaled by token.

A bias of the key projection (Qwen2.x), or any other constant, is added before RoPE and turns with the
position. A format that scales whole tokens (lattices, rotated pages, uniform ones per token) spends its codes
on it; ranges per channel take it up in their zeros. So pages hold, with the mean k̄ [N, D] over tokens after
the first ``FIRST``,

    K_pre - k̄                       (``k_pages`` "pre")     on lattices, which torch decodes anyway
    K_post - mean over s of R_s k̄   (``k_pages`` "post")    in formats that kernels read as they are stored

where R_s is the model's own RoPE at position s. What the second leaves of the mean swings within a page;
where that is more than the keys' own variance, such a layer is stored before RoPE, too, which dynamic caches
alone take. Predicted keys need no mean: the bias of the prediction holds it. Values keep theirs, which no
projection's bias dominates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcal import artifact
from kvcal.data.sequences import DataSpec
from kvcal.errors import NonFiniteActivations, UnsupportedModel
from kvcal.models.load import LoadedModel
from kvcal.models.rope import rotary_maps
from kvcal.models.taps import Captured, tap
from kvcal.pages.rescale_and_rope import rotate
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import RAW
from kvcal.plan.plain_layer import BASIS, BEFORE_ROPE, FEEDBACK, Pages
from kvcal.progress import Reporter
from kvcal.records import refusing
from kvcal.stages.calibration import few_logits
from kvcal.stages.checkpoint import Mean

KIND = "centre"
SCHEMA = 1
# Tokens whose keys can be unlike all others (sinks); sequences and tokens of each that a mean needs at most.
FIRST, MAX_SEQUENCES, MAX_TOKENS = 8, 8, 1024
# For recipes that calibrate nothing else: installed prose.
DATA = DataSpec("python:docs", num_samples=4, seq_len=MAX_TOKENS, min_len=64)
# A mean that is less than this share of the keys' variance is left in; positions that a constant stands for.
SMALL, POSITIONS = 0.01, 32768


@dataclass(frozen=True, eq=False)
class Centring:
    """``stored``: by the names of a plan's tensors. A layer with a rotary table is stored before RoPE."""

    stored: Mapping[str, Tensor]

    def apply(self, layers: tuple[LayerPlan, ...]) -> tuple[LayerPlan, ...]:
        """The layers that were measured, centred. ArtifactError for layers that cannot be."""
        found = list(layers)
        with refusing("the means of keys do not go with the layers", hint="make the plan again in another folder"):
            for number, layer in enumerate(found):
                prefix = f"layers.{layer.geometry.index}"
                if f"{prefix}.k_offset" in self.stored:
                    k_pages: Pages = "pre" if f"{prefix}.rotary" in self.stored else "post"
                    found[number] = replace(layer, k_offset=True, k_pages=k_pages)
        return tuple(found)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors that the centred layers need beyond those that they needed before."""
        return dict(self.stored)


def takes_mean(layer: LayerPlan) -> bool:
    """Whether keys are scaled by token, and by no transform that holds or moves their mean."""
    if not layer.takes_transforms or not {*layer.transforms("k")} <= {BEFORE_ROPE, FEEDBACK, BASIS}:
        return False
    fmt = layer.format("k")
    return fmt != RAW and fmt.axis == "token" and not fmt.needs_queries and not fmt.changes_at


def run_centre(
    loaded: LoadedModel,
    layers: tuple[LayerPlan, ...],
    sequences: Sequence[Tensor],
    inputs: dict[str, Any],
    path: Path,
    reporter: Reporter,
) -> Centring:
    """Measure, and write to ``path``; raises as ``centring``, and ArtifactError for a file that cannot be
    written."""
    found = centring(loaded, layers, sequences, reporter)
    artifact.write(path, artifact.Artifact(KIND, SCHEMA, inputs, {}, dict(found.stored)))
    return found


def load(path: Path) -> Centring:
    return Centring(artifact.read(path, KIND, SCHEMA).tensors)


@torch.no_grad()
def centring(
    loaded: LoadedModel, layers: tuple[LayerPlan, ...], sequences: Sequence[Tensor], reporter: Reporter
) -> Centring:
    """The means of layers that ``takes_mean``, on a few of ``sequences``, int64 [T] each. None for a model
    whose keys before RoPE are not known, which ``reporter`` is told."""
    chosen = {layer.geometry.index: layer for layer in layers if takes_mean(layer)}
    totals: dict[int, Mean] = {}
    squares: dict[int, Mean] = {}

    def observe(captured: Captured) -> None:
        if captured.layer not in chosen:
            return
        if captured.k_pre_BNTD is None:
            raise UnsupportedModel(f"layer {captured.layer} changes its keys after RoPE, or rotates by unknown means")
        keys_TND = captured.k_pre_BNTD[0, :, FIRST:].transpose(0, 1)
        index, empty = captured.layer, Mean.empty(keys_TND.shape[1:])
        totals[index] = totals.get(index, empty).update(keys_TND)
        squares[index] = squares.get(index, empty).update(keys_TND.double().square())

    try:
        tables = {index: found.tensor() for index, found in rotary_maps(loaded.model, loaded.geometry, chosen).items()}
        with tap(loaded.model, observe, loaded.geometry):
            for tokens_T in [tokens for tokens in sequences if len(tokens) > FIRST][:MAX_SEQUENCES]:
                tokens_BT = tokens_T[None, :MAX_TOKENS].to(loaded.model.device)
                loaded.model(input_ids=tokens_BT, use_cache=False, **few_logits(loaded.model))
    except UnsupportedModel as unknown:
        reporter.say(f"centre: keys that are scaled by token keep their mean: {unknown.message}")
        return Centring({})
    stored: dict[str, Tensor] = {}
    before = []
    for index, total in totals.items():
        mean_ND, variance = total.result(), (squares[index].result() - total.result().square()).sum()
        if not bool(torch.isfinite(variance)):
            raise NonFiniteActivations(f"keys of layer {index} hold NaN or infinity")
        is_pre = chosen[index].k_pages == "pre" or not chosen[index].format("k").takes_feedback
        if not is_pre:
            constant_ND, swing = _constant(mean_ND, tables[index])
            is_pre = swing > float(variance)
            if is_pre:
                before.append(index)
            elif constant_ND.double().square().sum() < SMALL * variance:
                continue
        stored[f"layers.{index}.k_offset"] = mean_ND.float() if is_pre else constant_ND
        if is_pre:
            stored[f"layers.{index}.rotary"] = tables[index]
    if before:
        reporter.say(
            f"centre: RoPE turns the mean of the keys of layers {before}, which is more than what they vary by; they "
            "are stored before RoPE, which dynamic caches alone take. Keys per channel need none of it."
        )
    return Centring(stored)


def _constant(mean_ND: Tensor, table: Tensor) -> tuple[Tensor, float]:
    """The mean fp32 [N, D] of R_s k̄ over positions, and the sum over heads of the variance that is left
    about it."""
    positions = torch.arange(0, POSITIONS, 7)  # a step that no frequency of use divides
    total, square = torch.zeros_like(mean_ND), 0.0
    for part in positions.split(1024):
        turned_NTD = rotate(mean_ND[:, None].expand(-1, len(part), -1), table, part).double()
        total, square = total + turned_NTD.sum(1), square + float(turned_NTD.square().sum())
    constant_ND = total / len(positions)
    return constant_ND.float(), square / len(positions) - float(constant_ND.square().sum())
