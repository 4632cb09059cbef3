"""The runtime's predictor: its exact product against Python integers, its bytes and its tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from oracles import to_float32
from predictor_cases import correlated, fitted, weight_by_hand
from torch import Tensor

from kvcal.errors import ArtifactError
from kvcal.geometry import CacheDtype
from kvcal.pages.predictor import LinearPredictor, PredictorShape
from kvcal.stages.predictors.regression import to_int4, to_linear, to_low_rank

PREFIX = "layers.3.k_predictor"


def predictors(cache_dtype: CacheDtype = "bfloat16", inputs: int = 24, outputs: int = 16) -> list[LinearPredictor]:
    fit = fitted(inputs, outputs)
    return [to_linear(fit, cache_dtype), to_low_rank(fit, 5, cache_dtype), to_int4(fit, 10, cache_dtype)]


def exponent_above(values: Sequence[float]) -> int:
    """The least e with all values below 2^e, -100 or more."""
    return max(math.frexp(max(map(abs, values), default=0.0))[1] if any(values) else -100, -100)


def integers(values: Sequence[float]) -> tuple[list[int], int]:
    """A row as Python integers of at most 2^14 and the exponent of their unit."""
    exponent = exponent_above(values)
    return [round(math.ldexp(value, 14 - exponent)) for value in values], exponent - 14


def exact_product(x: Sequence[float], weight: Tensor, bias: Sequence[float]) -> list[float]:
    """One row times a weight [O, F], in Python integers, rounded to fp32 once."""
    columns = [exponent_above(column) for column in weight.T.tolist()]
    x_row, x_unit = integers([to_float32(math.ldexp(value, e)) for value, e in zip(x, columns, strict=True)])
    outputs = []
    for row, constant in zip(weight.tolist(), bias, strict=True):
        w_row, w_unit = integers([math.ldexp(value, -e) for value, e in zip(row, columns, strict=True)])
        product = sum(a * b for a, b in zip(x_row, w_row, strict=True))
        outputs.append(to_float32(math.ldexp(float(product), x_unit + w_unit) + constant))
    return outputs


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float16", "float32"])
def test_the_product_is_exact_in_integers(cache_dtype: CacheDtype) -> None:
    rows = torch.randn(6, 23, generator=torch.Generator().manual_seed(1)) * 10.0
    rows[1] *= 1e-30
    rows[2] = 0.0
    rows[3, ::2] *= 1e6
    rows[4] = 1e-44  # fp32's subnormal numbers
    for predictor in predictors(cache_dtype, inputs=23):
        bias = predictor.stored["bias"].tolist()
        found = predictor.apply(rows).tolist()
        for row, outputs in zip(rows.tolist(), found, strict=True):
            if predictor.shape.kind == "low_rank":
                down = exact_product(row, predictor.stored["down"], [0.0] * 5)
                expected = exact_product(down, predictor.stored["up"], bias)
            elif predictor.shape.kind == "int4":
                expected = exact_product(row, weight_by_hand(predictor), bias)
            else:
                expected = exact_product(row, predictor.stored["weight"], bias)
            assert outputs == expected


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float32"])
def test_the_product_is_close_to_that_of_the_stored_weight(cache_dtype: CacheDtype) -> None:
    x = correlated(200, 24, 16)[0].float()
    for predictor in predictors(cache_dtype):
        weight, bias = predictor.dense()
        expected = x.double() @ weight.T + bias
        largest = (x.double().abs() * weight.abs().amax(0)).amax(-1, keepdim=True)  # contribution of an input
        assert ((predictor.apply(x).double() - expected).abs() <= largest * 24 * 2.0**-13 + 1e-5).all()


def test_small_inputs_count_beside_large_ones() -> None:
    """Keys in the hundreds beside values below one, as in models whose keys have a bias: a weight that makes up for the
    difference keeps them apart. Rounded by the largest input alone, values would be lost."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(50, 64, generator=generator)
    scale = torch.where(torch.arange(64) < 32, 1e-3, 400.0)
    weight = torch.randn(48, 64, generator=generator)
    shape = PredictorShape("linear", 64, 48, "float32")
    small = LinearPredictor(shape, {"weight": weight / scale, "bias": torch.zeros(48)})
    expected = x.double() @ weight.double().T
    error = (small.apply(x * scale).double() - expected).abs().max()
    assert error <= 2e-3 * expected.std()
    rounded = (x * scale / 400 * 2**13).round() * 400 / 2**13
    assert (rounded / scale - x)[:, :32].abs().max() >= 0.5


def test_the_same_rows_give_the_same_bits_in_any_batch() -> None:
    """Ordinary products do not: shown on this machine's, so that the test is known to be able to fail."""
    x = torch.randn(3, 2, 128, 256, generator=torch.Generator().manual_seed(2))
    for predictor in predictors(inputs=256, outputs=48):
        whole = predictor.apply(x)
        assert whole.shape == (3, 2, 128, 48) and whole.dtype == torch.float32
        assert torch.equal(predictor.apply(x[1, 1]), whole[1, 1])
        assert torch.equal(predictor.apply(x[2, 0, 5:6]), whole[2, 0, 5:6])
        assert torch.equal(predictor.apply(x.flip(0).transpose(0, 1)), whole.flip(0).transpose(0, 1))
        assert torch.equal(predictor.apply(x[2, 0, 5]), whole[2, 0, 5])
        many = predictor.apply(x.repeat(6, 1, 1, 1))  # beyond one chunk of rows
        assert torch.equal(many[-1], whole[-1])
    shuffled = torch.randperm(256, generator=torch.Generator().manual_seed(3))
    weight = torch.randn(48, 256)
    assert not torch.equal(x[0, 0] @ weight.T, x[0, 0][:, shuffled] @ weight[:, shuffled].T)
    integral = LinearPredictor(PredictorShape("linear", 256, 48, "float32"), {"weight": weight, "bias": torch.ones(48)})
    permuted = LinearPredictor(integral.shape, {"weight": weight[:, shuffled], "bias": torch.ones(48)})
    assert torch.equal(integral.apply(x), permuted.apply(x[..., shuffled]))


def test_largest_numbers_stay_exact() -> None:
    """2^15 inputs, all of the largest integers: sums of digits are the largest that 32 bits have to hold."""
    shape = PredictorShape("linear", 2**15, 1, "float32")
    ones = LinearPredictor(shape, {"weight": torch.ones(1, 2**15), "bias": torch.zeros(1)})
    below = torch.full((1, 2**15), 1.0 - 2.0**-24)  # rounds up to 2^14 units
    assert ones.apply(below).item() == 2.0**15
    below[0, 0] = 0.5
    assert ones.apply(below).item() == to_float32(2.0**15 - 0.5)


def test_a_row_that_is_not_finite_stays_visible_and_alone() -> None:
    x = torch.ones(3, 24)
    x[0, 3], x[1, 4] = math.nan, math.inf
    for predictor in predictors():
        found = predictor.apply(x)
        assert not found[:2].isfinite().any() and found[2].isfinite().all()


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits() -> None:
    x = torch.randn(40, 128, 256, generator=torch.Generator().manual_seed(2)) * 30.0
    for predictor in predictors(inputs=256, outputs=48):
        assert torch.equal(predictor.to("cuda").apply(x.cuda()).cpu(), predictor.apply(x))
        assert torch.equal(predictor.to("cuda").apply(x[7:8].cuda()).cpu(), predictor.apply(x)[7:8])


BYTES_BY_HAND = [
    (PredictorShape("linear", 24, 16, "bfloat16"), 24 * 16 * 2 + 16 * 2),
    (PredictorShape("linear", 24, 16, "float32"), 24 * 16 * 4 + 16 * 4),
    (PredictorShape("low_rank", 24, 16, "bfloat16", rank=5), 5 * 24 * 2 + 16 * 5 * 2 + 16 * 2),
    (PredictorShape("int4", 24, 16, "bfloat16", group_size=10), 16 * 12 + 16 * 3 * 2 + 16 * 2),
    (PredictorShape("int4", 24, 16, "float32", group_size=8), 16 * 12 + 16 * 3 * 2 + 16 * 4),
    (PredictorShape("int4", 23, 16, "float32", group_size=64), 16 * 12 + 16 * 1 * 2 + 16 * 4),
]


@pytest.mark.parametrize("shape, nbytes", BYTES_BY_HAND)
def test_bytes_by_hand(shape: PredictorShape, nbytes: int) -> None:
    assert shape.nbytes == nbytes
    tensors = {name: torch.ones(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in shape.tensors().items()}
    assert LinearPredictor(shape, tensors).nbytes == nbytes


def test_a_predictor_survives_its_tensors() -> None:
    x = torch.randn(5, 24)
    for predictor in predictors():
        tensors = predictor.tensors(PREFIX)
        assert all(name.startswith(PREFIX + ".") for name in tensors)
        again = LinearPredictor.from_tensors(predictor.shape, {**tensors, "other": x}, PREFIX)
        assert again.nbytes == predictor.nbytes == predictor.shape.nbytes
        assert torch.equal(again.apply(x), predictor.apply(x))


@pytest.mark.parametrize(
    "name, spoil, message",
    [
        ("weight", None, "int4 predictor: missing tensor 'layers.3.k_predictor.weight'"),
        ("weight", lambda t: t[:, 1:], r"\[16, 11\], expected uint8 \[16, 12\]"),
        ("weight", lambda t: t.to(torch.int8), "is int8"),
        ("bias", lambda t: t.half(), r"float16 \[16\], expected bfloat16"),
        ("bias", lambda t: t * math.nan, "NaN or infinity"),
        ("scale", lambda t: t * math.inf, "NaN or infinity"),
        ("scale", lambda t: -t, "holds values from .* expected 0 to inf"),
    ],
)
def test_wrong_tensors_are_refused(name: str, spoil, message: str) -> None:
    predictor = to_int4(fitted(), 10, "bfloat16")
    tensors = predictor.tensors(PREFIX)
    tensor = tensors.pop(f"{PREFIX}.{name}")
    if spoil is not None:
        tensors[f"{PREFIX}.{name}"] = spoil(tensor)
    with pytest.raises(ArtifactError, match=message):
        LinearPredictor.from_tensors(predictor.shape, tensors, PREFIX)


@pytest.mark.parametrize(
    "arguments",
    [
        ("mlp", 8, 8, "bfloat16"),
        ("linear", 0, 8, "bfloat16"),
        ("linear", 2**15 + 1, 8, "bfloat16"),
        ("linear", 8, 8, "bfloat16", 4),
        ("low_rank", 8, 8, "bfloat16"),
        ("low_rank", 8, 6, "bfloat16", 7),
        ("low_rank", 8, 8, "bfloat16", 0),
        ("int4", 8, 8, "bfloat16"),
        ("int4", 8, 8, "bfloat16", None, 0),
    ],
)
def test_shapes_that_no_predictor_has_are_refused(arguments: tuple) -> None:
    with pytest.raises(ValueError, match="expected|takes a rank|takes a group_size"):
        PredictorShape(*arguments)
