"""The predictors that can be fitted, and the record of those that were: what each explains, costs and saves.

A predictor is worth 1/2 log2(1 / (1 - explained variance)) bits a value: the error of a scaled quantizer is a
share of the variance that is left, and every bit divides it by 4. Where that, times the quantized values of
the workload, is less than the predictor's own bytes, or the explained variance is at most ``min_explained``,
it is left out.

The file is an artifact of its own: :meth:`PredictorRecord.apply` puts the predictors that pay into a plan's
layers, :meth:`PredictorRecord.tensors` gives what these layers then need (predictors, and rotary tables to
get at keys before RoPE). Predictors that do not pay are named with the reason and leave no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor

from kvcal import artifact
from kvcal.errors import UsageError
from kvcal.geometry import CacheDtype, Index, ModelIdentity
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import RAW, SIDES, Side, num_pages
from kvcal.plan.plan import Workload
from kvcal.plan.tensors import check_layers
from kvcal.quantities import format_bytes
from kvcal.records import record_of, refusing
from kvcal.strict import STRICT, Amount, Count, Number, NumBytes, Positive, dump
from kvcal.systems.aqua_kv.predictor import PredictorShape
from kvcal.systems.aqua_kv.recipe import PredictorSpec
from kvcal.systems.aqua_kv.transform import Predictor, predictor_shape

KIND = "predictors"
SCHEMA = 2
# What a perfect predictor is said to save: no more bits are there to be saved.
MAX_SAVED_BITS = 16.0


@pydantic_dataclass(frozen=True, config=STRICT)
class Fit:
    """One fitted predictor, measured on held-out sequences. ``explained``: its explained variance as stored;
    ``nbytes`` are its tensors, ``saved_bits`` what it is worth per value, 1/2 log2(1 / (1 - explained)), and
    ``saved_bytes`` that times the quantized values of the workload.

    ``error`` and ``plain_error``: of what the cache reads back with the record's predictors and without any,
    as shares of the variance; None where the predictor was left out."""

    num_inputs: Positive
    num_outputs: Positive
    explained: Number
    nbytes: NumBytes
    saved_bits: Amount
    saved_bytes: NumBytes
    error: Amount | None = None
    plain_error: Amount | None = None

    @property
    def measured_bits(self) -> float | None:
        """Bits per value by which the error fell, 1/2 log2 of the ratio: what ``saved_bits`` foretold."""
        if self.error is None or self.plain_error is None or not self.error > 0 or not self.plain_error > 0:
            return None
        return 0.5 * math.log2(self.plain_error / self.error)


@pydantic_dataclass(frozen=True, config=STRICT)
class Finding:
    """One side of a paged layer. ``source``: the layer it is predicted from, None for the first. ``reason``:
    why there is no predictor; None where there is one. ``fit`` is None where none was tried."""

    layer: Index
    side: Side
    source: Index | None
    reason: str | None
    fit: Fit | None

    @property
    def is_kept(self) -> bool:
        return self.reason is None


@pydantic_dataclass(frozen=True, config=STRICT)
class Subject:
    """The model, settings and data of a fit; tokens are those of whole pages."""

    model: ModelIdentity
    cache_dtype: CacheDtype
    spec: PredictorSpec
    workload: Workload
    data_fingerprint: str
    data_description: str
    num_fit_tokens: Count
    num_held_out_tokens: Count


@dataclass(frozen=True, eq=False)
class PredictorRecord:
    """See the module's docstring. ``stored``: by the names of kvcal.plan.tensors."""

    subject: Subject
    findings: tuple[Finding, ...]
    stored: Mapping[str, Tensor]

    @property
    def kept(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.is_kept)

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.stored.values())

    def apply(self, layers: tuple[LayerPlan, ...]) -> tuple[LayerPlan, ...]:
        """The layers that were fitted, with their predictors. ArtifactError for layers that cannot have
        them."""
        with refusing("the predictors do not go with the layers", hint="fit predictors again for these layers"):
            return with_predictors(layers, self.findings, self.subject.spec)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors that the applied layers need beyond those that they needed before."""
        return dict(self.stored)


def with_predictors(
    layers: tuple[LayerPlan, ...], findings: Sequence[Finding], spec: PredictorSpec
) -> tuple[LayerPlan, ...]:
    """``layers`` with the predictors of the findings that are kept."""
    found = {layer.geometry.index: layer for layer in layers}
    for finding in findings:
        if finding.is_kept and finding.source is not None and finding.layer in found:
            found[finding.layer] = with_predictor(found[finding.layer], finding.side, finding.source, spec)
    return tuple(found.values())


def with_predictor(layer: LayerPlan, side: Side, source: int, spec: PredictorSpec) -> LayerPlan:
    """``layer`` with one side predicted from layer ``source``. ValueError where it cannot be."""
    keys: dict[str, Any] = {f"{side}_predictor": Predictor(spec.kind, source, spec.rank, spec.group_size)}
    if side == "k":
        keys |= {"k_pages": "pre", "k_offset": False}  # its bias holds the mean
    return replace(layer, **keys)


@dataclass(frozen=True)
class Target:
    """One regression: ``side`` of ``layer`` on the pages of ``source``, the paged layer before it.
    ``reason``: why there is none, None if there is. ``shape``: of its predictor, None without one."""

    layer: LayerPlan
    source: LayerPlan | None
    side: Side
    reason: str | None
    shape: PredictorShape | None

    @property
    def index(self) -> int:
        return self.layer.geometry.index


def find_targets(layers: Sequence[LayerPlan], spec: PredictorSpec, cache_dtype: CacheDtype) -> tuple[Target, ...]:
    """Two for each paged layer, keys first. UsageError for a rank that a weight cannot have."""
    targets, source = [], None
    for layer in layers:
        if not layer.is_paged:
            continue
        for side in SIDES:
            shape, reason = None, _obstacle(layers, layer, source, side, spec)
            if reason is None and source is not None:
                predicted = with_predictor(layer, side, source.geometry.index, spec)
                try:
                    shape = predictor_shape(predicted, source, side, cache_dtype)
                except ValueError as wrong:
                    raise UsageError(f"predictors of layer {layer.geometry.index}: {wrong}") from None
            targets.append(Target(layer, source, side, reason, shape))
        source = layer
    return tuple(targets)


def every_finding(layers: Sequence[LayerPlan], spec: PredictorSpec, cache_dtype: CacheDtype) -> list[Finding]:
    """Findings that keep all predictors that can be. UsageError as ``find_targets``."""
    return [
        Finding(target.index, target.side, target.source.geometry.index, None, None)
        for target in find_targets(layers, spec, cache_dtype)
        if target.shape is not None and target.source is not None
    ]


def _obstacle(
    layers: Sequence[LayerPlan], layer: LayerPlan, source: LayerPlan | None, side: Side, spec: PredictorSpec
) -> str | None:
    """Why ``side`` of ``layer`` cannot be predicted in these formats."""
    if source is None:
        return "there is no layer before it"
    if layer.format(side) == RAW:
        return "16 bits leave no error to save"
    if any(fmt.changes_at for fmt in (source.format(side), *layer.formats)):
        return "pages that shrink would change what is predicted from them"
    try:
        predicted = with_predictor(layer, side, source.geometry.index, spec)
        check_layers([predicted if other is layer else other for other in layers])
    except ValidationError as refused:
        return refused.errors()[0]["msg"].removeprefix("Value error, ")
    except ValueError as refused:
        return str(refused)
    return None


def decide(target: Target, explained: float | None, spec: PredictorSpec, workload: Workload) -> Finding:
    """Whether a predictor that explains this share of the variance pays at ``workload``; None: it was not
    tried."""
    source, shape = None if target.source is None else target.source.geometry.index, target.shape
    if explained is None or shape is None:
        return Finding(target.index, target.side, source, target.reason or "was not fitted", None)
    num_tokens = sum(PAGE_TOKENS * num_pages(length) for length in workload.lengths)
    saved_bits = saved_bits_per_value(explained)
    saved_bytes = int(saved_bits * shape.num_outputs * num_tokens / 8)
    fit = Fit(shape.num_inputs, shape.num_outputs, explained, shape.nbytes, saved_bits, saved_bytes)
    return Finding(target.index, target.side, source, unpaid(fit, spec, workload), fit)


def unpaid(fit: Fit, spec: PredictorSpec, workload: Workload) -> str | None:
    """Why a fitted predictor does not pay; None where it does, or none is to be left out."""
    if spec.drop and fit.explained <= spec.min_explained:
        return f"explains {fit.explained:.4f} of the variance, at most min_explained = {spec.min_explained:g}"
    if spec.drop and fit.saved_bytes < fit.nbytes:
        return (
            f"saves {format_bytes(fit.saved_bytes)} at {workload.batch} x {workload.context} tokens and takes "
            f"{format_bytes(fit.nbytes)}"
        )
    return None


def saved_bits_per_value(explained: float) -> float:
    """See the module's docstring; 0 for a predictor that explains nothing."""
    left = 1.0 - max(explained, 0.0)
    return MAX_SAVED_BITS if left <= 4.0**-MAX_SAVED_BITS else 0.5 * math.log2(1.0 / left)


@pydantic_dataclass(frozen=True, config=STRICT)
class _Body:
    subject: Subject
    findings: tuple[Finding, ...]


def save(record: PredictorRecord, inputs: dict[str, Any], path: Path) -> None:
    body = dump(_Body(record.subject, record.findings))
    artifact.write(path, artifact.Artifact(KIND, SCHEMA, inputs, body, dict(record.stored)))


def load(path: Path) -> PredictorRecord:
    stored = artifact.read(path, KIND, SCHEMA)
    body = record_of(_Body, stored.body, path)
    return PredictorRecord(body.subject, body.findings, stored.tensors)


def table_rows(record: PredictorRecord) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    headers = ("layer", "side", "explained", "bits saved", "measured", "bytes", "saves", "error", "without", "")
    rows = []
    for finding in record.findings:
        fit, cells = finding.fit, [""] * 7
        if fit is not None:
            numbers = [(fit.explained, ".4f"), (fit.saved_bits, ".2f"), (fit.measured_bits, ".2f")]
            numbers += [(fit.nbytes, "d"), (fit.saved_bytes, "d"), (fit.error, ".4f"), (fit.plain_error, ".4f")]
            cells = ["" if value is None else format(value, spec) for value, spec in numbers]
        reason = "" if finding.reason is None else f"left out: {finding.reason}"
        rows.append((str(finding.layer), finding.side.upper(), *cells, reason))
    return headers, rows
