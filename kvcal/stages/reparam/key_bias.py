"""Large biases of key projections (Qwen2.x): which layers have one, and what to say about them.

A bias is added before RoPE and turns with the position. It makes up most of the keys' energy in some layers, costs bits
in every format, and a static offset removes it only from channels that turn slowly. So every way to a plan warns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kvcal.errors import UnsupportedModel
from kvcal.models.geometry import attention_layers
from kvcal.models.load import LoadedModel
from kvcal.models.projections import key_biases
from kvcal.models.taps import Captured, tap
from kvcal.progress import Reporter

# A bias that is more than this share of the keys' energy is worth a warning.
LARGE_BIAS = 0.5


def bias_findings(loaded: LoadedModel, mean_squares: Mapping[int, float]) -> dict[int, tuple[float | None, str | None]]:
    """{layer: (share of the bias in its keys' energy, warning)} for every layer of ``mean_squares``, the mean of
    ‖K‖² over tokens, all KV heads together; rotations do not change it. No share without a bias that reaches the keys;
    a warning for a large share, or where the model's projections are unknown."""
    try:
        biases = key_biases(loaded.model, loaded.geometry)
    except UnsupportedModel as unknown:
        return dict.fromkeys(mean_squares, (None, _unchecked(unknown)))
    found: dict[int, tuple[float | None, str | None]] = {}
    for index, mean_square in mean_squares.items():
        has_share = index in biases and mean_square > 0
        share = float(biases[index].double().square().sum()) / mean_square if has_share else None
        found[index] = share, None if share is None or share <= LARGE_BIAS else _warning(index, share)
    return found


def warn_of_biases(loaded: LoadedModel, sample: Callable[[], Tensor], reporter: Reporter) -> None:
    """Say which layers' keys are mostly bias, measured on ``sample()``, tokens [T]; a model without biases is not
    run."""
    try:
        has_biases = bool(key_biases(loaded.model, loaded.geometry))
        mean_squares = _mean_squares(loaded, sample()) if has_biases else {}
    except UnsupportedModel as unknown:
        reporter.say(_unchecked(unknown))
        return
    for _, warning in bias_findings(loaded, mean_squares).values():
        if warning is not None:
            reporter.say(warning)


@torch.no_grad()
def _mean_squares(loaded: LoadedModel, tokens_T: Tensor) -> dict[int, float]:
    """{layer: the mean of ‖K‖² over the tokens}, of the layers with full attention."""
    paged = {layer.index for layer in attention_layers(loaded.geometry) if layer.window is None}
    found: dict[int, float] = {}

    def observe(captured: Captured) -> None:
        if captured.layer in paged:
            found[captured.layer] = float(captured.k_post_BNTD[0].double().square().sum((0, 2)).mean())

    with tap(loaded.model, observe, loaded.geometry):
        loaded.model(input_ids=tokens_T[None].to(loaded.model.device), use_cache=False)
    return dict(sorted(found.items()))


def _warning(index: int, share: float) -> str:
    return (
        f"layer {index}: the bias of its key projection is {share:.0%} of its keys' energy; it is added before RoPE "
        "and turns with the position, so that an offset removes it only from slow channels"
    )


def _unchecked(unknown: UnsupportedModel) -> str:
    return f"large biases of key projections could not be checked: {unknown.message}"
