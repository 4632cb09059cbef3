"""How far λ of one calibration is from λ of real long text: the first part of show_reparam.py.

Calibrations see the same tokens: in pieces of L tokens with the model at positions x 1, 2, 4 and 8; in pieces with the
model at positions x 1 and its keys, before RoPE, turned to positions x 4 afterwards, which tells what stretching does
to RoPE from what it does to the model; and in whole texts of 4 L tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from shared import mean_and_error
from torch import Tensor

from kvcal.models.load import LoadedModel
from kvcal.models.rope import RotaryMap
from kvcal.models.taps import Captured, tap
from kvcal.pages.rescale_and_rope import rotate
from kvcal.stages.lambda_candidates import calibration_inputs, lambda_of

STRETCH = 4


@dataclass(frozen=True)
class Texts:
    """int64 [4 L] each; ``is_loss`` bool [4 L] each: tokens whose prediction counts."""

    tokens: tuple[Tensor, ...]
    is_loss: tuple[Tensor, ...]

    def pieces(self, length: int) -> tuple[Tensor, ...]:
        """All texts in pieces of ``length`` tokens, each with the first token of its text (bos) in front."""
        return tuple(torch.cat([text[:1], piece[1:]]) for text in self.tokens for piece in text.split(length))


def spearman(one_NC: Tensor, other_NC: Tensor) -> float:
    """Mean over heads."""
    ranks = torch.stack([one_NC, other_NC]).argsort(-1).argsort(-1).double()
    ranks = ranks - ranks.mean(-1, keepdim=True)
    return float((ranks.prod(0).sum(-1) / ranks.square().sum(-1).prod(0).sqrt()).mean())


def log_lambdas(
    loaded: LoadedModel, maps: Mapping[int, RotaryMap], sequences: Sequence[Tensor], scale: float, turned: float | None
) -> dict[int, Tensor]:
    """log λ at α = 1, {layer: fp64 [N, D]}: the model at positions x ``scale``, and its keys turned x ``turned``."""
    largest: dict[int, Tensor] = {}

    def measure(captured: Captured) -> None:
        if captured.layer not in maps:
            return
        keys_BNTD = captured.k_post_BNTD
        if turned is not None:
            assert captured.k_pre_BNTD is not None
            positions_T = turned * torch.arange(keys_BNTD.shape[2], device=keys_BNTD.device)
            table = maps[captured.layer].tensor().to(keys_BNTD.device)
            keys_BNTD = rotate(captured.k_pre_BNTD, table, positions_T.round().long())
        found = keys_BNTD[0, :, 1:].abs().amax(1).double().cpu()
        largest[captured.layer] = found.maximum(largest.get(captured.layer, found))

    with torch.no_grad(), tap(loaded.model, measure, loaded.geometry):
        for tokens in sequences:
            loaded.model(**calibration_inputs(loaded, tokens[None], scale))
    return {index: lambda_of(found, maps[index].pairs, 1.0).double().log() for index, found in largest.items()}


def distances(
    loaded: LoadedModel, maps: Mapping[int, RotaryMap], texts: Texts, test: Texts, length: int, group: int
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Calibration -> part -> [(root mean square, its error), (Spearman, its error)] of log λ against the test texts',
    by groups of ``group`` texts. ``maps``: of the layers to look at."""
    short = length // STRETCH
    calibrations: dict[str, tuple[int, float, float | None]] = {
        f"L tokens x {scale:g}": (short, scale, None) for scale in (1.0, 2.0, 4.0, 8.0)
    }
    calibrations |= {"L tokens x 1, keys x 4": (short, 1.0, 4.0), "4 L tokens": (length, 1.0, None)}
    slow = {index: 2 * math.pi / found.frequency > short for index, found in maps.items()}
    first = min(maps)
    channels = {  # one of a pair, which share λ
        "all": {index: found.pairs[:, 0] for index, found in maps.items()},
        "slow": {index: found.pairs[slow[index], 0] for index, found in maps.items()},
        "fast": {index: found.pairs[~slow[index], 0] for index, found in maps.items()},
        "first layer": {first: maps[first].pairs[:, 0]},
    }
    measured: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for start in range(0, len(texts.tokens) - group + 1, group):
        some = Texts(texts.tokens[start : start + group], ())
        target = log_lambdas(loaded, maps, test.tokens[start : start + group], 1.0, None)
        for name, (num_tokens, scale, turned) in calibrations.items():
            found = log_lambdas(loaded, maps, some.pieces(num_tokens), scale, turned)
            for part, of_layer in channels.items():
                both = [(found[i][:, c], target[i][:, c]) for i, c in of_layer.items() if len(c) > 1]
                squares = torch.cat([(a - b).square().flatten() for a, b in both])
                correlation = sum(spearman(a, b) for a, b in both) / len(both)
                measured.setdefault((name, part), []).append((float(squares.mean().sqrt()), correlation))
    rows: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in calibrations}
    for (name, part), values in measured.items():
        rows[name][part] = [mean_and_error([value[i] for value in values]) for i in (0, 1)]
    return rows
