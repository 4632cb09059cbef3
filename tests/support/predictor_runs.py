"""Shared by the tests of the predictor stage and of prefixes: a tiny loaded model, data, formats, and one
run."""

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from cache_cases import HEAD_DIM, VOCAB_SIZE, tiny_llama
from form_cases import rotary_table
from tiny_models import as_loaded
from torch import Tensor

from kvcal.data.sequences import TokenDataset
from kvcal.models.load import LoadedModel
from kvcal.plan.layer import LayerPlan, bare_layers
from kvcal.plan.page_format import Boost, Format, Tier
from kvcal.plan.plan import Plan, Workload
from kvcal.plan.tensors import needed_tensors
from kvcal.progress import Silent
from kvcal.systems.aqua_kv.fit import run_fit_predictors
from kvcal.systems.aqua_kv.recipe import PredictorSpec
from kvcal.systems.aqua_kv.record import PredictorRecord
from kvcal.systems.aqua_kv.transform import Predictor

FIRST = Format(4, "token", 64, num_sink_tokens=4)
REST = Format(2, "token", 64, num_sink_tokens=4)
BOOSTED = Format(2, "channel", 32, 4, boost=Boost("query_magnitude", (Tier(4, 0.5),)))
WORKLOAD = Workload(8, 4096)


@functools.cache
def loaded_llama(num_layers: int = 3) -> LoadedModel:
    return as_loaded(tiny_llama(2, num_layers))


def sequences(lengths: Sequence[int], seed: int = 0, vocab_size: int = VOCAB_SIZE) -> TokenDataset:
    generator = torch.Generator().manual_seed(seed)
    tokens = tuple(torch.randint(3, vocab_size, (length,), generator=generator) for length in lengths)
    masks = tuple(torch.arange(length) > 0 for length in lengths)
    return TokenDataset(tokens, masks, f"print-{seed}-{list(lengths)}", "random tokens")


def aqua_layers(loaded: LoadedModel, k_pages: str = "post") -> tuple[LayerPlan, ...]:
    """The first paged layer in ``FIRST``, others in ``REST``."""
    found, fmt = [], FIRST
    for layer in bare_layers(loaded.geometry):
        if layer.is_paged:
            layer, fmt = LayerPlan(layer.geometry, fmt, fmt, k_pages=k_pages), REST
        found.append(layer)
    return tuple(found)


def fit(
    loaded: LoadedModel, layers: tuple[LayerPlan, ...], data: TokenDataset, spec: PredictorSpec | None = None,
    workload: Workload = WORKLOAD, path: Path | None = None,
) -> PredictorRecord:  # fmt: skip
    spec = spec or PredictorSpec(drop=False)
    with tempfile.TemporaryDirectory() as folder:
        target = path or Path(folder) / "predictors.safetensors"
        return run_fit_predictors(
            loaded, layers, {}, data, spec, workload, {"data": data.fingerprint}, target, Silent()
        )


def plan_with(loaded: LoadedModel, layers: tuple[LayerPlan, ...], record: PredictorRecord | None = None) -> Plan:
    """A plan of ``layers``, with the record's predictors."""
    applied, tensors = (layers, {}) if record is None else (record.apply(layers), record.tensors())
    return Plan(loaded.identity, loaded.geometry.cache_dtype, applied, WORKLOAD, {}, tensors)


def plan_of_random_predictors(
    loaded: LoadedModel, k: Format, v: Format, first_k: Format | None = None, first_v: Format | None = None
) -> Plan:
    """Values of all layers but the first are predicted, by random weights."""
    layers = tuple(
        LayerPlan(one, k, v, v_predictor=Predictor("linear", i - 1))
        if i
        else LayerPlan(one, first_k or k, first_v or v)
        for i, one in enumerate(loaded.geometry.layers)
    )
    generator, tensors = torch.Generator().manual_seed(3), {}
    for name, spec in needed_tensors(layers, loaded.geometry.cache_dtype).items():
        if name.endswith("rotary"):
            tensors[name] = rotary_table(HEAD_DIM, HEAD_DIM // 2)
        else:
            tensors[name] = (0.1 * torch.randn(*spec.extents, generator=generator)).to(getattr(torch, spec.dtype))
    return Plan(loaded.identity, loaded.geometry.cache_dtype, layers, WORKLOAD, {}, tensors)


@functools.cache
def fitted_llama(k_pages: str = "post") -> tuple[tuple[LayerPlan, ...], PredictorRecord]:
    """Layers of ``loaded_llama`` and their predictors; ``k_pages`` of the layers without one."""
    layers = aqua_layers(loaded_llama(), k_pages)
    return layers, fit(loaded_llama(), layers, sequences([260] * 6))


def prompt(length: int) -> Tensor:
    return sequences([length], seed=7).sequences[0]
