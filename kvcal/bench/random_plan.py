"""A plan of layers that are all stored alike, its tensors drawn at random: what is timed needs no model to fit it to.

Only what changes a time is as in a real plan: shapes, dtypes, a lattice's points, RoPE's angles. Predictors contract
(their largest singular value is about 0.5 at most), so that reconstructions stay small from layer to layer, in a
benchmark that feeds its layers in a ring, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcal.bench.shape import CACHE_DTYPE, Heads, Pair
from kvcal.geometry import ModelIdentity
from kvcal.pages.grids import gaussian_grid
from kvcal.plan.layer import LayerPlan
from kvcal.plan.plan import Plan, Workload
from kvcal.plan.tensors import needed_tensors

THETA = 10_000.0  # RoPE's; angles cost the same with any
GAIN = 0.25
INT4_SPREAD = 4.6  # the standard deviation of a random code of 4 bits


def uniform_plan(model: ModelIdentity, pair: Pair, heads: Heads, num_layers: int, batch: int, num_tokens: int) -> Plan:
    """``num_layers`` layers stored as ``pair`` says."""
    layers = tuple(heads.layer(pair, index) for index in range(num_layers))
    return Plan(model, CACHE_DTYPE, layers, Workload(batch, num_tokens), provenance={}, tensors=_tensors(layers))


def _tensors(layers: Sequence[LayerPlan]) -> dict[str, Tensor]:
    generator, head_dim = torch.Generator().manual_seed(0), layers[0].attention.k_head_dim
    found = {}
    for name, spec in needed_tensors(layers, CACHE_DTYPE).items():
        size, dtype = list(spec.extents), spec.dtype
        kind = name.rpartition(".")[2]
        if kind == "rotary":
            found[name] = rotary_table(head_dim)
        elif name.startswith("lattice."):
            found[name] = gaussian_grid(size[1], size[0])
        elif kind.endswith("signs"):
            found[name] = torch.randint(0, 2, size, generator=generator, dtype=dtype).mul_(2).sub_(1)
        elif dtype == torch.uint8:  # codes of 4 bits, two a byte
            found[name] = torch.randint(0, 256, size, generator=generator, dtype=dtype)
        else:
            found[name] = _weights(kind, size, generator).to(dtype)
    return found


def _weights(kind: str, size: Sequence[int], generator: torch.Generator) -> Tensor:
    """fp32, of a predictor."""
    spread = GAIN / max(size) ** 0.5
    if kind == "scale":
        return torch.rand(*size, generator=generator).add_(0.5).mul_(spread / INT4_SPREAD)
    return torch.randn(*size, generator=generator).mul_(spread)


def rotary_table(head_dim: int) -> Tensor:
    """fp64 [head_dim / 2, 4], as kvcal.plan.tensors has it: Llama's pairs."""
    first = torch.arange(head_dim // 2, dtype=torch.float64)
    angles = THETA ** (-2 * first / head_dim)
    return torch.stack([first, first + head_dim // 2, angles, torch.ones_like(first)], dim=1)
