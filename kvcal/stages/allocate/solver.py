"""The option of every unit for which the sum of losses is smallest and the bytes fit: exactly, with a proof.

This is the multiple-choice knapsack of PM-KVQ's Eq. 6-8: one option per unit (a layer's or a head's K or V),
one byte constraint, a sum of losses. Bytes are integers and stay integers: they may reach 1e11, where a
floating solver's tolerance of 1e-6 would already be 100 KB.

1. Dominated options go: another option of the unit has no more bytes and no more loss. Exact, since swapping
   it in can hurt neither the budget nor the sum.
2. The linear relaxation is solved by its greedy rule (steps along each unit's lower convex hull, best loss
   per byte first). It gives a lower bound, a feasible choice, and for every option its reduced cost: what
   using it costs at least above the bound. Options whose reduced cost exceeds the gap between that choice and
   the bound are in no better or equal solution, so they go too. Usually a few dozen are left: the core.
3. Integer enumeration (``knapsack.enumerate_states``) of what in the core could be as good decides: exactly, and
   among equal losses for the fewest bytes, then the lowest option numbers. It takes milliseconds, and gives
   up after CORE_SUMS partial sums.
4. HiGHS solves the core as a 0/1 program through cvxpy (``solve_program``). Where enumeration gave up, its answer,
   recounted in integers, tightens the core for a second enumeration, and if that gives up too, its bound is the
   proof. Elsewhere ``solve`` still reports its bound and gap, as a second opinion; ``sweep`` then leaves it out,
   being tens of times slower.

HiGHS works in float64 and takes a row as kept when it is broken by less than 1e-6, an integer as whole when
it is off by as much. So the bytes become small integers first (the smallest option taken off, the common
divisor divided out, then a power of two, which is exact in floats), the limit sits half a unit above the last
feasible integer, and every answer is recounted in integers: should an infeasible one have passed, exactly
that choice is forbidden by one more row and the program solved again, which loses no other choice.

On one slow core, 160 units of 24 options take 0.02-0.1 s and 1,280 take 0.1-0.4 s, almost all of it cvxpy and
HiGHS; a sweep of 64 budgets takes 0.7 and 4 s. Hundreds of exactly identical units are the worst case.

Left out: several constraints, and interactions between units (the losses are taken to add up).
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcal.errors import InfeasibleBudget, UsageError
from kvcal.quantities import format_bytes
from kvcal.stages.allocate.knapsack import (
    SAFETY,
    Floats,
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
WEIGHT_BITS = 20  # integrality's 1e-6 of the largest coefficient then stays near one unit
HALF_UNIT = 0.5  # above the last feasible integer: what fits and what does not are both clear of the limit
EXACT: dict[str, Any] = {"mip_rel_gap": 0.0, "mip_abs_gap": 0.0, "threads": 1, "random_seed": 0}
PROGRAM_LOSS_BITS = 13  # the largest loss is about 1e4: HiGHS ignores improvements below 1e-6


@dataclass(frozen=True)
class Solution:
    """``choice`` is an option number per unit, as given. ``bound`` is a proven lower bound on the loss of any
    allocation within ``budget_bytes`` and ``gap`` = (loss - bound) / loss, as HiGHS left them (0 where the
    relaxation alone decided). ``proof`` is "integer" (certified by enumeration, gap or not), "solver"
    (HiGHS closed its gap) or "none" (a limit was hit; the choice is still feasible)."""

    choice: tuple[int, ...]
    budget_bytes: int
    nbytes: int
    loss: float
    bound: float
    gap: float
    proof: str


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
    units: Sequence[Unit], *, budgets: Sequence[int] | None = None, num_points: int = 64, time_limit_s: float = 30.0
) -> Sweep:
    """The Pareto front of bytes against loss, from the fewest bytes to the most that still help.

    Without ``budgets`` the whole front is enumerated if that forms no more than FRONT_SUMS partial sums: for a
    dozen units, or for more whose bytes have a coarse common divisor. Otherwise ``num_points`` budgets, evenly
    spaced, or the ``budgets`` given, are solved one by one, each as ``solve`` does.
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
    sizes = items.base_bytes + states.nbytes_S
    return tuple(
        _solution(items, items.start_U + np.array(states.choice(state)), int(nbytes), None, "integer")
        for state, nbytes in enumerate(sizes)
    )


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
    answer = solve_program(groups, core.capacity, time_limit_s, CHECK_NODES if certified else None)
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
    """The choices that the bounds leave open. ``groups`` are the entries of each unit that still has several, ``units``
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


@dataclass(frozen=True)
class Answer:
    """``positions`` is the option chosen in every group, counted feasible, or None when none was found in
    time; ``bound`` is at most the loss of any feasible choice, as HiGHS proved it in floats."""

    positions: tuple[int, ...] | None
    bound: float


def solve_program(
    groups: Sequence[tuple[Ints, Floats]], capacity: int, time_limit_s: float, max_nodes: int | None = None
) -> Answer:
    """HiGHS's choice of least loss, one option of each group (bytes int64, losses), within ``capacity`` bytes, which
    the smallest options are known to keep. One thread and a fixed seed: the same input gives the same answer,
    unless the time runs out; stopping after ``max_nodes`` branchings does not depend on time."""
    # Imported here: cvxpy takes a second, and callers that only build units or read solutions need none of it.
    import cvxpy as cp
    from scipy import sparse

    sizes = [len(nbytes) for nbytes, _ in groups]
    first = np.cumsum(sizes) - sizes
    weight, room = _small_integers([nbytes for nbytes, _ in groups], capacity)
    shift = min(0, WEIGHT_BITS - int(weight.max()).bit_length())
    loss = np.concatenate([losses for _, losses in groups])
    exponent = PROGRAM_LOSS_BITS - math.frexp(float(loss.max()))[1]

    x = cp.Variable(len(weight), boolean=True)
    unit = np.repeat(np.arange(len(sizes)), sizes)
    one_hot = sparse.csr_array((np.ones(len(weight)), (unit, np.arange(len(weight)))))
    limit = math.ldexp(room + HALF_UNIT, shift)
    rows = [one_hot @ x == 1, np.ldexp(weight.astype(np.float64), shift) @ x <= limit]
    objective = cp.Minimize(np.ldexp(loss, exponent) @ x)
    nodes = 2**31 - 1 if max_nodes is None else max_nodes
    deadline = time.monotonic() + time_limit_s
    while True:
        problem = cp.Problem(objective, rows)
        seconds = max(0.0, deadline - time.monotonic())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "may be inaccurate" at the time limit: we recount anyway
                problem.solve(solver=cp.HIGHS, mip_max_nodes=nodes, time_limit=seconds, **EXACT)
        except cp.SolverError:
            return Answer(None, -math.inf)
        if x.value is None or problem.status not in (cp.OPTIMAL, cp.USER_LIMIT):
            return Answer(None, -math.inf)
        info: Any = problem.solver_stats.extra_stats  # highspy's HighsInfo, which cvxpy hands on untyped
        bound = math.ldexp(float(info.mip_dual_bound), -exponent)
        chosen = first + [int(np.argmax(part)) for part in np.split(x.value, first[1:])]
        if int(weight[chosen].sum()) <= room:
            return Answer(tuple(int(position) for position in chosen - first), bound)
        if time.monotonic() >= deadline:
            return Answer(None, bound)
        rows.append(cp.sum(x[chosen]) <= len(sizes) - 1)


def _small_integers(nbytes: Sequence[Ints], capacity: int) -> tuple[Ints, int]:
    """All groups' bytes above each group's smallest, and the room for them, in units of the common divisor."""
    smallest = [int(group.min()) for group in nbytes]
    weight = np.concatenate([group - least for group, least in zip(nbytes, smallest, strict=True)])
    divisor = int(np.gcd.reduce(weight)) or 1
    return weight // divisor, (capacity - sum(smallest)) // divisor
