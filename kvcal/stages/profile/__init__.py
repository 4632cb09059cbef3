"""The profile stage: measures what every candidate format costs in every layer, and writes the profile.

One backward per batch of sequences gives the statistics of ``profile.observers``, PM-KVQ's sensitivities (Eq. 5) and
KVmix's weight-gradient norms among them; then the KL to the 16-bit cache is measured for one layer's keys or values at
a time (``stages.divergence``). Both resume where an interrupted run stopped (``stages.checkpoint``), and neither's
memory grows with the number of sequences.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from kvcal.data.sequences import TokenDataset
from kvcal.errors import NonFiniteActivations
from kvcal.models.load import LoadedModel, weight_bytes
from kvcal.models.taps import check_taps
from kvcal.plan.page_format import SIDES, Side
from kvcal.progress import Reporter
from kvcal.recipe import CacheSpec, ProfileSpec
from kvcal.stages.batches import Batch, for_each_batch
from kvcal.stages.checkpoint import Checkpoint, Mean, State, Statistic, require_steps, summed
from kvcal.stages.divergence import LOCKSTEP, Text, divergences, kl_texts, one_side_plan, padded_texts, unquantized_plan
from kvcal.stages.profile.observers import OBSERVERS, GradientPass
from kvcal.stages.profile.record import KIND, SCHEMA, Profile, ProfileSetup, load, save

__all__ = ["KIND", "SCHEMA", "Profile", "ProfileSetup", "load", "run_profile", "save"]

GRADIENTS, DIVERGENCES = "gradient samples", "divergence steps"
# Tokens of a batch of gradients, padding included.
BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}
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
        gradients = GradientPass(
            loaded.model,
            loaded.geometry,
            {side: setup.candidates(side) for side in SIDES},
            cache.num_sink_tokens,
            cache.param_dtype,
        )
        measure = partial(gradient_means, gradients)
        most_tokens = BATCH_TOKENS[loaded.model.device.type]
        most_tokens = for_each_batch(data, most_tokens, measure, GRADIENTS, checkpoint, reporter, "profile: gradients")
        runs = [range(number, number + 1) for number in range(len(steps))]
        kl_means = summed(lambda number: divergence_means(loaded, setup, steps[number]))
        checkpoint.run(DIVERGENCES, runs, kl_means, reporter, "profile: divergence")
        profile = Profile(replace(setup, batch_tokens=most_tokens), checkpoint.state.means)
        save(profile, inputs, path)
    return profile


def gradient_means(gradients: GradientPass, batch: Batch) -> dict[str, Mean]:
    """The statistics of a batch by name."""
    found = gradients.measure(batch)
    means = {"loss": Mean.of(found.loss_B)}
    for place, (name, observer) in product(found.errors, OBSERVERS.items()):
        means[f"{name}.{place[1]}.{place[0]}"] = Mean.of(observer.observe(found, place))
    return means


def divergence_means(loaded: LoadedModel, setup: ProfileSetup, step: Step) -> dict[str, Mean]:
    """The KL of some layers' sides on a batch of texts, by name: so many sides that their plans fill a lockstep."""
    places, texts = step
    reference = unquantized_plan(loaded.identity, loaded.geometry)
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
    return {_kl_name(*place): Mean.of(row.T) for place, row in zip(places, rows, strict=True)}


def _kl_name(index: int, side: Side) -> str:
    return f"kl.{side}.{index}"


def _divergence_steps(setup: ProfileSetup, texts: Sequence[Text]) -> list[Step]:
    places = [(layer.index, side) for layer, side in product(setup.layers, SIDES) if setup.kl_candidates(side)]
    most = max((len(setup.kl_candidates(side)) for _, side in places), default=1)
    return list(product(_split(places, max(1, LOCKSTEP // most)), _split(texts, KL_BATCH)))


def _split(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    return [items[first : first + size] for first in range(0, len(items), size)]
