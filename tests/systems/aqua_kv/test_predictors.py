"""The runtime's predictor: its product in fp32 against fp64, its bytes and its tensors."""

import math

import pytest
import torch
from predictor_cases import correlated, fitted, weight_by_hand
from torch import Tensor

from kvcal.geometry import CacheDtype
from kvcal.systems.aqua_kv.predictor import LinearPredictor, PredictorShape
from kvcal.systems.aqua_kv.regression import to_int4, to_linear, to_low_rank

PREFIX = "layers.3.k_predictor"


def predictors(cache_dtype: CacheDtype = "bfloat16", inputs: int = 24, outputs: int = 16) -> list[LinearPredictor]:
    fit = fitted(inputs, outputs)
    return [to_linear(fit, cache_dtype), to_low_rank(fit, 5, cache_dtype), to_int4(fit, 10, cache_dtype)]


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float32"])
def test_the_product_is_close_to_that_of_the_stored_weight(cache_dtype: CacheDtype) -> None:
    x = correlated(200, 24, 16)[0].float()
    for predictor in predictors(cache_dtype):
        weight, bias = predictor.dense()
        if predictor.shape.kind == "int4":
            assert torch.equal(weight, weight_by_hand(predictor))
        expected = x.double() @ weight.T + bias
        terms = x.double().abs() @ weight.abs().T + bias.abs()
        found = predictor.apply(x)
        assert found.dtype == torch.float32
        assert ((found.double() - expected).abs() <= 24 * 2.0**-24 * terms + 1e-5).all()


def test_small_inputs_count_beside_large_ones() -> None:
    """Keys in the hundreds with values below one, as in models whose keys have a bias: a weight that makes up
    for the difference keeps them apart. Rounded by the largest input alone, values would be lost."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(50, 64, generator=generator)
    scale = torch.where(torch.arange(64) < 32, 1e-3, 400.0)
    weight = torch.randn(48, 64, generator=generator)
    shape = PredictorShape("linear", 64, 48, "float32")
    small = LinearPredictor(shape, {"weight": weight / scale, "bias": torch.zeros(48)})
    expected = x.double() @ weight.double().T
    error = (small.apply(x * scale).double() - expected).abs().max()
    assert error <= 1e-5 * expected.std()


def test_products_have_all_bits_whatever_the_program_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    products, seen, linear = torch.backends.mkldnn.matmul, [], torch.nn.functional.linear

    def observed(*args: Tensor) -> Tensor:
        seen.append(products.fp32_precision)
        return linear(*args)

    monkeypatch.setattr(torch.nn.functional, "linear", observed)
    before = products.fp32_precision
    try:
        products.fp32_precision = "bf16"
        for predictor in predictors():
            predictor.apply(torch.ones(3, 24))
        assert products.fp32_precision == "bf16"
    finally:
        products.fp32_precision = before
    assert seen == ["ieee"] * 4  # low rank has two


def test_a_row_that_is_not_finite_stays_visible_and_alone() -> None:
    x = torch.ones(3, 24)
    x[0, 3], x[1, 4] = math.nan, math.inf
    for predictor in predictors():
        found = predictor.apply(x)
        assert not found[:2].isfinite().any() and found[2].isfinite().all()


@pytest.mark.gpu
def test_a_gpu_gives_the_same_without_tf32() -> None:
    x = torch.randn(40, 128, 256, generator=torch.Generator().manual_seed(2)) * 30.0
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    try:
        products.fp32_precision = "tf32"
        for predictor in predictors(inputs=256, outputs=48):
            expected = predictor.apply(x)
            on_gpu = {name: tensor.cuda() for name, tensor in predictor.stored.items()}
            found = LinearPredictor(predictor.shape, on_gpu).apply(x.cuda()).cpu()
            assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    finally:
        products.fp32_precision = before


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
    assert sum(tensor.nbytes for tensor in tensors.values()) == nbytes


def test_a_predictor_survives_its_tensors() -> None:
    x = torch.randn(5, 24)
    for predictor in predictors():
        tensors = predictor.tensors(PREFIX)
        assert all(name.startswith(PREFIX + ".") for name in tensors)
        again = LinearPredictor.from_tensors(predictor.shape, {**tensors, "other": x}, PREFIX)
        assert again.stored.keys() == predictor.stored.keys()
        assert torch.equal(again.apply(x), predictor.apply(x))
