"""Budgets: the four ways to state one, in bytes, and what is said when nothing fits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvcal.errors import InfeasibleBudget, UsageError
from kvcal.geometry import CACHE_DTYPES, Geometry
from kvcal.plan import LayerPlan, Workload, bare_layers
from kvcal.quantities import format_bytes, parse_bytes
from kvcal.recipe import AllocateSpec, Recipe, fixed_layers, load_recipe
from kvcal.stages.allocation_record import layer_bytes, num_values

MAX_BITS = 4096  # per cached value: a single token in a buffer of 128 at 16 bits has 2,048


@dataclass(frozen=True)
class ModelSizes:
    """What of a model a budget depends on. ``weight_bytes``: in its checkpoint's dtype."""

    geometry: Geometry
    weight_bytes: int
    vocab_size: int


@dataclass(frozen=True)
class Budget:
    """``total`` bytes; ``weights`` and ``workspace`` of them only if the whole device was budgeted."""

    total: int
    weights: int | None = None
    workspace: int | None = None

    @property
    def cache(self) -> int:
        """What is left for the cache; may be negative."""
        return self.total - (self.weights or 0) - (self.workspace or 0)


def workspace_bytes(sizes: ModelSizes, workload: Workload) -> int:
    """The stated workspace of one decode step: fp32 logits and their softmax, and one layer's K and V unpacked.

    The CUDA kernels need no unpacked layer; a long prefill in one piece needs more: give ``workspace`` then.
    """
    logits = 2 * 4 * workload.batch * sizes.vocab_size
    per_token = [
        layer.attention.num_kv_heads * (layer.attention.k_head_dim + layer.attention.v_head_dim)
        for layer in bare_layers(sizes.geometry)
        if layer.is_paged
    ]
    itemsize = CACHE_DTYPES[sizes.geometry.cache_dtype].itemsize
    return logits + max(per_token, default=0) * workload.batch * workload.context * itemsize


def resolve_budget(sizes: ModelSizes, spec: AllocateSpec, layers: tuple[LayerPlan, ...], fixed: int) -> Budget:
    """The budget in bytes; ``fixed`` are those of bounded layers and states, which bits per value do not count."""
    workload = Workload(spec.batch, spec.context)
    if spec.budget is not None:
        auto = spec.workspace == "auto"
        workspace = workspace_bytes(sizes, workload) if auto else parse_bytes(spec.workspace)
        return Budget(parse_bytes(spec.budget), sizes.weight_bytes, workspace)
    if spec.kv_budget is not None:
        return Budget(parse_bytes(spec.kv_budget))
    if spec.bits is not None:
        if not spec.bits <= MAX_BITS:
            raise UsageError(f"bits = {spec.bits}; allowed: up to {MAX_BITS}", hint="16 bits compress nothing")
        return Budget(int(spec.bits * num_values(layers, workload) / 8) + fixed)
    assert spec.same_bytes_as is not None
    other: Recipe = load_recipe(spec.same_bytes_as)
    if other.formats is None or not other.is_baseline:
        raise UsageError(
            f"same_bytes_as = {spec.same_bytes_as!r} is no recipe of [formats] alone, its bytes are not known before",
            hint="name a recipe with [formats], such as kivi-2",
        )
    return Budget(sum(layer_bytes(fixed_layers(other.formats, layers), sizes.geometry.cache_dtype, workload)))


def infeasible(spec: AllocateSpec, budget: Budget, smallest: int, bits: float) -> InfeasibleBudget:
    """``smallest`` in bytes, ``bits`` what that is per cached value (shown rounded up, so that it is feasible)."""
    rounded_up = math.ceil(bits * 1000) / 1000
    device = ""
    if budget.weights:
        device = f" ({format_bytes(budget.weights)} weights + {format_bytes(budget.workspace or 0)} workspace)"
    return InfeasibleBudget(
        f"a budget of {format_bytes(budget.total)} is too small for batch {spec.batch} x {spec.context} tokens: the "
        f"smallest feasible one is {format_bytes(smallest)} = {smallest} bytes{device}, {rounded_up:.3f} bits per "
        "cached value",
        smallest,
        hint="raise the bits, or --context, over which sinks, windows and half pages spread, or profile fewer bits"
        if spec.bits is not None
        else "raise the budget, lower --batch or --context, or profile fewer bits or larger groups",
    )
