"""Shared by the scripts: recipes with changes, plans without a calibration, means with their errors, and
tables."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kvcal.geometry import Geometry, ModelIdentity
from kvcal.models.load import LoadedModel
from kvcal.pages.error_feedback import feedback_factor
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.plan import SIDES, Format, LayerPlan, Plan, Side, Workload, bare_layers
from kvcal.plan.tensors import layout_tensors, needed_tensors
from kvcal.recipe import Recipe
from kvcal.recipe_files import load_recipe, read_settings, with_knobs
from kvcal.systems.basis.basis import fitted_basis, moved_hessian
from kvcal.systems.basis.hessians import rotated
from kvcal.systems.basis.recipe import BasisSpec
from kvcal.systems.basis.rotated import GAINED_BITS, value_gains
from kvcal.systems.pm_kvq.schedule import progressive_layers

RECIPE = "default"
DAMAGE = {"k": 3.0, "v": 1.0}  # of 2 bits, in the median: keys do more

Pair = tuple[float, float]
Place = tuple[int, Side]  # the layer's cache index first


def recipe_of(name: str) -> Recipe:
    """A recipe by name or path, as it is or changed: ``kvmix:importance.window=none``; semicolons separate
    several changes. A key without a value gets its default: ``pm-kvq:reparam=`` is without λ."""
    base, _, changes = name.partition(":")
    settings = read_settings([one for one in changes.split(";") if one])
    return replace(with_knobs(load_recipe(base), settings), name=name)


def scheduled(plan: Plan, workload: Workload) -> Plan:
    """A plan whose pages have their final bits at the end of ``workload``, and no sooner than they have
    to."""
    layers = [
        replace(layer, **{side: replace(layer.format(side), **{"shrink_at": ()}) for side in SIDES if layer.is_paged})
        for layer in plan.layers
    ]
    budget = sum(layer.nbytes(plan.cache_dtype, workload.lengths, workload.context) for layer in layers)
    return replace(plan, layers=progressive_layers(layers, workload, plan.cache_dtype, budget), workload=workload)


def random_model(config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    """A model of this shape with the library's random initialisation, made in bf16 on the device."""
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def default_plan(
    geometry: Geometry,
    bits: float,
    workload: Workload | None = None,
    identity: ModelIdentity | None = None,
    stripe_tokens: Literal[16, 32] = 16,
) -> Plan:
    """A plan with the formats, the tensors and the bytes of one that the default recipe makes at ``bits`` a
    value of ``workload`` (default: the recipe's), the same at every call. What a calibration finds is random:
    which sides get more bits, bases (of condition 3 to 32) and factors. It shows time and memory, and no
    quality. Stripes of ``stripe_tokens`` lie behind a window that makes up a page with one of them.

    ValueError: the formats take more than ``bits`` at their least.
    """
    recipe, generator = load_recipe(RECIPE), torch.Generator().manual_seed(0)
    window = PAGE_TOKENS - stripe_tokens
    spec = replace(recipe.cache, stripe_tokens=stripe_tokens, k_recent_window=window, v_recent_window=window)
    recipe = replace(recipe, cache=spec)
    assert recipe.allocate is not None and recipe.basis is not None
    paged = [layer.geometry.index for layer in bare_layers(geometry) if layer.takes_transforms]
    damage = {place: DAMAGE[place[1]] * float(torch.randn((), generator=generator).exp())
              for place in itertools.product(paged, SIDES)}  # fmt: skip
    chosen, widths = dict.fromkeys(damage, 2), recipe.profile.num_bits
    layers, tensors = _layers_of(geometry, chosen, recipe), dict[str, Tensor]()
    for layer in layers:
        tensors |= _random_transforms(layer, recipe.basis, generator) if layer.takes_transforms else {}
    identity = identity or ModelIdentity("random", geometry.model_type, "0" * 64, "0" * 64, "0" * 64)
    workload = workload or Workload(recipe.allocate.batch, recipe.allocate.context)
    plan = Plan(identity, geometry.cache_dtype, layers, workload, {}, tensors)
    spare = (bits - plan.bits_per_value()) * len(chosen)
    if spare < 0:
        raise ValueError(f"{bits} bits a value of {workload}: at least {plan.bits_per_value():.3f} are taken")
    # What a bit more takes off the damage falls from width to width, so that the steps of a place come in
    # order.
    steps = [(place, fewer, more) for place in damage for fewer, more in itertools.pairwise(widths)]
    for place, fewer, more in sorted(
        steps, key=lambda step: -damage[step[0]] * (4.0 ** -step[1] - 4.0 ** -step[2]) / (step[2] - step[1])
    ):
        spare -= more - fewer
        if spare < 0:
            break
        chosen[place] = more
    layers = _layers_of(geometry, chosen, recipe)
    needed = needed_tensors(layers, geometry.cache_dtype)
    return replace(plan, layers=layers, tensors={name: tensors[name] for name in needed})


def _layers_of(geometry: Geometry, bits: Mapping[Place, int], recipe: Recipe) -> tuple[LayerPlan, ...]:
    """All layers, with pages of these bits in a basis where they take one."""
    found = []
    for layer in bare_layers(geometry):
        if layer.takes_transforms:
            index, cache = layer.geometry.index, recipe.cache
            k, v = (cache.format(side, bits[index, side], "token", 128, "rotated") for side in SIDES)
            has = dict.fromkeys(("k_feedback", "v_feedback", "k_basis", "v_basis"), True)
            layer = LayerPlan(layer.geometry, k, v, **has, v_gain=v.num_bits == GAINED_BITS)
        found.append(layer)
    return tuple(found)


def _random_transforms(layer: LayerPlan, spec: BasisSpec, generator: torch.Generator) -> dict[str, Tensor]:
    """Bases, factors and gains that the calibration makes of random costs and covariances; and signs."""
    heads, found = layer.attention.num_kv_heads, layout_tensors((layer,))
    for side in SIDES:
        dim, prefix = layer.head_dim(side), f"layers.{layer.geometry.index}.{side}"
        energies = torch.logspace(-3, 3, dim, 2, dtype=torch.float64)
        turns = torch.linalg.qr(torch.randn(2, heads, dim, dim, dtype=torch.float64, generator=generator)).Q
        costs, covariance = turns @ (energies.unsqueeze(1) * turns.mT)
        center = torch.randn(heads, dim, dtype=torch.float64, generator=generator) if side == "k" else None
        basis = fitted_basis(costs, covariance, spec.exponent, center)
        costs = moved_hessian(costs, basis)
        gains = {f"{prefix}_gain": value_gains(torch.linalg.eigvalsh(costs))} if side == "v" else {}
        factor, _ = feedback_factor(rotated(costs, found[f"{prefix}_signs"]), spec.damping)
        found |= basis.tensors(prefix) | gains | {f"{prefix}_feedback": factor}
    return found


def layers_with(loaded: LoadedModel, k: Format, v: Format) -> tuple[LayerPlan, ...]:
    """Every layer with pages stored in these formats."""
    bare = bare_layers(loaded.geometry)
    return tuple(replace(layer, k=k, v=v) if layer.is_paged else layer for layer in bare)


def mean_and_error(values: Sequence[float] | Tensor) -> Pair:
    """Mean over texts and its standard error (0 for a single one)."""
    found = torch.as_tensor(values, dtype=torch.float64)
    return float(found.mean()), float(found.std() / math.sqrt(len(found))) if len(found) > 1 else 0.0


def ratio_and_error(sums: Tensor, counts: Tensor) -> Pair:
    """Mean over tokens, from each text's sum and count, and its standard error over texts (delta method; 0
    for a single one)."""
    mean, n = float(sums.sum() / counts.sum()), len(sums)
    spread = float((sums - mean * counts).square().sum())
    return mean, math.sqrt(n / max(1, n - 1) * spread) / float(counts.sum())


def print_table(title: str, head: Sequence[object], rows: Sequence[Sequence[object]]) -> None:
    """Floats get four digits."""
    print(f"\n### {title}\n")
    print("| " + " | ".join(map(str, head)) + " |\n" + "|---" * len(head) + "|")
    for row in rows:
        cells = (f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row)
        print("| " + " | ".join(cells) + " |", flush=True)
