"""The profile stage: measures what every candidate costs, and writes the profile (see stages.profile_record).

One backward per sequence gives PM-KVQ's sensitivities (Eq. 5) and KVmix's weight-gradient norms
(``observers.gradients``); then the KL to the 16-bit cache is measured for one layer's keys or values at a time
(``stages.divergence``). Both go on where an interrupted run stopped (``stages.checkpoint``), and neither's memory
grows with the number of sequences. Left out: several devices (statistics merge, so shards of the data could).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch

from kvcal.data.sequences import TokenDataset
from kvcal.errors import NonFiniteActivations
from kvcal.models.load import LoadedModel, weight_bytes
from kvcal.models.taps import check_taps
from kvcal.plan.plan import SIDES, Side
from kvcal.progress import Reporter
from kvcal.recipe import CacheSpec, ProfileSpec
from kvcal.stages.checkpoint import Checkpoint, Mean, State, Statistic, require_steps
from kvcal.stages.divergence import LOCKSTEP, Text, divergences, kl_texts, one_side_plan, padded_texts, unquantized_plan
from kvcal.stages.profile.gradients import GradientObserver
from kvcal.stages.profile.record import KIND, SCHEMA, Profile, Subject, load, save

__all__ = ["KIND", "SCHEMA", "Profile", "Subject", "load", "run_profile", "save"]

GRADIENTS, DIVERGENCES = "gradient samples", "divergence steps"
# Texts fed at once: 1.5 times faster than one by one on a CPU, and as many logits of one chunk are held.
KL_BATCH = 4

Item = TypeVar("Item")


def run_profile(
    loaded: LoadedModel,
    data: TokenDataset,
    spec: ProfileSpec,
    cache: CacheSpec,
    inputs: dict[str, Any],
    path: Path,
    reporter: Reporter,
) -> Profile:
    """Measure, and write to ``path``; an earlier run of the same ``inputs`` that was interrupted is continued.

    Raises:
        NonFiniteActivations: NaN or infinity, naming layer and sample.
        UsageError: no sequence is long enough for the KL.
        UnsupportedModel: keys, values or their projections cannot be found.
        ArtifactError: a file cannot be written.
    """
    config = loaded.model.config.get_text_config(decoder=True)
    subject = Subject(
        loaded.identity,
        loaded.geometry,
        weight_bytes(loaded.model),
        config.vocab_size,
        spec,
        cache,
        data.fingerprint,
        data.description,
        len(data.sequences),
        data.num_tokens,
        data.num_loss_tokens,
        getattr(config, "max_position_embeddings", None),
    )
    check_taps(loaded.model, loaded.geometry)  # before the long part, as the next line: they may refuse
    texts = kl_texts(data, spec.kl_samples, spec.kl_tokens, cache) if subject.layers else []
    means = {name: Mean.empty(spec.extents) for name, spec in subject.totals().items()}
    start = State(means, {GRADIENTS: 0, DIVERGENCES: 0})

    def declare(done: Mapping[str, int], _: Collection[str]) -> dict[str, Statistic]:
        require_steps(done, {GRADIENTS: len(data.sequences), DIVERGENCES: len(_divergence_steps(subject, texts))})
        measured = {cell for group, _ in _divergence_steps(subject, texts)[: done[DIVERGENCES]] for cell in group}
        counts: dict[str, int | None] = {
            f"kl.{side}.{layer.index}": None if (layer.index, side) in measured else 0
            for layer, side in product(subject.layers, SIDES)
        }
        return {name: Statistic(spec, counts.get(name, done[GRADIENTS])) for name, spec in subject.totals().items()}

    with Checkpoint(path, KIND, inputs, start, declare, reporter) as checkpoint:
        _measure_gradients(loaded, data, subject, checkpoint, reporter)
        _measure_divergences(loaded, texts, subject, checkpoint, reporter)
        profile = Profile(subject, checkpoint.state.means)
        save(profile, inputs, path)
    return profile


def _measure_gradients(
    loaded: LoadedModel, data: TokenDataset, subject: Subject, checkpoint: Checkpoint, reporter: Reporter
) -> None:
    """One step a sequence."""
    wanted = {side: subject.candidates(side) for side in SIDES}
    cache, total = subject.cache, len(data.sequences)
    observer = GradientObserver(loaded.model, loaded.geometry, wanted, cache.num_sink_tokens, cache.param_dtype)
    for sample in range(checkpoint.state.done[GRADIENTS], total):
        reporter(sample, total, "profile: gradients")
        found = observer.measure(sample, data.sequences[sample], data.loss_masks[sample])
        observed = {"loss": torch.tensor([found.loss])}
        for (index, side), errors in found.errors.items():
            observed[f"sensitivity.{side}.{index}"] = errors.weighted_NC.unsqueeze(0)
            observed[f"squared_error.{side}.{index}"] = errors.squared_C.unsqueeze(0)
            observed[f"energy.{side}.{index}"] = errors.energy.unsqueeze(0)
            observed[f"grad_norm.{side}.{index}"] = torch.tensor(
                [found.weight_grad_norms[index, side]], dtype=torch.float64
            )
        checkpoint.advance(checkpoint.state.after(GRADIENTS, observed))
    reporter(total, total, "profile: gradients")


def _measure_divergences(
    loaded: LoadedModel, texts: Sequence[Text], subject: Subject, checkpoint: Checkpoint, reporter: Reporter
) -> None:
    """One step for some layers' sides, so many that their plans fill a lockstep, in a batch of texts."""
    reference = unquantized_plan(loaded.identity, loaded.geometry)
    steps = _divergence_steps(subject, texts)
    for step in range(checkpoint.state.done[DIVERGENCES], len(steps)):
        reporter(step, len(steps), "profile: divergence")
        group, batch = steps[step]
        plans = [
            one_side_plan(reference, index, side, subject.cache.format(side, *candidate))
            for index, side in group
            for candidate in subject.kl_candidates(side)
        ]
        try:
            kl_Pn = divergences(loaded.model, reference, plans, *padded_texts(batch))
        except NonFiniteActivations as error:
            place = ", ".join(f"{side} of layer {index}" for index, side in group)
            samples = [text.sample for text in batch]
            raise NonFiniteActivations(
                f"samples {samples} with a quantized cache ({place}): {error.message}", error.hint
            ) from error
        rows = kl_Pn.split([len(subject.kl_candidates(side)) for _, side in group])
        observed = {f"kl.{side}.{index}": row.T for (index, side), row in zip(group, rows, strict=True)}
        checkpoint.advance(checkpoint.state.after(DIVERGENCES, observed))
    reporter(len(steps), len(steps), "profile: divergence")


def _divergence_steps(
    subject: Subject, texts: Sequence[Text]
) -> list[tuple[Sequence[tuple[int, Side]], Sequence[Text]]]:
    """(layers' sides, texts) of every step."""
    cells = [(layer.index, side) for layer, side in product(subject.layers, SIDES) if subject.kl_candidates(side)]
    most = max((len(subject.kl_candidates(side)) for _, side in cells), default=1)
    return list(product(_split(cells, max(1, LOCKSTEP // most)), _split(texts, KL_BATCH)))


def _split(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    return [items[first : first + size] for first in range(0, len(items), size)]
