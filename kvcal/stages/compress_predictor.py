"""A fitted regression as a predictor that a plan can carry: whole, as two thin matrices, or in 4 bits.

Rounding a weight W to W' adds trace((W' - W) M (W' - W)^T) to the squared error per token, where M is the covariance of
the inputs plus the ridge. Keys of one layer are strongly correlated, so that M is far from the identity, and both
compressions here keep that error small, not |W' - W|:

- low rank (reduced-rank regression): the best W' of rank r is P W, with P the projection on the first r eigenvectors
  of W M W^T, which is the cut singular value decomposition of W M^(1/2); it needs no root of M.
- 4 bits (GPTQ): columns are rounded one after the other; the error of each is carried to the columns to come, through
  the Cholesky factor of M^-1. A scale is chosen per output and group of inputs when its first column's turn comes, the
  smallest that clips nothing. ``compensate=False`` is plain rounding to nearest.

The bias is fitted again to the rounded weight, so that the mean error is zero to the rounding of the bias itself.
All arithmetic is fp64 on the CPU. Left out: scales searched by error, and columns in order of importance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcal.errors import NonFiniteActivations
from kvcal.geometry import CACHE_DTYPES, CacheDtype
from kvcal.observers.normal_equations import LinearFit
from kvcal.transforms.linear_predictor import INT4_ZERO, Kind, LinearPredictor, PredictorShape

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
