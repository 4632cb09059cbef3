"""Formats and sizes to measure, the factors aimed for, and the bytes that a decode step must move.

Bytes are those of one layer's attention. Packed pages are read once, where they are. A stored form
(kvcal.store.dequantize) is read, written out as pages of 16 bits, and these are read by ``decode``; the pages that
predictors read are written and read in fp32 on top. Left out: temporaries, room beyond the tokens that are there, and
pages that the step packs. So the bytes are a floor, and their ratio to 16 bits is the ceiling of a format's factor.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field
from pydantic.dataclasses import dataclass
from transformers import LlamaConfig

from kvcal.errors import UsageError
from kvcal.geometry import CACHE_DTYPES, AttentionGeometry, CacheDtype
from kvcal.kernels.choice import CHANNELS_AT_ONCE, MAX_HEAD_DIM, WIDE_HEAD_DIMS
from kvcal.kernels.variants import stored_form
from kvcal.pages.record_layout import PAGE_TOKENS, RAW_BITS
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import RAW, SIDES, Boost, Format, Side, Tier, num_pages
from kvcal.plan.tensors import predictor_shape
from kvcal.recipe import PredictorSpec
from kvcal.recipe_files import load_recipe
from kvcal.stages.predictors.record import with_predictor
from kvcal.strict import STRICT, Positive

CACHE_DTYPE: CacheDtype = "bfloat16"
ITEM_BYTES = CACHE_DTYPES[CACHE_DTYPE].itemsize
PREDICTOR_ITEM_BYTES = 4  # predictors read pages in fp32


@dataclass(frozen=True, config=STRICT)
class Point:
    """``batch`` sequences that hold ``context`` tokens each."""

    batch: Positive
    context: Annotated[int, Field(ge=PAGE_TOKENS)]

    @property
    def name(self) -> str:
        """``8 x 32K``."""
        return f"{self.batch} x {self.context if self.context % 1024 else f'{self.context // 1024}K'}"


class Stored(Protocol):
    """Layers to time, under one name. ``num_ends``: layers at either end of a model that are unlike those between
    them: the first predicts without being predicted, the last is predicted without predicting."""

    @property
    def name(self) -> str: ...

    @property
    def num_ends(self) -> int: ...

    def layers(self, heads: Heads, count: int) -> tuple[LayerPlan, ...]:
        """The first ``count`` layers of a model."""


@dataclass(frozen=True, config=STRICT)
class Pair:
    """Formats of keys and values under one name. ``k_pages`` "pre": pages hold keys before RoPE. ``predictors``: every
    layer but the first holds the residual of what the one before predicts, keys before RoPE. ``first``: formats of the
    first layer, where it has its own."""

    name: str
    k: Format
    v: Format
    k_pages: Literal["post", "pre"] = "post"
    predictors: PredictorSpec | None = None
    first: tuple[Format, Format] | None = None

    @property
    def num_ends(self) -> int:
        return 0 if self.predictors is None and self.first is None else 1

    def layers(self, heads: Heads, count: int) -> tuple[LayerPlan, ...]:
        return tuple(heads.layer(self, index) for index in range(count))


@dataclass(frozen=True, config=STRICT)
class Heads:
    """``num_kv_heads`` KV heads of ``head_dim``, each read by ``group`` query heads."""

    num_kv_heads: int = 8
    head_dim: int = 128
    group: int = 4

    @property
    def num_query_heads(self) -> int:
        return self.num_kv_heads * self.group

    def config(self, num_layers: int) -> LlamaConfig:
        """A model's with such layers; nothing else of it matters to a cache."""
        return LlamaConfig(
            num_hidden_layers=num_layers,
            num_attention_heads=self.num_query_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            hidden_size=self.num_query_heads * self.head_dim,
        )

    def geometry(self, index: int) -> AttentionGeometry:
        """Of layer ``index`` of a model all of whose layers have these heads."""
        return AttentionGeometry(index, self.num_query_heads, self.num_kv_heads, self.head_dim, self.head_dim)

    def layer(self, pair: Pair, index: int) -> LayerPlan:
        """The same layer with the formats of ``pair``."""
        k, v = pair.first if index == 0 and pair.first is not None else (pair.k, pair.v)
        layer = LayerPlan(self.geometry(index), (k,), (v,), k_pages=pair.k_pages)
        if index and pair.predictors is not None:
            for side in pair.predictors.sides:
                layer = with_predictor(layer, side, index - 1, pair.predictors)
        return layer


@dataclass(frozen=True, config=STRICT)
class StepBytes:
    """Bytes of all sequences. ``stored``: records, sinks and recent tokens, read; ``reconstructed``:
    pages of 16 bits, written and read; ``kept``: pages that predictors read, written and read; ``predictors``:
    weights."""

    stored: int
    reconstructed: int = 0
    kept: int = 0
    predictors: int = 0

    @property
    def total(self) -> int:
        return self.stored + self.reconstructed + self.kept + self.predictors


def step_bytes(stored_as: Stored, heads: Heads, point: Point) -> StepBytes:
    """Bytes of a layer in the middle of a model; ``point.context`` tokens before the step, and the new one."""
    before, layer, following = stored_as.layers(heads, 3)
    stored = reconstructed = predictors = 0
    page_values: dict[Side, int] = {}
    for side in SIDES:
        held = point.batch * num_pages(point.context + 1)
        page_values[side] = held * PAGE_TOKENS * heads.num_kv_heads * heads.head_dim
        for fmt, of_heads in layer.runs(side):
            num_heads = of_heads.stop - of_heads.start
            is_form = stored_form(layer, side, fmt) is not None
            read = point.batch * fmt.pages_read(point.context)
            record = fmt.layout(side, num_heads, heads.head_dim, CACHE_DTYPE, fmt.num_bits).record_bytes
            sinks = point.batch * min(fmt.num_sink_tokens, fmt.pages_read(point.context) * PAGE_TOKENS)
            unquantized = point.batch * (point.context + 1) - read * PAGE_TOKENS + sinks
            stored += (held if is_form else read) * (num_heads if fmt.lattice_dim is None else 1) * record
            stored += unquantized * num_heads * heads.head_dim * ITEM_BYTES
            if is_form:
                reconstructed += (held + read) * ITEM_BYTES * PAGE_TOKENS * num_heads * heads.head_dim
        if layer.predictor(side) is not None:
            predictors += predictor_shape(layer, before, side, CACHE_DTYPE).nbytes
    # Values are predicted from this layer's keys, too.
    own_keys: list[Side] = ["k"] if layer.predictor("v") is not None else []
    written = {side for side in SIDES if following.predictor(side) is not None} | {*own_keys}
    inputs = [side for side in SIDES if layer.predictor(side) is not None] + own_keys
    kept = PREDICTOR_ITEM_BYTES * sum(page_values[side] for side in (*written, *inputs))
    return StepBytes(stored, reconstructed, kept, predictors)


def raw_bytes(heads: Heads, point: Point) -> int:
    """Bytes of the keys and values of ``point.context`` tokens in 16 bits: what the baselines read."""
    return 2 * point.batch * heads.num_kv_heads * point.context * heads.head_dim * ITEM_BYTES


def bits_per_value(stored_as: Stored, heads: Heads, point: Point) -> float:
    """Bits that are stored for each cached value, scales, sinks and recent tokens included."""
    return RAW_BITS * step_bytes(stored_as, heads, point).stored / raw_bytes(heads, point)


def uniform(num_bits: int, num_sink_tokens: int = 0, recent_window: int = 0) -> tuple[Format, Format]:
    """K per channel and V per token, groups of 128."""
    shared: dict[str, Any] = {"num_bits": num_bits, "num_sink_tokens": num_sink_tokens, "recent_window": recent_window}
    return Format(axis="channel", **shared), Format(axis="token", **shared)


RAW_PAIR = Pair("16", RAW, RAW)
KITTY = Format(2, "channel", 128, boost=Boost("magnitude", (Tier(4, 0.125),)))
LATTICE, ROTATED = Format(2, lattice_dim=2), Format(2, quantizer="rotated")
ROTATED_LATTICE = Format(2, quantizer="rotated-lattice")
PAIRS = {
    **{str(bits): Pair(str(bits), *uniform(bits)) for bits in (1, 2, 3, 4, 8)},
    "2-window": Pair("2-window", *uniform(2, 32, 128)),
    "kitty": Pair("kitty", KITTY, uniform(2)[1]),
    "16": RAW_PAIR,
    "2-uneven": Pair("2-uneven", uniform(2, 32)[0], uniform(2)[1]),
    "pre-rope": Pair("pre-rope", *uniform(2), k_pages="pre"),
    "higgs": Pair("higgs", LATTICE, LATTICE),
    "aqua": Pair("aqua", LATTICE, LATTICE, predictors=PredictorSpec()),
    "2-rotated": Pair("2-rotated", ROTATED, ROTATED),
    "kitty-rotated": Pair("kitty-rotated", KITTY, ROTATED),
    "2-lattice": Pair("2-lattice", ROTATED_LATTICE, ROTATED_LATTICE),
}
DEFAULT_PAIRS = ("2", "2-window", "kitty", "3", "4", "8", "16")
QUICK_PAIRS = ("2", "kitty", "4", "16")
STEP_PAIRS = ("2", "kitty", "4")
POINTS = tuple(Point(batch, 1024 * kilo) for batch, kilo in ((1, 8), (1, 32), (1, 128), (8, 8), (8, 32), (32, 32)))
QUICK_POINTS = (Point(1, 8192), Point(8, 32768))
LAYER_POINTS = (Point(32, 8192), Point(32, 32768))
BATCHES, CONTEXTS = (1, 8, 32), (8192, 32768)

# Factors over the fastest 16-bit kernel at (batch, Ki tokens), aimed for on an H200 with these heads before the kernels
# were written; where a range over the whole grid was set, its ends stand at the smallest and the largest point.
TARGET_HEADS = (8, 128)
TARGETS: dict[str, dict[tuple[int, int], float]] = {
    "2": {(1, 8): 2.1, (1, 32): 3.4, (1, 128): 4.7, (8, 8): 3.8, (8, 32): 5.0, (32, 32): 5.5},
    "4": {(1, 8): 1.8, (32, 32): 3.4},
    "3": {(1, 8): 1.9, (32, 32): 4.1},
    "kitty": {(1, 8): 2.0, (32, 32): 5.2},
}


def target(name: str, heads: Heads, point: Point) -> float | None:
    """The factor aimed for, None where none was set."""
    if (heads.num_kv_heads, heads.head_dim) != TARGET_HEADS or point.context % 1024:
        return None
    return TARGETS.get(name, {}).get((point.batch, point.context // 1024))


def chosen_pairs(formats: Sequence[str], recipes: Sequence[str], default: Sequence[str]) -> tuple[Pair, ...]:
    """The named formats and the recipes' own, each once; ``default`` without any.

    Raises:
        UsageError: no such format or recipe, or a recipe that leaves its formats to a solver.
    """
    for name in formats:
        if name not in PAIRS:
            raise UsageError(
                f"--format {name!r} is none of {', '.join(PAIRS)}", hint="other formats: --recipe with [formats]"
            )
    pairs = [PAIRS[name] for name in (formats if formats or recipes else default)]
    return tuple({pair.name: pair for pair in (*pairs, *map(recipe_pair, recipes))}.values())


def recipe_pair(name: str) -> Pair:
    """The formats of a recipe that fixes those of all layers; λ, which is folded into the query, is left out.

    Raises:
        UsageError: no such recipe, or none that fixes its formats.
    """
    recipe = load_recipe(name)
    formats = recipe.formats
    if formats is None:
        raise UsageError(
            f"recipe {name!r} leaves its formats to a solver; only recipes with [formats] can be timed",
            hint="for example kitty, kivi-2 or uniform-3",
        )
    if recipe.tune is not None:
        raise UsageError(
            f"recipe {name!r} is tuned for a model, and so are its tiers; only fixed capacities can be timed",
            hint="for example mixkvq-capped",
        )
    if recipe.progressive is not None or formats.k.shrink_at or formats.v.shrink_at:
        raise UsageError(
            f"recipe {name!r} lets pages shrink; only recipes whose bits stay can be timed",
            hint="what its pages end with: a recipe with the same [formats] and no [progressive]",
        )
    first = (formats.first_k or formats.k, formats.first_v or formats.v)
    has_first = first != (formats.k, formats.v)
    return Pair(recipe.name, formats.k, formats.v, formats.k_pages, recipe.predictors, first if has_first else None)


def chosen_heads(num_kv_heads: int, head_dim: int, group: int) -> Heads:
    """The heads asked for. UsageError: a head size that no kernel takes."""
    if head_dim % CHANNELS_AT_ONCE or head_dim > MAX_HEAD_DIM:
        raise UsageError(
            f"--head-dim {head_dim}: expected a multiple of {CHANNELS_AT_ONCE} up to {MAX_HEAD_DIM}",
            hint=f"{', '.join(map(str, WIDE_HEAD_DIMS))} are served by decode, all others by decode_plain",
        )
    return Heads(num_kv_heads, head_dim, group)


def chosen_points(batches: Sequence[int], contexts: Sequence[int], default: Sequence[Point]) -> tuple[Point, ...]:
    """``default`` if neither is given, else every batch with every context, the missing ones from BATCHES or CONTEXTS.
    UsageError: a context shorter than a page."""
    for context in contexts:
        if context < PAGE_TOKENS:
            raise UsageError(f"--context {context}: expected at least {PAGE_TOKENS} tokens, one page")
    if not batches and not contexts:
        return tuple(default)
    return tuple(itertools.starmap(Point, itertools.product(batches or BATCHES, contexts or CONTEXTS)))
