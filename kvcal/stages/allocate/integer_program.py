"""A multiple-choice knapsack as a 0/1 program, for HiGHS through cvxpy, safe against its tolerances.

HiGHS works in float64 and takes a row as kept when it is broken by less than 1e-6, an integer as whole when
it is off by as much. So the bytes become small integers first (the smallest option taken off, the common
divisor divided out, then a power of two, which is exact in floats), the limit sits half a unit above the last
feasible integer, and every answer is recounted in integers: should an infeasible one have passed, exactly
that choice is forbidden by one more row and the program solved again, which loses no other choice.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcal.stages.allocate.knapsack import Floats, Ints

WEIGHT_BITS = 20  # integrality's 1e-6 of the largest coefficient then stays near one unit
HALF_UNIT = 0.5  # above the last feasible integer: what fits and what does not are both clear of the limit
EXACT: dict[str, Any] = {"mip_rel_gap": 0.0, "mip_abs_gap": 0.0, "threads": 1, "random_seed": 0}
LOSS_BITS = 13  # the largest loss is about 1e4: HiGHS ignores improvements below 1e-6


@dataclass(frozen=True)
class Answer:
    """``positions`` is the option chosen in every group, counted feasible, or None when none was found in
    time; ``bound`` is at most the loss of any feasible choice, as HiGHS proved it in floats."""

    positions: tuple[int, ...] | None
    bound: float


def solve(
    groups: Sequence[tuple[Ints, Floats]], capacity: int, time_limit_s: float, max_nodes: int | None = None
) -> Answer:
    """Minimises the sum of losses over one option of each group, (bytes int64, losses), within ``capacity``
    bytes, which the smallest options are known to keep. One thread and a fixed seed: the same input gives the
    same answer, unless the time runs out; stopping after ``max_nodes`` branchings does not depend on time."""
    # Imported here: cvxpy takes a second, and whoever only builds units or reads solutions needs none of it.
    import cvxpy as cp
    from scipy import sparse

    sizes = [len(nbytes) for nbytes, _ in groups]
    first = np.cumsum(sizes) - sizes
    weight, room = _small_integers([nbytes for nbytes, _ in groups], capacity)
    shift = min(0, WEIGHT_BITS - int(weight.max()).bit_length())
    loss = np.concatenate([losses for _, losses in groups])
    exponent = LOSS_BITS - math.frexp(float(loss.max()))[1]

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
        bound = math.ldexp(_dual_bound(problem.solver_stats.extra_stats), -exponent)
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


def _dual_bound(info: Any) -> float:
    """``info`` is highspy's HighsInfo, which cvxpy hands on untyped."""
    return float(info.mip_dual_bound)
