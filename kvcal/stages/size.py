"""The bytes of a cache, and how far a memory goes with them: at the same bits in every layer, before anything is
measured, and for a finished plan, which gains on 16 bits.

The rows of equal bits are recipes with [formats] alone, so that each can be compiled as it stands. Bytes are the plan's
own (``Plan.nbytes``); what a memory has to hold beside the cache is what a budget of a whole device counts: weights,
logits and the workspace of a decode step. The largest batch and context are found by bisection, since all of these grow
with both. Left out: activations of a long prompt, and what the framework itself takes.

On several devices (tensor parallelism) each holds its share of the KV heads, and copies where there are fewer heads
than devices; weights and states are divided evenly.

The KL to expect of a finished plan is the one that it was chosen by, on calibration text: measured for the whole plan
by a search; after a profile, the sum of what each layer's keys and values cause alone, which need not add up.
`kvcal eval` measures it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from kvcal.errors import UsageError
from kvcal.geometry import AttentionGeometry, Geometry, LayerGeometry, ModelIdentity, StateGeometry
from kvcal.models.config import ModelSizes
from kvcal.plan.layer import LayerPlan, bare_layers
from kvcal.plan.page_format import RAW, SIDES
from kvcal.plan.plan import Plan, Workload
from kvcal.plan.tensors import tensors_nbytes
from kvcal.quantities import MAX_BATCH, MAX_CONTEXT
from kvcal.recipe import fixed_layers
from kvcal.recipe_files import load_recipe
from kvcal.store.workspace import logits_bytes, step_workspace

if TYPE_CHECKING:  # what measures is not needed for sizes
    from kvcal.stages.allocate.record import Allocation
    from kvcal.stages.profile.record import Profile

RECIPES = ("16-bit", "uniform-8", "uniform-4", "uniform-3", "uniform-2")
KlSource = Literal["measured by the search", "sum of single layers"]


@dataclass(frozen=True)
class Fit:
    """One plan in a memory: bytes of ``total`` at the workload; the largest batch at its context and the largest
    context at its batch, 0 where not even one fits."""

    total: int
    max_batch: int
    max_context: int


@dataclass(frozen=True)
class SizeRow:
    """One recipe at a workload; ``fit`` is None without a memory."""

    recipe: str
    bits_per_value: float
    cache_bytes: int
    fit: Fit | None


def uniform_sizes(sizes: ModelSizes, workload: Workload, memory: int | None, devices: int = 1) -> Iterator[SizeRow]:
    """A row for each of ``RECIPES``, on each of ``devices`` alike. ``memory``: bytes of one device, which needs
    ``sizes.weight_bytes``.

    Raises:
        UsageError: heads that cannot be shared out evenly, or a memory without known weights.
    """
    if memory is not None and sizes.weight_bytes is None:
        raise UsageError(
            f"{sizes.id}: its weights are not here, neither their safetensors files nor an index",
            hint="state their bytes, such as --weights 16GB",
        )
    geometry = shared_geometry(sizes.geometry, devices)
    weights = -(-(sizes.weight_bytes or 0) // devices)
    identity = ModelIdentity(sizes.id, geometry.model_type, "", "", "")
    for name in RECIPES:
        formats = load_recipe(name).formats
        assert formats is not None
        layers = fixed_layers(formats, bare_layers(geometry))
        plan = Plan(identity, geometry.cache_dtype, layers, workload, {})
        fit = None if memory is None else fit_of(plan, memory, weights, sizes.vocab_size)
        yield SizeRow(name, plan.bits_per_value(), plan.predicted_bytes, fit)


def finest(rows: list[SizeRow], memory: int) -> SizeRow | None:
    """The first row that fits the memory, None where none does."""
    return next((row for row in rows if row.fit is not None and row.fit.total <= memory), None)


def fit_of(plan: Plan, memory: int, weights: int | None, vocab_size: int) -> Fit:
    """The reach of ``memory`` bytes. ``weights``: their bytes, None where the memory is for the cache alone."""
    tensors, alike = tensors_nbytes(plan.tensors), Counter(map(_without_index, plan.layers))
    # A step's workspace is that of its largest layer, where nothing is predicted from another one.
    is_predicted = any(layer.predictor(side) is not None for layer in plan.layers for side in SIDES)
    distinct = plan.layers if is_predicted else tuple(alike)

    def total(batch: int, context: int) -> int:
        row = sum(count * layer.nbytes(plan.cache_dtype, (context,), context) for layer, count in alike.items())
        cache = batch * row + tensors
        if weights is None:
            return cache
        workspace = step_workspace(distinct, plan.cache_dtype, batch, context).nbytes
        return weights + cache + logits_bytes(batch, vocab_size) + workspace

    batch, context = plan.workload.batch, plan.workload.context
    return Fit(
        total(batch, context),
        _largest(MAX_BATCH, lambda count: total(count, context) <= memory),
        _largest(MAX_CONTEXT, lambda count: total(batch, count) <= memory),
    )


def _without_index(layer: LayerPlan) -> LayerPlan:
    """The key of a layer's bytes, equal for layers that take the same."""
    return replace(layer, geometry=replace(layer.geometry, index=0), k_predictor=None, v_predictor=None)


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest count from 1 to ``most`` that fits, 0 for none; what fits stays so with less."""
    return bisect_left(range(1, most + 1), True, key=lambda count: not fits(count))


def shared_geometry(geometry: Geometry, devices: int) -> Geometry:
    """The share of one of ``devices``. UsageError where heads cannot be shared out evenly."""
    return replace(geometry, layers=tuple(_shared(layer, devices) for layer in geometry.layers))


def _shared(layer: LayerGeometry, devices: int) -> LayerGeometry:
    if isinstance(layer, StateGeometry):
        return replace(layer, bytes_per_sequence=-(-layer.bytes_per_sequence // devices))
    assert isinstance(layer, AttentionGeometry)
    queries, heads = layer.num_query_heads, layer.num_kv_heads
    if queries % devices or (heads % devices and devices % heads):
        raise UsageError(
            f"--tp {devices}: layer {layer.index} has {queries} query heads and {heads} KV heads, which {devices} "
            "devices cannot share evenly",
            hint="choose a divisor of the query heads that divides the KV heads, or is a multiple of them",
        )
    state_bytes = -(-layer.state_bytes // devices)
    heads = max(1, heads // devices)
    return replace(layer, num_query_heads=queries // devices, num_kv_heads=heads, state_bytes=state_bytes)


@dataclass(frozen=True)
class Gain:
    """Bytes of the cache at the plan's workload, in the plan and in the model's own; ``budget`` in bytes, and how far
    it goes with the plan and at 16 bits: None where pages shrink on a schedule for the workload alone. ``expected_kl``
    in nats per token, None where it was not measured for these formats."""

    cache_bytes: int
    raw_bytes: int
    bits_per_value: float
    budget: int
    fit: Fit | None
    raw_fit: Fit
    expected_kl: float | None
    kl_source: KlSource | None

    @property
    def ratio(self) -> float:
        return self.raw_bytes / self.cache_bytes


def gain_of(plan: Plan, allocation: Allocation, vocab_size: int, profile: Profile | None) -> Gain:
    """The gain of ``plan`` within the budget of its ``allocation``; ``profile``: what the allocation was made from;
    None after a search."""
    split = allocation.split
    fit = None if plan.is_progressive else fit_of(plan, split.budget, split.weights, vocab_size)
    kl = allocation.loss if profile is None else expected_kl(allocation, profile)
    source: KlSource = "measured by the search" if profile is None else "sum of single layers"
    return Gain(
        plan.predicted_bytes,
        plan.raw_nbytes(plan.workload.lengths),
        plan.bits_per_value(),
        split.budget,
        fit,
        fit_of(plan.unquantized(), split.budget, split.weights, vocab_size),
        kl,
        None if kl is None else source,
    )


def expected_kl(allocation: Allocation, profile: Profile) -> float | None:
    """The sum of the KL that each layer's keys and values cause alone in their formats; None where one of them was not
    measured, or a layer's heads differ."""
    found = list(_single_kls(allocation, profile))
    return None if any(kl is None for kl in found) else sum(kl for kl in found if kl is not None)


def _single_kls(allocation: Allocation, profile: Profile) -> Iterator[float | None]:
    for layer in allocation.layers:
        for side in SIDES if layer.is_paged else ():
            candidates = profile.setup.kl_candidates(side)
            formats = [profile.cache.format(side, *candidate) for candidate in candidates]
            chosen = layer.formats(side)
            if set(chosen) == {RAW}:
                yield 0.0
            elif len(chosen) == 1 and chosen[0] in formats:
                yield float(profile.kl(layer.geometry.index, side)[formats.index(chosen[0])])
            else:
                yield None
