"""The bytes of a cache, and how far a memory goes with them: at the same bits in every layer, before anything
is measured, and for a finished plan.

Rows of equal bits are recipes with [formats] alone. A memory holds the cache (``Plan.nbytes``), weights,
logits and the workspace of a decode step; activations of a long prompt are left out. The largest batch and
context are found by bisection. With tensor parallelism, each device holds its share of the KV heads, and
copies where there are fewer heads than devices; weights and states are divided evenly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvcal.errors import UsageError
from kvcal.geometry import AttentionGeometry, Geometry, LayerGeometry, ModelIdentity, StateGeometry
from kvcal.models.config import ModelSizes
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.layer import bare_layers, fixed_layers
from kvcal.plan.page_format import RAW, SIDES
from kvcal.plan.plan import Plan, Workload
from kvcal.plan.tensors import needed_nbytes, tensors_nbytes
from kvcal.quantities import MAX_BATCH, MAX_CONTEXT
from kvcal.recipe_files import load_recipe
from kvcal.store.workspace import logits_bytes, step_workspace

if TYPE_CHECKING:  # what measures is not needed for sizes
    from kvcal.stages.allocate.record import BudgetSplit

MAX_PAGES = MAX_CONTEXT // PAGE_TOKENS
RECIPES = ("16-bit", "uniform-8", "uniform-4", "uniform-3", "uniform-2")


@dataclass(frozen=True)
class Fit:
    """One plan in a memory: bytes of ``total`` at the workload; the largest batch at its context and the
    largest context at its batch, 0 where not even one fits."""

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
    """A row for each of ``RECIPES``, on each of ``devices`` alike. ``memory``: bytes of one device, which
    needs ``sizes.weight_bytes``."""
    if memory is not None and sizes.weight_bytes is None:
        raise UsageError(
            f"{sizes.id}: its weights are not here, neither their safetensors files nor an index",
            hint="state their bytes, such as --weights 16GB",
        )
    geometry = replace(sizes.geometry, layers=tuple(_shared(layer, devices) for layer in sizes.geometry.layers))
    weights = -(-(sizes.weight_bytes or 0) // devices)
    identity = ModelIdentity(sizes.id, geometry.model_type, "", "", "")
    for name in RECIPES:
        formats = load_recipe(name).formats
        assert formats is not None
        layers = fixed_layers(formats, bare_layers(geometry))
        plan = Plan(identity, geometry.cache_dtype, layers, workload, {})
        fit = None if memory is None else fit_of(plan, memory, weights, sizes.vocab_size)
        yield SizeRow(name, plan.bits_per_value(), plan.predicted_bytes, fit)


def fit_of(plan: Plan, memory: int, weights: int | None, vocab_size: int) -> Fit:
    """The reach of ``memory`` bytes. ``weights``: their bytes, None where the memory is for the cache
    alone."""
    tensors = tensors_nbytes(plan.tensors)
    alike = Counter(layer.alone for layer in plan.layers)  # layers that take the same bytes
    # A step's workspace is that of its largest layer, where none reads another one.
    reads_others = any(layer.sources(side) for layer in plan.layers for side in SIDES)
    distinct = plan.layers if reads_others else tuple(alike)

    def row(context: int) -> int:
        return sum(count * layer.nbytes(plan.cache_dtype, (context,), context) for layer, count in alike.items())

    def total(batch: int, context: int) -> int:
        cache = batch * row(context) + tensors
        if weights is None:
            return cache
        workspace = step_workspace(distinct, plan.cache_dtype, batch, context).nbytes
        return weights + cache + logits_bytes(batch, vocab_size) + workspace

    batch, context = plan.workload.batch, plan.workload.context
    most = min(MAX_BATCH, memory // max(1, row(context)))  # the cache alone is within the memory
    return Fit(
        total(batch, context),
        bisect_left(range(1, most + 1), True, key=lambda count: total(count, context) > memory),
        bisect_left(range(1, MAX_CONTEXT + 1), True, key=lambda count: total(batch, count) > memory),
    )


def _shared(layer: LayerGeometry, devices: int) -> LayerGeometry:
    """The share of one of ``devices``. UsageError where heads cannot be shared out evenly."""
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


def least_bits(geometry: Geometry, workload: Workload) -> float | None:
    """All-in bits of the smallest plan of `kvcal plan`; None where its recipe does not choose: without layers
    that grow with tokens, and for latents."""
    recipe, paged = load_recipe("default"), [layer for layer in bare_layers(geometry) if layer.takes_transforms]
    if not paged or geometry.has_latents:
        return None
    spec, total = recipe.profile, 0
    for layer in paged:
        formats = {
            side: recipe.cache.format(side, min(spec.kl_bits), spec.k_axes[0], spec.kl_group, spec.quantizers[0])
            for side in SIDES
        }
        for side, fmt in formats.items():
            shape = layer.attention.num_kv_heads, layer.head_dim(side), geometry.cache_dtype, workload.lengths
            total += min(one.nbytes(side, *shape) for one in (fmt, RAW))
        in_basis = {f"{side}_{part}": True for side in SIDES for part in ("basis", "feedback")}
        whole = replace(layer, k=formats["k"], v=formats["v"], **in_basis, v_gain=True)  # type: ignore[arg-type]
        total += needed_nbytes([whole], geometry.cache_dtype)
    values = sum(layer.attention.values_per_token for layer in paged) * workload.batch * workload.context
    return budget_bits(total, values)


def budget_bits(nbytes: int, num_values: int) -> float:
    """The least bits per cached value, in hundredths, whose budget holds so many bytes."""
    cents = -(-800 * nbytes // num_values)
    return next(bits for bits in (cents / 100, (cents + 1) / 100) if int(bits * num_values / 8) >= nbytes)


def pays_from(plan: Plan) -> int | None:
    """The number of tokens from which on one sequence takes fewer bytes with the plan than with the model's
    own cache; None where bits are scheduled, or where it never does."""

    def pays(num_tokens: int) -> bool:
        return plan.nbytes((num_tokens,)) < plan.raw_nbytes((num_tokens,))

    if plan.is_progressive or not pays(PAGE_TOKENS * MAX_PAGES):
        return None
    # A page adds less than its tokens take at 16 bits. Within a page the plan takes no more, once it is begun.
    pages = bisect_left(range(1, MAX_PAGES), True, key=lambda count: pays(PAGE_TOKENS * count)) + 1
    stripes = [fmt.stripe_tokens for layer in plan.layers for fmt in layer.formats if fmt.stripe_tokens < PAGE_TOKENS]
    last = range(PAGE_TOKENS * (pages - 1) + max(stripes, default=1), PAGE_TOKENS * pages)
    return last.start + bisect_left(last, True, key=pays)


@dataclass(frozen=True)
class Gain:
    """Bytes of the cache at the plan's workload, in the plan and in the model's own; ``budget`` in bytes, and
    how far it goes with the plan and at 16 bits: None where bits are scheduled for the workload
    alone."""

    cache_bytes: int
    raw_bytes: int
    bits_per_value: float
    budget: int
    fit: Fit | None
    raw_fit: Fit

    @property
    def ratio(self) -> float:
        return self.raw_bytes / self.cache_bytes


def gain_of(plan: Plan, split: BudgetSplit, vocab_size: int) -> Gain:
    fit = None if plan.is_progressive else fit_of(plan, split.budget, split.weights, vocab_size)
    raw_fit = fit_of(plan.unquantized(), split.budget, split.weights, vocab_size)
    raw_bytes = plan.raw_nbytes(plan.workload.lengths)
    return Gain(plan.predicted_bytes, raw_bytes, plan.bits_per_value(), split.budget, fit, raw_fit)
