"""Shared by the tests of predictors: data to fit on, fits, and int4 weights read code by code."""

import torch
from torch import Tensor

from kvcal.systems.aqua_kv.predictor import LinearPredictor
from kvcal.systems.aqua_kv.regression import LinearFit, NormalEquations


def correlated(num_tokens: int, num_inputs: int, num_outputs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs with variances over four decades in random directions and a mean far from zero; outputs that
    follow them linearly, with noise. fp64."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(1, -3, num_inputs, dtype=torch.float64)
    directions = torch.linalg.qr(torch.randn(num_inputs, num_inputs, generator=generator, dtype=torch.float64))[0]
    x = torch.randn(num_tokens, num_inputs, generator=generator, dtype=torch.float64) * scales @ directions + 3.0
    weight = torch.randn(num_inputs, num_outputs, generator=generator, dtype=torch.float64)
    noise = torch.randn(num_tokens, num_outputs, generator=generator, dtype=torch.float64)
    return x, x @ weight + 0.5 * noise + 100.0


def fitted(num_inputs: int = 24, num_outputs: int = 16, seed: int = 0) -> LinearFit:
    x, y = correlated(400, num_inputs, num_outputs, seed)
    return NormalEquations.empty(num_inputs, num_outputs).update(x, y).solve(1e-3)


def weight_by_hand(predictor: LinearPredictor) -> Tensor:
    """An int4 predictor's weight, code by code."""
    packed, scale = predictor.stored["weight"].tolist(), predictor.stored["scale"].tolist()
    group_size = predictor.shape.group_size
    rows = []
    for bytes_row, scale_row in zip(packed, scale, strict=True):
        codes = [code for byte in bytes_row for code in (byte % 16, byte // 16)][: predictor.shape.num_inputs]
        rows.append([(code - 8) * scale_row[i // group_size] for i, code in enumerate(codes)])
    return torch.tensor(rows, dtype=torch.float64)
