"""The regression that fits AQUA-KV's predictors, against loops over numbers."""

import math

import pytest
import torch
from predictor_cases import correlated

from kvcal.errors import NonFiniteActivations, UsageError
from kvcal.stages.predictors.regression import NormalEquations


def gauss(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solves matrix x = right by elimination with row exchange."""
    size = len(right)
    rows = [row[:] + [value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(i + 1, size):
            factor = rows[r][i] / rows[i][i]
            rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution


@pytest.mark.parametrize("ridge", [0.0, 1e-3, 10.0])
def test_the_fit_is_ridge_regression_without_penalty_on_the_bias(ridge: float) -> None:
    """Against the uncentred equations of the augmented input [x, 1], solved by elimination."""
    x, y = correlated(40, 4, 3)
    n, tokens, outputs = 40, x.tolist(), y.tolist()
    means = [sum(token[i] for token in tokens) / n for i in range(4)]
    variances = [sum((token[i] - means[i]) ** 2 for token in tokens) / n for i in range(4)]
    penalty = n * ridge * sum(variances) / 4
    augmented = [[*token, 1.0] for token in tokens]
    matrix = [[sum(token[i] * token[j] for token in augmented) for j in range(5)] for i in range(5)]
    for i in range(4):
        matrix[i][i] += penalty
    fit = NormalEquations.empty(4, 3).update(x, y).solve(ridge)
    for channel in range(3):
        right = [sum(t[i] * out[channel] for t, out in zip(augmented, outputs, strict=True)) for i in range(5)]
        *weights, bias = gauss(matrix, right)
        assert fit.weight_OF[channel].tolist() == pytest.approx(weights, rel=1e-5, abs=1e-6)
        assert fit.bias_O[channel].item() == pytest.approx(bias, rel=1e-6)


def test_streaming_and_merging_equal_one_batch() -> None:
    """In fp64 from fp32 tokens; more tokens than are converted at a time."""
    x, y = (tensor.float() for tensor in correlated(5000, 6, 3))
    whole = NormalEquations.empty(6, 3).update(x, y)
    stream = NormalEquations.empty(6, 3)
    for start, stop in ((0, 1), (1, 700), (700, 5000)):
        stream = stream.update(x[start:stop], y[start:stop])
    halves = [NormalEquations.empty(6, 3).update(x[part], y[part]) for part in (slice(2500), slice(2500, None))]
    for other in (stream, halves[0].merge(halves[1])):
        assert other.count == whole.count == 5000
        for name in whole.sums:
            assert torch.allclose(other.sums[name], whole.sums[name], rtol=1e-12)
    direct = x.double().T @ x.double()
    assert torch.allclose(whole.sums["xx"], direct, rtol=1e-12) and whole.sums["xx"].dtype == torch.float64


def test_explained_variance_of_held_out_tokens_needs_their_sums_only() -> None:
    x, y = correlated(300, 6, 4)
    fit = NormalEquations.empty(6, 4).update(x[:100], y[:100]).solve(0.1)
    x, y = x[100:], y[100:]
    held_out = NormalEquations.empty(6, 4).update(x, y)
    weight, bias = fit.weight_OF.tolist(), fit.bias_O.tolist()
    error = spread = 0.0
    for channel in range(4):
        values = y[:, channel].tolist()
        mean = sum(values) / len(values)
        for token, value in zip(x.tolist(), values, strict=True):
            predicted = sum(w * v for w, v in zip(weight[channel], token, strict=True)) + bias[channel]
            error += (value - predicted) ** 2
            spread += (value - mean) ** 2
    assert held_out.explained_variance(fit.weight_OF, fit.bias_O) == pytest.approx(1 - error / spread, abs=1e-9)
    assert 0.5 < 1 - error / spread < 0.9999


def test_inputs_that_never_change_predict_the_mean() -> None:
    _, y = correlated(50, 3, 2)
    for constant in (0.0, 7.3):
        fit = NormalEquations.empty(3, 2).update(torch.full((50, 3), constant, dtype=torch.float64), y).solve()
        predicted = fit.weight_OF @ torch.full((3,), constant, dtype=torch.float64) + fit.bias_O
        assert torch.allclose(predicted, y.mean(0), rtol=1e-6)


@pytest.mark.parametrize("side", ["x", "y"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(side: str, value: float) -> None:
    tokens = {"x": torch.ones(5, 3), "y": torch.ones(5, 2)}
    tokens[side][4, 1] = value
    with pytest.raises(NonFiniteActivations, match="NaN or infinity"):
        NormalEquations.empty(3, 2).update(tokens["x"], tokens["y"])


def test_too_few_tokens_are_refused() -> None:
    x, y = correlated(6, 6, 2)
    sums = NormalEquations.empty(6, 2).update(x, y)
    with pytest.raises(UsageError, match="6 calibration tokens .* 6 inputs: at least 7"):
        sums.solve()
    sums.update(x[:1], y[:1]).solve()
