"""The reparam stage's record: λ and offset of every layer, and the attention block's error with them.

The record holds the whole error curve of each layer's search, so that it can be seen how much λ brings, and where.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor

from kvcal import artifact
from kvcal.errors import ArtifactError
from kvcal.geometry import Index
from kvcal.plan.layer import LayerPlan, bare_layers
from kvcal.plan.tensors import offset_spec, rescale_spec
from kvcal.recipe import ReparamSpec
from kvcal.records import TensorSpec, record_of, refusing, require_tensors
from kvcal.stages.reparam.search import CalibrationSubject
from kvcal.strict import STRICT, Amount, Share, dump

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

    index: Index
    alpha: Share
    has_offset: bool
    error: Amount
    energy: Amount
    errors: tuple[Amount, ...]
    offset_errors: tuple[Amount, ...]
    k_bias_share: Amount | None
    warning: str | None

    @property
    def error_at_zero(self) -> float:
        """Without λ and offset."""
        return self.errors[0]


@pydantic_dataclass(frozen=True, config=STRICT)
class Subject(CalibrationSubject):
    """The model, data and settings of a calibration."""

    spec: ReparamSpec


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
        """The layers with λ and offset, where the search chose any. Raises ArtifactError: the layers are another
        model's, or store keys before RoPE."""
        if tuple(layer.geometry for layer in layers) != self.subject.geometry.layers:
            raise ArtifactError(
                f"λ was calibrated for {self.subject.identity.id}, whose layers are not the plan's",
                hint="run reparam again for this model",
            )
        by_index = {layer.index: layer for layer in self.layers}
        return tuple(_with(layer, by_index.get(layer.geometry.index)) for layer in layers)

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
    tensors = {f"layers.{index}.k_rescale": lambda_ND for index, lambda_ND in record.lambdas.items()}
    tensors |= {f"layers.{index}.k_offset": offset_ND for index, offset_ND in record.offsets.items()}
    artifact.write(path, artifact.Artifact(KIND, SCHEMA, inputs, dump(body), tensors))


def load(path: Path) -> Reparam:
    """Read and check a record. ArtifactError: missing, corrupt or foreign file; unknown, missing or mis-shaped content;
    λ, offsets or curves out of range."""
    stored = artifact.read(path, KIND, SCHEMA)
    body = record_of(_Body, stored.body, path)
    with refusing(path):
        require_tensors(stored.tensors, _declared(body))
    indices = [layer.index for layer in body.layers]
    lambdas = {index: stored.tensors[f"layers.{index}.k_rescale"] for index in indices}
    offsets = {index: stored.tensors[f"layers.{index}.k_offset"] for index in indices}
    return Reparam(body.subject, body.layers, lambdas, offsets)


def _declared(body: _Body) -> dict[str, TensorSpec]:
    """λ and offset of every layer. ValueError for layers that are not the model's, or that no search gives."""
    steps = body.subject.spec.num_steps
    declared: dict[str, TensorSpec] = {}
    paged = {layer.geometry.index: layer.attention for layer in bare_layers(body.subject.geometry) if layer.is_paged}
    for layer in body.layers:
        prefix = f"layers.{layer.index}"
        if layer.index not in paged or f"{prefix}.k_rescale" in declared:
            raise ValueError(f"layer {layer.index} is given twice, or is no layer of full attention")
        curve = layer.offset_errors if layer.has_offset else layer.errors
        if {len(layer.errors), len(layer.offset_errors) or steps + 1} != {steps + 1} or not curve:
            raise ValueError(
                f"layer {layer.index} has error curves of {len(layer.errors)} and {len(layer.offset_errors)} "
                f"values for num_steps = {steps}"
            )
        step = round(layer.alpha * steps)
        if (layer.alpha, layer.error) != (step / steps, curve[step]):
            raise ValueError(
                f"layer {layer.index} has α = {layer.alpha} and error = {layer.error}, which its curve does not"
            )
        shape = paged[layer.index].num_kv_heads, paged[layer.index].k_head_dim
        declared |= {f"{prefix}.k_rescale": rescale_spec(*shape), f"{prefix}.k_offset": offset_spec(*shape)}
    return declared


def table_rows(record: Reparam) -> tuple[list[str], list[list[str]]]:
    """(headers, rows) for people: one row a layer; errors as shares of the exact output's energy."""
    headers = ["layer", "α", "offset", "λ", "error without", "error with", "bias share"]
    rows = []
    for layer in record.layers:
        energy, lambda_ND = max(layer.energy, 1e-300), record.lambdas[layer.index]
        errors = [f"{error / energy:.2e}" for error in (layer.error_at_zero, layer.error)]
        bias = "–" if layer.k_bias_share is None else f"{layer.k_bias_share:.0%}"
        extent = f"{float(lambda_ND.min()):.2f} – {float(lambda_ND.max()):.2f}"
        rows.append([str(layer.index), f"{layer.alpha:.2f}", "yes" if layer.has_offset else "–", extent, *errors, bias])
    return headers, rows
