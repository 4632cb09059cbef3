"""The profile stage: measures what every candidate format costs in every layer, and writes the profile.

One backward per sequence gives the statistics of ``profile.observers``, PM-KVQ's sensitivities (Eq. 5) and KVmix's
weight-gradient norms among them; then the KL to the 16-bit cache is measured for one layer's keys or values at a time
(``stages.divergence``). Both resume where an interrupted run stopped (``stages.checkpoint``), and neither's memory
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
from kvcal.plan.page_format import SIDES, Side
from kvcal.progress import Reporter
from kvcal.recipe import CacheSpec, ProfileSpec
from kvcal.stages.checkpoint import Checkpoint, Mean, State, Statistic, require_steps
from kvcal.stages.divergence import LOCKSTEP, Text, divergences, kl_texts, one_side_plan, padded_texts, unquantized_plan
from kvcal.stages.profile.observers import OBSERVERS, GradientPass
from kvcal.stages.profile.record import KIND, SCHEMA, Profile, ProfileSetup, load, save

__all__ = ["KIND", "SCHEMA", "Profile", "ProfileSetup", "load", "run_profile", "save"]

GRADIENTS, DIVERGENCES = "gradient samples", "divergence steps"
# Texts fed at once: 1.5 times faster than one by one on a CPU, and as many logits of one chunk are held.
KL_BATCH = 4

Item = TypeVar("Item")
# Layers' sides to measure, and the texts to measure them on.
Step = tuple[Sequence[tuple[int, Side]], Sequence[Text]]


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
    setup = ProfileSetup(
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
    check_taps(loaded.model, loaded.geometry)  # before the long part, as the next line: they may raise
    texts = kl_texts(data, spec.kl_samples, spec.kl_tokens, cache) if setup.layers else []
    totals, steps = setup.totals(), _divergence_steps(setup, texts)
    start = State({name: Mean.empty(total.extents) for name, total in totals.items()}, {GRADIENTS: 0, DIVERGENCES: 0})

    def declare(done: Mapping[str, int], _: Collection[str]) -> dict[str, Statistic]:
        require_steps(done, {GRADIENTS: len(data.sequences), DIVERGENCES: len(steps)})
        counts: dict[str, int | None] = dict.fromkeys(totals, done[GRADIENTS])
        counts |= {_kl_name(*place): 0 for place in product((layer.index for layer in setup.layers), SIDES)}
        counts |= {_kl_name(*place): None for places, _ in steps[: done[DIVERGENCES]] for place in places}
        return {name: Statistic(total, counts[name]) for name, total in totals.items()}

    with Checkpoint(path, KIND, inputs, start, declare, reporter) as checkpoint:
        _measure_gradients(loaded, data, setup, checkpoint, reporter)
        _measure_divergences(loaded, steps, setup, checkpoint, reporter)
        profile = Profile(setup, checkpoint.state.means)
        save(profile, inputs, path)
    return profile


def _measure_gradients(
    loaded: LoadedModel, data: TokenDataset, setup: ProfileSetup, checkpoint: Checkpoint, reporter: Reporter
) -> None:
    """One step a sequence."""
    candidates = {side: setup.candidates(side) for side in SIDES}
    cache, total = setup.cache, len(data.sequences)
    gradients = GradientPass(loaded.model, loaded.geometry, candidates, cache.num_sink_tokens, cache.param_dtype)
    for number in range(checkpoint.state.done[GRADIENTS], total):
        reporter(number, total, "profile: gradients")
        sample = gradients.measure(number, data.sequences[number], data.loss_masks[number])
        observed = {"loss": torch.tensor([sample.loss])}
        for place, (name, observer) in product(sample.errors, OBSERVERS.items()):
            observed[f"{name}.{place[1]}.{place[0]}"] = observer.observe(sample, place).unsqueeze(0)
        checkpoint.advance(checkpoint.state.after(GRADIENTS, observed))
    reporter(total, total, "profile: gradients")


def _measure_divergences(
    loaded: LoadedModel, steps: Sequence[Step], setup: ProfileSetup, checkpoint: Checkpoint, reporter: Reporter
) -> None:
    """One step for some layers' sides, so many that their plans fill a lockstep, in a batch of texts."""
    reference = unquantized_plan(loaded.identity, loaded.geometry)
    for number in range(checkpoint.state.done[DIVERGENCES], len(steps)):
        reporter(number, len(steps), "profile: divergence")
        places, texts = steps[number]
        plans = [
            one_side_plan(reference, index, side, setup.cache.format(side, *candidate))
            for index, side in places
            for candidate in setup.kl_candidates(side)
        ]
        try:
            kl_Pn = divergences(loaded.model, reference, plans, *padded_texts(texts))
        except NonFiniteActivations as error:
            names = ", ".join(f"{side} of layer {index}" for index, side in places)
            samples = [text.sample for text in texts]
            message = f"samples {samples} with a quantized cache ({names}): {error.message}"
            raise NonFiniteActivations(message, error.hint) from error
        rows = kl_Pn.split([len(setup.kl_candidates(side)) for _, side in places])
        observed = {_kl_name(*place): row.T for place, row in zip(places, rows, strict=True)}
        checkpoint.advance(checkpoint.state.after(DIVERGENCES, observed))
    reporter(len(steps), len(steps), "profile: divergence")


def _kl_name(index: int, side: Side) -> str:
    return f"kl.{side}.{index}"


def _divergence_steps(setup: ProfileSetup, texts: Sequence[Text]) -> list[Step]:
    places = [(layer.index, side) for layer, side in product(setup.layers, SIDES) if setup.kl_candidates(side)]
    most = max((len(setup.kl_candidates(side)) for _, side in places), default=1)
    return list(product(_split(places, max(1, LOCKSTEP // most)), _split(texts, KL_BATCH)))


def _split(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    return [items[first : first + size] for first in range(0, len(items), size)]
