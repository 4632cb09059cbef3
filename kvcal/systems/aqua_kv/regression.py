"""Linear regression with a bias from streaming sums, which fits AQUA-KV's predictors, and the compressed
weights.

Alg. 1 of AQUA-KV (lines 13 and 17) asks for arg min_f ||f(X) - Y||^2 with f linear. The sums X'X, X'Y, X'1,
Y'1 and the diagonal of Y'Y are all that the fit needs, and all that its error on other tokens needs: the
explained variance of any weights on held-out tokens follows from the sums of those tokens, without a second
pass. So memory is F^2 + F O numbers, however many tokens there are, and two halves merge into the whole.

    minimise  1/n sum |y - W x - b|^2  +  p |W|^2,      p = ridge * mean diagonal of cov(x)

The bias carries no penalty, which is what centring with the means gives: W = cov(y, x) (cov(x) + p)^-1 and b
= mean(y) - W mean(x). The penalty is a share of the variances, not of the second moments: a constant added to
inputs changes nothing. Sums and products are fp64: centring afterwards loses (mean / deviation)^2 of 16
digits.

Sums of fp64 depend on their order in the last digit: two machines, or a CPU and a GPU, fit weights that agree
to about 1e-12, and hardly ever differ once rounded to the cache's dtype.

A predictor is stored in the cache's dtype, of low rank (reduced-rank regression), or in 4 bits a weight,
rounded column by column: the error of one is made good by those after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal.errors import NonFiniteActivations, UsageError
from kvcal.geometry import CACHE_DTYPES, CacheDtype
from kvcal.systems.aqua_kv.predictor import INT4_ZERO, LinearPredictor, PredictorShape
from kvcal.systems.aqua_kv.recipe import PredictorSpec

RIDGE = 1e-3
_CHUNK_TOKENS = 4096  # rows that are fp64 at a time
_SMALLEST_PENALTY = 1e-14  # of the second moments: inputs that never change are not divided by their rounding error
_MOST, _LEAST = 7, -8  # of a 4-bit code less INT4_ZERO


@dataclass(frozen=True, eq=False)
class LinearFit:
    """y = weight_OF x + bias_O, fp64 on the CPU. ``metric_FF`` is cov(x) + p: replacing the weight by W' adds
    trace((W' - W) metric (W' - W)^T) to the minimised sum, so that is what a compressed weight should keep
    small."""

    weight_OF: Tensor
    x_mean_F: Tensor
    y_mean_O: Tensor
    metric_FF: Tensor

    @property
    def extents(self) -> tuple[int, int]:
        return self.weight_OF.shape[1], self.weight_OF.shape[0]

    @property
    def bias_O(self) -> Tensor:
        return self.bias_of(self.weight_OF)

    def bias_of(self, weight_OF: Tensor) -> Tensor:
        """The best bias for other weights, such as rounded ones: fp64 [O]."""
        return self.y_mean_O - weight_OF @ self.x_mean_F


@dataclass(frozen=True, eq=False)
class Moments:
    """Means and covariances (divided by the count) of what was seen, fp64 on the CPU."""

    x_mean_F: Tensor
    y_mean_O: Tensor
    xx_FF: Tensor
    xy_FO: Tensor
    y_variance_O: Tensor


@dataclass(frozen=True, eq=False)
class NormalEquations:
    """``sums`` over ``count`` tokens, fp64 on one device, the CPU to be solved, never changed in place: "xx"
    [F, F] of x x', "xy" [F, O] of x y', "x" [F], "y" [O], and "y2" [O] of y^2."""

    sums: Mapping[str, Tensor]
    count: int

    @staticmethod
    def shapes(num_inputs: int, num_outputs: int) -> dict[str, tuple[int, ...]]:
        F, O = num_inputs, num_outputs  # noqa: E741
        return {"xx": (F, F), "xy": (F, O), "x": (F,), "y": (O,), "y2": (O,)}

    @classmethod
    def empty(cls, num_inputs: int, num_outputs: int, device: torch.device | str = "cpu") -> NormalEquations:
        shapes = cls.shapes(num_inputs, num_outputs)
        return cls({name: torch.zeros(shape, dtype=torch.float64, device=device) for name, shape in shapes.items()}, 0)

    def update(self, x_nF: Tensor, y_nO: Tensor) -> NormalEquations:
        """With n more tokens, any float dtype, on the sums' device. Raises NonFiniteActivations: NaN or
        infinity among them."""
        seen = self
        for x, y in zip(x_nF.split(_CHUNK_TOKENS), y_nO.split(_CHUNK_TOKENS), strict=True):
            seen = seen.merge(_sums(x.to(torch.float64), y.to(torch.float64)))
        return seen

    def merge(self, other: NormalEquations) -> NormalEquations:
        sums = {name: total + other.sums[name] for name, total in self.sums.items()}
        return NormalEquations(sums, self.count + other.count)

    def result(self) -> Moments:
        """Means and covariances."""
        mean = {name: total / self.count for name, total in self.sums.items()}
        x_mean, y_mean = mean["x"], mean["y"]
        xx_FF, xy_FO = mean["xx"] - torch.outer(x_mean, x_mean), mean["xy"] - torch.outer(x_mean, y_mean)
        return Moments(x_mean, y_mean, xx_FF, xy_FO, (mean["y2"] - y_mean * y_mean).clamp(min=0.0))

    def solve(self, ridge: float = RIDGE) -> LinearFit:
        """The ridge regression of y on x. Raises UsageError: not more tokens than inputs, so that the fit
        would only repeat its own data."""
        num_inputs = len(self.sums["x"])
        if self.count <= num_inputs:
            raise UsageError(
                f"{self.count} calibration tokens are too few to fit a predictor with {num_inputs} inputs: "
                f"at least {num_inputs + 1} are needed",
                hint="use more or longer calibration sequences; ten times as many tokens as inputs is a good number",
            )
        moments = self.result()
        second_moments = self.sums["xx"].diagonal().mean().item() / self.count
        penalty = max(ridge * moments.xx_FF.diagonal().mean().item(), _SMALLEST_PENALTY * second_moments)
        # Inputs that are all zero predict nothing: any penalty gives weights of 0.
        metric = moments.xx_FF + torch.eye(num_inputs, dtype=torch.float64) * (penalty or 1.0)
        weight = torch.cholesky_solve(moments.xy_FO, torch.linalg.cholesky(metric)).T.contiguous()
        return LinearFit(weight, moments.x_mean_F, moments.y_mean_O, metric)

    def explained_variance(self, weight_OF: Tensor, bias_O: Tensor) -> float:
        """1 - sum of squared errors / sum of squares about each channel's mean, both over all channels, of
        any weights on these tokens: 1 is perfect, 0 is what the mean alone gives, below 0 is worse than that.

        Outputs that do not vary at all leave nothing to explain: 0."""
        moments = self.result()
        weight, bias = weight_OF.to("cpu", torch.float64), bias_O.to("cpu", torch.float64)
        offset = moments.y_mean_O - weight @ moments.x_mean_F - bias
        cross = (weight.T * moments.xy_FO).sum()
        spread = (weight @ moments.xx_FF * weight).sum()
        total = moments.y_variance_O.sum()
        error = total - 2.0 * cross + spread + (offset * offset).sum()
        return 1.0 - error.item() / total.item() if total.item() > 0.0 else 0.0


def _sums(x_nF: Tensor, y_nO: Tensor) -> NormalEquations:
    """Of one chunk in fp64."""
    x_F, y_O = x_nF.sum(0), y_nO.sum(0)
    # fp32 numbers cannot overflow a sum in fp64: it is finite exactly when all of them are.
    if not torch.isfinite(x_F.sum() + y_O.sum()):
        raise NonFiniteActivations("keys or values to fit a predictor on hold NaN or infinity")
    sums = {"xx": x_nF.T @ x_nF, "xy": x_nF.T @ y_nO, "x": x_F, "y": y_O, "y2": (y_nO * y_nO).sum(0)}
    return NormalEquations(sums, x_nF.shape[0])


def compress(fit: LinearFit, spec: PredictorSpec, cache_dtype: CacheDtype) -> LinearPredictor:
    """The predictor of the kind that ``spec`` asks for."""
    if spec.kind == "low_rank":
        assert spec.rank is not None
        return to_low_rank(fit, spec.rank, cache_dtype)
    if spec.kind == "int4":
        assert spec.group_size is not None
        return to_int4(fit, spec.group_size, cache_dtype)
    return to_linear(fit, cache_dtype)


def to_linear(fit: LinearFit, cache_dtype: CacheDtype) -> LinearPredictor:
    """The weight in the cache's dtype. NonFiniteActivations where it does not fit in there."""
    weight = fit.weight_OF.to(CACHE_DTYPES[cache_dtype])
    return _finished(fit, PredictorShape("linear", *fit.extents, cache_dtype), {"weight": weight})


def to_low_rank(fit: LinearFit, rank: int, cache_dtype: CacheDtype) -> LinearPredictor:
    """Reduced-rank regression. ValueError for a rank that the weight cannot have; NonFiniteActivations as
    above."""
    shape = PredictorShape("low_rank", *fit.extents, cache_dtype, rank, None)
    predicted = fit.weight_OF @ fit.metric_FF @ fit.weight_OF.T
    vectors = torch.linalg.eigh((predicted + predicted.T) / 2.0).eigenvectors[:, -rank:].flip(-1)
    # The sign of an eigenvector is a library's whim: its largest entry is made positive.
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    up = (vectors * torch.where(largest < 0, -1.0, 1.0)).contiguous()
    dtype = CACHE_DTYPES[cache_dtype]
    return _finished(fit, shape, {"down": (up.T @ fit.weight_OF).to(dtype), "up": up.to(dtype)})


def to_int4(fit: LinearFit, group_size: int, cache_dtype: CacheDtype) -> LinearPredictor:
    """4 bits a weight. ValueError for a group_size below 1; NonFiniteActivations as above."""
    shape = PredictorShape("int4", *fit.extents, cache_dtype, None, group_size)
    num_inputs = shape.num_inputs
    weight, codes, scales = fit.weight_OF.clone(), [], []
    # U, upper triangular, with U^T U = M^-1: an error of column i is made good by columns after it, as row i
    # says.
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(fit.metric_FF))
    carry = torch.linalg.cholesky(inverse, upper=True)
    for start in range(0, num_inputs, group_size):
        stop = min(start + group_size, num_inputs)
        group, factor = weight[:, start:stop], carry[start:stop, start:]
        scale = torch.maximum(group.amax(-1) / _MOST, group.amin(-1) / _LEAST).clamp(min=0.0).half()
        errors = torch.empty_like(group)
        for column in range(stop - start):
            step = scale.double()  # a scale of 0 gives code 0
            code = (group[:, column] / torch.where(step == 0.0, torch.inf, step)).round().clamp(_LEAST, _MOST)
            codes.append(code)
            errors[:, column] = (group[:, column] - code * step) / factor[column, column]
            inside = factor[column, column + 1 : stop - start]
            group[:, column + 1 :] -= torch.outer(errors[:, column], inside)
        weight[:, stop:] -= errors @ factor[:, stop - start :]
        scales.append(scale)
    # Bytes of two codes, the even input in the low four bits; the filling of an odd number is weight 0.
    whole = torch.nn.functional.pad(torch.stack(codes, -1), (0, num_inputs % 2)).add(INT4_ZERO).to(torch.uint8)
    packed = whole[:, 0::2] | (whole[:, 1::2] << 4)
    return _finished(fit, shape, {"weight": packed, "scale": torch.stack(scales, -1)})


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
