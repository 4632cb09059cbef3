"""Compositions: all the ways to store a layer's keys or values that a search may choose from, and plans made of them.

A unit is a layer's K or V, or one KV head's; its options are the recipe's choices as far as they can be composed there,
and 16 bits, except where a prediction may read them and [cache] has sinks or a window: 16 bits have neither, so that
their pages are of other tokens than those predicted. Bytes of an option are exact and belong to it alone: records,
sinks, ring, query statistic, and the tensors it brings (λ, signs, predictor, rotary tables). The points of a lattice,
which options share, are reserved for the whole plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from pydantic import ValidationError
from torch import Tensor

from kvcal.errors import UsageError
from kvcal.geometry import Geometry
from kvcal.plan.layer import LayerPlan, Predictor, bare_layers
from kvcal.plan.page_format import RAW, SIDES, Format, Side
from kvcal.plan.plan import Workload
from kvcal.plan.tensors import lattice_tensors, needed_nbytes, needed_tensors
from kvcal.recipe import CacheSpec, KeyChoice, PredictorSpec, SearchSpec, ValueChoice
from kvcal.stages.allocate.record import one_or_each

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Unit:
    """A part of a layer that gets an option of its own. ``head`` None: all KV heads of the layer."""

    index: int
    side: Side
    head: int | None

    def __str__(self) -> str:
        return f"layer {self.index} {self.side.upper()}" + ("" if self.head is None else f" head {self.head}")


@dataclass(frozen=True)
class Composition:
    """An option. ``rescale``: the number of the choice whose λ the keys are divided by, None for none."""

    name: str
    format: Format
    rescale: int | None = None
    predictor: Predictor | None = None


@dataclass(frozen=True, eq=False)
class OptionTensors:
    """Tensors that options need beside their formats. ``lambdas``: for each number of a choice with rescale, λ [N, D]
    fp32 of every layer; ``predictors``: tensors of fitted predictors, and rotary tables, by their names in a plan."""

    lambdas: Mapping[int, Mapping[int, Tensor]]
    predictors: Mapping[str, Tensor]


def choice_name(choice: KeyChoice | ValueChoice) -> str:
    """The name of a choice in tables: "2 channel/128 + 12% at 4 (magnitude) λ"."""
    parts = [str(choice.num_bits)]
    if choice.num_bits < RAW.num_bits:
        axis = choice.axis if isinstance(choice, KeyChoice) else "token"
        parts.append(f"lattice d{choice.lattice_dim}" if choice.lattice_dim else f"{axis}/{choice.group_size}")
    if isinstance(choice, KeyChoice):
        if choice.boost is not None:
            tiers = ", ".join(f"{100 * tier.share:g}% at {tier.num_bits}" for tier in choice.boost.tiers)
            parts.append(f"+ {tiers} ({choice.boost.score})")
        if choice.rescale:
            parts.append("λ")
    if choice.predicted:
        parts.append("predicted")
    return " ".join(parts)


def choice_format(choice: KeyChoice | ValueChoice, cache: CacheSpec) -> Format:
    """UsageError, naming the choice, where its parts do not go together."""
    if choice.num_bits == RAW.num_bits:
        return RAW
    try:
        if isinstance(choice, ValueChoice):
            plain = cache.format("v", choice.num_bits, "token", choice.group_size)
            return replace(plain, lattice_dim=choice.lattice_dim)
        plain = cache.format("k", choice.num_bits, choice.axis, choice.group_size)
        return replace(plain, lattice_dim=choice.lattice_dim, boost=choice.boost)
    except ValidationError as conflict:
        reason = conflict.errors()[0]["msg"].removeprefix("Value error, ")
        raise UsageError(
            f"the choice {choice_name(choice)!r} cannot be composed: {reason}",
            hint="take it out of [search], or change the part that is named",
        ) from None


def options_of(
    layer: LayerPlan,
    side: Side,
    source: int | None,
    is_last: bool,
    spec: SearchSpec,
    cache: CacheSpec,
    predictors: PredictorSpec | None,
) -> tuple[Composition, ...]:
    """The compositions of a layer's side. ``source``: the paged layer before it, None for the first, which cannot be
    predicted; ``is_last``: no paged layer is behind it."""
    choices: Sequence[KeyChoice | ValueChoice] = spec.keys if side == "k" else spec.values
    options = []
    for number, choice in enumerate(choices):
        predictor = None
        if choice.predicted:
            _require_predictable(choice, cache, predictors)
            if source is None or predictors is None:
                continue
            predictor = Predictor(predictors.kind, source, predictors.rank, predictors.group_size)
        rescale = number if isinstance(choice, KeyChoice) and choice.rescale else None
        options.append(Composition(choice_name(choice), choice_format(choice, cache), rescale, predictor))
    options.append(Composition(choice_name(KeyChoice(16)), RAW))
    read_by_next = not is_last and any(choice.predicted for choice in choices)
    read_by_values = side == "k" and source is not None and any(choice.predicted for choice in spec.values)
    if (read_by_next or read_by_values) and (cache.num_sink_tokens or cache.k_recent_window or cache.v_recent_window):
        options = [option for option in options if option.format != RAW]
    unique: dict[object, Composition] = {}
    for option in options:
        unique.setdefault((option.format, option.rescale, option.predictor), option)
    return tuple(unique.values())


def _require_predictable(choice: KeyChoice | ValueChoice, cache: CacheSpec, predictors: PredictorSpec | None) -> None:
    name = choice_name(choice)
    if predictors is None:
        raise UsageError(
            f"the choice {name!r} is predicted, and the recipe has no [predictors]",
            hint="add [predictors], or take the choice out of [search]",
        )
    if cache.k_recent_window != cache.v_recent_window:
        raise UsageError(
            f"the choice {name!r} is predicted, and k_recent_window = {cache.k_recent_window} differs from "
            f"v_recent_window = {cache.v_recent_window}: pages would be of other tokens",
            hint="give both the same window in [cache]",
        )


def most_scratch(
    geometry: Geometry, spec: SearchSpec, cache: CacheSpec, predictors: PredictorSpec | None
) -> tuple[LayerPlan, ...]:
    """Every layer in those of its options that need the most scratch: predicted ones, else lattices."""
    layers, source = [], None
    for layer in bare_layers(geometry):
        if layer.is_paged:
            k, v = (
                max(
                    options_of(layer, side, source, False, spec, cache, predictors),
                    key=lambda option: (option.predictor is not None, option.format.lattice_dim or 0),
                )
                for side in SIDES
            )
            layer = _with_options(layer, [replace(k, rescale=None)], [v])
            source = layer.geometry.index
        layers.append(layer)
    return tuple(layers)


def composed_layers(
    geometry: Geometry, chosen: Mapping[Unit, Composition], brought: OptionTensors
) -> tuple[tuple[LayerPlan, ...], dict[str, Tensor]]:
    """The layers and plan tensors of one option for every unit. λ is 1 for heads that take none, where others do."""
    layers, tensors = [], {}
    for layer in bare_layers(geometry):
        if layer.is_paged:
            index, heads = layer.geometry.index, range(layer.attention.num_kv_heads)
            k, v = (
                [chosen.get(Unit(index, side, None)) or chosen[Unit(index, side, head)] for head in heads]
                for side in SIDES
            )
            layer = _with_options(layer, k, v)
            if layer.k_rescale:
                ones = torch.ones(layer.attention.k_head_dim)
                rows = [
                    ones if option.rescale is None else brought.lambdas[option.rescale][index][head]
                    for head, option in zip(heads, k, strict=True)
                ]
                tensors[f"layers.{index}.k_rescale"] = torch.stack(rows)
        layers.append(layer)
    needed = needed_tensors(layers, geometry.cache_dtype)
    tensors |= {name: tensor for name, tensor in brought.predictors.items() if name in needed}
    return tuple(layers), tensors | lattice_tensors(layers)


def _with_options(layer: LayerPlan, k: Sequence[Composition], v: Sequence[Composition]) -> LayerPlan:
    """The layer in one option for all heads, or one for each. Predictions are of all heads."""
    return LayerPlan(
        layer.geometry,
        one_or_each(tuple(option.format for option in k)),
        one_or_each(tuple(option.format for option in v)),
        k_rescale=any(option.rescale is not None for option in k),
        k_pages="post" if k[0].predictor is None else "pre",
        k_predictor=k[0].predictor,
        v_predictor=v[0].predictor,
    )


def option_nbytes(unit: Unit, option: Composition, layer: LayerPlan, geometry: Geometry, workload: Workload) -> int:
    """Bytes that the option takes at the workload, with the tensors that it alone brings (of λ a row for every head,
    whichever of them take it)."""
    heads = layer.attention.num_kv_heads if unit.head is None else 1
    dim, cache_dtype, raw = layer.head_dim(unit.side), geometry.cache_dtype, [Composition("", RAW)]
    alone = _with_options(layer, [option], raw) if unit.side == "k" else _with_options(layer, raw, [option])
    layers = [alone if one.geometry.index == unit.index else one for one in bare_layers(geometry)]
    shared = lattice_nbytes([(option.format.lattice_dim, option.format.num_bits)])
    stored = option.format.nbytes(unit.side, heads, dim, cache_dtype, workload.lengths)
    return stored + needed_nbytes(layers, cache_dtype) - shared


def lattice_nbytes(lattices: Iterable[tuple[int | None, int]]) -> int:
    """Bytes of the points of all lattices (their dimension, None for no lattice, and bits), each once."""
    return sum(2 ** (dim * bits) * dim * FLOAT_BYTES for dim, bits in set(lattices) if dim is not None)
