"""Which option every unit gets, so that the losses' sum is smallest and the bytes fit: exactly, with a proof.

This is the multiple-choice knapsack of PM-KVQ's Eq. 6-8: one option per unit (a layer's or a head's K or V),
one byte constraint, a sum of losses. Bytes are integers and stay integers: they may reach 1e11, where a
floating solver's tolerance of 1e-6 would already be 100 KB.

1. Dominated options go: another option of the unit has no more bytes and no more loss. Exact, since swapping
   it in can hurt neither the budget nor the sum.
2. The linear relaxation is solved by its greedy rule (steps along each unit's lower convex hull, best loss
   per byte first). It gives a lower bound, a feasible choice, and for every option its reduced cost: what
   using it costs at least above the bound. Options whose reduced cost exceeds the gap between that choice and
   the bound are in no better or equal solution, so they go too. Usually a few dozen are left: the core.
3. Integer enumeration (``kvcal.stages.allocate.knapsack``) of what in the core could be as good decides: exactly, and
   among equal losses for the fewest bytes, then the lowest option numbers. It takes milliseconds, and gives
   up after CORE_SUMS partial sums.
4. HiGHS solves the core as a 0/1 program through cvxpy (``kvcal.stages.allocate.integer_program``). Where enumeration
   gave up, its answer, recounted in integers, tightens the core for a second enumeration, and if that gives
   up too, its bound is the proof. Elsewhere ``solve`` still reports its bound and gap, as a second opinion;
   ``sweep`` then leaves it out, being tens of times slower.

On one slow core, 160 units of 24 options take 0.02-0.1 s and 1,280 take 0.1-0.4 s, almost all of it cvxpy and
HiGHS; a sweep of 64 budgets takes 0.7 and 4 s. Hundreds of exactly identical units are the worst case.

Left out: several constraints, and interactions between units (the losses are taken to add up).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcal.errors import InfeasibleBudget, UsageError
from kvcal.quantities import format_bytes
from kvcal.stages.allocate import integer_program
from kvcal.stages.allocate.knapsack import (
    SAFETY,
    Ints,
    Items,
    Option,
    Relaxation,
    Unit,
    count_losses,
    enumerate_states,
    prepare,
    relax,
)

__all__ = ["Option", "Solution", "Sweep", "Unit", "solve", "sweep"]

CORE_SUMS = 4_000_000
FRONT_SUMS = 10_000_000
CHECK_NODES = 500  # for HiGHS where enumeration has already decided: its bound is then a second opinion
SOLVER_GAP = 1e-9  # HiGHS's gap, relative, up to which its own bound counts as a proof


@dataclass(frozen=True)
class Solution:
    """``choice`` is an option number per unit, as given. ``bound`` is a proven lower bound on the loss of any
    allocation within ``budget_bytes`` and ``gap`` = (loss - bound) / loss, as HiGHS left them (0 where the
    relaxation alone decided). ``proof`` is "integer" (certified by enumeration, gap or not), "solver"
    (HiGHS closed its gap) or "none" (a limit was hit: ``proven`` is False, the choice is still feasible)."""

    choice: tuple[int, ...]
    budget_bytes: int
    nbytes: int
    loss: float
    bound: float
    gap: float
    proof: str

    @property
    def proven(self) -> bool:
        return self.proof != "none"


@dataclass(frozen=True)
class Sweep:
    """Solutions by rising bytes and strictly falling loss. ``method`` is "front": every non-dominated
    (bytes, loss) pair there is; or "grid": the optimum of each budget asked for, without repetitions, and
    there may be others in between."""

    points: tuple[Solution, ...]
    method: str


def solve(units: Sequence[Unit], budget_bytes: int, *, time_limit_s: float = 30.0) -> Solution:
    """The choice of least loss within ``budget_bytes``; of equal losses (to 2^-60) the one of fewest bytes,
    then of the lowest option numbers, first unit first.

    Where enumeration gave up (``proof`` is not "integer"), HiGHS's answer among equal losses stands instead.
    The same input gives the same answer in any process, unless the time limit is hit, which ``proof`` says.
    UsageError for units that cannot be allocated; InfeasibleBudget, with the smallest that would do.
    """
    return _solve(prepare(units), budget_bytes, time_limit_s, always_program=True)


def sweep(
    units: Sequence[Unit],
    *,
    budgets: Sequence[int] | None = None,
    num_points: int = 64,
    time_limit_s: float = 30.0,
) -> Sweep:
    """The Pareto front of bytes against loss, from the fewest bytes to the most that still help.

    Without ``budgets`` the whole front is enumerated if that forms no more than FRONT_SUMS partial sums: for a
    dozen units, or for more whose bytes have a coarse common divisor. Otherwise ``num_points`` budgets, evenly
    spaced, or the ``budgets`` given, are solved one by one. Each point is what ``solve`` gives at its
    ``budget_bytes``.
    """
    items = prepare(units)
    if budgets is None:
        points = _whole_front(items)
        if points is not None:
            return Sweep(points, "front")
        if num_points < 2:
            raise UsageError(f"a sweep of {num_points} points; allowed: at least 2")
        useful = int(items.extra_E[items.last_U].sum())
        budgets = [items.base_bytes + useful * i // (num_points - 1) for i in range(num_points)]
    solved: list[Solution] = []
    for budget_bytes in sorted(set(budgets)):
        solution = _solve(items, budget_bytes, time_limit_s, always_program=False)
        if not solved or solution.loss < solved[-1].loss:
            solved.append(solution)
    return Sweep(tuple(solved), "grid")


def _whole_front(items: Items) -> tuple[Solution, ...] | None:
    """Every non-dominated point, or None when there are too many, or losses too far apart to count."""
    largest = math.fsum(items.loss_E[items.start_U])
    count_E = count_losses(items.loss_E, largest)
    groups = np.split(np.arange(len(count_E)), items.start_U[1:])
    falls = [np.diff(-count_E[group]) for group in groups]
    if any(len(fall) and fall.min() < 16 * len(groups) for fall in falls):
        return None  # rounding, at most half a count per unit, could hide a step that a single budget would see
    states = enumerate_states(items, groups, count_E, int(items.extra_E.sum()), FRONT_SUMS)
    if states is None:
        return None
    points = []
    for state in range(len(states.nbytes_S)):
        entries_U = items.start_U + np.array(states.choice(state))
        nbytes = items.base_bytes + int(states.nbytes_S[state])
        points.append(_solution(items, entries_U, nbytes, None, "integer"))
    return tuple(points)


def _solve(items: Items, budget_bytes: int, time_limit_s: float, always_program: bool) -> Solution:
    if budget_bytes < items.base_bytes:
        raise InfeasibleBudget(
            f"a budget of {budget_bytes} bytes ({format_bytes(budget_bytes)}) is too small: the smallest "
            f"allocation takes {items.base_bytes} bytes ({format_bytes(items.base_bytes)})",
            smallest_bytes=items.base_bytes,
            hint=f"give at least {items.base_bytes}B",
        )
    capacity = budget_bytes - items.base_bytes
    relaxed = relax(items, capacity)
    core = _Core.cut(items, relaxed, relaxed.choice_U, capacity)
    best_U = _enumerate(items, relaxed, core)
    certified = best_U is not None
    core = _Core.cut(items, relaxed, core.best_U if best_U is None else best_U, capacity)
    if not core.groups or (certified and not always_program):
        return _solution(items, core.best_U, budget_bytes, None, "integer")

    groups = [(items.extra_E[group], items.loss_E[group]) for group in core.groups]
    answer = integer_program.solve(groups, core.capacity, time_limit_s, CHECK_NODES if certified else None)
    bound = max(relaxed.bound, answer.bound + core.fixed_loss(items))
    if certified:
        return _solution(items, core.best_U, budget_bytes, bound, "integer")
    best_U = core.best_U
    if answer.positions is not None:
        best_U = min(best_U, core.with_positions(answer.positions), key=lambda U: _loss(items, U))
    core = _Core.cut(items, relaxed, best_U, capacity)
    best_U = _enumerate(items, relaxed, core)
    if best_U is not None:
        return _solution(items, best_U, budget_bytes, bound, "integer")
    closed = _loss(items, core.best_U) - bound <= SOLVER_GAP * _loss(items, core.best_U)
    return _solution(items, core.best_U, budget_bytes, bound, "solver" if closed else "none")


def _solution(items: Items, entries_U: Ints, budget_bytes: int, bound: float | None, proof: str) -> Solution:
    loss = _loss(items, entries_U)
    nbytes = items.base_bytes + int(items.extra_E[entries_U].sum())
    low = loss if bound is None else min(bound, loss)
    gap = (loss - low) / loss if loss > 0 else 0.0
    choice = tuple(int(option) for option in items.option_E[entries_U])
    return Solution(choice, budget_bytes, nbytes, loss, low, gap, proof)


def _loss(items: Items, entries_U: Ints) -> float:
    return math.fsum(items.loss_E[entries_U])


@dataclass(frozen=True)
class _Core:
    """What the bounds leave open. ``groups`` are the entries of each unit that still has several, ``units``
    their numbers; ``best_U`` is the best choice so far, and right for all other units. ``capacity`` is the
    bytes above the units' smallest left for the groups, ``limit`` the reduced cost they may add up to."""

    units: Ints
    groups: list[Ints]
    best_U: Ints
    capacity: int
    limit: float

    @classmethod
    def cut(cls, items: Items, relaxed: Relaxation, best_U: Ints, capacity: int) -> _Core:
        upper = _loss(items, best_U)
        limit = upper - relaxed.bound + SAFETY * upper
        live_E = (relaxed.reduced_E <= limit) & (items.loss_E <= upper * (1 + SAFETY))
        live_E[best_U] = True
        count_U = np.add.reduceat(live_E.astype(np.int64), items.start_U)
        units = np.flatnonzero(count_U > 1)
        entries = np.flatnonzero(live_E & (count_U > 1)[items.unit_E])
        groups = np.split(entries, np.cumsum(count_U[units])[:-1]) if len(units) else []
        fixed = int(items.extra_E[best_U].sum() - items.extra_E[best_U[units]].sum())
        return cls(units, groups, best_U, capacity - fixed, limit)

    def with_positions(self, positions: Sequence[int]) -> Ints:
        """``best_U`` with the groups' units set to these entries of their groups."""
        whole_U = self.best_U.copy()
        whole_U[self.units] = [group[at] for group, at in zip(self.groups, positions, strict=True)]
        return whole_U

    def fixed_loss(self, items: Items) -> float:
        """The loss of the units that are not in the core."""
        return math.fsum(np.delete(items.loss_E[self.best_U], self.units))


def _enumerate(items: Items, relaxed: Relaxation, core: _Core) -> Ints | None:
    """The best choice, by enumerating in integers all that could be as good; None if they are too many."""
    if not core.groups:
        return core.best_U
    upper = _loss(items, core.best_U)
    count_E = count_losses(np.minimum(items.loss_E, 2 * upper), upper)
    states = enumerate_states(items, core.groups, count_E, core.capacity, CORE_SUMS, (relaxed.reduced_E, core.limit))
    if states is None:
        return None
    return core.with_positions(states.choice(len(states.loss_S) - 1))
