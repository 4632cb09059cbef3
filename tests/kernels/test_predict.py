"""Predictions from products of bytes: the bits of ``LinearPredictor.apply``, on a GPU; the digits, on any machine."""

from __future__ import annotations

import math

import pytest
import torch
from cubin_resources import resources
from predictor_cases import fitted
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels.compile import cubin
from kvcal.kernels.predict import ROWS_AT_ONCE, _Factor, digits_defines, prepared
from kvcal.pages.predictor import MAX_INPUTS, LinearPredictor, PredictorShape
from kvcal.stages.predictors.regression import to_int4, to_linear, to_low_rank

ARCHS = ("sm_80", "sm_89", "sm_90", "sm_120")


def random_predictor(inputs: int, outputs: int, cache_dtype: str = "bfloat16") -> LinearPredictor:
    """Columns of sizes from 1e-3 to 1e3, and one of zeros."""
    generator = torch.Generator().manual_seed(inputs)
    shape = PredictorShape("linear", inputs, outputs, cache_dtype)
    dtype = CACHE_DTYPES[cache_dtype]
    weight = torch.randn(outputs, inputs, generator=generator) * torch.logspace(-3, 3, inputs)
    weight[:, inputs // 2] = 0.0
    return LinearPredictor(
        shape, {"weight": weight.to(dtype), "bias": torch.randn(outputs, generator=generator).to(dtype)}
    )


def in_digits(integers: Tensor) -> tuple[Tensor, Tensor]:
    """int64 of at most 2^14 -> high and low digits, signed bytes."""
    low = (integers + 128) % 256 - 128
    return ((integers - low) // 256).to(torch.int8), low.to(torch.int8)


def test_three_products_of_digits_are_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    # The library's product of bytes serves GPUs alone; on a CPU that of torch 2.11 gives other sums.
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: (a.long() @ b.long()).int())
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-(2**14), 2**14 + 1, (32, 48), generator=generator)
    w = torch.randint(-(2**14), 2**14 + 1, (16, 48), generator=generator)
    x[0], w[0] = 2**14, -(2**14)
    x[1], w[1] = 63 * 256 + 128, -64 * 256 + 128  # the lowest low digit, -128
    factor = _Factor(torch.cat(in_digits(w)[::-1], dim=-1), torch.ones(16), torch.ones(48))
    high, cross, low = (part.long() for part in factor.products(torch.cat(in_digits(x), dim=-1)))
    assert torch.equal(65536 * high + 256 * cross + low, x @ w.T)


def test_on_a_cpu_it_is_the_reference() -> None:
    predictor, x = random_predictor(24, 16), torch.randn(7, 24)
    predict = prepared(predictor)
    assert torch.equal(predict([x]), predictor.apply(x))
    assert torch.equal(predict([x[:, :8], x[:, 8:]]), predictor.apply(x))


@pytest.mark.parametrize("arch", ARCHS)
def test_the_kernels_stay_in_their_budget(arch: str) -> None:
    """32 registers or so: as many threads as an SM has. The widest row has 128 of its numbers in a thread."""
    for first, second, registers, instructions in (
        (1024, 0, 32, 150),
        (1024, 1024, 32, 240),
        (MAX_INPUTS, 0, 216, 2000),
    ):
        found = resources(cubin("digits", digits_defines(first, second, first + second), arch))["digits"]
        assert found.local_bytes == 0 and found.registers <= registers and found.instructions <= instructions
    found = resources(cubin("digit_sums", {"OUTPUTS": 1024, "PADDED_OUTPUTS": 1024}, arch))["digit_sums"]
    assert found.local_bytes == 0 and found.registers <= 48 and found.instructions <= 460


@pytest.mark.parametrize("inputs, outputs", [(5, 3), (18, 7), (7, 12), (4 * 256 + 16, 1000)])
def test_unusual_sizes_compile(inputs: int, outputs: int) -> None:
    padded = -(-inputs // 16) * 16
    assert cubin("digits", digits_defines(inputs, 3, padded + 16))
    assert cubin("digit_sums", {"OUTPUTS": outputs, "PADDED_OUTPUTS": -(-outputs // 8) * 8})


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 63, 127, 128, 129, 1000, ROWS_AT_ONCE + 128])
@pytest.mark.parametrize("kind", ["linear", "rank 5", "rank 12", "int4"])
def test_a_gpu_gives_the_bits_of_the_reference(kind: str, num_rows: int) -> None:
    fit = fitted(24, 16)
    predictor = {
        "linear": lambda: to_linear(fit, "bfloat16"),
        "rank 5": lambda: to_low_rank(fit, 5, "float16"),
        "rank 12": lambda: to_low_rank(fit, 12, "bfloat16"),
        "int4": lambda: to_int4(fit, 10, "float32"),
    }[kind]()
    x = torch.randn(num_rows, 24, generator=torch.Generator().manual_seed(num_rows)) * torch.logspace(-3, 3, 24)
    found = prepared(predictor.to("cuda"))([x.cuda()]).cpu()
    assert found.shape == (num_rows, 16) and found.dtype == torch.float32
    assert torch.equal(found, predictor.apply(x))


@pytest.mark.gpu
@pytest.mark.parametrize("first, second", [(8, 8), (5, 0), (6, 12), (64, 128), (1024, 1024), (1000, 24), (640, 4096)])
@pytest.mark.parametrize("outputs", [3, 4, 12, 64, 1000])
@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float32"])
def test_all_widths_and_two_parts(first: int, second: int, outputs: int, cache_dtype: str) -> None:
    predictor = random_predictor(first + second, outputs, cache_dtype)
    x = torch.randn(2, 128, first + second, generator=torch.Generator().manual_seed(outputs))
    x[0, 0], x[0, 1], x[0, 2] = 0.0, 1e-44, 1e30
    x[1, :, ::3] *= 1e4
    parts = [part for part in x.split([first, second], dim=-1) if part.shape[-1]]
    found = prepared(predictor.to("cuda"))([part.cuda() for part in parts]).cpu()
    assert torch.equal(found, predictor.apply(x))


@pytest.mark.gpu
def test_the_largest_sums_stay_exact_on_a_gpu() -> None:
    """2^15 inputs of the largest high digits, then of the lowest low ones."""
    for number in (1.0 - 2.0**-24, 1.0 - 2.0**-7):
        shape = PredictorShape("linear", MAX_INPUTS, 8, "float32")
        predictor = LinearPredictor(shape, {"weight": torch.full((8, MAX_INPUTS), number), "bias": torch.zeros(8)})
        x = torch.full((20, MAX_INPUTS), number)
        x[3:] *= -1.0
        assert torch.equal(prepared(predictor.to("cuda"))([x.cuda()]).cpu(), predictor.apply(x))


@pytest.mark.gpu
def test_a_row_that_is_not_finite_stays_visible_and_alone_on_a_gpu() -> None:
    predictor = to_low_rank(fitted(24, 16), 5, "bfloat16")
    x = torch.randn(40, 24)
    expected = predictor.apply(x)
    x[0, 3], x[1, 4], x[2, 23] = math.nan, math.inf, -math.inf
    found = prepared(predictor.to("cuda"))([x.cuda()]).cpu()
    assert not found[:3].isfinite().any() and torch.equal(found[3:], expected[3:])


@pytest.mark.gpu
def test_a_captured_prediction_is_the_eager_one() -> None:
    predictor = random_predictor(256, 48).to("cuda")
    x = torch.randn(3, 128, 256, device="cuda")
    prepared(predictor)([x])  # compiled and loaded outside of the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = prepared(predictor)([x])
    for seed in range(3):
        x.copy_(torch.randn(3, 128, 256, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(found.cpu(), predictor.to("cpu").apply(x.cpu()))
