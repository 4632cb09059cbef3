"""The option of every unit for which the sum of losses is smallest and the bytes fit, with a proven gap.

This is the multiple-choice knapsack of PM-KVQ's Eq. 6-8: one option per unit (a layer's or a head's K or V),
one byte constraint, a sum of losses. HiGHS solves it as a 0/1 program through cvxpy.

HiGHS works in float64, takes a row as kept when it is broken by less than 1e-6, and ignores improvements
below that. So dominated options go first (another one of the unit has no more bytes and no more loss), the
smallest option's bytes are taken off, the rest is divided by its greatest common divisor, and losses are
scaled to at most 1e4. Every answer is counted again in integers: one that takes too many bytes is forbidden
by one more row, and the program solved again.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcal.errors import InfeasibleBudget
from kvcal.quantities import format_bytes

CLOSED = 1e-9  # a gap below is rounding
HIGHS: dict[str, Any] = {"mip_rel_gap": 1e-7, "mip_abs_gap": 0.0, "threads": 1, "random_seed": 0}


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
class Solution:
    """``choice``: an option's number for each unit. ``bound``: no choice within ``budget_bytes`` has a
    smaller loss; ``gap`` = (loss - bound) / loss. ``proof``: "solver", or "none" where the time ran out
    before the gap closed."""

    choice: tuple[int, ...]
    budget_bytes: int
    nbytes: int
    loss: float
    bound: float
    gap: float
    proof: str


def solve(units: Sequence[Unit], budget_bytes: int, *, time_limit_s: float = 30.0) -> Solution:
    """The choice of least loss within ``budget_bytes``. The same input gives the same answer in any process,
    unless the time runs out."""
    kept = [_undominated(unit) for unit in units]
    base = sum(options[0][0] for options in kept)
    if budget_bytes < base:
        raise InfeasibleBudget(
            f"a budget of {budget_bytes} bytes ({format_bytes(budget_bytes)}) is too small: the smallest "
            f"allocation takes {base} bytes ({format_bytes(base)})",
            smallest_bytes=base,
            hint=f"give at least {base}B",
        )
    last = [len(options) - 1 for options in kept]
    if sum(options[-1][0] for options in kept) <= budget_bytes:
        return _solution(kept, last, budget_bytes, None)
    found, bound = _program(kept, budget_bytes - base, time_limit_s)
    return _solution(kept, found, budget_bytes, bound)


Entry = tuple[int, float, int]  # bytes, loss, option number


def _undominated(unit: Unit) -> list[Entry]:
    """By rising bytes and strictly falling loss."""
    kept: list[Entry] = []
    for entry in sorted((option.nbytes, float(option.loss), number) for number, option in enumerate(unit.options)):
        if not kept or entry[1] < kept[-1][1]:
            kept.append(entry)
    return kept


def _program(kept: Sequence[Sequence[Entry]], room: int, time_limit_s: float) -> tuple[list[int], float]:
    """A position in every unit's entries, within ``room`` bytes above the smallest, and a bound on the loss;
    the smallest entries and no bound where the time ran out before anything was found."""
    import cvxpy as cp  # takes a second
    from scipy import sparse

    sizes = [len(options) for options in kept]
    first = np.cumsum(sizes) - sizes
    extra = np.array([nbytes - options[0][0] for options in kept for nbytes, _, _ in options], dtype=np.int64)
    divisor = int(np.gcd.reduce(extra))
    weight, limit = extra // divisor, room // divisor
    loss = np.array([loss for options in kept for _, loss, _ in options])
    scale, unit = 1e4 / loss.max(), np.repeat(np.arange(len(sizes)), sizes)
    x = cp.Variable(len(loss), boolean=True)
    one_each = sparse.csr_array((np.ones(len(loss)), (unit, np.arange(len(loss)))))
    row_scale = min(1.0, 2.0**20 / weight.max())
    # Half a unit above the limit: what fits and what does not are clear of it.
    rows = [one_each @ x == 1, (row_scale * weight) @ x <= row_scale * (limit + 0.5)]
    while True:
        problem = cp.Problem(cp.Minimize((scale * loss) @ x), rows)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "may be inaccurate" at the time limit: it is counted again
                problem.solve(solver=cp.HIGHS, time_limit=time_limit_s, **HIGHS)
        except cp.SolverError:
            return [0] * len(sizes), 0.0
        if x.value is None or problem.status not in (cp.OPTIMAL, cp.USER_LIMIT):
            return [0] * len(sizes), 0.0
        info: Any = problem.solver_stats.extra_stats  # HiGHS's HighsInfo, which cvxpy hands on untyped
        chosen = [int(np.argmax(part)) for part in np.split(x.value, first[1:])]
        if int(weight[first + chosen].sum()) <= limit:
            return chosen, max(0.0, float(info.mip_dual_bound) / scale)
        rows.append(cp.sum(x[first + chosen]) <= len(sizes) - 1)


def _solution(kept: Sequence[Sequence[Entry]], at: Sequence[int], budget_bytes: int, bound: float | None) -> Solution:
    """``bound``: None for a loss that nothing is below."""
    entries = [options[position] for options, position in zip(kept, at, strict=True)]
    loss = math.fsum(loss for _, loss, _ in entries)
    bound = loss if bound is None else min(bound, loss)
    gap = (loss - bound) / loss if loss > 0 else 0.0
    gap = 0.0 if gap <= CLOSED else gap
    proof = "solver" if gap <= 1e-6 else "none"
    choice = tuple(number for *_, number in entries)
    return Solution(choice, budget_bytes, sum(nbytes for nbytes, _, _ in entries), loss, bound, gap, proof)
