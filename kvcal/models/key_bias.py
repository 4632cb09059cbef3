"""Large biases of key projections.

Such a bias (Qwen2.x) is added before RoPE and turns with the position. It makes up most of the keys' energy in some
layers, and a static offset removes it only from channels that turn slowly. Keys that are scaled by token lose it in the
centre stage (kvcal.stages.centre); λ, which is for keys after RoPE, warns of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from transformers import PreTrainedModel

from kvcal.errors import UnsupportedModel
from kvcal.geometry import Geometry
from kvcal.models.attention import attention_modules, layer_index
from kvcal.models.geometry import attention_layers
from kvcal.models.load import LoadedModel
from kvcal.models.projections import projections, query_key_norms

# A bias that is more than this share of the keys' energy is worth a warning.
LARGE_BIAS = 0.5
MOSTLY_BIAS = (  # the same for all layers, so that it is said once
    "keys are mostly the bias of their projection in some layers (bias share): it is added before RoPE and turns with "
    "the position, so that an offset removes it only from slow channels"
)


def key_biases(model: PreTrainedModel, geometry: Geometry) -> dict[int, Tensor]:
    """{layer: the bias that is added to its keys before RoPE, [N, D]}, of the layers that have one and no norm after
    it, as latents have. UnsupportedModel for a model whose projections are in no known order."""
    normed = {layer_index(module) for module in attention_modules(model) if query_key_norms(module) is not None}
    normed |= {layer.index for layer in attention_layers(geometry) if layer.is_latent}
    return {
        index: found.key.bias.detach()[found.k_channels_ND.to(found.key.bias.device)]
        for index, found in projections(model, geometry).items()
        if found.key.bias is not None and index not in normed
    }


def bias_findings(loaded: LoadedModel, mean_squares: Mapping[int, float]) -> dict[int, tuple[float | None, str | None]]:
    """{layer: (share of the bias in its keys' energy, warning)} for every layer of ``mean_squares``, the mean of ‖K‖²
    over tokens, all KV heads together; rotations do not change it. No share without a bias that reaches the keys; a
    warning for a large share, or where the model's projections are unknown."""
    try:
        biases = key_biases(loaded.model, loaded.geometry)
    except UnsupportedModel as unknown:
        return dict.fromkeys(mean_squares, (None, _unchecked(unknown)))
    found: dict[int, tuple[float | None, str | None]] = {}
    for index, mean_square in mean_squares.items():
        has_share = index in biases and mean_square > 0
        share = float(biases[index].double().square().sum()) / mean_square if has_share else None
        warning = None
        if share is not None and share > LARGE_BIAS:
            warning = MOSTLY_BIAS
        found[index] = share, warning
    return found


def _unchecked(unknown: UnsupportedModel) -> str:
    return f"large biases of key projections could not be checked: {unknown.message}"
