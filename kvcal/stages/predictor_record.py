"""The fitted predictors of a model: which of them a plan takes, what each explains, costs and saves, and their tensors.

The file is an artifact of its own: :meth:`PredictorRecord.apply` puts the predictors that pay into a plan's layers,
:meth:`PredictorRecord.tensors` gives what these layers then need (predictors, and rotary tables to get at keys before
RoPE). Predictors that do not pay are named with the reason and leave no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor

from kvcal import artifact
from kvcal.errors import ArtifactError
from kvcal.formats import Side
from kvcal.geometry import CacheDtype, ModelIdentity
from kvcal.layer_plan import LayerPlan, Predictor
from kvcal.plan import Workload
from kvcal.specs import PredictorSpec
from kvcal.strict import STRICT, dump, parse
from kvcal.transforms.linear_predictor import LinearPredictor, PredictorShape

KIND = "predictors"
SCHEMA = 1


@pydantic_dataclass(frozen=True, config=STRICT)
class Fit:
    """One fitted predictor, measured on held-out sequences. ``explained``: its explained variance as stored;
    ``explained_whole`` that of the fp64 weights, ``explained_nearest`` that of int4 weights without error compensation.
    ``nbytes`` are its tensors, ``saved_bits`` what it is worth per value, 1/2 log2(1 / (1 - explained)), and
    ``saved_bytes`` that times the quantized values of the workload.

    ``error`` and ``plain_error``: of what the cache reads back with the record's predictors and without any, as shares
    of the variance; None where the predictor was left out."""

    num_inputs: int
    num_outputs: int
    explained: float
    explained_whole: float
    explained_nearest: float | None
    nbytes: int
    saved_bits: float
    saved_bytes: int
    error: float | None = None
    plain_error: float | None = None

    @property
    def measured_bits(self) -> float | None:
        """Bits per value by which the error fell, 1/2 log2 of the ratio: what ``saved_bits`` foretold."""
        if self.error is None or self.plain_error is None or not self.error > 0 or not self.plain_error > 0:
            return None
        return 0.5 * math.log2(self.plain_error / self.error)


@pydantic_dataclass(frozen=True, config=STRICT)
class Finding:
    """One side of a paged layer. ``source``: the layer it is predicted from, None for the first. ``reason``: why there
    is no predictor; None where there is one. ``fit`` is None where none was tried."""

    layer: int
    side: Side
    source: int | None
    reason: str | None
    fit: Fit | None

    @property
    def is_kept(self) -> bool:
        return self.reason is None


@pydantic_dataclass(frozen=True, config=STRICT)
class Subject:
    """What the predictors were fitted to; tokens are those of whole pages."""

    model: ModelIdentity
    cache_dtype: CacheDtype
    spec: PredictorSpec
    workload: Workload
    data_fingerprint: str
    data_description: str
    num_fit_tokens: int
    num_held_out_tokens: int


@dataclass(frozen=True, eq=False)
class PredictorRecord:
    """See the module's docstring. ``stored``: by the names of kvcal.plan_tensors."""

    subject: Subject
    findings: tuple[Finding, ...]
    stored: Mapping[str, Tensor]

    @property
    def kept(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.is_kept)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: predictors and rotary tables."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.stored.values())

    def apply(self, layers: tuple[LayerPlan, ...]) -> tuple[LayerPlan, ...]:
        """The layers that were fitted, with their predictors. ValueError for layers that cannot have them."""
        return with_predictors(layers, self.findings, self.subject.spec)

    def tensors(self) -> dict[str, Tensor]:
        """What the applied layers need beyond what they needed before."""
        return dict(self.stored)


def with_predictors(
    layers: tuple[LayerPlan, ...], findings: Sequence[Finding], spec: PredictorSpec
) -> tuple[LayerPlan, ...]:
    """``layers`` with the predictors of the findings that are kept."""
    kept = {(finding.layer, finding.side): finding for finding in findings if finding.is_kept}
    found = []
    for layer in layers:
        for side in ("k", "v"):
            finding = kept.get((layer.geometry.index, side))
            if finding is not None and finding.source is not None:
                layer = with_predictor(layer, finding.side, finding.source, spec)
        found.append(layer)
    return tuple(found)


def with_predictor(layer: LayerPlan, side: Side, source: int, spec: PredictorSpec) -> LayerPlan:
    """``layer`` with one side predicted from layer ``source``. ValueError where it cannot be."""
    predictor = Predictor(spec.kind, source, spec.rank, spec.group_size)
    if side == "v":
        return replace(layer, v_predictor=predictor)
    return replace(layer, k_predictor=predictor, k_pages="pre")


def table_rows(record: PredictorRecord) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headers and a row for each layer's side."""
    headers = ("layer", "side", "explained", "bits saved", "measured", "bytes", "saves", "error", "without", "")
    rows = []
    for finding in record.findings:
        fit = finding.fit
        cells = [str(finding.layer), finding.side.upper()]
        if fit is None:
            cells += [""] * 7
        else:
            cells += [f"{fit.explained:.4f}", f"{fit.saved_bits:.2f}", _number(fit.measured_bits, ".2f")]
            cells += [str(fit.nbytes), str(fit.saved_bytes)]
            cells += [_number(fit.error, ".4f"), _number(fit.plain_error, ".4f")]
        rows.append((*cells, "" if finding.reason is None else f"left out: {finding.reason}"))
    return headers, rows


def _number(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


@pydantic_dataclass(frozen=True, config=STRICT)
class _Body:
    subject: Subject
    findings: tuple[Finding, ...]


def save(record: PredictorRecord, inputs: dict[str, Any], path: Path) -> None:
    """Write the record. ArtifactError when it cannot be written."""
    body = dump(_Body(record.subject, record.findings))
    artifact.write(path, artifact.Artifact(KIND, SCHEMA, inputs, body, dict(record.stored)))


def load(path: Path) -> PredictorRecord:
    """Read and check a record.

    Raises:
        ArtifactError: missing, corrupt or foreign file; unknown, missing or mis-shaped content.
    """
    stored = artifact.read(path, KIND, SCHEMA)
    body = parse(_Body, stored.body, str(path), ArtifactError)
    known = {name for name in stored.tensors if name.startswith("layers.") and name.endswith(".rotary")}
    for name in known:
        table = stored.tensors[name]
        if table.dtype != torch.float64 or table.dim() != 2 or table.shape[1] != 4:
            raise ArtifactError(
                f"{path}: {name} is {table.dtype} {list(table.shape)}, expected torch.float64 [pairs, 4]"
            )
    spec = body.subject.spec
    for finding in body.findings:
        if not finding.is_kept:
            continue
        if finding.fit is None or finding.source is None:
            raise ArtifactError(f"{path}: {finding.side} of layer {finding.layer} is kept, but was not fitted")
        inputs, outputs = finding.fit.num_inputs, finding.fit.num_outputs
        prefix = f"layers.{finding.layer}.{finding.side}_predictor"
        try:
            shape = PredictorShape(spec.kind, inputs, outputs, body.subject.cache_dtype, spec.rank, spec.group_size)
        except ValueError as wrong:
            raise ArtifactError(f"{path}: {finding.side} of layer {finding.layer}: {wrong}") from None
        known |= LinearPredictor.from_tensors(shape, stored.tensors, prefix).tensors(prefix).keys()
    unknown = sorted(stored.tensors.keys() - known)
    if unknown:
        raise ArtifactError(f"{path}: unknown tensor {unknown[0]!r}")
    return PredictorRecord(body.subject, body.findings, stored.tensors)
