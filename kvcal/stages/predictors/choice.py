"""Which regressions AQUA-KV's Alg. 1 makes for some layers, and which of the predictors pay.

A predictor is worth 1/2 log2(1 / (1 - explained variance)) bits a value: the error of a scaled quantizer is a share of
the variance that is left, and every bit divides it by 4. Where that, times the quantized values of the workload, is
less than the predictor's own bytes, or the explained variance is at most ``min_explained``, it is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from kvcal.errors import NonFiniteActivations, UsageError
from kvcal.geometry import CACHE_DTYPES, CacheDtype
from kvcal.pages.layout import PAGE_TOKENS
from kvcal.pages.predictor import INT4_ZERO, Kind, LinearPredictor, PredictorShape
from kvcal.plan.format import RAW, Side
from kvcal.plan.layer import LayerPlan
from kvcal.plan.plan import Workload
from kvcal.plan.tensors import check_layers, predictor_shape
from kvcal.quantities import format_bytes
from kvcal.specs import PredictorSpec
from kvcal.stages.predictors.normal_equations import LinearFit, NormalEquations
from kvcal.stages.predictors.record import Finding, Fit, with_predictor

_MOST, _LEAST = 7, -8  # of a code less INT4_ZERO


def to_linear(fit: LinearFit, cache_dtype: CacheDtype) -> LinearPredictor:
    """The weight in the cache's dtype. NonFiniteActivations where it does not fit in there."""
    weight = fit.weight_OF.to(CACHE_DTYPES[cache_dtype])
    return _finished(fit, _shape("linear", fit, cache_dtype), {"weight": weight})


def to_low_rank(fit: LinearFit, rank: int, cache_dtype: CacheDtype) -> LinearPredictor:
    """Reduced-rank regression. ValueError for a rank that the weight cannot have; NonFiniteActivations as above."""
    shape = _shape("low_rank", fit, cache_dtype, rank=rank)
    predicted = fit.weight_OF @ fit.metric_FF @ fit.weight_OF.T
    vectors = torch.linalg.eigh((predicted + predicted.T) / 2.0).eigenvectors[:, -rank:].flip(-1)
    # The sign of an eigenvector is a library's whim: its largest entry is made positive.
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    up = (vectors * torch.where(largest < 0, -1.0, 1.0)).contiguous()
    dtype = CACHE_DTYPES[cache_dtype]
    return _finished(fit, shape, {"down": (up.T @ fit.weight_OF).to(dtype), "up": up.to(dtype)})


def to_int4(fit: LinearFit, group_size: int, cache_dtype: CacheDtype, compensate: bool = True) -> LinearPredictor:
    """4 bits a weight. ValueError for a group_size below 1; NonFiniteActivations as above."""
    shape = _shape("int4", fit, cache_dtype, group_size=group_size)
    num_inputs = shape.num_inputs
    weight, codes, scales = fit.weight_OF.clone(), [], []
    carry = _carry(fit.metric_FF) if compensate else torch.eye(num_inputs, dtype=torch.float64)
    for start in range(0, num_inputs, group_size):
        stop = min(start + group_size, num_inputs)
        group, factor = weight[:, start:stop], carry[start:stop, start:]
        scale = torch.maximum(group.amax(-1) / _MOST, group.amin(-1) / _LEAST).clamp(min=0.0).half()
        errors = torch.empty_like(group)
        for column in range(stop - start):
            code = _rounded(group[:, column], scale.double())
            codes.append(code)
            errors[:, column] = (group[:, column] - code * scale.double()) / factor[column, column]
            inside = factor[column, column + 1 : stop - start]
            group[:, column + 1 :] -= torch.outer(errors[:, column], inside)
        weight[:, stop:] -= errors @ factor[:, stop - start :]
        scales.append(scale)
    packed = _packed(torch.stack(codes, -1))
    return _finished(fit, shape, {"weight": packed, "scale": torch.stack(scales, -1)})


def _carry(metric_FF: Tensor) -> Tensor:
    """U, upper triangular, with U^T U = M^-1: row i says how an error of column i is made good by columns behind it."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(metric_FF))
    return torch.linalg.cholesky(inverse, upper=True)


def _rounded(weight: Tensor, scale: Tensor) -> Tensor:
    """Nearest code less INT4_ZERO, fp64; 0 where the scale is 0."""
    return (weight / torch.where(scale == 0.0, torch.inf, scale)).round().clamp(_LEAST, _MOST)


def _packed(codes_OF: Tensor) -> Tensor:
    """Codes less INT4_ZERO -> bytes, the even input in the low four bits; the filling of an odd number is weight 0."""
    codes = torch.nn.functional.pad(codes_OF, (0, codes_OF.shape[-1] % 2)).add(INT4_ZERO).to(torch.uint8)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def _shape(
    kind: Kind, fit: LinearFit, cache_dtype: CacheDtype, rank: int | None = None, group_size: int | None = None
) -> PredictorShape:
    outputs, inputs = fit.weight_OF.shape
    return PredictorShape(kind, inputs, outputs, cache_dtype, rank, group_size)


def _finished(fit: LinearFit, shape: PredictorShape, stored: dict[str, Tensor]) -> LinearPredictor:
    """With the bias that the rounded weight wants."""
    bias = torch.zeros(shape.num_outputs, dtype=CACHE_DTYPES[shape.cache_dtype])
    weight, _ = LinearPredictor(shape, {**stored, "bias": bias}).dense()
    stored["bias"] = fit.bias_of(weight).to(bias.dtype)
    for name, tensor in stored.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise NonFiniteActivations(
                f"the {name} of a {shape.kind} predictor goes beyond {str(tensor.dtype).removeprefix('torch.')}",
                hint="leave this layer without a predictor, or calibrate on more text",
            )
    return LinearPredictor(shape, stored)


# What a perfect predictor is said to save: no more bits are there to be saved.
MAX_SAVED_BITS = 16.0


@dataclass(frozen=True)
class Target:
    """One regression: ``side`` of ``layer`` on the pages of ``source``, the paged layer before it. ``reason``: why
    there is none, None if there is. ``shape``: of its predictor, None without one."""

    layer: LayerPlan
    source: LayerPlan | None
    side: Side
    reason: str | None
    shape: PredictorShape | None

    @property
    def index(self) -> int:
        return self.layer.geometry.index


class Measured(NamedTuple):
    """The variance of held-out tokens, and the shares that are explained (see predictor_record.Fit)."""

    variance: float
    explained: float
    explained_whole: float
    explained_nearest: float | None = None


def find_targets(layers: Sequence[LayerPlan], spec: PredictorSpec, cache_dtype: CacheDtype) -> tuple[Target, ...]:
    """Two for each paged layer, keys first. UsageError for a rank that a weight cannot have."""
    targets, source = [], None
    for layer in layers:
        if not layer.is_paged:
            continue
        for side in ("k", "v"):
            reason = _refusal(layers, layer, source, side, spec)
            shape = None
            if reason is None and source is not None:
                predicted = with_predictor(layer, side, source.geometry.index, spec)
                try:
                    shape = predictor_shape(predicted, source, side, cache_dtype)
                except ValueError as wrong:
                    raise UsageError(f"predictors of layer {layer.geometry.index}: {wrong}") from None
            targets.append(Target(layer, source, side, reason, shape))
        source = layer
    return tuple(targets)


def _refusal(
    layers: Sequence[LayerPlan], layer: LayerPlan, source: LayerPlan | None, side: Side, spec: PredictorSpec
) -> str | None:
    """Why ``side`` of ``layer`` cannot be predicted in these formats."""
    if source is None:
        return "there is no layer before it"
    if side not in spec.sides:
        return f"only {' and '.join(spec.sides)} were asked for"
    if RAW in layer.formats(side):
        return "16 bits leave no error to save"
    if any(fmt.shrink_at for fmt in (*source.formats(side), *layer.k, *layer.v)):
        return "pages that shrink would change what is predicted from them"
    try:
        predicted = with_predictor(layer, side, source.geometry.index, spec)
        check_layers([predicted if other is layer else other for other in layers])
    except ValidationError as refused:
        return refused.errors()[0]["msg"].removeprefix("Value error, ")
    except ValueError as refused:
        return str(refused)
    return None


def compress(fit: LinearFit, spec: PredictorSpec, cache_dtype: CacheDtype) -> LinearPredictor:
    """The predictor of the kind that ``spec`` asks for."""
    if spec.kind == "low_rank":
        assert spec.rank is not None
        return to_low_rank(fit, spec.rank, cache_dtype)
    if spec.kind == "int4":
        assert spec.group_size is not None
        return to_int4(fit, spec.group_size, cache_dtype)
    return to_linear(fit, cache_dtype)


def measure(fit: LinearFit, predictor: LinearPredictor, held_out: NormalEquations, spec: PredictorSpec) -> Measured:
    """What ``predictor`` explains of held-out tokens."""
    found = Measured(
        held_out.result().y_variance_O.sum().item(),
        held_out.explained_variance(*predictor.dense()),
        held_out.explained_variance(fit.weight_OF, fit.bias_O),
    )
    if spec.group_size is None:
        return found
    nearest = to_int4(fit, spec.group_size, predictor.shape.cache_dtype, compensate=False)
    return found._replace(explained_nearest=held_out.explained_variance(*nearest.dense()))


def decide(target: Target, measured: Measured | None, spec: PredictorSpec, workload: Workload) -> Finding:
    """Whether the predictor pays at ``workload``; without a measurement, that it was not tried."""
    source = None if target.source is None else target.source.geometry.index
    if measured is None or target.shape is None:
        return Finding(target.index, target.side, source, target.reason or "was not fitted", None)
    (fmt,) = target.layer.formats(target.side)
    num_tokens = sum(PAGE_TOKENS * fmt.num_pages(length) for length in workload.lengths)
    saved_bits = saved_bits_per_value(measured.explained)
    saved_bytes = int(saved_bits * target.shape.num_outputs * num_tokens / 8)
    fit = Fit(
        target.shape.num_inputs,
        target.shape.num_outputs,
        measured.explained,
        measured.explained_whole,
        measured.explained_nearest,
        target.shape.nbytes,
        saved_bits,
        saved_bytes,
    )
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
