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
from typing import Any

from kvcal.data.sequences import TokenDataset
from kvcal.errors import NonFiniteActivations
from kvcal.models.load import LoadedModel, weight_bytes
from kvcal.models.taps import check_taps
from kvcal.plan.page_format import SIDES, Side
from kvcal.plan.plan import Plan
from kvcal.progress import Reporter
from kvcal.recipe import CacheSpec, ProfileSpec
from kvcal.stages.batches import Batch, for_each_batch
from kvcal.stages.checkpoint import Checkpoint, Mean, State, Statistic, require_steps, summed
from kvcal.stages.divergence import (
    LOCKSTEP,
    Room,
    Text,
    cache_share,
    divergences,
    kl_texts,
    one_side_plan,
    padded_texts,
    unquantized_plan,
)
from kvcal.stages.profile.observers import OBSERVERS, GradientPass
from kvcal.stages.profile.record import KIND, SCHEMA, Profile, ProfileSetup, load, save

__all__ = ["KIND", "SCHEMA", "Profile", "ProfileSetup", "load", "run_profile", "save"]

GRADIENTS, DIVERGENCES = "gradient samples", "divergence steps"
# Tokens of a batch of gradients, padding included.
BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}
# Texts fed at once: 1.5 times faster than one by one on a CPU, and as many logits of one chunk are held.
KL_BATCH = 4

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
        room = Room(LOCKSTEP, reporter)
        runs = [range(number, number + 1) for number in range(len(steps))]
        kl_means = summed(lambda number: divergence_means(loaded, setup, steps[number], room))
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


def divergence_means(loaded: LoadedModel, setup: ProfileSetup, step: Step, room: Room) -> dict[str, Mean]:
    """The KL of some layers' sides on a batch of texts, by name: so many sides that their plans fill a lockstep."""
    places, texts = step
    reference = unquantized_plan(loaded.identity, loaded.geometry)
    plans = [plan for place in places for plan in _plans_of(setup, reference, place)]
    try:
        kl_Pn = divergences(loaded.model, reference, plans, *padded_texts(texts), room)
    except NonFiniteActivations as error:
        names = ", ".join(f"{side} of layer {index}" for index, side in places)
        samples = [text.sample for text in texts]
        message = f"samples {samples} with a quantized cache ({names}): {error.message}"
        raise NonFiniteActivations(message, error.hint) from error
    rows = kl_Pn.split([len(setup.kl_candidates(side)) for _, side in places])
    return {_kl_name(*place): Mean.of(row.T) for place, row in zip(places, rows, strict=True)}


def _kl_name(index: int, side: Side) -> str:
    return f"kl.{side}.{index}"


def _plans_of(setup: ProfileSetup, reference: Plan, place: tuple[int, Side]) -> list[Plan]:
    """A layer's side alone in each of its candidates."""
    return [one_side_plan(reference, *place, setup.cache.format(place[1], *c)) for c in setup.kl_candidates(place[1])]


def _divergence_steps(setup: ProfileSetup, texts: Sequence[Text]) -> list[Step]:
    """Layers' sides, so many that their plans fill a lockstep, or one, with each batch of texts."""
    reference = unquantized_plan(setup.identity, setup.geometry)
    groups: list[list[tuple[int, Side]]] = []
    free = 0.0
    for layer, side in product(setup.layers, SIDES):
        place = (layer.index, side)
        needed = sum(cache_share(reference, plan) for plan in _plans_of(setup, reference, place))
        if needed > free:
            groups.append([])
            free = LOCKSTEP
        if needed:
            groups[-1].append(place)
        free -= needed
    return list(product(groups, [texts[first : first + KL_BATCH] for first in range(0, len(texts), KL_BATCH)]))
