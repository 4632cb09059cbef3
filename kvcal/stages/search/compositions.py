"""Compositions: all the ways to store a layer's keys or values that a search may choose from, and plans made of them.

A unit is a layer's K or V, or one KV head's; its options are the recipe's choices as far as they can be composed there,
and 16 bits, except where a prediction may read them and [cache] has sinks or a window: 16 bits have neither, so that
their pages are of other tokens than those predicted. Bytes of an option are exact and belong to it alone: records,
sinks, window, buffer, query statistic, and the tensors it brings (λ, signs, predictor, rotary tables). What several
options share (a lattice's points) is reserved for the whole plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import ValidationError
from torch import Tensor

from kvcal.errors import UsageError
from kvcal.geometry import Geometry
from kvcal.plan.format import RAW, SIDES, Format, Side
from kvcal.plan.layer import LayerPlan, Predictor, bare_layers
from kvcal.plan.plan import Workload
from kvcal.plan.tensors import lattice_tensors, needed_tensors
from kvcal.recipe import CacheSpec
from kvcal.specs import KeyChoice, PredictorSpec, SearchSpec, ValueChoice

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Unit:
    """What gets an option of its own. ``head`` None: all KV heads of the layer."""

    index: int
    side: Side
    head: int | None

    def __str__(self) -> str:
        return f"layer {self.index} {self.side.upper()}" + ("" if self.head is None else f" head {self.head}")


@dataclass(frozen=True)
class Composition:
    """An option. ``rescale``: which choice's λ the keys are divided by, None for none."""

    name: str
    format: Format
    rescale: int | None = None
    predictor: Predictor | None = None


@dataclass(frozen=True, eq=False)
class Materials:
    """What options need beside their formats. ``lambdas``: for each number of a choice with rescale, λ [N, D] fp32 of
    every layer; ``predictors``: tensors of fitted predictors, and rotary tables, by their names in a plan."""

    lambdas: Mapping[int, Mapping[int, Tensor]]
    predictors: Mapping[str, Tensor]


def choice_name(choice: KeyChoice | ValueChoice) -> str:
    """What a choice is called in tables: "2 channel/128 + 12% at 4 (magnitude) λ"."""
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


def key_format(choice: KeyChoice, cache: CacheSpec) -> Format:
    """UsageError, naming the choice, where its parts do not go together."""
    if choice.num_bits == RAW.num_bits:
        return RAW
    plain = cache.format("k", choice.num_bits, choice.axis, choice.group_size)
    return _composed(plain, choice, boost=choice.boost)


def value_format(choice: ValueChoice, cache: CacheSpec) -> Format:
    """As :func:`key_format`."""
    if choice.num_bits == RAW.num_bits:
        return RAW
    return _composed(cache.format("v", choice.num_bits, "token", choice.group_size), choice)


def _composed(plain: Format, choice: KeyChoice | ValueChoice, **changes: object) -> Format:
    try:
        return replace(plain, lattice_dim=choice.lattice_dim, **changes)  # type: ignore[arg-type]
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
    found = []
    for number, choice in enumerate(choices):
        fmt = key_format(choice, cache) if isinstance(choice, KeyChoice) else value_format(choice, cache)
        rescale = number if isinstance(choice, KeyChoice) and choice.rescale else None
        predictor = None
        if choice.predicted:
            if predictors is None:
                raise UsageError(
                    f"the choice {choice_name(choice)!r} is predicted, and the recipe has no [predictors]",
                    hint="add [predictors], or take the choice out of [search]",
                )
            if cache.k_recent_window != cache.v_recent_window:
                raise UsageError(
                    f"the choice {choice_name(choice)!r} is predicted, and k_recent_window = {cache.k_recent_window} "
                    f"differs from v_recent_window = {cache.v_recent_window}: pages would be of other tokens",
                    hint="give both the same window in [cache]",
                )
            if source is None:
                continue
            predictor = Predictor(predictors.kind, source, predictors.rank, predictors.group_size)
        found.append(Composition(choice_name(choice), fmt, rescale, predictor))
    found.append(Composition(choice_name(KeyChoice(16)), RAW))
    read_by_next = not is_last and any(choice.predicted for choice in choices)
    read_by_values = side == "k" and source is not None and any(choice.predicted for choice in spec.values)
    if (read_by_next or read_by_values) and (cache.num_sink_tokens or cache.k_recent_window or cache.v_recent_window):
        found = [option for option in found if option.format != RAW]
    unique = {(c.format, c.rescale, c.predictor): c for c in reversed(found)}
    return tuple(sorted(unique.values(), key=found.index))


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
            pages: Literal["post", "pre"] = "post" if k.predictor is None else "pre"
            layer = LayerPlan(
                layer.geometry,
                (k.format,),
                (v.format,),
                k_pages=pages,
                k_predictor=k.predictor,
                v_predictor=v.predictor,
            )
            source = layer.geometry.index
        layers.append(layer)
    return tuple(layers)


def composed_layers(
    geometry: Geometry, chosen: Mapping[Unit, Composition], materials: Materials
) -> tuple[tuple[LayerPlan, ...], dict[str, Tensor]]:
    """The layers and plan tensors of one option for every unit."""
    layers, tensors = [], {}
    for layer in bare_layers(geometry):
        if layer.is_paged:
            layer, lambdas = _composed_layer(layer, chosen, materials)
            if lambdas is not None:
                tensors[f"layers.{layer.geometry.index}.k_rescale"] = lambdas
        layers.append(layer)
    needed = needed_tensors(layers, geometry.cache_dtype)
    tensors |= {name: tensor for name, tensor in materials.predictors.items() if name in needed}
    return tuple(layers), tensors | lattice_tensors(layers)


def _composed_layer(
    layer: LayerPlan, chosen: Mapping[Unit, Composition], materials: Materials
) -> tuple[LayerPlan, Tensor | None]:
    """The layer with its options, and its λ if a head takes one: 1 for the others."""
    index, heads = layer.geometry.index, range(layer.attention.num_kv_heads)
    of: dict[Side, list[Composition]] = {
        side: [chosen.get(Unit(index, side, None)) or chosen[Unit(index, side, head)] for head in heads]
        for side in SIDES
    }
    k, v = (tuple(option.format for option in of[side]) for side in SIDES)
    lambdas = None
    if any(option.rescale is not None for option in of["k"]):
        rows = [
            torch.ones(layer.attention.k_head_dim)
            if option.rescale is None
            else materials.lambdas[option.rescale][index][head]
            for head, option in zip(heads, of["k"], strict=True)
        ]
        lambdas = torch.stack(rows)
    k_predictor, v_predictor = of["k"][0].predictor, of["v"][0].predictor
    made = LayerPlan(
        layer.geometry,
        k[:1] if len(set(k)) == 1 else k,
        v[:1] if len(set(v)) == 1 else v,
        k_rescale=lambdas is not None,
        k_pages="post" if k_predictor is None else "pre",
        k_predictor=k_predictor,
        v_predictor=v_predictor,
    )
    return made, lambdas


def option_nbytes(unit: Unit, option: Composition, layer: LayerPlan, geometry: Geometry, workload: Workload) -> int:
    """Bytes that the option takes at the workload, with the tensors that it alone brings."""
    heads = layer.attention.num_kv_heads if unit.head is None else 1
    dim = layer.head_dim(unit.side)
    total = option.format.nbytes(unit.side, heads, dim, geometry.cache_dtype, workload.lengths)
    if option.rescale is not None:  # a row of λ for every head, whichever of them take it
        total += layer.attention.num_kv_heads * dim * FLOAT_BYTES
    alone = LayerPlan(
        layer.geometry,
        (option.format if unit.side == "k" else RAW,),
        (option.format if unit.side == "v" else RAW,),
        k_pages="pre" if unit.side == "k" and option.predictor else "post",
        k_predictor=option.predictor if unit.side == "k" else None,
        v_predictor=option.predictor if unit.side == "v" else None,
    )
    layers = [alone if one.geometry.index == unit.index else one for one in bare_layers(geometry)]
    for name, spec in needed_tensors(layers, geometry.cache_dtype).items():
        if not name.startswith("lattice."):
            pairs = layer.attention.k_head_dim // 2
            total += torch.Size(extent or pairs for extent in spec.shape).numel() * spec.dtype.itemsize
    return total


def shared_nbytes(units: Mapping[Unit, Sequence[Composition]]) -> int:
    """Bytes of the lattices' points, for all lattices that may be chosen."""
    lattices = {(o.format.lattice_dim, o.format.num_bits) for options in units.values() for o in options}
    return sum(2 ** (dim * bits) * dim * FLOAT_BYTES for dim, bits in lattices if dim is not None)
