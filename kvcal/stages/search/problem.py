"""The units of a search, their options, and the bytes that these may take together.

Keys and values of a layer are a couple: some pairs of options do not go together, because the
pair would be decoded by the slower kernel. The solver chooses pairs. A choice has two constraints: its bytes, and a
step's time no longer than at 16 bits (kvcal.stages.search.speed). The solver knows bytes alone; where its answer is too
slow, time gets a price, by bisection the lowest at which the answer is fast enough. The choice lies between the two
answers at either side of that price.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvcal.distributed import from_first
from kvcal.errors import InfeasibleBudget
from kvcal.geometry import Geometry
from kvcal.plan.layer import LayerPlan, bare_layers
from kvcal.plan.page_format import SIDES, Side
from kvcal.plan.plan import Workload
from kvcal.recipe import PredictorSpec
from kvcal.stages.allocate import solver
from kvcal.stages.search.compositions import (
    RAW_OPTION,
    Composition,
    Style,
    Unit,
    lattice_nbytes,
    option_nbytes,
    options_of,
    with_options,
)
from kvcal.stages.search.speed import TOLERANCE, Speed

PRICES = 24  # of time that are tried: a bracket by factors of four, then halves of it

Choice = tuple[int, ...]  # an option number for every unit
Pairs = frozenset[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Problem:
    """The options of every unit, their bytes, and the bytes they may take together. ``couples``: positions of the units
    of keys and values of a layer, with the pairs of options that go together; ``us``: of each couple, the time
    of every such pair and of 16 bits; ``most_us``: that all may take together."""

    units: tuple[Unit, ...]
    options: tuple[tuple[Composition, ...], ...]
    nbytes: tuple[tuple[int, ...], ...]
    couples: tuple[tuple[int, int, Pairs], ...]
    capacity: int
    us: tuple[Mapping[tuple[int, int], float], ...]
    most_us: float

    def step_us(self, choice: Choice) -> float:
        """A step's time."""
        return sum(us[choice[k], choice[v]] for (k, v, _), us in zip(self.couples, self.us, strict=True))

    def size(self, choice: Choice) -> int:
        return sum(sizes[option] for sizes, option in zip(self.nbytes, choice, strict=True))

    def chosen(self, choice: Choice) -> dict[Unit, Composition]:
        return {unit: options[option] for unit, options, option in zip(self.units, self.options, choice, strict=True)}

    def is_allowed(self, choice: Choice) -> bool:
        """Whether all pairs go together, and a step is fast enough."""
        are_pairs = all((choice[k], choice[v]) in pairs for k, v, pairs in self.couples)
        return are_pairs and self.step_us(choice) <= self.most_us * (1 + TOLERANCE)

    @property
    def raw(self) -> Choice:
        """16 bits everywhere."""
        return tuple(options.index(RAW_OPTION) for options in self.options)

    @property
    def smallest(self) -> Choice:
        """The pair of fewest bytes for every couple, of those no slower than 16 bits."""
        choice, raw = [0] * len(self.units), self.raw
        for (k, v, pairs), us in zip(self.couples, self.us, strict=True):
            fast = [pair for pair in pairs if us[pair] <= us[raw[k], raw[v]]]
            choice[k], choice[v] = min(fast, key=lambda p: (self.nbytes[k][p[0]] + self.nbytes[v][p[1]], p))
        return tuple(choice)

    def choice_of(self, layers: Sequence[LayerPlan]) -> Choice | None:
        """The choice whose plan has these layers; None where they are no composition of the options."""
        by_index, choice = {layer.geometry.index: layer for layer in layers}, []
        for unit, options in zip(self.units, self.options, strict=True):
            layer, side = by_index[unit.index], unit.side
            rescale = side == "k" and layer.k_rescale
            found = [
                number
                for number, option in enumerate(options)
                if option.format == layer.format(side)
                and (option.predictor, option.style.rescale) == (layer.predictor(side), rescale)
            ]
            if not found:
                return None
            choice.append(found[0])
        of_unit = self.chosen(tuple(choice))
        for layer in layers:
            if layer.is_paged:
                k, v = (of_unit[Unit(layer.geometry.index, side)] for side in SIDES)
                if (with_options(layer, k, v).k_pages, layer.k_offset) != (layer.k_pages, False):
                    return None
        return tuple(choice)

    def solve(self, losses: Sequence[Mapping[int, float]]) -> Choice | None:
        """The choice of least loss among the pairs of options that ``losses`` names; None if none fits, or is fast
        enough."""
        slow = self._solved(losses, 0.0)
        if slow is None or self.is_allowed(slow):
            return slow
        spread = sum(max(row.values()) - min(row.values()) for row in losses)
        low, high, fast = 0.0, max(spread, TOLERANCE) / max(self.most_us, TOLERANCE), None
        for _ in range(PRICES):
            price = high if fast is None else (low + high) / 2
            choice = self._solved(losses, price)
            assert choice is not None  # one fits the bytes
            if self.is_allowed(choice):
                fast, high = choice, price
            else:
                slow, low, high = choice, price, 4 * high if fast is None else high
        return None if fast is None else self._between(slow, fast, losses)

    def _between(self, slow: Choice, fast: Choice, losses: Sequence[Mapping[int, float]]) -> Choice:
        """Couples of the slow choice as those of the fast one, by the loss for the time saved, until it is allowed:
        where many layers are alike, one price turns all at once. The fast choice if bytes do not allow that."""

        def cost(couple: tuple[int, Mapping[tuple[int, int], float]]) -> float:
            (k, v, _), us = self.couples[couple[0]], couple[1]
            saved = us[slow[k], slow[v]] - us[fast[k], fast[v]]
            more = sum(losses[unit][fast[unit]] - losses[unit][slow[unit]] for unit in (k, v))
            return more / saved if saved > 0 else math.inf

        choice = list(slow)
        for number, _ in sorted(enumerate(self.us), key=cost):
            for unit in self.couples[number][:2]:
                choice[unit] = fast[unit]
            if self.is_allowed(tuple(choice)) and self.size(tuple(choice)) <= self.capacity:
                return tuple(choice)
        return fast

    def _solved(self, losses: Sequence[Mapping[int, float]], us_price: float) -> Choice | None:
        """The choice of least loss and price of its time within the bytes."""
        units, pairs_of = [], []
        for (k, v, pairs), us in zip(self.couples, self.us, strict=True):
            named = sorted(pair for pair in pairs if pair[0] in losses[k] and pair[1] in losses[v])
            costs = [losses[k][i] + losses[v][j] + us_price * us[i, j] for i, j in named]
            options = [
                solver.Option(str(number), self.nbytes[k][i] + self.nbytes[v][j], cost - min(costs))
                for number, ((i, j), cost) in enumerate(zip(named, costs, strict=True))
            ]
            units.append(solver.Unit(f"{self.units[k]}, {self.units[v]}", tuple(options)))
            pairs_of.append(named)
        try:  # by rank 0: the solver's time is limited, and ranks could come to other choices
            solved = from_first(lambda: solver.solve(units, self.capacity).choice)
        except InfeasibleBudget:
            return None
        choice = [0] * len(self.units)
        for (k, v, _), named, number in zip(self.couples, pairs_of, solved, strict=True):
            choice[k], choice[v] = named[number]
        return tuple(choice)


def problem_of(
    geometry: Geometry,
    styles: Mapping[Side, Sequence[Style]],
    predictors: PredictorSpec | None,
    workload: Workload,
    paged_bytes: int,
    speed: Speed,
) -> Problem:
    """Units and options of a model: all that fit beside the smallest of all other units, and 16 bits. ``paged_bytes``:
    what the paged layers and their tensors may take.

    Raises:
        UsageError: a style that cannot be composed. InfeasibleBudget: not even the smallest options fit.
    """
    units: list[Unit] = []
    options: list[tuple[Composition, ...]] = []
    couples, step_us, most_us, source = [], [], 0.0, None
    paged = [layer for layer in bare_layers(geometry) if layer.is_paged]
    layer_of = {layer.geometry.index: layer for layer in paged}
    for layer in paged:
        index = layer.geometry.index
        offered = {side: options_of(layer, side, source, styles[side], predictors, speed) for side in SIDES}
        first = len(units)
        for side in SIDES:
            units.append(Unit(index, side))
            options.append(tuple(offered[side]))
        us = _pairs(layer, options[first], options[first + 1], speed)
        couples.append((first, first + 1, frozenset(us)))
        step_us.append(us)
        most_us += us[options[first].index(RAW_OPTION), options[first + 1].index(RAW_OPTION)]
        source = index
    nbytes = tuple(
        tuple(option_nbytes(unit, option, layer_of[unit.index], geometry, workload) for option in row)
        for unit, row in zip(units, options, strict=True)
    )
    lattices = ((option.format.lattice_dim, option.format.num_bits) for row in options for option in row)
    capacity = paged_bytes - lattice_nbytes(lattices)
    wide = Problem(tuple(units), tuple(options), nbytes, tuple(couples), capacity, tuple(step_us), most_us)
    smallest = wide.size(wide.smallest)
    if smallest > capacity:
        missing = smallest - capacity
        raise InfeasibleBudget(
            f"the smallest compositions of [search] take {smallest} bytes at batch {workload.batch} x "
            f"{workload.context} tokens, {missing} more than the budget leaves for them",
            paged_bytes + missing,
            hint="raise the budget, or add choices with fewer bits",
        )
    return _fitting(wide, capacity - smallest)


def _pairs(
    layer: LayerPlan, k: Sequence[Composition], v: Sequence[Composition], speed: Speed
) -> dict[tuple[int, int], float]:
    """Numbers of the options that go together, and the layer's time with them in all heads."""
    every = itertools.product(range(len(k)), range(len(v)))
    times = {(i, j): speed.us(with_options(layer, k[i], v[j])) for i, j in every}
    return {pair: us for pair, us in times.items() if us is not None}


def _fitting(wide: Problem, room: int) -> Problem:
    """The problem without options that fit beside the smallest in no pair. 16 bits stay: others are measured beside
    them."""
    options, nbytes, couples, step_us = list(wide.options), list(wide.nbytes), [], []
    smallest, raw = wide.smallest, wide.raw
    for (k, v, pairs), us in zip(wide.couples, wide.us, strict=True):
        sizes = {pair: wide.nbytes[k][pair[0]] + wide.nbytes[v][pair[1]] for pair in pairs}
        least = sizes[smallest[k], smallest[v]]
        fitting = [pair for pair, size in sizes.items() if size - least <= room]
        new_number = []
        for place, position in enumerate((k, v)):
            kept = {pair[place] for pair in fitting} | {wide.options[position].index(RAW_OPTION)}
            new_number.append({old: new for new, old in enumerate(sorted(kept))})
            options[position] = tuple(wide.options[position][number] for number in sorted(kept))
            nbytes[position] = tuple(wide.nbytes[position][number] for number in sorted(kept))
        moved = {pair: (new_number[0][pair[0]], new_number[1][pair[1]]) for pair in {*fitting, (raw[k], raw[v])}}
        couples.append((k, v, frozenset(moved[pair] for pair in fitting)))
        step_us.append({new: us[old] for old, new in moved.items()})
    return replace(wide, options=tuple(options), nbytes=tuple(nbytes), couples=tuple(couples), us=tuple(step_us))


def side_choice(problem: Problem, side: Side, style: Style, room: int | None = None) -> Choice:
    """One style for all keys, or all values, and 16 bits for the others. Where a layer does not have it (the first
    cannot be predicted), the largest option within ``room`` bytes of the smallest; 16 bits without one."""
    choice = list(problem.raw)
    for position, (unit, options) in enumerate(zip(problem.units, problem.options, strict=True)):
        if unit.side == side:
            numbers = [number for number, option in enumerate(options) if option.style == style]
            if numbers:
                choice[position] = numbers[0]
            elif room is not None:
                sizes = problem.nbytes[position]
                fitting = [number for number, size in enumerate(sizes) if size <= min(sizes) + room]
                choice[position] = max(fitting, key=lambda number: sizes[number])
    return tuple(choice)


def uniform_choices(problem: Problem, effects: Mapping[tuple[Side, Style], float], most: int) -> dict[str, Choice]:
    """One style for all keys and one for all values: those that fit, the ``most`` of least ``effects`` (of either side
    alone, taken to add up), by name."""
    found: dict[Choice, tuple[float, str]] = {}
    for (k_side, k), (v_side, v) in itertools.product(effects, effects):
        if (k_side, v_side) == ("k", "v"):
            whole = problem.size(_beside(problem, side_choice(problem, "k", k, 0), side_choice(problem, "v", v, 0)))
            room = max(0, (problem.capacity - whole) // 2)
            choice = _beside(problem, side_choice(problem, "k", k, room), side_choice(problem, "v", v, room))
            if problem.size(choice) <= problem.capacity and problem.is_allowed(choice):
                found.setdefault(choice, (effects["k", k] + effects["v", v], f"K {k}, V {v}"))
    ranked = sorted(found, key=lambda choice: found[choice])[:most]
    return {found[choice][1]: choice for choice in ranked}


def _beside(problem: Problem, keys: Choice, values: Choice) -> Choice:
    return tuple(k if unit.side == "k" else v for unit, k, v in zip(problem.units, keys, values, strict=True))


def shared_styles(problem: Problem, side: Side) -> list[Style]:
    """Styles that all layers behind the first have, in the order of the options."""
    rows = [
        (unit.index, [option.style for option in options])
        for unit, options in zip(problem.units, problem.options, strict=True)
        if unit.side == side
    ]
    later = [row for index, row in rows if index != problem.units[0].index] or [row for _, row in rows]
    return [style for style in dict.fromkeys(s for _, row in rows for s in row) if all(style in row for row in later)]
