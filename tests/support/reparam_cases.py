"""Shared by the tests of λ: models with a loud rotary pair, data, and a run of the stage."""

from dataclasses import replace
from pathlib import Path

import torch
import transformers as hf
from tiny_models import _IDS, _SHAPE, _build
from transformers import PreTrainedModel

from kvcal.data.sequences import TokenDataset
from kvcal.models.load import LoadedModel
from kvcal.plan.layer import LayerPlan, bare_layers
from kvcal.plan.page_format import Format
from kvcal.progress import Silent
from kvcal.systems.pm_kvq import reparam as reparam_stage
from kvcal.systems.pm_kvq.recipe import ReparamSpec

PER_TOKEN = Format(2, "token", 128, num_sink_tokens=1, recent_window=16)
SPEC = ReparamSpec(position_scale=1.0, num_steps=4)
INPUTS = {"data.fingerprint": "f"}


def outlier_model(num_layers: int = 2, scale: float = 12.0, kind: type = hf.LlamaConfig, **other) -> PreTrainedModel:
    """2 KV heads, 4 query heads of 16. A rotary pair of keys is ``scale`` times larger, of queries smaller."""
    shape = _SHAPE | {"num_key_value_heads": 2, "num_hidden_layers": num_layers, "hidden_size": 32, **other}
    model = _build(kind(**_IDS, **shape, head_dim=16))
    with torch.no_grad():
        for layer in model.model.layers:
            for channel in (5, 13):
                layer.self_attn.k_proj.weight.view(2, 16, -1)[:, channel] *= scale
                layer.self_attn.q_proj.weight.view(4, 16, -1)[:, channel] /= scale
    return model


def data_of(*lengths: int) -> TokenDataset:
    generator = torch.Generator().manual_seed(5)
    sequences = tuple(torch.randint(3, 128, (length,), generator=generator) for length in lengths)
    return TokenDataset(sequences, tuple(torch.arange(n) > 0 for n in lengths), "f", "random tokens")


DATA = data_of(290, 60, 180)


def layers_of(loaded: LoadedModel, k: Format = PER_TOKEN) -> tuple[LayerPlan, ...]:
    bare = bare_layers(loaded.geometry)
    return tuple(replace(layer, k=k) if layer.is_paged else layer for layer in bare)


def run(folder: Path, loaded: LoadedModel, layers=None, reporter=None, **other) -> reparam_stage.Reparam:
    given = {"data": DATA, "spec": SPEC, "inputs": INPUTS} | other
    folder.mkdir(exist_ok=True)
    return reparam_stage.run_reparam(
        loaded, layers_of(loaded) if layers is None else layers, path=folder / "reparam.safetensors",
        reporter=reporter or Silent(), **given,
    )  # fmt: skip
