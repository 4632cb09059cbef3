"""Finer choices than whole bits of a layer's keys or values, as oracles: what would they gain at equal bytes?

heads    keys of a layer in two groups of KV heads, each with its width. First the KL of one head's keys alone at 2
         bits, next to that of all heads of the layer; then the integer program chooses by head or by layer, at the
         bits that the program's plan by layer spends
levels   3, 5, 6 and 7 levels as options, as many bits as their logarithm; costs fall as the squared error of a Gaussian
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from codes import HeadsCodec, LevelsCodec, best_step, by_place, coded_maker, distortion_of
from quality import MakeCache, Texts, read_missing

from kvcal import Plan
from kvcal.data.sequences import DataSpec
from kvcal.folder import sequences, tokenizer_of
from kvcal.pages.codec import PageCodec
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.page_format import Side
from kvcal.recipe import CacheSpec
from kvcal.stages.allocate.solver import Option, Unit, solve
from kvcal.stages.divergence import one_side_plan, unquantized_plan
from kvcal.systems.basis.rotated import DISTORTION

if TYPE_CHECKING:
    from choice_of_bits import Bench

WIDTHS = (2, 3, 4, 8)
LEVELS = (3, 4, 5, 6, 7, 8, 16, 256)
SOURCE, LONGEST = "by-layer", 1024  # whose basis and costs; tokens of a text that heads are measured on
Place = tuple[int, Side]


def measure_heads(bench: Bench) -> None:
    found = bench.found.setdefault("heads", {"alone": {}, "read": {}, "against": {}, "bits": {}, "widths": {}})
    costs = _costs_of_heads(bench, found)
    values = {index: float(bench.profile(SOURCE).kl(index, "v")[0]) for index in costs}
    makers: dict[str, MakeCache] = {}
    for bits in bench.given.bits:
        layers = bench.allocation(SOURCE, bits).layers
        count = len(next(iter(costs.values()))["heads"])
        spent = sum(count * layer.format(side).num_bits for layer in layers if layer.is_paged for side in ("k", "v"))
        base = f"by layer@{bits:g}"
        for way, ways in (("by layer", _alike), ("by head", _groups)):
            chosen = _solved_heads(costs, values, ways, spent)
            name = f"{way}@{bits:g}"
            makers[name] = _heads_maker(bench, chosen)
            found["against"][name], found["bits"][name] = base, bits
            found["widths"][name] = {f"{index}.{side}": list(widths) for (index, side), widths in chosen.items()}
    read_missing(bench.loaded, makers, bench.texts, found["read"], bench.given.at_once, bench.save)


def _costs_of_heads(bench: Bench, found: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Of every layer, KL of its keys at 2 bits: of all heads, and of each alone ("heads")."""
    loaded, basis = bench.loaded, bench.basis
    reference = unquantized_plan(loaded.identity, loaded.geometry)
    cache, makers = _cache(bench), dict[str, MakeCache]()
    fmt = cache.format("k", 2, "token", 128, "rotated")
    layers = [layer for layer in reference.layers if layer.takes_transforms]
    for layer in layers:
        index, count = layer.geometry.index, layer.attention.num_kv_heads
        plan = basis.changed(one_side_plan(reference, index, "k", fmt))
        for head in (None, *range(count)):
            widths = tuple(2 if head in (None, number) else 16 for number in range(count))
            makers[f"{index}.{'all' if head is None else head}"] = _maker(bench, plan, {(index, "k"): widths})
    alone = found["alone"]
    read_missing(loaded, makers, _fitting_texts(bench), alone, 12, bench.save)
    means = {name: sum(row[0] for row in rows["fit"]) / len(rows["fit"]) for name, rows in alone.items()}
    return {
        layer.geometry.index: {
            "all": means[f"{layer.geometry.index}.all"],
            "heads": [means[f"{layer.geometry.index}.{head}"] for head in range(layer.attention.num_kv_heads)],
        }
        for layer in layers
    }


def _cache(bench: Bench) -> CacheSpec:
    """Whole pages in place of stripes, with as many tokens at 16 bits on average: an eighth of the forwards."""
    cache = bench.recipe(SOURCE).cache
    window = cache.k_recent_window - (PAGE_TOKENS - cache.stripe_tokens) // 2
    return replace(cache, stripe_tokens=PAGE_TOKENS, k_recent_window=window, v_recent_window=window)


def _fitting_texts(bench: Bench) -> Texts:
    """Of the pool that plans are calibrated on, none of them shorter than the others."""
    count, longest = (4, LONGEST // 2) if bench.given.quick else (8, LONGEST)
    tokens = min(longest, bench.given.tokens)
    spec: DataSpec = replace(bench.recipe(SOURCE).data, num_samples=count, seq_len=tokens, min_len=tokens)
    data = sequences(spec, bench.loaded)
    scored = torch.stack(list(data.loss_masks)) & (torch.arange(tokens) > 0)
    assert tokenizer_of(bench.loaded) is not None
    return Texts(("fit",) * len(scored), torch.stack(list(data.sequences)), ((),) * len(scored), scored)


def _alike(costs: list[float]) -> list[tuple[int, ...]]:
    return [(bits,) * len(costs) for bits in WIDTHS]


def _groups(costs: list[float]) -> list[tuple[int, ...]]:
    """One width, or two of which the heads that cost most have the wider."""
    order, found = sorted(range(len(costs)), key=lambda head: -costs[head]), _alike(costs)
    for few, more in combinations(WIDTHS, 2):
        for count in range(1, len(costs)):
            found.append(tuple(more if head in order[:count] else few for head in range(len(costs))))
    return found


def _solved_heads(
    costs: Mapping[int, Mapping[str, Any]], values: Mapping[int, float],
    ways: Callable[[list[float]], list[tuple[int, ...]]], spent: int,
) -> dict[Place, tuple[int, ...]]:  # fmt: skip
    """Widths of every place; a layer's cost is divided among heads as they cost alone."""
    units, places = [], list[Place]()
    for index, of_layer in costs.items():
        alone = of_layer["heads"]
        for side, whole in (("k", of_layer["all"]), ("v", values[index])):
            shares = [one / max(sum(alone), 1e-30) for one in alone] if side == "k" else [1 / len(alone)] * len(alone)
            options = []
            for widths in ways(alone) if side == "k" else _alike(alone):
                loss = sum(
                    whole * share * DISTORTION[bits] / DISTORTION[2] for share, bits in zip(shares, widths, strict=True)
                )
                options.append(Option(widths, sum(widths), loss))
            units.append(Unit(f"{index} {side}", tuple(options)))
            places.append((index, side))
    choice = solve(units, spent).choice
    return {place: unit.options[number].key for place, unit, number in zip(places, units, choice, strict=True)}


def _heads_maker(bench: Bench, chosen: Mapping[Place, tuple[int, ...]]) -> MakeCache:
    plan = _planned(bench, {place: min(widths) for place, widths in chosen.items()})
    return _maker(bench, plan, {place: widths for place, widths in chosen.items() if len({*widths}) > 1})


def _planned(bench: Bench, widths: Mapping[Place, int]) -> Plan:
    """The plan of whole bits in the basis."""
    cache = _cache(bench)
    plan = unquantized_plan(bench.loaded.identity, bench.loaded.geometry)
    for (index, side), bits in widths.items():
        plan = one_side_plan(plan, index, side, cache.format(side, bits, "token", 128, "rotated"))
    return bench.basis.changed(plan)


def _maker(bench: Bench, plan: Plan, widths: Mapping[Place, tuple[int, ...]]) -> MakeCache:
    changes = {place: partial(HeadsCodec.instead_of, widths=found) for place, found in widths.items()}
    return coded_maker(plan, bench.loaded.model.config, by_place(changes))


def measure_levels(bench: Bench) -> None:
    found = bench.found.setdefault("levels", {"read": {}, "against": {}, "bits": {}, "widths": {}})
    found["distortion"] = {str(levels): [best_step(levels), distortion_of(levels)] for levels in LEVELS}
    makers: dict[str, MakeCache] = {}
    for bits in bench.given.bits:
        layers = [layer for layer in bench.allocation(SOURCE, bits).layers if layer.is_paged]
        spent = sum(1000 * layer.format(side).num_bits for layer in layers for side in ("k", "v"))
        base = f"whole bits@{bits:g}"
        for way, allowed in (("whole bits", (4, 8, 16, 256)), ("any levels", LEVELS)):
            chosen, name = _solved_levels(bench, allowed, spent), f"{way}@{bits:g}"
            plan = _planned(bench, {place: math.ceil(math.log2(levels)) for place, levels in chosen.items()})
            changes: dict[Place, Callable[[PageCodec], PageCodec]] = {
                place: partial(LevelsCodec.instead_of, levels=levels)
                for place, levels in chosen.items()
                if levels.bit_count() > 1
            }
            makers[name] = coded_maker(plan, bench.loaded.model.config, by_place(changes))
            found["against"][name], found["bits"][name] = base, bits
            found["widths"][name] = {f"{index}.{side}": levels for (index, side), levels in chosen.items()}
    read_missing(bench.loaded, makers, bench.texts, found["read"], bench.given.at_once, bench.save)


def _solved_levels(bench: Bench, allowed: tuple[int, ...], spent: int) -> dict[Place, int]:
    """Levels of every place, within ``spent`` thousandths of a bit."""
    profile = bench.profile(SOURCE)
    places: list[Place] = [(layer.index, side) for layer in profile.setup.layers for side in ("k", "v")]
    units = []
    for index, side in places:
        cost = float(profile.kl(index, side)[0])
        options = [
            Option(levels, math.ceil(1000 * math.log2(levels)), cost * distortion_of(levels) / distortion_of(4))
            for levels in allowed
        ]
        units.append(Unit(f"{index} {side}", tuple(options)))
    choice = solve(units, spent).choice
    return {place: unit.options[number].key for place, unit, number in zip(places, units, choice, strict=True)}
