"""The profile stage: measures what every candidate format costs in every layer, and writes the profile.

One backward per batch of sequences gives the statistics of ``profile.observers``, PM-KVQ's sensitivities (Eq.
5) and KVmix's weight-gradient norms among them; then the KL to the 16-bit cache is measured for one layer's
keys or values at a time (``stages.divergence``). Both resume where an interrupted run stopped
(``stages.checkpoint``), and neither's memory grows with the number of sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from kvcal.data.sequences import TokenDataset
from kvcal.errors import naming
from kvcal.models.load import LoadedModel, weight_bytes
from kvcal.models.streamed import is_streamed
from kvcal.models.taps import check_taps
from kvcal.plan.page_format import SIDES, Side
from kvcal.plan.plan import Plan
from kvcal.progress import Reporter
from kvcal.recipe import CacheSpec, ProfileSpec
from kvcal.stages import divergence
from kvcal.stages.checkpoint import (
    Batch,
    Checkpoint,
    Mean,
    State,
    for_each_batch,
    graph_bytes,
    host_bytes,
    parameter_bytes,
    summed,
)
from kvcal.stages.profile.observers import MAX_LOGITS, OBSERVERS, GradientPass
from kvcal.stages.profile.record import KIND, TOGETHER, Profile, ProfileSetup, save
from kvcal.stages.profile.sensitivity import Candidate
from kvcal.systems.basis.fit import BasisRecord

GRADIENTS, DIVERGENCES = "gradient samples", "divergence steps"
# Tokens of a batch of gradients, padding included.
BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}
# Of a device's memory, for gradients by estimate; fragments and kernels' scratch take the rest.
MEMORY_SHARE = 0.85
# Of the host's, for the inputs of streamed layers until the backward.
INPUTS_SHARE = 0.25

# Of layers by cache index: the keys or the values that are quantized at once.
Place = tuple[Sequence[int], Side]
# Places to measure, and the texts to measure them on.
Step = tuple[Sequence[Place], Sequence[divergence.Text]]


def run_profile(
    loaded: LoadedModel,
    data: TokenDataset,
    spec: ProfileSpec,
    cache: CacheSpec,
    inputs: dict[str, Any],
    path: Path,
    reporter: Reporter,
    basis: BasisRecord | None = None,
) -> Profile:
    """Measure, and write to ``path``; an earlier run of the same ``inputs`` that was interrupted is
    continued. ``basis``: of the pages whose KL is measured."""
    about_data = (data.fingerprint, data.description, len(data.sequences), data.num_tokens, data.num_loss_tokens)
    weights = weight_bytes(loaded.model)
    setup = ProfileSetup(
        loaded.identity, loaded.geometry, weights, loaded.vocab_size, spec, cache, *about_data, loaded.max_context
    )
    check_taps(loaded.model, loaded.geometry)  # before the long part, as the next line: they may raise
    texts = divergence.kl_texts(data, spec.kl_samples, spec.kl_tokens, cache) if setup.layers else []
    steps = _divergence_steps(setup, texts, divergence.texts_at_once(loaded, spec.kl_tokens))
    means = {name: Mean.empty(shape) for name, shape in setup.totals().items()}
    start = State(means, {GRADIENTS: 0, DIVERGENCES: 0})
    with Checkpoint(path, KIND, inputs, start, reporter) as checkpoint:
        most_tokens = batch_tokens(loaded, max(map(len, data.sequences)))
        if spec.gradients:
            measured = {side: setup.candidates(side) for side in SIDES}
            gradients = GradientPass(loaded.model, loaded.geometry, measured, cache)
            measure = partial(gradient_means, gradients)
            at_once, label = batches_at_once(loaded, most_tokens), "profile: gradients"
            most_tokens = for_each_batch(data, most_tokens, measure, GRADIENTS, checkpoint, label, at_once)
        room = divergence.Room(divergence.LOCKSTEP, reporter)
        runs = [range(number, number + 1) for number in range(len(steps))]
        kl_means = summed(lambda number: divergence_means(loaded, setup, steps[number], room, basis))
        checkpoint.run(DIVERGENCES, runs, kl_means, "profile: divergence")
        profile = Profile(replace(setup, batch_tokens=most_tokens), checkpoint.state.means)
        save(profile, inputs, path)
    return profile


def batch_tokens(loaded: LoadedModel, width: int) -> int:
    """Tokens of a batch of gradients, padding included: ``BATCH_TOKENS``, halved until the estimated peak
    fits into the memory that the device has in all, or was given, but not below ``width``, one sequence.
    Never by what is free: bytes of a profile depend on it."""
    device = loaded.model.device
    most_tokens = BATCH_TOKENS[device.type]
    if device.type == "cuda":
        memory = MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory
        if loaded.residence is not None:
            memory = loaded.residence.memory - (1 - MEMORY_SHARE) * loaded.residence.working
        while most_tokens >= 2 * width and gradient_bytes(loaded, most_tokens) > memory:
            most_tokens //= 2
    return most_tokens


def batches_at_once(loaded: LoadedModel, most_tokens: int) -> int:
    """Batches that share the loads of a streamed model's layers: as many as find room for their layers'
    inputs in host memory, and for their logits' gradients on the device. Results do not depend on it."""
    residence = loaded.residence
    if residence is None or not is_streamed(loaded.model):
        return 1
    shapes = residence.shapes
    by_host = int(INPUTS_SHARE * host_bytes()) // (shapes.num_layers * most_tokens * shapes.hidden)
    free = int(MEMORY_SHARE * residence.working) - shapes.working(most_tokens)
    return max(1, min(by_host, 1 + free // shapes.waiting(most_tokens)))


def gradient_bytes(loaded: LoadedModel, num_tokens: int) -> int:
    """Bytes of the device while gradients of a batch are measured: weights, the graph, logits with their
    gradient, and the fp32 parts of the loss; of a streamed model those that its residence counts, of a
    layer's graph."""
    model, residence = loaded.model, loaded.residence
    if residence is not None and is_streamed(model):
        return residence.memory - residence.working + residence.shapes.working(num_tokens)
    num_logits = num_tokens * loaded.vocab_size
    logits = 2 * model.dtype.itemsize * num_logits + 3 * 4 * min(MAX_LOGITS, num_logits)
    return parameter_bytes(model) + num_tokens * graph_bytes(model) + logits


def gradient_means(gradients: GradientPass, batches: Sequence[Batch]) -> list[dict[str, Mean]]:
    every = []
    for found in gradients.measure_together(batches):
        means = {"loss": Mean.of(found.loss_B)}
        for (index, side), (name, observer) in product(found.errors, OBSERVERS.items()):
            means[f"{name}.{side}.{index}"] = Mean.of(observer.observe(found, (index, side)))
        every.append(means)
    return every


def divergence_means(
    loaded: LoadedModel, setup: ProfileSetup, step: Step, room: divergence.Room, basis: BasisRecord | None = None
) -> dict[str, Mean]:
    places, texts = step
    reference = divergence.unquantized_plan(loaded.identity, loaded.geometry)
    plans = [plan for place in places for plan in _plans_of(setup, reference, place)]
    plans = plans if basis is None else [basis.changed(plan) for plan in plans]
    names = ", ".join(f"{side} of layer {_name(setup, indices)}" for indices, side in places)
    with naming(f"samples {[text.sample for text in texts]} with a quantized cache ({names})"):
        given = reference, plans, *divergence.padded_texts(texts)
        found = divergence.deviations(loaded.model, *given, room, is_flip_wanted=False)
    sizes = [len(_candidates(setup, place)) for place in places]
    parts = zip(places, found.kl_Pn.split(sizes), found.kl_of_sequences(len(texts)).split(sizes), strict=True)
    means: dict[str, Mean] = {}
    for (indices, side), kl_Cn, of_texts_CB in parts:
        name = f"{side}.{_name(setup, indices)}"
        means[f"kl.{name}"] = Mean.of(kl_Cn.T)
        means[f"kl_of_texts.{name}"] = Mean.of(torch.stack([of_texts_CB, of_texts_CB.square()]).permute(2, 0, 1))
    return means


def _plans_of(setup: ProfileSetup, reference: Plan, place: Place) -> list[Plan]:
    """A place alone in each of the candidates whose KL is measured there."""
    plans = []
    for candidate in _candidates(setup, place):
        plan = reference
        for index in place[0]:
            plan = divergence.one_side_plan(plan, index, place[1], setup.cache.format(place[1], *candidate))
        plans.append(plan)
    return plans


def _candidates(setup: ProfileSetup, place: Place) -> tuple[Candidate, ...]:
    return setup.measured(place[1]) if len(place[0]) == 1 else setup.together(place[1])


def _name(setup: ProfileSetup, indices: Sequence[int]) -> str:
    return TOGETHER if len(indices) > 1 else str(indices[0])


def _divergence_steps(setup: ProfileSetup, texts: Sequence[divergence.Text], batch: int) -> list[Step]:
    """Layers' sides, so many that their plans fill a lockstep, or one, with each batch of texts."""
    reference = divergence.unquantized_plan(setup.identity, setup.geometry)
    groups: list[list[Place]] = []
    free = 0.0
    every = tuple(layer.index for layer in setup.layers)
    together = [every] if len(every) > 1 else []
    for indices, side in product([*((index,) for index in every), *together], SIDES):
        place: Place = (indices, side)
        needed = sum(divergence.cache_share(reference, plan) for plan in _plans_of(setup, reference, place))
        if needed > free:
            groups.append([])
            free = divergence.LOCKSTEP
        if needed:
            groups[-1].append(place)
        free -= needed
    return list(product(groups, [texts[first : first + batch] for first in range(0, len(texts), batch)]))
