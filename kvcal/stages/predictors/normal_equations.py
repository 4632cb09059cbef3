"""Linear regression with a bias from streaming sums: what fits AQUA-KV's predictors.

Alg. 1 of AQUA-KV (lines 13 and 17) asks for arg min_f ||f(X) - Y||^2 with f linear. The sums X'X, X'Y, X'1, Y'1 and
the diagonal of Y'Y are all that the fit needs, and all that its error on other tokens needs: the explained variance of
any weights on held-out tokens follows from the sums of those tokens, without a second pass. So memory is F^2 + F O
numbers, however many tokens there are, and two halves merge into the whole.

    minimise  1/n sum |y - W x - b|^2  +  p |W|^2,      p = ridge * mean diagonal of cov(x)

The bias carries no penalty, which is what centring with the means gives: W = cov(y, x) (cov(x) + p)^-1 and
b = mean(y) - W mean(x). The penalty is a share of the variances, not of the second moments, so that a constant added
to the inputs changes nothing. Sums and products are fp64: centring afterwards loses (mean / deviation)^2 of 16 digits.

Sums of fp64 depend on their order in the last digit: two machines, or a CPU and a GPU, fit weights that agree to
about 1e-12, and hardly ever differ once rounded to the cache's dtype. Left out: more than one penalty (the paper fixes
1e-3), and the off-diagonal of Y'Y.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal.errors import NonFiniteActivations, UsageError

RIDGE = 1e-3
_CHUNK_TOKENS = 4096  # rows that are fp64 at a time
_SMALLEST_PENALTY = 1e-14  # of the second moments: inputs that never change are not divided by their rounding error


@dataclass(frozen=True, eq=False)
class LinearFit:
    """y = weight_OF x + bias_O, fp64 on the CPU. ``metric_FF`` is cov(x) + p: replacing the weight by W' adds
    trace((W' - W) metric (W' - W)^T) to the minimised sum, so that is what a compressed weight should keep small."""

    weight_OF: Tensor
    x_mean_F: Tensor
    y_mean_O: Tensor
    metric_FF: Tensor

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
    """Sums over ``count`` tokens of x x', x y', x, y and y^2, fp64 on the CPU; never changed in place."""

    xx_FF: Tensor
    xy_FO: Tensor
    x_F: Tensor
    y_O: Tensor
    y2_O: Tensor
    count: int

    @classmethod
    def empty(cls, num_inputs: int, num_outputs: int) -> NormalEquations:
        """No token yet."""
        x = torch.zeros(num_inputs, dtype=torch.float64)
        y = torch.zeros(num_outputs, dtype=torch.float64)
        return cls(torch.outer(x, x), torch.outer(x, y), x, y, y, 0)

    def update(self, x_nF: Tensor, y_nO: Tensor) -> NormalEquations:
        """With n more tokens, any float dtype; the products are computed on the inputs' device.

        Raises:
            NonFiniteActivations: NaN or infinity among them.
        """
        seen = self
        for x, y in zip(x_nF.split(_CHUNK_TOKENS), y_nO.split(_CHUNK_TOKENS), strict=True):
            seen = seen.merge(_sums(x.to(torch.float64), y.to(torch.float64)))
        return seen

    def merge(self, other: NormalEquations) -> NormalEquations:
        """The statistic of both sets of tokens."""
        return NormalEquations(
            self.xx_FF + other.xx_FF,
            self.xy_FO + other.xy_FO,
            self.x_F + other.x_F,
            self.y_O + other.y_O,
            self.y2_O + other.y2_O,
            self.count + other.count,
        )

    def tensors(self) -> dict[str, Tensor]:
        """The sums by name, as a file keeps them; with ``count`` all there is."""
        return {"xx": self.xx_FF, "xy": self.xy_FO, "x": self.x_F, "y": self.y_O, "y2": self.y2_O}

    @staticmethod
    def shapes(num_inputs: int, num_outputs: int) -> dict[str, tuple[int, ...]]:
        """Of :meth:`tensors`."""
        F, O = num_inputs, num_outputs  # noqa: E741
        return {"xx": (F, F), "xy": (F, O), "x": (F,), "y": (O,), "y2": (O,)}

    @classmethod
    def from_tensors(cls, sums: Mapping[str, Tensor], count: int) -> NormalEquations:
        """Inverse of :meth:`tensors`."""
        return cls(sums["xx"], sums["xy"], sums["x"], sums["y"], sums["y2"], count)

    def result(self) -> Moments:
        """Means and covariances. ValueError without a token."""
        if self.count == 0:
            raise ValueError("the moments of no tokens")
        x_mean, y_mean = self.x_F / self.count, self.y_O / self.count
        return Moments(
            x_mean,
            y_mean,
            self.xx_FF / self.count - torch.outer(x_mean, x_mean),
            self.xy_FO / self.count - torch.outer(x_mean, y_mean),
            (self.y2_O / self.count - y_mean * y_mean).clamp(min=0.0),
        )

    def solve(self, ridge: float = RIDGE) -> LinearFit:
        """The ridge regression of y on x.

        Raises:
            UsageError: not more tokens than inputs, so that the fit would only repeat its own data; or ridge < 0.
        """
        num_inputs = self.x_F.shape[0]
        if not ridge >= 0.0:
            raise UsageError(f"ridge = {ridge} must be 0 or more")
        if self.count <= num_inputs:
            raise UsageError(
                f"{self.count} calibration tokens are too few to fit a predictor with {num_inputs} inputs: "
                f"at least {num_inputs + 1} are needed",
                hint="use more or longer calibration sequences; ten times as many tokens as inputs is a good number",
            )
        moments = self.result()
        second_moments = self.xx_FF.diagonal().mean().item() / self.count
        penalty = max(ridge * moments.xx_FF.diagonal().mean().item(), _SMALLEST_PENALTY * second_moments)
        # Inputs that are all zero predict nothing: any penalty gives weights of 0.
        metric = moments.xx_FF + torch.eye(num_inputs, dtype=torch.float64) * (penalty or 1.0)
        weight = torch.cholesky_solve(moments.xy_FO, torch.linalg.cholesky(metric)).T.contiguous()
        return LinearFit(weight, moments.x_mean_F, moments.y_mean_O, metric)

    def explained_variance(self, weight_OF: Tensor, bias_O: Tensor) -> float:
        """1 - sum of squared errors / sum of squares about each channel's mean, both over all channels, of any weights
        on these tokens: 1 is perfect, 0 is what the mean alone gives, below 0 is worse than that.

        Outputs that do not vary at all leave nothing to explain: 0.
        UsageError for fewer than two tokens.
        """
        if self.count < 2:
            raise UsageError(
                f"{self.count} held-out tokens are too few for an explained variance: at least 2 are needed",
                hint="hold out a larger share of the calibration data",
            )
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
        raise NonFiniteActivations(
            "keys or values to fit a predictor on hold NaN or infinity",
            hint="check the checkpoint; a model that overflows in float16 needs --dtype bfloat16 or float32",
        )
    xx_FF, xy_FO, y2_O = x_nF.T @ x_nF, x_nF.T @ y_nO, (y_nO * y_nO).sum(0)
    return NormalEquations(xx_FF.cpu(), xy_FO.cpu(), x_F.cpu(), y_O.cpu(), y2_O.cpu(), x_nF.shape[0])
