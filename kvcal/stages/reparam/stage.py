"""The reparam stage: λ (and a static offset) for the keys of every layer, calibrated on short text at far positions.

PM-KVQ moves outliers of key channels into the query before keys are quantized per token (Eq. 9-10). A channel's
outliers depend on how far RoPE turns it, and slow channels turn once in tens of thousands of tokens; so positions are
multiplied by ``position_scale`` (Eq. 12): 2,048 tokens stand for 8,192, at the cost of 2,048. Never beyond the model's
context, though: what lies there is never cached.

Two passes over the data, one sequence at a time, which an interrupted run continues:

1. statistics: largest, smallest and mean K_post per channel, without the sinks, which are never quantized;
2. search: for every α of the grid, without and with the offset, the keys are written to the plan's pages and read back,
   and the attention block runs again with them (``rereading``), as decoding would read them. The smallest squared
   error of the block's output wins; values stay exact, since no choice here changes theirs.

Left out: one α per head, α chosen on the loss instead of layer by layer, and far positions for the keys alone, with the
model at its ordinary ones (experiments/show_reparam.py measures the difference). Layers whose keys are per channel,
before RoPE, 16 bits or in a sliding window stay as they are, and so do latents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcal.data.sequences import TokenDataset
from kvcal.errors import NonFiniteActivations, UsageError, naming
from kvcal.models.key_bias import bias_findings
from kvcal.models.load import LoadedModel
from kvcal.models.rereading import Reread, rereading
from kvcal.models.rope import rotary_pairs
from kvcal.models.taps import Captured, check_taps
from kvcal.plan.layer import LATENTS, LayerPlan
from kvcal.plan.tensors import lattice_tensors
from kvcal.progress import Reporter
from kvcal.recipe import ReparamSpec
from kvcal.stages.checkpoint import Checkpoint, Mean, State, shards, summed
from kvcal.stages.reparam.record import KIND, LayerReparam, Reparam, Subject, save
from kvcal.stages.reparam.search import (
    KeyStatistics,
    best_candidate,
    calibration_inputs,
    candidate_tensors,
    fitting_scale,
    is_searched,
    key_statistics,
    merged_statistics,
    page_segments,
    read_back,
    searched_heads,
    with_candidate,
)

STATISTICS, SEARCH = "statistics samples", "search samples"


def run_reparam(
    loaded: LoadedModel,
    layers: tuple[LayerPlan, ...],
    data: TokenDataset,
    spec: ReparamSpec,
    inputs: dict[str, Any],
    path: Path,
    reporter: Reporter,
) -> Reparam:
    """Calibrate λ for the formats of ``layers`` and write the record to ``path``; an earlier run of the same ``inputs``
    that was interrupted is continued.

    Raises:
        UsageError: a sequence longer than the model's context, or none in which a page is read.
        UnsupportedModel: the model's keys or their rotation cannot be observed.
        NonFiniteActivations: NaN or infinity, naming layer and sample.
        ArtifactError: a file cannot be written.
    """
    searched = {layer.geometry.index: layer for layer in layers if searched_heads(layer) is not None}
    check_taps(loaded.model, loaded.geometry)
    pairs = rotary_pairs(loaded.model, loaded.geometry, searched)
    tensors = {name: t.to(loaded.model.device) for name, t in lattice_tensors(layers).items()}
    if loaded.geometry.has_latents:
        reporter.say(f"reparam: {LATENTS}")
    if searched:
        _require_pages(data, searched)
    elif any(layer.takes_transforms for layer in layers):
        reporter.say("reparam: no layer quantizes its keys per token, nothing to search")
    scale = fitting_scale(loaded, data.sequences, spec.position_scale, reporter)
    search = _Search(loaded, searched, pairs, tensors, data, spec, scale)
    with Checkpoint(path, KIND, inputs, search.start(), reporter) as checkpoint:
        if searched:
            count = len(data.sequences)
            statistics = summed(search.statistics, merged_statistics)
            checkpoint.run(STATISTICS, shards(count), statistics, "reparam: statistics", merged_statistics)
            errors = summed(partial(search.errors, KeyStatistics.by_layer(checkpoint.state.means)))
            checkpoint.run(SEARCH, shards(count), errors, "reparam: search")
        record = search.record(checkpoint.state.means)
        save(record, inputs, path)
    return record


def _require_pages(data: TokenDataset, layers: Mapping[int, LayerPlan]) -> None:
    longest = max(len(tokens) for tokens in data.sequences)
    formats = [fmt for layer in layers.values() for fmt in layer.k if is_searched(fmt)]
    if not any(fmt.pages_read(longest - 1) for fmt in formats):
        raise UsageError(
            f"the longest of {len(data.sequences)} sequences has {longest} tokens, of which none reads a quantized "
            "page: all errors would be 0",
            hint="give longer sequences",
        )


@dataclass(frozen=True, eq=False)
class _Search:
    """One run of the stage. ``layers``: the searched ones, by index; ``tensors``: the plan's, on the model's device."""

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

    @property
    def candidates(self) -> tuple[tuple[float, bool], ...]:
        """(α, with offset), in the order of the errors."""
        offsets = (False, True) if self.spec.offset else (False,)
        return tuple((alpha, has_offset) for has_offset in offsets for alpha in self.alphas)

    @property
    def sinks(self) -> dict[int, int]:
        """Tokens that none of a layer's searched heads quantizes."""
        formats = {index: [fmt for fmt in layer.k if is_searched(fmt)] for index, layer in self.layers.items()}
        return {index: min(fmt.num_sink_tokens for fmt in searched) for index, searched in formats.items()}

    def start(self) -> State:
        """Statistics, squared errors of all candidates [C] and energy [] of each layer, without observations."""
        means: dict[str, Mean] = {}
        for index, layer in self.layers.items():
            means |= KeyStatistics.empty(layer.attention.num_kv_heads, layer.attention.k_head_dim).stored(index)
            means |= {f"energy.{index}": Mean.empty(()), f"errors.{index}": Mean.empty((len(self.candidates),))}
        return State(means, {STATISTICS: 0, SEARCH: 0})

    def statistics(self, sample: int) -> dict[str, Mean]:
        """The statistics of one sequence."""
        with naming(f"sample {sample}"):
            found = key_statistics(self.loaded, self.data.sequences[sample], self.position_scale, self.sinks)
        return {name: mean for index, keys in found.items() for name, mean in keys.stored(index).items()}

    def errors(self, statistics: Mapping[int, KeyStatistics], sample: int) -> dict[str, Mean]:
        """Errors and energies of one sequence."""
        found: dict[str, Mean] = {}

        def measure(captured: Captured, reread: Reread) -> None:
            index = captured.layer
            if index in self.layers:
                errors_C, energy = self._errors(captured, reread, statistics[index])
                found[f"errors.{index}"] = Mean(errors_C.cpu(), 1)
                found[f"energy.{index}"] = Mean(energy.cpu(), 1)

        inputs = calibration_inputs(self.loaded, self.data.sequences[sample][None], self.position_scale)
        with naming(f"sample {sample}"), rereading(self.loaded.model, measure, self.loaded.geometry):
            self.loaded.model(**inputs)
        return found

    def _errors(self, captured: Captured, reread: Reread, statistics: KeyStatistics) -> tuple[Tensor, Tensor]:
        """Squared errors of all candidates [C] and energy [] of one layer and sequence, fp64."""
        layer, pairs, k_post_BNTD = self.layers[captured.layer], self.pairs[captured.layer], captured.k_post_BNTD
        segments = page_segments(layer, k_post_BNTD.shape[2])
        exact = reread(k_post_BNTD, segments).double()
        reads_pages = any(bool(segment.is_stored_NT.any()) for segment in segments)
        errors = [] if reads_pages else [exact.new_zeros(())] * len(self.candidates)
        for alpha, has_offset in self.candidates if reads_pages else ():
            found = candidate_tensors(layer, statistics, pairs, alpha, has_offset, self.spec.shared_heads)
            changed, tensors = with_candidate(layer, self.tensors, *(t.to(k_post_BNTD.device) for t in found))
            k_read_BNTD = read_back(changed, self.loaded.geometry.cache_dtype, tensors, k_post_BNTD)
            errors.append((reread(k_read_BNTD, segments).double() - exact).square().sum())
        errors_C = torch.stack(errors)
        if not bool(torch.isfinite(errors_C).all()):
            raise NonFiniteActivations(f"the attention output of layer {captured.layer} is not finite")
        return errors_C, exact.square().sum()

    def record(self, means: Mapping[str, Mean]) -> Reparam:
        """The best candidate of every layer."""
        loaded, spec, data = self.loaded, self.spec, self.data
        by_layer = KeyStatistics.by_layer(means)
        energies = {index: float(keys.square) / max(keys.count, 1) for index, keys in by_layer.items()}
        biases = bias_findings(loaded, energies)
        found, lambdas, offsets = [], {}, {}
        for index, layer in self.layers.items():
            errors = tuple(means[f"errors.{index}"].result().tolist())
            plain, with_offset = errors[: spec.num_steps + 1], errors[spec.num_steps + 1 :]
            step, has_offset = best_candidate(plain, with_offset)
            alpha, error = self.alphas[step], (with_offset if has_offset else plain)[step]
            lambdas[index], offsets[index] = candidate_tensors(
                layer, by_layer[index], self.pairs[index], alpha, has_offset, spec.shared_heads
            )
            energy = float(means[f"energy.{index}"].result())
            found.append(LayerReparam(index, alpha, has_offset, error, energy, plain, with_offset, *biases[index]))
        about_data = (data.fingerprint, data.description, data.num_tokens)
        subject = Subject(loaded.identity, loaded.geometry, self.position_scale, *about_data, spec)
        return Reparam(subject, tuple(found), lambdas, offsets)
