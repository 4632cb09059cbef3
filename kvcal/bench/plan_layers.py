"""A plan's layers as what is timed: layers that differ in nothing but their place share a measurement.

A layer is timed among others of its kind: it is predicted from one like it, wherever the plan has it predicted from.
Formats, transforms and predictors are the plan's, tensors are random (kvcal.bench.case). Layers with sliding windows or
states hold what the model holds without a plan; they are counted and not timed.

A search for decoding may give a layer any of some pairs of formats: what a table of step times should hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic.dataclasses import dataclass as record

from kvcal.bench.shape import CACHE_DTYPE, Heads, Pair, Point
from kvcal.errors import UsageError
from kvcal.geometry import Geometry
from kvcal.pages.record_layout import PAGE_TOKENS
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES, Format, Side
from kvcal.plan.plan import Plan, Workload, load_plan
from kvcal.recipe_files import load_recipe
from kvcal.stages.search.compositions import Style, styles_of, system_plans
from kvcal.stages.search.problem import problem_of
from kvcal.stages.search.speed import ByBytes
from kvcal.stages.search.step_times import placed
from kvcal.strict import STRICT

# Of the problem of a search, whose options of a layer are all that is asked.
LOAD, ROOM = Workload(1, 32768), 1 << 50


@record(frozen=True, config=STRICT)
class LayerKind:
    """Layers of a plan that are alike. ``like``: one of them, as layer 1 of a model that has no others (index and
    predictors' sources)."""

    name: str
    like: LayerPlan
    indices: tuple[int, ...]

    @property
    def num_ends(self) -> int:
        """As of a Pair: layers at either end that are unlike those between them."""
        return int(any(self.like.predictor(side) is not None for side in SIDES))

    def layers(self, heads: Heads, count: int) -> tuple[LayerPlan, ...]:
        """``count`` layers of the kind, each predicted from the one before; the first is not."""
        return tuple(placed(self.like, index) for index in range(count))


@record(frozen=True, config=STRICT)
class TimedPlan:
    """The plan that a report is about. ``point``: its workload; ``num_others``: layers that are not timed."""

    name: str
    sha256: str
    heads: Heads
    point: Point
    kinds: tuple[LayerKind, ...]
    num_others: int

    @property
    def points(self) -> tuple[Point, ...]:
        """The sizes to time unless others are asked for."""
        return (self.point,)


@dataclass(frozen=True)
class WholePlan:
    """All layers of a plan, for whole steps of a model."""

    name: str
    plan_layers: tuple[LayerPlan, ...]
    num_ends: int = 0

    def layers(self, heads: Heads, count: int) -> tuple[LayerPlan, ...]:
        """The plan's own. UsageError: the model has others."""
        theirs = {layer.geometry for layer in self.plan_layers}
        if theirs != {heads.geometry(index) for index in range(count)}:
            raise UsageError(
                f"--plan {self.name}: it is for {len(theirs)} layers, the shape has {count} of {heads}; or their heads "
                "differ",
                hint="give the --shape that the plan was made for",
            )
        return self.plan_layers


def whole_plan(path: str | Path) -> WholePlan:
    """The layers of a plan file, under the file's name. ArtifactError: no plan there."""
    return WholePlan(Path(path).stem, load_plan(path).layers)


def timed_plan(path: str | Path) -> TimedPlan:
    """The kinds of layers of a plan file.

    Raises:
        ArtifactError: no plan there.
        UsageError: no pages, or layers of different heads.
    """
    plan = load_plan(path)
    heads = plan_heads(plan, str(path))
    groups: dict[LayerPlan, list[int]] = {}
    paged = [layer for layer in plan.layers if layer.is_paged]
    for layer in paged:
        groups.setdefault(placed(layer), []).append(layer.geometry.index)
    kinds = tuple(LayerKind(kind_name(like, indices), like, tuple(indices)) for like, indices in groups.items())
    point = Point(plan.workload.batch, max(PAGE_TOKENS, plan.workload.context))
    return TimedPlan(Path(path).name, plan.sha256, heads, point, kinds, len(plan.layers) - len(paged))


def plan_heads(plan: Plan, name: str) -> Heads:
    """The heads of all paged layers. UsageError: there are none, or they differ."""
    found = {
        Heads(layer.attention.num_kv_heads, layer.head_dim("k"), layer.attention.group_heads): layer
        for layer in plan.layers
        if layer.is_paged
    }
    if len(found) != 1 or any(layer.head_dim("k") != layer.head_dim("v") for layer in plan.layers if layer.is_paged):
        shown = ", ".join(map(str, found)) or "no pages"
        raise UsageError(
            f"--plan {name}: its layers have {shown}; expected one number of heads and one size for keys and values",
            hint="time its formats one by one: --recipe with [formats], --heads and --head-dim",
        )
    return next(iter(found))


def kind_name(like: LayerPlan, indices: Sequence[int]) -> str:
    """Such as "19 layers from 2: K 2 channel g128, V 2 token g128"; the first index tells kinds apart."""
    sides = [f"{side.upper()} {' + '.join(_styles(like, side))}" for side in SIDES]
    return f"{len(indices)} layer{'s' * (len(indices) > 1)} from {indices[0]}: {', '.join(sides)}"


def _styles(layer: LayerPlan, side: Side) -> list[str]:
    """One for each format, with the number of its heads where there are several."""
    runs = layer.runs(side)
    counts: dict[str, int] = {}
    for fmt, heads in runs:
        style = Style(fmt, side == "k" and layer.k_rescale, layer.predictor(side) is not None)
        counts[str(style)] = counts.get(str(style), 0) + heads.stop - heads.start
    return [style if len(counts) == 1 else f"{style} ({count} heads)" for style, count in counts.items()]


def search_pairs(name: str, heads: Heads) -> tuple[Pair, ...]:
    """Every pair of a recipe with [search] that attention reads as it is stored, once; λ takes no time, and 16 bits are
    a baseline.

    Raises:
        UsageError: no such recipe, or none with [search].
    """
    recipe = load_recipe(name)
    spec = recipe.search
    if spec is None:
        raise UsageError(f"--search {name}: the recipe has no [search]", hint="for example best; others: --recipe")
    geometry = Geometry("llama", CACHE_DTYPE, (heads.geometry(0), heads.geometry(1)))
    plans = system_plans(geometry, spec, recipe.predictors).values()
    styles = {side: styles_of(side, spec, recipe.cache, recipe.predictors, plans) for side in SIDES}
    problem = problem_of(geometry, styles, recipe.predictors, LOAD, ROOM, False, ByBytes(CACHE_DTYPE, LOAD))
    k, v, pairs = problem.couples[-1]
    found: dict[tuple[Format, Format], Pair] = {}
    for i, j in sorted(pairs):
        key, value = problem.options[k][i], problem.options[v][j]
        found.setdefault((key.format, value.format), Pair(f"K {key.name}, V {value.name}", key.format, value.format))
    return tuple(found.values())
