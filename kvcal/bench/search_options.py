"""The pairs of formats that a search for decoding may give a layer: what a table of step times should hold."""

from __future__ import annotations

from kvcal.bench.shape import CACHE_DTYPE, Heads, Pair
from kvcal.errors import UsageError
from kvcal.geometry import AttentionGeometry, Geometry
from kvcal.plan.page_format import SIDES, Format
from kvcal.plan.plan import Workload
from kvcal.recipe_files import load_recipe
from kvcal.stages.search.compositions import styles_of, system_plans
from kvcal.stages.search.problem import problem_of
from kvcal.stages.search.speed import ByBytes

# Nothing but the options of a layer is asked of the problem.
LOAD, ROOM = Workload(1, 32768), 1 << 50


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
    layers = (
        AttentionGeometry(index, heads.num_query_heads, heads.num_kv_heads, heads.head_dim, heads.head_dim)
        for index in range(2)
    )
    geometry = Geometry("llama", CACHE_DTYPE, tuple(layers))
    plans = system_plans(geometry, spec, recipe.predictors).values()
    styles = {side: styles_of(side, spec, recipe.cache, recipe.predictors, plans) for side in SIDES}
    problem = problem_of(geometry, styles, recipe.predictors, LOAD, ROOM, False, ByBytes(CACHE_DTYPE, LOAD))
    k, v, pairs = problem.couples[-1]
    found: dict[tuple[Format, Format], Pair] = {}
    for i, j in sorted(pairs):
        key, value = problem.options[k][i], problem.options[v][j]
        found.setdefault((key.format, value.format), Pair(f"K {key.name}, V {value.name}", key.format, value.format))
    return tuple(found.values())
