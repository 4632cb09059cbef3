"""The multiple-choice knapsack's exact parts: pruning, the linear relaxation, and enumeration in integers.

``allocate.solver`` puts them together and gives the reasons. The relaxation's greedy rule and the reduced costs
are the classical ones (Sinha and Zoltners 1979; Pisinger 1995); the enumeration is Nemhauser and Ullmann's
list of non-dominated states (1969), cut by the reduced costs. Losses are floats outside; the enumeration
counts them in integers of 2^-60 of the largest total, so that equal sums are equal in any order.

E entries are the options of all units in one flat array, unit by unit, each unit's by rising bytes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcal.errors import UsageError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MAX_TOTAL_BYTES = 2**53  # up to here float64 holds every integer: 9 petabytes
LOSS_BITS = 60
SAFETY = 1e-12  # rounding of a bound, as a share of the loss it bounds; float64 sums err by far less


@dataclass(frozen=True)
class Option:
    """One way to store a unit: ``nbytes`` everything included, and its ``loss`` (finite, >= 0, any unit)."""

    key: Hashable
    nbytes: int
    loss: float


@dataclass(frozen=True)
class Unit:
    """A part of the cache that gets exactly one option, such as layer 3's keys."""

    name: str
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Items:
    """The undominated options. ``unit_E`` and ``option_E`` number units and their options as given,
    ``extra_E`` is int64 bytes above the unit's smallest option, ``loss_E`` float64; ``start_U`` is the first
    entry of each unit, the smallest, and ``last_U`` the last, of least loss. ``base_bytes`` is the sum of the
    units' smallest. ``steps`` are the convex hulls' (loss saved per byte, unit, entry reached), best first.
    """

    unit_E: Ints
    option_E: Ints
    extra_E: Ints
    loss_E: Floats
    start_U: Ints
    last_U: Ints
    base_bytes: int
    steps: tuple[tuple[float, int, int], ...]


@dataclass(frozen=True)
class Relaxation:
    """``choice_U`` (entries) is feasible, ``bound`` is at most any feasible loss, and using entry e costs at
    least ``bound + reduced_E[e]``; the reduced costs of several units add up."""

    choice_U: Ints
    bound: float
    reduced_E: Floats


@dataclass(frozen=True)
class States:
    """The S non-dominated sums by rising ``nbytes_S`` and falling ``loss_S`` (both int64). ``trail`` holds,
    group by group, each state's parent state and the position it chose in the group."""

    nbytes_S: Ints
    loss_S: Ints
    trail: tuple[tuple[Ints, Ints], ...]

    def choice(self, state: int) -> list[int]:
        """The position chosen in every group."""
        chosen = []
        for parent_S, position_S in reversed(self.trail):
            chosen.append(int(position_S[state]))
            state = int(parent_S[state])
        return chosen[::-1]


def prepare(units: Sequence[Unit]) -> Items:
    """Checks the units and drops dominated options: of equal ones the first stays.

    UsageError for no units, a unit without options, bytes that are not whole and >= 0, a loss that is NaN,
    infinite or negative, or totals too large to be exact.
    """
    if not units:
        raise UsageError("there is nothing to allocate: no units were given; allowed: at least one")
    kept = [_undominated(unit) for unit in units]
    sizes = [len(entries) for entries in kept]
    total = sum(entries[-1][0] for entries in kept)
    if total > MAX_TOTAL_BYTES:
        raise UsageError(f"the largest allocation has {total} bytes; allowed: at most {MAX_TOTAL_BYTES}")
    if not math.isfinite(sum(entries[0][1] for entries in kept)):
        raise UsageError("the losses add up to infinity; allowed: a finite sum", hint="rescale the losses")
    last_U = np.cumsum(np.array(sizes, dtype=np.int64)) - 1
    start_U = np.concatenate(([0], last_U[:-1] + 1))
    steps = [step for unit, entries in enumerate(kept) for step in _hull_steps(unit, start_U[unit], entries)]
    return Items(
        unit_E=np.repeat(np.arange(len(kept)), sizes),
        option_E=np.array([option for entries in kept for _, _, option in entries]),
        extra_E=np.array([nbytes - entries[0][0] for entries in kept for nbytes, _, _ in entries]),
        loss_E=np.array([loss for entries in kept for _, loss, _ in entries]),
        start_U=start_U,
        last_U=last_U,
        base_bytes=sum(entries[0][0] for entries in kept),
        steps=tuple(sorted(steps, key=lambda step: -step[0])),
    )


def _undominated(unit: Unit) -> list[tuple[int, float, int]]:
    """(bytes, loss, option number) by rising bytes and strictly falling loss."""
    if not unit.options:
        raise UsageError(f"unit '{unit.name}' has no options; allowed: at least one")
    for option in unit.options:
        place = f"of option '{option.key}' of unit '{unit.name}'"
        if type(option.nbytes) is not int or option.nbytes < 0:
            raise UsageError(f"the bytes {place} are {option.nbytes!r}; allowed: whole numbers >= 0")
        if not 0 <= option.loss < math.inf:
            raise UsageError(
                f"the loss {place} is {option.loss}; allowed: finite numbers >= 0",
                hint="the profile's statistics overflowed or are damaged",
            )
    kept: list[tuple[int, float, int]] = []
    for entry in sorted((o.nbytes, float(o.loss), number) for number, o in enumerate(unit.options)):
        if not kept or entry[1] < kept[-1][1]:
            kept.append(entry)
    return kept


def _hull_steps(unit: int, start: int, entries: list[tuple[int, float, int]]) -> list[tuple[float, int, int]]:
    """(loss saved per byte, unit, entry reached) along the lower convex hull; the savings strictly fall."""
    hull = [(math.inf, 0)]
    for position in range(1, len(entries)):
        while True:
            before = entries[hull[-1][1]]
            here = entries[position]
            gain = (before[1] - here[1]) / (here[0] - before[0])
            if gain < hull[-1][0]:
                break
            hull.pop()
        hull.append((gain, position))
    return [(gain, unit, int(start) + position) for gain, position in hull[1:]]


def relax(items: Items, capacity: int) -> Relaxation:
    """The linear relaxation for ``capacity`` >= 0 bytes above ``items.base_bytes``.

    Greedy: take hull steps, best first, until one does not fit. Its saving per byte is the multiplier mu of
    the Lagrangian, which the choice so far minimises; the rest of the steps only improve ``choice_U``.
    """
    choice_U = items.start_U.copy()
    break_U, mu, slack = None, 0.0, capacity
    blocked: set[int] = set()
    left = capacity
    for gain, unit, entry in items.steps:
        if unit in blocked:
            continue
        nbytes = int(items.extra_E[entry] - items.extra_E[choice_U[unit]])
        if nbytes <= left:
            choice_U[unit] = entry
            left -= nbytes
            continue
        blocked.add(unit)
        if break_U is None:
            break_U, mu, slack = choice_U.copy(), gain, left
    base_U = choice_U if break_U is None else break_U
    # Relative to the choice at the break, so that a hopeless option's huge loss cannot drown the others.
    base_E = base_U[items.unit_E]
    more_E = (items.extra_E - items.extra_E[base_E]).astype(np.float64)
    reduced_E = np.maximum(items.loss_E - items.loss_E[base_E] + mu * more_E, 0.0)
    bound = max(0.0, math.fsum(items.loss_E[base_U]) - mu * slack)
    return Relaxation(choice_U, bound, reduced_E)


def count_losses(loss_E: Floats, largest: float) -> Ints:
    """Losses up to ``largest`` as int64 multiples of the power of two nearest 2^-60 of it."""
    exponent = LOSS_BITS - math.frexp(largest)[1]
    return np.rint(np.ldexp(loss_E, exponent)).astype(np.int64)


def enumerate_states(
    items: Items,
    groups: Sequence[Ints],
    count_E: Ints,
    capacity: int,
    max_sums: int,
    cut: tuple[Floats, float] | None = None,
) -> States | None:
    """Every non-dominated (bytes, loss) sum of one entry per group that has at most ``capacity`` bytes, or
    None when that means to form more than ``max_sums`` partial sums (a second is about four million).

    ``count_E`` are integer losses, each at most about 2^60; sums beyond 2^61 are dropped, which no feasible
    total of interest reaches. ``cut`` = (reduced_E, limit) drops partial sums that cost more than
    ``limit`` above the relaxation's bound. Of equal sums the one with the lowest option numbers survives,
    compared unit by unit in the order given.
    """
    nbytes_S, loss_S, rank_S = (np.zeros(1, dtype=np.int64) for _ in range(3))
    cost_S = np.zeros(1)
    trail = []
    reduced_E, limit = cut if cut is not None else (np.zeros(len(count_E)), math.inf)
    room = capacity - sum(int(items.extra_E[group[0]]) for group in groups)
    for group in groups:
        room += int(items.extra_E[group[0]])  # the groups still to come take at least their smallest
        max_sums -= len(nbytes_S) * len(group)
        if max_sums < 0:
            return None
        nbytes = (nbytes_S[:, None] + items.extra_E[group]).ravel()
        cost = (cost_S[:, None] + reduced_E[group]).ravel()
        loss = (loss_S[:, None] + count_E[group]).ravel()
        live = np.flatnonzero((nbytes <= room) & (cost <= limit) & (loss <= 2 ** (LOSS_BITS + 1)))
        parent, position = np.divmod(live, len(group))
        nbytes, cost, loss = nbytes[live], cost[live], loss[live]
        lexical = np.lexsort((items.option_E[group[position]], rank_S[parent]))
        rank = np.empty_like(lexical)
        rank[lexical] = np.arange(len(lexical))
        order = np.lexsort((rank, loss, nbytes))
        least = np.minimum.accumulate(loss[order])
        falls = np.concatenate(([True], least[1:] < least[:-1]))
        kept = order[falls]
        nbytes_S, loss_S, cost_S, rank_S = nbytes[kept], loss[kept], cost[kept], rank[kept]
        trail.append((parent[kept], position[kept]))
    return States(nbytes_S, loss_S, tuple(trail))
