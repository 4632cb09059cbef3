"""Which formats are measured at which sizes, and what was aimed for there.

The targets are those set before the kernels were written, for 8 KV heads of 128 on an H200; they stand beside what
was measured, reached or not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvcal.bench.shape import RAW_PAIR, Heads, Pair, Point
from kvcal.errors import UsageError
from kvcal.kernels.choice import FOLDED_HEAD_DIMS
from kvcal.kernels.refusals import CHANNELS_AT_ONCE, MAX_HEAD_DIM
from kvcal.pages.layout import PAGE_TOKENS
from kvcal.plan.format import Boost, Format, Tier
from kvcal.recipe import load_recipe
from kvcal.specs import PredictorSpec

POINTS = tuple(Point(batch, 1024 * kilo) for batch, kilo in ((1, 8), (1, 32), (1, 128), (8, 8), (8, 32), (32, 32)))
QUICK_POINTS = (Point(1, 8192), Point(8, 32768))
LAYER_POINTS = (Point(32, 8192), Point(32, 32768))
BATCHES, CONTEXTS = (1, 8, 32), (8192, 32768)
SINKS, WINDOW = 32, 128


def uniform(num_bits: int, num_sink_tokens: int = 0, recent_window: int = 0) -> tuple[Format, Format]:
    """K per channel and V per token, groups of 128."""
    shared = {"group_size": 128, "num_sink_tokens": num_sink_tokens, "recent_window": recent_window}
    return Format(num_bits, "channel", **shared), Format(num_bits, "token", **shared)  # type: ignore[arg-type]


def _kitty() -> tuple[Format, Format]:
    k, v = uniform(2)
    return Format(k.num_bits, k.axis, k.group_size, boost=Boost("magnitude", (Tier(4, 0.125),))), v


LATTICE = Format(2, lattice_dim=2)

PAIRS = {
    **{str(bits): Pair(str(bits), *uniform(bits)) for bits in (1, 2, 3, 4, 8)},
    "2-window": Pair("2-window", *uniform(2, SINKS, WINDOW)),
    "kitty": Pair("kitty", *_kitty()),
    "16": RAW_PAIR,
    "2-uneven": Pair("2-uneven", uniform(2, SINKS)[0], uniform(2)[1]),
    "pre-rope": Pair("pre-rope", *uniform(2), k_pages="pre"),
    "higgs": Pair("higgs", LATTICE, LATTICE),
    "aqua": Pair("aqua", LATTICE, LATTICE, predictors=PredictorSpec()),
}
DEFAULT_PAIRS = ("2", "2-window", "kitty", "3", "4", "8", "16")
QUICK_PAIRS = ("2", "kitty", "4", "16")
STEP_PAIRS = ("2", "kitty", "4")

# Factor over the fastest 16-bit kernel, by format, at (batch, context) with 8 KV heads of 128; where a range over
# the whole grid was set, its ends stand at the smallest and the largest point.
TARGET_HEADS = (8, 128)
TARGETS: dict[str, dict[tuple[int, int], float]] = {
    "2": {(1, 8): 2.1, (1, 32): 3.4, (1, 128): 4.7, (8, 8): 3.8, (8, 32): 5.0, (32, 32): 5.5},
    "4": {(1, 8): 1.8, (32, 32): 3.4},
    "3": {(1, 8): 1.9, (32, 32): 4.1},
    "kitty": {(1, 8): 2.0, (32, 32): 5.2},
}


def target(name: str, heads: Heads, point: Point) -> float | None:
    """What was aimed for, None where nothing was."""
    if (heads.num_kv_heads, heads.head_dim) != TARGET_HEADS or point.context % 1024:
        return None
    return TARGETS.get(name, {}).get((point.batch, point.context // 1024))


def chosen_pairs(formats: Sequence[str], recipes: Sequence[str], default: Sequence[str]) -> tuple[Pair, ...]:
    """The named formats and the recipes' own, each once; ``default`` without any.

    Raises:
        UsageError: no such format or recipe, or a recipe that leaves its formats to a solver.
    """
    unknown = [name for name in formats if name not in PAIRS]
    if unknown:
        raise UsageError(
            f"--format {unknown[0]!r} is none of {', '.join(PAIRS)}", hint="other formats: --recipe with [formats]"
        )
    names = formats if formats or recipes else default
    found = {name: PAIRS[name] for name in names}
    found |= {pair.name: pair for pair in map(recipe_pair, recipes)}
    return tuple(found.values())


def recipe_pair(name: str) -> Pair:
    """How a recipe stores a layer that fixes the formats of all; λ, which is folded into the query, is left out.

    Raises:
        UsageError: no such recipe, or none that fixes its formats.
    """
    recipe = load_recipe(name)
    if recipe.formats is None:
        raise UsageError(
            f"recipe {name!r} leaves its formats to a solver; only recipes with [formats] can be timed",
            hint="for example kitty, kivi-2 or uniform-3",
        )
    if recipe.tune is not None:
        raise UsageError(
            f"recipe {name!r} is tuned for a model, and so are its rooms; only fixed rooms can be timed",
            hint="for example mixkvq-capped",
        )
    formats = recipe.formats
    if recipe.progressive is not None or formats.k.shrink_at or formats.v.shrink_at:
        raise UsageError(
            f"recipe {name!r} lets pages shrink; only recipes whose bits stay can be timed",
            hint="what its pages end with: a recipe with the same [formats] and no [progressive]",
        )
    first = (formats.first_k or formats.k, formats.first_v or formats.v)
    has_first = first != (formats.k, formats.v)
    return Pair(recipe.name, formats.k, formats.v, formats.k_pages, recipe.predictors, first if has_first else None)


def chosen_heads(num_kv_heads: int, head_dim: int, group: int) -> Heads:
    """The heads that were asked for.

    Raises:
        UsageError: a head size that no kernel takes.
    """
    if head_dim % CHANNELS_AT_ONCE or head_dim > MAX_HEAD_DIM:
        folded = " and ".join(map(str, FOLDED_HEAD_DIMS))
        raise UsageError(
            f"--head-dim {head_dim}: expected a multiple of {CHANNELS_AT_ONCE} up to {MAX_HEAD_DIM}",
            hint=f"{folded} are served by decode, all others by decode_plain",
        )
    return Heads(num_kv_heads, head_dim, group)


def chosen_points(batches: Sequence[int], contexts: Sequence[int], default: Sequence[Point]) -> tuple[Point, ...]:
    """``default`` if neither is given, else every batch with every context, what is missing taken from BATCHES and
    CONTEXTS.

    Raises:
        UsageError: a context shorter than a page.
    """
    if not batches and not contexts:
        return tuple(default)
    short = [context for context in contexts if context < PAGE_TOKENS]
    if short:
        raise UsageError(f"--context {short[0]}: expected at least {PAGE_TOKENS} tokens, one page")
    return tuple(itertools.starmap(Point, itertools.product(batches or BATCHES, contexts or CONTEXTS)))
