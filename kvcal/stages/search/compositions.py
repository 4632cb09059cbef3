"""Compositions: all the ways to store a layer's keys or values that a search may choose from, and plans made of them.

A unit is a layer's K or V. Its options are the recipe's choices, the formats of the systems
that it names, and 16 bits, as far as a plan may have them (kvcal.stages.search.speed). Bytes of an option are exact and
belong to it alone: records, sinks, ring, query statistic, and the tensors it brings (λ, signs, predictor, rotary
tables). The points of a lattice, which options share, are reserved for the whole plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pydantic import ValidationError
from torch import Tensor

from kvcal.errors import UsageError
from kvcal.geometry import Geometry
from kvcal.plan.layer import LayerPlan, Predictor, bare_layers
from kvcal.plan.page_format import RAW, SIDES, Format, Side
from kvcal.plan.plan import Workload
from kvcal.plan.tensors import lattice_tensors, needed_nbytes, needed_tensors
from kvcal.recipe import CacheSpec, KeyChoice, PredictorSpec, Recipe, SearchSpec, ValueChoice, fixed_layers
from kvcal.recipe_files import load_recipe
from kvcal.stages.allocate.importance import layer_format
from kvcal.stages.allocate.record import layers_in
from kvcal.stages.predictors.record import with_predictor
from kvcal.stages.reparam.search import is_searched
from kvcal.stages.search.speed import Speed
from kvcal.strict import dump

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Unit:
    """The keys or the values of a layer, which get an option of their own."""

    index: int
    side: Side

    def __str__(self) -> str:
        return f"layer {self.index} {self.side.upper()}"


class Style(NamedTuple):
    """A way to store keys or values in any layer: a format, with the layer's λ, as residuals of a prediction."""

    format: Format
    rescale: bool = False
    predicted: bool = False

    def __str__(self) -> str:
        """Such as "2 channel g128 +12.5%@4 magnitude λ sinks 4"."""
        fmt = self.format
        parts = [fmt.label]
        parts += ["λ"] * self.rescale + ["predicted"] * self.predicted
        parts += [f"sinks {fmt.num_sink_tokens}"] * bool(fmt.num_sink_tokens)
        parts += [f"window {fmt.max_window}"] * bool(fmt.max_window)
        parts += [f"params {fmt.param_dtype}"] * (fmt.param_dtype != RAW.param_dtype)
        return " ".join(parts)


@dataclass(frozen=True)
class Composition:
    """An option: a style in one layer."""

    style: Style
    predictor: Predictor | None = None

    @property
    def name(self) -> str:
        return str(self.style)

    @property
    def format(self) -> Format:
        return self.style.format


RAW_OPTION = Composition(Style(RAW))


@dataclass(frozen=True, eq=False)
class OptionTensors:
    """Tensors that options need beside their formats. ``lambdas``: for each format of keys with λ, λ [N, D] fp32 of
    every layer; ``predictors``: tensors of fitted predictors, and rotary tables, by their names in a plan."""

    lambdas: Mapping[Format, Mapping[int, Tensor]]
    predictors: Mapping[str, Tensor]


def choice_style(choice: KeyChoice | ValueChoice, cache: CacheSpec) -> Style:
    """UsageError, naming the choice, where its parts do not go together."""
    side: Side = "k" if isinstance(choice, KeyChoice) else "v"
    rescale, axis = (choice.rescale, choice.axis) if isinstance(choice, KeyChoice) else (False, "token")
    if choice.num_bits == RAW.num_bits:
        return Style(RAW)
    boost = choice.boost if isinstance(choice, KeyChoice) else None
    try:
        plain = cache.format(side, choice.num_bits, axis, choice.group_size)
        fmt = replace(
            plain,
            quantizer=choice.quantizer,
            lattice_dim=choice.lattice_dim,
            boost=boost,
            num_sink_tokens=plain.num_sink_tokens if choice.num_sink_tokens is None else choice.num_sink_tokens,
            recent_window=plain.recent_window if choice.recent_window is None else choice.recent_window,
        )
        return Style(fmt, rescale, choice.predicted)
    except ValidationError as conflict:
        reason = conflict.errors()[0]["msg"].removeprefix("Value error, ")
        given = {name: value for name, value in dump(choice).items() if value not in (None, False, "uniform")}
        raise UsageError(
            f"the choice {given} of [search] cannot be composed: {reason}",
            hint="take it out of [search], or change the part that is named",
        ) from None


def system_plans(
    geometry: Geometry, spec: SearchSpec, predictors: PredictorSpec | None
) -> dict[str, tuple[LayerPlan, ...]]:
    """The layers of every system's own plan, by name: final formats of a recipe whose pages shrink, thresholds as they
    are, of [importance] one plan for either class of layers. AQUA-KV's are missing without ``predictors``, and plans
    that choose channels by queries for a model with latents."""
    plans: dict[str, tuple[LayerPlan, ...]] = {}
    for name in spec.systems:
        recipe = load_recipe(name)
        if recipe.formats is not None and recipe.formats.k.needs_queries and geometry.has_latents:
            continue
        if recipe.importance is not None:
            for label, is_important in (("few bits", False), ("more bits", True)):
                k, v = (
                    layer_format(
                        side, is_important, recipe.importance, recipe.cache.num_sink_tokens, recipe.cache.param_dtype
                    )
                    for side in SIDES
                )
                plans[f"{name} ({label})"] = layers_in(geometry, k, v)
        elif recipe.predictors is None or predictors is not None:
            plans[name] = _transformed(recipe, geometry, predictors)
    return plans


def _transformed(recipe: Recipe, geometry: Geometry, predictors: PredictorSpec | None) -> tuple[LayerPlan, ...]:
    """A recipe's formats with the λ and the predictors that it asks for."""
    assert recipe.formats is not None
    layers, source = [], None
    for layer in fixed_layers(recipe.formats, bare_layers(geometry)):
        if layer.takes_transforms:
            if recipe.reparam is not None and is_searched(layer.k[0]):
                layer = replace(layer, k_rescale=True)
            if recipe.predictors is not None and predictors is not None and source is not None:
                for side in recipe.predictors.sides:
                    layer = with_predictor(layer, side, source, predictors)
            source = layer.geometry.index
        layers.append(layer)
    return tuple(layers)


def styles_of(
    side: Side,
    spec: SearchSpec,
    cache: CacheSpec,
    predictors: PredictorSpec | None,
    systems: Iterable[Sequence[LayerPlan]],
) -> tuple[Style, ...]:
    """All ways to store keys, or values: the recipe's own, those of the systems' plans, and 16 bits; each once."""
    choices: Sequence[KeyChoice | ValueChoice] = spec.keys if side == "k" else spec.values
    styles = [choice_style(choice, cache) for choice in choices]
    if predictors is None and any(style.predicted for style in styles):
        raise UsageError(
            f"the choice '{next(style for style in styles if style.predicted)}' is predicted, and the recipe has no "
            "[predictors]",
            hint="add [predictors], or take the choice out of [search]",
        )
    for layers in systems:
        styles += [
            Style(fmt, side == "k" and layer.k_rescale, layer.predictor(side) is not None)
            for layer in layers
            for fmt in layer.formats(side)
        ]
    return tuple(dict.fromkeys((*styles, RAW_OPTION.style)))


def options_of(
    layer: LayerPlan,
    side: Side,
    source: int | None,
    styles: Sequence[Style],
    predictors: PredictorSpec | None,
    speed: Speed,
) -> tuple[Composition, ...]:
    """The compositions of a layer's side. ``source``: the paged layer before it, None for the first, which cannot be
    predicted. UsageError for a style that no layer can have."""
    options = []
    for style in styles:
        if layer.attention.is_latent and not fits_latent(style, side):
            continue
        predictor = None
        if style.predicted:
            if source is None or predictors is None:
                continue
            predictor = Predictor(predictors.kind, source, predictors.rank, predictors.group_size)
        option = Composition(style, predictor)
        try:
            alone = alone_in(layer, side, option)
        except ValidationError as conflict:
            reason = conflict.errors()[0]["msg"].removeprefix("Value error, ")
            raise UsageError(
                f"the choice '{style}' of [search] cannot be composed: {reason}",
                hint="take it out of [search], or change the part that is named",
            ) from None
        if speed.offers(alone, side):
            options.append(option)
    return tuple(options)


def fits_latent(style: Style, side: Side) -> bool:
    """Whether a layer of latent attention can have it: no transforms, no query scores, rotary keys at 16 bits."""
    is_plain = not (style.rescale or style.predicted or style.format.needs_queries)
    return is_plain if side == "k" else style == RAW_OPTION.style


def alone_in(layer: LayerPlan, side: Side, option: Composition) -> LayerPlan:
    """The layer with one side in ``option`` and the other at 16 bits."""
    return with_options(layer, *((option, RAW_OPTION) if side == "k" else (RAW_OPTION, option)))


def most_scratch(
    geometry: Geometry, styles: Mapping[Side, Sequence[Style]], predictors: PredictorSpec | None, speed: Speed
) -> tuple[LayerPlan, ...]:
    """Every layer in those of its options that need the most scratch: predicted ones, else lattices."""
    layers, source = [], None
    for layer in bare_layers(geometry):
        if layer.is_paged:
            k, v = (
                max(
                    options_of(layer, side, source, styles[side], predictors, speed),
                    key=lambda option: (option.predictor is not None, option.format.lattice_dim or 0),
                )
                for side in SIDES
            )
            layer, source = replace(with_options(layer, k, v), k_rescale=False), layer.geometry.index
        layers.append(layer)
    return tuple(layers)


def composed_layers(
    geometry: Geometry, chosen: Mapping[Unit, Composition], brought: OptionTensors
) -> tuple[tuple[LayerPlan, ...], dict[str, Tensor]]:
    """The layers and plan tensors of one option for every unit."""
    layers, tensors = [], {}
    for layer in bare_layers(geometry):
        if layer.is_paged:
            index = layer.geometry.index
            k, v = (chosen[Unit(index, side)] for side in SIDES)
            layer = with_options(layer, k, v)
            if layer.k_rescale:
                tensors[f"layers.{index}.k_rescale"] = brought.lambdas[k.format][index]
        layers.append(layer)
    needed = needed_tensors(layers, geometry.cache_dtype)
    tensors |= {name: tensor for name, tensor in brought.predictors.items() if name in needed}
    return tuple(layers), tensors | lattice_tensors(layers)


def with_options(layer: LayerPlan, k: Composition, v: Composition) -> LayerPlan:
    """The layer in these options."""
    return LayerPlan(
        layer.geometry,
        (k.format,),
        (v.format,),
        k_rescale=k.style.rescale,
        k_pages="post" if k.predictor is None else "pre",
        k_predictor=k.predictor,
        v_predictor=v.predictor,
    )


def option_nbytes(unit: Unit, option: Composition, layer: LayerPlan, geometry: Geometry, workload: Workload) -> int:
    """Bytes that the option takes at the workload, with the tensors that it alone brings."""
    heads = layer.attention.num_kv_heads
    dim, cache_dtype = layer.head_dim(unit.side), geometry.cache_dtype
    alone = alone_in(layer, unit.side, option)
    layers = [alone if one.geometry.index == unit.index else one for one in bare_layers(geometry)]
    shared = lattice_nbytes([(option.format.lattice_dim, option.format.num_bits)])
    stored = option.format.nbytes(unit.side, heads, dim, cache_dtype, workload.lengths)
    return stored + needed_nbytes(layers, cache_dtype) - shared


def lattice_nbytes(lattices: Iterable[tuple[int | None, int]]) -> int:
    """Bytes of the points of all lattices (their dimension, None for no lattice, and bits), each once."""
    return sum(2 ** (dim * bits) * dim * FLOAT_BYTES for dim, bits in set(lattices) if dim is not None)


def complexity(layers: Sequence[LayerPlan]) -> int:
    """Different ways in which the plan stores keys, and values: 2 for one of each."""
    ways = {
        (side, fmt, layer.predictor(side) is not None, side == "k" and layer.k_rescale)
        for layer in layers
        for side in SIDES
        for fmt in layer.formats(side)
    }
    return len(ways)
