"""The reparam stage: λ for the keys of every layer, calibrated on short text at far positions.

PM-KVQ moves outliers of key channels into the query before keys are quantized per token (Eq. 9-10). A
channel's outliers depend on how far RoPE turns it, and slow channels turn once in tens of thousands of
tokens; so positions are multiplied by ``position_scale`` (Eq. 12): 2,048 tokens stand for 8,192, at the cost
of 2,048. Never beyond the model's context, though: what lies there is never cached.

Two passes over the data, one sequence at a time, of which an interrupted run continues the second:

1. magnitudes: max|K_post| per channel, without the sinks, which are never quantized;
2. search: for every α of the grid, the keys are written to the plan's pages and read back, and the attention
   block runs again with them (``rereading``), as decoding would read them. The smallest squared error of the
   block's output wins; values stay exact, since no choice here changes theirs.

The record holds the whole error curve of each layer's search, so that it can be seen how much λ brings, and
where.

Layers whose keys are per channel, before RoPE, 16 bits or in a sliding window stay as they are, and so do
latents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor

from kvcal import artifact
from kvcal.data.sequences import TokenDataset
from kvcal.distributed import map_over_ranks
from kvcal.errors import ArtifactError, NonFiniteActivations, UsageError, naming
from kvcal.geometry import Index
from kvcal.models.load import LoadedModel
from kvcal.models.rope import rotary_pairs
from kvcal.models.taps import Captured, Reread, check_taps, rereading
from kvcal.plan.layer import LATENTS, LayerPlan
from kvcal.plan.tensors import layout_tensors
from kvcal.progress import Reporter
from kvcal.records import record_of
from kvcal.stages.calibration import CalibrationSubject, calibration_inputs, fitting_scale
from kvcal.stages.checkpoint import Checkpoint, Mean, State, shards, summed
from kvcal.strict import STRICT, Amount, Share, dump
from kvcal.systems.pm_kvq.lambda_candidates import key_magnitudes, lambda_of, page_segments, read_back, takes_rescale
from kvcal.systems.pm_kvq.recipe import ReparamSpec

KIND = "reparam"
SCHEMA = 2
SEARCH = "search samples"


@pydantic_dataclass(frozen=True, config=STRICT)
class LayerReparam:
    """One searched layer. Errors are squared, summed over tokens and channels of the attention block's
    output, as a mean over samples; ``energy`` is the same sum of the exact output. ``errors[a]``: at the a-th
    α of the grid."""

    index: Index
    alpha: Share
    error: Amount
    energy: Amount
    errors: tuple[Amount, ...]


@pydantic_dataclass(frozen=True, config=STRICT)
class Subject(CalibrationSubject):
    """The model, data and settings of a calibration."""

    spec: ReparamSpec


@pydantic_dataclass(frozen=True, config=STRICT)
class _Body:
    subject: Subject
    layers: tuple[LayerReparam, ...]


@dataclass(frozen=True, eq=False)
class Reparam:
    """``lambdas``: {layer: fp32 [N, D]} of every searched layer, 1 where the search chose none; for keys
    after RoPE, equal on each rotary pair."""

    subject: Subject
    layers: tuple[LayerReparam, ...]
    lambdas: Mapping[int, Tensor]

    def apply(self, layers: tuple[LayerPlan, ...]) -> tuple[LayerPlan, ...]:
        """The layers with λ, where the search chose one. Raises ArtifactError: the layers are another
        model's, or store keys before RoPE."""
        if tuple(layer.geometry for layer in layers) != self.subject.geometry.layers:
            raise ArtifactError(
                f"λ was calibrated for {self.subject.identity.id}, whose layers are not the plan's",
                hint="run reparam again for this model",
            )
        changed = {layer.index for layer in self.layers if layer.alpha > 0}
        if wrong := [x.geometry.index for x in layers if x.geometry.index in changed and x.k_pages == "pre"]:
            raise ArtifactError(
                f"λ of layer {wrong[0]} is for keys after RoPE, and the layer stores them before",
                hint="run reparam again for these formats",
            )
        return tuple(replace(x, k_rescale=True) if x.geometry.index in changed else x for x in layers)

    def tensors(self) -> dict[str, Tensor]:
        return {f"layers.{x.index}.k_rescale": self.lambdas[x.index] for x in self.layers if x.alpha > 0}


def run_reparam(
    loaded: LoadedModel,
    layers: tuple[LayerPlan, ...],
    data: TokenDataset,
    spec: ReparamSpec,
    inputs: dict[str, Any],
    path: Path,
    reporter: Reporter,
) -> Reparam:
    """Calibrate λ for the formats of ``layers`` and write the record to ``path``; an earlier run of the same
    ``inputs`` that was interrupted is continued."""
    searched = {layer.geometry.index: layer for layer in layers if takes_rescale(layer)}
    check_taps(loaded.model, loaded.geometry)
    pairs = rotary_pairs(loaded.model, loaded.geometry, searched)
    tensors = {name: t.to(loaded.model.device) for name, t in layout_tensors(layers).items()}
    if loaded.geometry.has_latents:
        reporter.say(f"reparam: {LATENTS}")
    longest = max(len(tokens) for tokens in data.sequences)
    if searched and not any(layer.format("k").pages_read(longest - 1) for layer in searched.values()):
        raise UsageError(
            f"the longest of {len(data.sequences)} sequences has {longest} tokens, of which none reads a quantized "
            "page: all errors would be 0",
            hint="give longer sequences",
        )
    if not searched and any(layer.takes_transforms for layer in layers):
        reporter.say("reparam: no layer quantizes its keys per token, nothing to search")
    scale = fitting_scale(loaded, data.sequences, spec.position_scale, reporter)
    search, count = _Search(loaded, searched, pairs, tensors, data, spec, scale), len(data.sequences)
    with Checkpoint(path, KIND, inputs, search.start(), reporter) as checkpoint:
        magnitudes: dict[int, Tensor] = {}
        if searched:
            for number, found in enumerate(map_over_ranks(range(count), search.magnitudes)):
                reporter(number + 1, count, "reparam: magnitudes")
                magnitudes = {index: keys.maximum(magnitudes.get(index, keys)) for index, keys in found.items()}
            errors = summed(partial(search.errors, magnitudes))
            checkpoint.run(SEARCH, shards(count), errors, "reparam: search")
        record = search.record(magnitudes, checkpoint.state.means)
        save(record, inputs, path)
    return record


@dataclass(frozen=True, eq=False)
class _Search:
    """One run of the stage. ``layers``: the searched ones, by index; ``tensors``: the plan's, on the model's
    device."""

    loaded: LoadedModel
    layers: Mapping[int, LayerPlan]
    pairs: Mapping[int, Tensor]
    tensors: Mapping[str, Tensor]
    data: TokenDataset
    spec: ReparamSpec
    position_scale: float

    @property
    def alphas(self) -> tuple[float, ...]:
        return tuple(step / self.spec.num_steps for step in range(self.spec.num_steps + 1))

    def start(self) -> State:
        """Squared errors at all α [C] and energy [] of each layer, without observations."""
        means: dict[str, Mean] = {}
        for index in self.layers:
            means |= {f"energy.{index}": Mean.empty(()), f"errors.{index}": Mean.empty((len(self.alphas),))}
        return State(means, {SEARCH: 0})

    def magnitudes(self, sample: int) -> dict[int, Tensor]:
        """Those of one sequence, by layer."""
        with naming(f"sample {sample}"):
            return key_magnitudes(self.loaded, self.data.sequences[sample], self.position_scale, self.layers)

    def errors(self, magnitudes: Mapping[int, Tensor], sample: int) -> dict[str, Mean]:
        found: dict[str, Mean] = {}

        def measure(captured: Captured, reread: Reread) -> None:
            index = captured.layer
            if index in self.layers:
                errors_C, energy = self._errors(captured, reread, magnitudes[index])
                found[f"errors.{index}"] = Mean(errors_C.cpu(), 1)
                found[f"energy.{index}"] = Mean(energy.cpu(), 1)

        inputs = calibration_inputs(self.loaded, self.data.sequences[sample][None], self.position_scale)
        with naming(f"sample {sample}"), rereading(self.loaded.model, measure, self.loaded.geometry):
            self.loaded.model(**inputs)
        return found

    def _errors(self, captured: Captured, reread: Reread, magnitude_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Squared errors at all α [C] and energy [] of one layer and sequence, fp64."""
        layer, pairs, k_post_BNTD = self.layers[captured.layer], self.pairs[captured.layer], captured.k_post_BNTD
        segments = page_segments(layer, k_post_BNTD.shape[2])
        exact = reread(k_post_BNTD, segments).double()
        reads_pages = any(bool(segment.is_stored_NT.any()) for segment in segments)
        errors = [] if reads_pages else [exact.new_zeros(())] * len(self.alphas)
        for alpha in self.alphas if reads_pages else ():
            lambda_ND = lambda_of(magnitude_ND, pairs, alpha).to(k_post_BNTD.device)
            tensors = {**self.tensors, f"layers.{captured.layer}.k_rescale": lambda_ND}
            rescaled, dtype = replace(layer, k_rescale=True), self.loaded.geometry.cache_dtype
            k_read_BNTD = read_back(rescaled, dtype, tensors, k_post_BNTD)
            errors.append((reread(k_read_BNTD, segments).double() - exact).square().sum())
        errors_C = torch.stack(errors)
        if not bool(torch.isfinite(errors_C).all()):
            raise NonFiniteActivations(f"the attention output of layer {captured.layer} is not finite")
        return errors_C, exact.square().sum()

    def record(self, magnitudes: Mapping[int, Tensor], means: Mapping[str, Mean]) -> Reparam:
        """The best α of every layer; of equal ones the smaller."""
        loaded, data, found, lambdas = self.loaded, self.data, [], {}
        for index in self.layers:
            errors = tuple(means[f"errors.{index}"].result().tolist())
            error, alpha = min(zip(errors, self.alphas, strict=True))
            lambdas[index] = lambda_of(magnitudes[index], self.pairs[index], alpha)
            found.append(LayerReparam(index, alpha, error, float(means[f"energy.{index}"].result()), errors))
        about_data = (data.fingerprint, data.description, data.num_tokens)
        subject = Subject(loaded.identity, loaded.geometry, self.position_scale, *about_data, self.spec)
        return Reparam(subject, tuple(found), lambdas)


def save(record: Reparam, inputs: dict[str, Any], path: Path) -> None:
    body = _Body(record.subject, record.layers)
    tensors = {f"layers.{index}.k_rescale": lambda_ND for index, lambda_ND in record.lambdas.items()}
    artifact.write(path, artifact.Artifact(KIND, SCHEMA, inputs, dump(body), tensors))


def load(path: Path) -> Reparam:
    stored = artifact.read(path, KIND, SCHEMA)
    body = record_of(_Body, stored.body, path)
    lambdas = {layer.index: stored.tensors[f"layers.{layer.index}.k_rescale"] for layer in body.layers}
    return Reparam(body.subject, body.layers, lambdas)


def table_rows(record: Reparam) -> tuple[list[str], list[list[str]]]:
    """(headers, rows) for people: one row a layer; errors as shares of the exact output's energy."""
    headers = ["layer", "α", "λ", "error without", "error with"]
    rows = []
    for layer in record.layers:
        energy, lambda_ND = max(layer.energy, 1e-300), record.lambdas[layer.index]
        errors = [f"{error / energy:.2e}" for error in (layer.errors[0], layer.error)]
        extent = f"{float(lambda_ND.min()):.2f} – {float(lambda_ND.max()):.2f}"
        rows.append([str(layer.index), f"{layer.alpha:.2f}", extent, *errors])
    return headers, rows
