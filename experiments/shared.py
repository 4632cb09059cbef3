"""What the experiments share: arguments, texts, means with their errors, and tables in Markdown."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kvcal.data.sequences import DataSpec, TokenDataset, load_sequences
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import Format, LayerPlan, bare_layers

Pair = tuple[float, float]


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
