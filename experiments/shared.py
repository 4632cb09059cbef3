"""What the experiments share: arguments, plans without a calibration, texts, means with their errors, and tables."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kvcal.data.sequences import DataSpec, TokenDataset, load_sequences
from kvcal.geometry import Geometry, ModelIdentity
from kvcal.models.load import LoadedModel
from kvcal.pages.basis import fitted_basis, moved_hessian
from kvcal.pages.error_feedback import feedback_factor
from kvcal.pages.rotated import GAINED_BITS, value_gains
from kvcal.plan.plan import SIDES, Format, LayerPlan, Plan, Side, Workload, bare_layers
from kvcal.plan.tensors import lattice_tensors, needed_nbytes, needed_tensors
from kvcal.recipe import FeedbackSpec, Recipe
from kvcal.recipe_files import load_recipe
from kvcal.stages.hessians import rotated

RECIPE = "basis"
KEYS_OVER_VALUES = 3.0  # of the mean damage, as random plans have it

Pair = tuple[float, float]
Place = tuple[int, Side]  # the layer's cache index first


def arguments(
    description: str | None, out_help: str = "JSON file", is_out_required: bool = True
) -> argparse.ArgumentParser:
    """A parser with --model, --device and --out."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reasoner-10m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=is_out_required, help=out_help)
    return parser


def random_model(config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    """A model of this shape with the library's random initialisation, made in bf16 on the device."""
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def default_plan(
    geometry: Geometry, bits: float, workload: Workload | None = None, identity: ModelIdentity | None = None
) -> Plan:
    """A plan with the formats, the tensors and the bytes of one that the default recipe makes at ``bits`` a value of
    ``workload`` (default: the recipe's), the same at every call. What a calibration finds is random: which sides get
    more bits, bases (of condition 3 to 32) and factors. It shows time and memory, and no quality.

    ValueError: the formats take more than ``bits`` at their least.
    """
    recipe, generator = load_recipe(RECIPE), torch.Generator().manual_seed(0)
    assert recipe.allocate is not None and recipe.feedback is not None
    workload = workload or Workload(recipe.allocate.batch, recipe.allocate.context)
    importance: dict[Place, float] = {}
    for layer in bare_layers(geometry):
        if layer.takes_transforms:
            for side, mean in zip(SIDES, (KEYS_OVER_VALUES, 1.0), strict=True):
                importance[layer.geometry.index, side] = mean * float(torch.randn((), generator=generator).exp())
    chosen, widths = dict.fromkeys(importance, 2), recipe.profile.num_bits
    steps = [(place, fewer, more) for place in importance for fewer, more in zip(widths, widths[1:], strict=False)]
    # What is gained by each further bit falls from step to step of a place, so that its steps come in order.
    steps.sort(key=lambda step: -importance[step[0]] * (4.0 ** -step[1] - 4.0 ** -step[2]) / (step[2] - step[1]))
    layers = _layers_of(geometry, chosen, recipe)
    if (least := _bits_per_value(geometry, layers, workload)) > bits:
        raise ValueError(f"{bits} bits a value: batch {workload.batch} x {workload.context} takes {least:.3f} at least")
    for place, _, more in steps:
        chosen[place] = more
        richer = _layers_of(geometry, chosen, recipe)
        if _bits_per_value(geometry, richer, workload) > bits:
            break
        layers = richer
    tensors = lattice_tensors(layers)
    for layer in layers:
        tensors |= _random_transforms(layer, recipe.feedback, tensors, generator) if layer.takes_transforms else {}
    identity = identity or ModelIdentity("random", geometry.model_type, "0" * 64, "0" * 64, "0" * 64)
    needed = {name: tensors[name] for name in needed_tensors(layers, geometry.cache_dtype)}
    return Plan(identity, geometry.cache_dtype, layers, workload, {}, needed)


def _layers_of(geometry: Geometry, bits: Mapping[Place, int], recipe: Recipe) -> tuple[LayerPlan, ...]:
    """All layers, with pages of these bits in a basis where they take one."""
    found = []
    for layer in bare_layers(geometry):
        if layer.takes_transforms:
            index, cache = layer.geometry.index, recipe.cache
            k, v = (cache.format(side, bits[index, side], "token", 128, "rotated") for side in SIDES)
            fed = LayerPlan(layer.geometry, (k,), (v,), k_feedback=True, v_feedback=True)
            layer = replace(fed, k_basis=True, v_basis=True, v_gain=v.num_bits == GAINED_BITS)
        found.append(layer)
    return tuple(found)


def _bits_per_value(geometry: Geometry, layers: Sequence[LayerPlan], workload: Workload) -> float:
    """As a plan of these layers has them."""
    paged = [layer for layer in layers if layer.is_paged]
    values = sum(layer.attention.values_per_token for layer in paged) * sum(workload.lengths)
    sizes = geometry.cache_dtype, workload.lengths, workload.context
    nbytes = sum(layer.nbytes(*sizes) - layer.state_nbytes(workload.batch) for layer in paged)
    return 8 * (nbytes + needed_nbytes(paged, geometry.cache_dtype)) / values


def _random_transforms(
    layer: LayerPlan, spec: FeedbackSpec, signs: Mapping[str, Tensor], generator: torch.Generator
) -> dict[str, Tensor]:
    """Bases, factors and gains that the calibration makes of random costs and covariances."""
    heads, found = layer.attention.num_kv_heads, dict[str, Tensor]()
    for side in SIDES:
        dim, prefix = layer.head_dim(side), f"layers.{layer.geometry.index}.{side}"
        energies = torch.logspace(-3, 3, dim, 2, dtype=torch.float64)
        turns = torch.linalg.qr(torch.randn(2, heads, dim, dim, dtype=torch.float64, generator=generator)).Q
        costs, covariance = turns @ (energies.unsqueeze(1) * turns.mT)
        center = torch.randn(heads, dim, dtype=torch.float64, generator=generator) if side == "k" else None
        basis = fitted_basis(costs, covariance, spec.exponent, center)
        costs = moved_hessian(costs, basis)
        gains = {f"{prefix}_gain": value_gains(torch.linalg.eigvalsh(costs))} if side == "v" else {}
        factor, _ = feedback_factor(rotated(costs, signs[f"{prefix}_signs"]), spec.damping)
        found |= basis.tensors(prefix) | gains | {f"{prefix}_feedback": factor}
    return found


def texts_of_length(loaded: LoadedModel, spec: DataSpec, count: int, purpose: str) -> TokenDataset:
    """The first ``count`` of the spec's texts that have ``spec.seq_len`` tokens, which is where they are cut."""
    assert loaded.tokenizer is not None
    data = load_sequences(spec, loaded.tokenizer, purpose=purpose)
    long = [number for number, tokens in enumerate(data.sequences) if tokens.numel() == spec.seq_len]
    if len(long) < count:
        found = f"{len(long)} of {spec.num_samples} texts of {spec.source} have {spec.seq_len} tokens"
        raise SystemExit(f"{found}, {count} were asked for")
    return picked(data, long[:count])


def picked(data: TokenDataset, numbers: Sequence[int]) -> TokenDataset:
    """The sequences of these numbers."""
    parts = (data.sequences, data.loss_masks, data.kinds)
    sequences, masks, kinds = (tuple(part[number] for number in numbers) for part in parts)
    return replace(data, sequences=sequences, loss_masks=masks, kinds=kinds)


def layers_with(loaded: LoadedModel, k: Format, v: Format) -> tuple[LayerPlan, ...]:
    """Every layer with pages stored in these formats."""
    bare = bare_layers(loaded.geometry)
    return tuple(replace(layer, k=(k,), v=(v,)) if layer.is_paged else layer for layer in bare)


def mean_and_error(values: Sequence[float] | Tensor) -> Pair:
    """Mean over texts and its standard error (0 for a single one)."""
    found = torch.as_tensor(values, dtype=torch.float64)
    return float(found.mean()), float(found.std() / math.sqrt(len(found))) if len(found) > 1 else 0.0


def ratio_and_error(sums: Tensor, counts: Tensor) -> Pair:
    """Mean over tokens, from each text's sum and count, and its standard error over texts (delta method; 0 for a single
    one)."""
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
