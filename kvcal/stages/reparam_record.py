"""What the reparam stage found: λ and offset of every layer, and what they do to the attention block's error.

The record holds the whole error curve of each layer's search, so that it can be seen how much λ brings, and where.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor

from kvcal import artifact
from kvcal.errors import ArtifactError
from kvcal.geometry import AttentionGeometry, Geometry, ModelIdentity
from kvcal.layer_plan import LayerPlan
from kvcal.specs import ReparamSpec
from kvcal.strict import STRICT, dump, parse

KIND = "reparam"
SCHEMA = 1


@pydantic_dataclass(frozen=True, config=STRICT)
class LayerReparam:
    """One searched layer. Errors are squared, summed over tokens and channels of the attention block's output, as a
    mean over samples; ``energy`` is the same sum of the exact output.

    ``errors[a]``: at the a-th α of the grid; ``offset_errors[a]``: with the offset, too; empty if it was not searched.
    ``k_bias_share``: the squared norm of k_proj's bias over the mean squared norm of the keys; None without a bias that
    reaches the keys. ``warning``: what to know about the layer, None mostly.
    """

    index: int
    alpha: float
    has_offset: bool
    error: float
    energy: float
    errors: tuple[float, ...]
    offset_errors: tuple[float, ...]
    k_bias_share: float | None
    warning: str | None

    @property
    def error_at_zero(self) -> float:
        """Without λ and offset."""
        return self.errors[0]


@pydantic_dataclass(frozen=True, config=STRICT)
class Subject:
    """What was calibrated, on what. ``position_scale``: the one used, which is the spec's within the model's context;
    ``num_tokens``: of the data."""

    identity: ModelIdentity
    geometry: Geometry
    spec: ReparamSpec
    position_scale: float
    data_fingerprint: str
    data_description: str
    num_tokens: int


@pydantic_dataclass(frozen=True, config=STRICT)
class _Body:
    subject: Subject
    layers: tuple[LayerReparam, ...]


@dataclass(frozen=True, eq=False)
class Reparam:
    """``lambdas`` and ``offsets``: {layer: fp32 [N, D]} of every searched layer, λ = 1 and offset 0 where the search
    chose none; both are for keys after RoPE, λ is equal on each rotary pair."""

    subject: Subject
    layers: tuple[LayerReparam, ...]
    lambdas: Mapping[int, Tensor]
    offsets: Mapping[int, Tensor]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Of all layers, in order, each text once."""
        return tuple(dict.fromkeys(layer.warning for layer in self.layers if layer.warning is not None))

    def apply(self, layers: tuple[LayerPlan, ...]) -> tuple[LayerPlan, ...]:
        """The layers with λ and offset, where the search chose any.

        Raises:
            ArtifactError: the layers are another model's, or store keys before RoPE.
        """
        if tuple(layer.geometry for layer in layers) != self.subject.geometry.layers:
            raise ArtifactError(
                f"λ was calibrated for {self.subject.identity.id}, whose layers are not the plan's",
                hint="run reparam again for this model",
            )
        found = {layer.index: layer for layer in self.layers}
        return tuple(_with(layer, found.get(layer.geometry.index)) for layer in layers)

    def tensors(self) -> dict[str, Tensor]:
        """The plan's tensors, for the layers as ``apply`` leaves them."""
        tensors = {}
        for layer in self.layers:
            if layer.alpha > 0:
                tensors[f"layers.{layer.index}.k_rescale"] = self.lambdas[layer.index]
            if layer.has_offset:
                tensors[f"layers.{layer.index}.k_offset"] = self.offsets[layer.index]
        return tensors


def _with(layer: LayerPlan, found: LayerReparam | None) -> LayerPlan:
    if found is None or not (found.alpha > 0 or found.has_offset):
        return layer
    if layer.k_pages == "pre":
        raise ArtifactError(
            f"λ of layer {found.index} is for keys after RoPE, and the layer stores them before",
            hint="run reparam again for these formats",
        )
    return replace(layer, k_rescale=found.alpha > 0, k_offset=found.has_offset)


def save(record: Reparam, inputs: dict[str, Any], path: Path) -> None:
    """Write the record. ArtifactError when it cannot be written."""
    body = _Body(record.subject, record.layers)
    tensors = {}
    for layer in record.layers:
        tensors[f"layers.{layer.index}.k_rescale"] = record.lambdas[layer.index]
        tensors[f"layers.{layer.index}.k_offset"] = record.offsets[layer.index]
    artifact.write(path, artifact.Artifact(KIND, SCHEMA, inputs, dump(body), tensors))


def load(path: Path) -> Reparam:
    """Read and check a record.

    Raises:
        ArtifactError: missing, corrupt or foreign file; unknown, missing or mis-shaped content; λ that is not positive.
    """
    stored = artifact.read(path, KIND, SCHEMA)
    body = parse(_Body, stored.body, str(path), ArtifactError)
    shapes = {
        layer.index: (layer.num_kv_heads, layer.k_head_dim)
        for layer in body.subject.geometry.layers
        if isinstance(layer, AttentionGeometry)
    }
    indices = [layer.index for layer in body.layers]
    expected = {f"layers.{index}.{name}" for index in indices for name in ("k_rescale", "k_offset")}
    if stored.tensors.keys() != expected or not shapes.keys() >= set(indices):
        raise ArtifactError(f"{path}: tensors {sorted(stored.tensors.keys() ^ expected)[:3]} are unknown or missing")
    for name, tensor in stored.tensors.items():
        shape = shapes[int(name.split(".")[1])]
        if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape:
            raise ArtifactError(f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}, expected fp32 {list(shape)}")
        if name.endswith("k_rescale") and not bool((tensor > 0).all()):
            raise ArtifactError(f"{path}: {name} holds a λ that is not positive")
    curves = {len(layer.errors) for layer in body.layers} | {len(layer.offset_errors) or None for layer in body.layers}
    if not curves <= {body.subject.spec.num_steps + 1, None}:
        raise ArtifactError(f"{path}: error curves of {sorted(filter(None, curves))} values for {body.subject.spec}")
    lambdas = {index: stored.tensors[f"layers.{index}.k_rescale"] for index in indices}
    offsets = {index: stored.tensors[f"layers.{index}.k_offset"] for index in indices}
    return Reparam(body.subject, body.layers, lambdas, offsets)


def table_rows(record: Reparam) -> tuple[list[str], list[list[str]]]:
    """(headers, rows) for people: one row a layer; errors as shares of the exact output's energy."""
    rows = []
    for layer in record.layers:
        energy, lambda_ND = max(layer.energy, 1e-300), record.lambdas[layer.index]
        rows.append(
            [
                str(layer.index),
                f"{layer.alpha:.2f}",
                "yes" if layer.has_offset else "–",
                f"{float(lambda_ND.min()):.2f} – {float(lambda_ND.max()):.2f}",
                f"{layer.error_at_zero / energy:.2e}",
                f"{layer.error / energy:.2e}",
                "–" if layer.k_bias_share is None else f"{layer.k_bias_share:.0%}",
            ]
        )
    return ["layer", "α", "offset", "λ", "error without", "error with", "bias share"], rows
