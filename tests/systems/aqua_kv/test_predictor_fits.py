"""The regression that fits AQUA-KV's predictors, against loops over numbers; and its weights rounded to two
thin matrices or to 4 bits, against other ways to compute the same."""

import math
from dataclasses import replace

import pytest
import torch
from predictor_cases import correlated, fitted, weight_by_hand
from torch import Tensor

from kvcal.errors import NonFiniteActivations, UsageError
from kvcal.systems.aqua_kv.regression import LinearFit, NormalEquations, to_int4, to_linear, to_low_rank


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


def added_error(fit: LinearFit, weight: Tensor) -> float:
    change = weight - fit.weight_OF
    return torch.einsum("of,fg,og->", change, fit.metric_FF, change).item()


@pytest.mark.parametrize("rank", [1, 4, 10])
def test_low_rank_is_the_best_of_its_rank_in_the_metric_of_the_inputs(rank: int) -> None:
    """The error added equals the sum of the squared singular values of W M^(1/2) that are cut (Eckart-Young),
    and is less than that of the cut singular value decomposition of W."""
    fit = fitted(24, 16)
    low_rank, _ = to_low_rank(fit, rank, "float32").dense()
    values, vectors = torch.linalg.eigh(fit.metric_FF)
    root = vectors * values.sqrt() @ vectors.T
    smallest = (torch.linalg.svdvals(fit.weight_OF @ root)[rank:] ** 2).sum().item()
    assert added_error(fit, low_rank) == pytest.approx(smallest, rel=1e-3)
    u, s, vh = torch.linalg.svd(fit.weight_OF)
    plain = u[:, :rank] * s[:rank] @ vh[:rank]
    assert added_error(fit, low_rank) < 0.9 * added_error(fit, plain)


def rounded_codes(fit: LinearFit, group_size: int) -> list[list[int]]:
    """Codes less 8, one weight after the other; the compensation from inverses of what is left."""
    num_outputs, num_inputs = fit.weight_OF.shape
    found = []
    for output in range(num_outputs):
        weight, codes, scale = fit.weight_OF[output].tolist(), [], 0.0
        for i in range(num_inputs):
            if i % group_size == 0:
                group = weight[i : i + group_size]
                scale = torch.tensor(max(max(group) / 7, min(group) / -8, 0.0), dtype=torch.float64).half().item()
            code = min(max(round(weight[i] / scale), -8), 7) if scale else 0
            codes.append(code)
            inverse = torch.linalg.inv(fit.metric_FF[i:, i:])[0].tolist()
            error = (weight[i] - code * scale) / inverse[0]
            for j in range(i + 1, num_inputs):
                weight[j] -= error * inverse[j - i]
        found.append(codes)
    return found


@pytest.mark.parametrize("num_inputs, group_size", [(24, 8), (23, 10), (12, 64)])
def test_int4_codes_against_one_weight_at_a_time(num_inputs: int, group_size: int) -> None:
    fit = fitted(num_inputs, 6)
    predictor = to_int4(fit, group_size, "bfloat16")
    packed = predictor.stored["weight"].tolist()
    codes = [[code - 8 for byte in row for code in (byte % 16, byte // 16)] for row in packed]
    assert [row[:num_inputs] for row in codes] == rounded_codes(fit, group_size)
    if num_inputs % 2:
        assert all(row[-1] == 0 for row in codes)
    assert torch.equal(weight_by_hand(predictor), predictor.dense()[0])


def test_compensated_int4_is_better_than_nearest_on_correlated_inputs() -> None:
    seed = 0
    fit = fitted(48, 16, seed)
    x, y = correlated(400, 48, 16, seed)
    sums = NormalEquations.empty(48, 16).update(x, y)
    gptq, nearest = (
        to_int4(replace(fit, metric_FF=metric), 16, "float32") for metric in (fit.metric_FF, torch.eye(48).double())
    )
    assert added_error(fit, gptq.dense()[0]) < 0.7 * added_error(fit, nearest.dense()[0])
    assert sums.explained_variance(*gptq.dense()) > sums.explained_variance(*nearest.dense())


def test_the_bias_makes_good_for_rounded_weights() -> None:
    """The mean error is zero, to the rounding of the bias."""
    x, y = correlated(400, 24, 16)
    fit = NormalEquations.empty(24, 16).update(x, y).solve()
    for predictor in (to_linear(fit, "bfloat16"), to_low_rank(fit, 3, "bfloat16"), to_int4(fit, 8, "bfloat16")):
        weight, bias = predictor.dense()
        error = (y - x @ weight.T - bias).mean(0).abs()
        assert (error <= bias.abs() * 2.0**-8 + 1e-9).all()


@pytest.mark.parametrize("zeros", [slice(None), slice(3)])
def test_int4_of_rows_of_zeros_is_zero(zeros: slice) -> None:
    fit = fitted()
    weight = fit.weight_OF.clone()
    weight[zeros] = 0.0
    fit = LinearFit(weight, fit.x_mean_F, fit.y_mean_O, fit.metric_FF)
    assert not to_int4(fit, 8, "bfloat16").dense()[0][zeros].any()


def test_weights_beyond_the_cache_dtype_are_refused() -> None:
    fit = fitted()
    huge = LinearFit(fit.weight_OF * 1e6, fit.x_mean_F, fit.y_mean_O, fit.metric_FF)
    for make in (to_linear, lambda *a: to_low_rank(a[0], 3, a[1]), lambda *a: to_int4(a[0], 8, a[1])):
        with pytest.raises(NonFiniteActivations, match="beyond float16"):
            make(huge, "float16")
