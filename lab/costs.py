"""Costs of other texts and behind other layouts: which choices do they lead to, and what do these lose?

layouts  the choice by the law and by side, with costs measured in stripes or in whole pages, in a cache of stripes or
         of whole pages; next to fixed widths of the same bytes
costs    costs measured on texts of 4,096 tokens, of ordinary text or of look-ups, alone and together with the
         default's. Costs of two kinds are added up as shares of what all layers lose alone. All plans are read in whole
         pages, an eighth of the forwards
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcal import Plan
from kvcal.plan.page_format import SIDES
from kvcal.stages.allocate.fixed_widths import fixed_allocations, in_pages
from kvcal.stages.allocate.stage import allocate
from kvcal.stages.checkpoint import Mean
from kvcal.stages.profile.record import Profile

if TYPE_CHECKING:
    from choice_of_bits import Bench

FIRST, PAGES, LONG, LOOK_UPS = "by-layer", "in pages", "long text", "long look-ups"  # of the bench's profiles
STRIPES_OF, PAGES_OF = (16, 112), (128, 64)  # tokens that are packed together, and of the window


def measure_layouts(bench: Bench) -> None:
    """The first bits in all layouts; then the choices of all bits."""
    first, new, old = bench.given.bits[0], bench.profile(FIRST), bench.profile(PAGES)
    spec = bench.recipe(FIRST, first).allocate
    assert spec is not None
    plans = {"costs by side, in stripes": bench.program(FIRST, first)}
    plans |= {"costs by side, in pages": in_layout(plans["costs by side, in stripes"], PAGES_OF)}
    by_old = bench.basis.planned(allocate(old.by_law, spec, {}, bench.reserved(bench.recipe(PAGES, first))))
    plans |= {"law, costs in pages, in pages": by_old, "law, costs in pages": in_layout(by_old, STRIPES_OF)}
    found = {f"{name}@{first:g}": plan for name, plan in plans.items()}
    for bits in bench.given.bits:
        recipe = bench.recipe(FIRST, bits)
        assert recipe.allocate is not None
        program, reserved = bench.allocation(FIRST, bits), bench.reserved(recipe)
        found[f"law@{bits:g}"] = bench.basis.planned(allocate(new.by_law, recipe.allocate, {}, reserved))
        for name, one in fixed_allocations(program, new, recipe.allocate, reserved).items():
            found[f"{name}@{bits:g}"] = bench.basis.planned(one)
    bench.measure({name: (plan, float(name.partition("@")[2])) for name, plan in found.items()})


def measure_costs(bench: Bench) -> None:
    new = bench.profile(FIRST)
    of = {name: replace(bench.profile(name), setup=new.setup) for name in (LONG, LOOK_UPS)}  # priced alike
    of |= {FIRST: new, f"{FIRST} and {LOOK_UPS}": both(new, of[LOOK_UPS]), f"{LONG} and {LOOK_UPS}": both(*of.values())}
    plans: dict[str, tuple[Plan, str]] = {}
    for bits in bench.given.bits:
        recipe = bench.recipe(FIRST, bits)
        assert recipe.allocate is not None
        for name, profile in of.items():
            for way, costs in (("", profile), (", law", profile.by_law)):
                plan = bench.basis.planned(allocate(costs, recipe.allocate, {}, bench.reserved(recipe)))
                plans[f"costs of {name}{way}@{bits:g}"] = (in_pages(plan), f"costs of {FIRST}@{bits:g}")
    bench.measure(plans)


def both(one: Profile, other: Profile) -> Profile:
    """Costs of two profiles, each as a share of what all layers alone lose by it at the fewest bits."""
    means: dict[str, Mean] = dict(one.means)
    added: dict[str, Mean] = {}
    for profile in (one, other):
        costs = {name: mean for name, mean in profile.means.items() if name.startswith("kl.")}
        total = sum(float(mean.result()[0]) for name, mean in costs.items() if not name.endswith(".all"))
        for name, mean in costs.items():
            share = mean.result() / total
            added[name] = Mean(added[name].total + share if name in added else share, 1)
    return replace(one, means=means | added)


def in_layout(plan: Plan, layout: tuple[int, int]) -> Plan:
    """The same widths, with other tokens that are packed together and another window."""
    change: Mapping[str, int] = dict(zip(("stripe_tokens", "recent_window"), layout, strict=True))
    layers = (
        replace(one, **{side: replace(one.format(side), **change) for side in SIDES})
        if one.is_paged and all(one.format(side).num_bits < 16 for side in SIDES) else one
        for one in plan.layers
    )  # fmt: skip
    return replace(plan, layers=tuple(layers))
