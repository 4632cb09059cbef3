"""The allocation solver against brute force in exact rational numbers, and its proofs, ties and refusals."""

import itertools
import json
import math
import os
import random
import subprocess
import sys
from fractions import Fraction

import pytest

from kvcal.errors import InfeasibleBudget, UsageError
from kvcal.stages.allocate import solver
from kvcal.stages.allocate.knapsack import prepare, relax
from kvcal.stages.allocate.solver import Option, Unit, solve, sweep


def units_of(*rows):
    """Units from lists of (bytes, loss)."""
    return [Unit(f"u{u}", tuple(Option(i, *pair) for i, pair in enumerate(row))) for u, row in enumerate(rows)]


def random_units(rng, num_units, num_options, bytes_up_to, loss):
    return units_of(
        *(
            [(rng.randint(0, bytes_up_to), loss(rng)) for _ in range(rng.randint(1, num_options))]
            for _ in range(num_units)
        )
    )


def all_choices(units):
    """(loss, bytes, choice) of everything, losses exact."""
    for choice in itertools.product(*(range(len(unit.options)) for unit in units)):
        picked = [unit.options[i] for unit, i in zip(units, choice, strict=True)]
        yield sum(Fraction(o.loss) for o in picked), sum(o.nbytes for o in picked), choice


def best_of(choices, budget_bytes):
    return min(entry for entry in choices if entry[1] <= budget_bytes)


# Eighths and tiny byte counts tie all the time; floats and 1e11 bytes never do.
STYLES = {
    "ties": (6, lambda rng: rng.randint(0, 6) / 8),
    "floats": (1000, lambda rng: rng.random()),
    "wide": (10**11, lambda rng: math.exp(rng.gauss(0, 8))),
}


@pytest.mark.parametrize("style", STYLES)
def test_equals_brute_force_also_at_the_last_byte(style):
    rng = random.Random(style)
    for _ in range(40):
        units = random_units(rng, rng.randint(1, 5), 5, *STYLES[style])
        choices = list(all_choices(units))
        smallest = min(nbytes for _, nbytes, _ in choices)
        some = rng.choice([entry for entry in choices])[1]
        optimum = best_of(choices, some)[1]
        for budget in {smallest, some, optimum, max(smallest, optimum - 1), 10**15}:
            loss, nbytes, choice = best_of(choices, budget)
            found = solver._solve(prepare(units), budget, 30.0, always_program=False)
            assert (found.choice, found.nbytes) == (choice, nbytes), (units, budget)
            assert found.loss == float(loss)
            assert found.proof == "integer" and found.gap == 0 and found.bound == found.loss


@pytest.mark.parametrize("style", ["ties", "floats", "wide"])
@pytest.mark.parametrize("enumerate_first", [True, False])
def test_the_integer_program_agrees(monkeypatch, style, enumerate_first):
    if not enumerate_first:
        monkeypatch.setattr(solver, "CORE_SUMS", 0)
    rng = random.Random(style)
    proofs = set()
    for _ in range(12):
        units = random_units(rng, 5, 5, *STYLES[style])
        choices = list(all_choices(units))
        loss, optimum, choice = best_of(choices, rng.choice(choices)[1])
        found = solve(units, optimum)
        proofs.add(found.proof)
        assert found.proof != "none" and found.nbytes <= optimum
        assert found.loss == pytest.approx(float(loss), rel=1e-12)
        assert found.bound <= found.loss and 0 <= found.gap <= 1e-9
        if enumerate_first or style != "ties":
            assert found.choice == choice
    assert ("solver" in proofs) != enumerate_first


def test_program_alone_keeps_bytes_exactly():
    """Coefficients far beyond what HiGHS resolves: the recount and the forbidden choices must repair it."""
    rng = random.Random(1)
    for bits in (10, 37, 48):
        for _ in range(6):
            units = random_units(rng, 4, 4, 2**bits, lambda rng: rng.random())
            items = prepare(units)
            ends = zip(items.start_U, items.last_U + 1, strict=True)
            groups = [(items.extra_E[a:b], items.loss_E[a:b]) for a, b in ends]
            losses = {}
            for picks in itertools.product(*(range(len(nbytes)) for nbytes, _ in groups)):
                nbytes = sum(int(group[0][i]) for group, i in zip(groups, picks, strict=True))
                losses[picks] = (nbytes, math.fsum(g[1][i] for g, i in zip(groups, picks, strict=True)))
            middle = sorted(nbytes for nbytes, _ in losses.values())[len(losses) // 2]
            for capacity in (middle, middle - 1, middle + 1) if middle else (0,):
                answer = solver.solve_program(groups, capacity, 30.0)
                nbytes, loss = losses[answer.positions]
                best = min(loss for nbytes, loss in losses.values() if nbytes <= capacity)
                assert nbytes <= capacity
                assert loss == pytest.approx(best, rel=1e-9)
                assert answer.bound <= loss * (1 + 1e-9)


def test_forbidding_one_choice_loses_no_other(monkeypatch):
    """With limits loosened on purpose the program first answers infeasibly, and must still end at the best."""
    groups = [(prepare(units_of([(0, 9.0), (4, 5.0), (7, 0.5)])).extra_E, [9.0, 5.0, 0.5])] * 2
    groups = [(nbytes, solver.np.array(losses)) for nbytes, losses in groups]
    monkeypatch.setattr(solver, "HALF_UNIT", 3.5)
    answer = solver.solve_program(groups, 11, 30.0)
    assert sorted(answer.positions) == [1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_relaxation_is_a_bound_and_its_reduced_costs_too(seed):
    rng = random.Random(seed)
    units = random_units(rng, 4, 5, 50, lambda rng: rng.random())
    items = prepare(units)
    for capacity in (0, 20, 60, 200):
        relaxed = relax(items, capacity)
        assert int(items.extra_E[relaxed.choice_U].sum()) <= capacity
        for loss, nbytes, choice in all_choices(units):
            if nbytes > capacity + items.base_bytes:
                continue
            assert relaxed.bound <= float(loss) + 1e-12
            chosen = [
                entry
                for entry, (unit, option) in enumerate(zip(items.unit_E, items.option_E, strict=True))
                if choice[unit] == option
            ]
            if len(chosen) == len(units):
                assert relaxed.bound + float(relaxed.reduced_E[chosen].sum()) <= float(loss) + 1e-12


def test_dominated_options_are_dropped_and_the_first_of_equals_stays():
    units = units_of([(5, 1.0), (5, 1.0), (3, 2.0), (4, 2.0), (6, 1.0), (9, 0.5), (8, 0.7), (10, 0.5)])
    assert prepare(units).option_E.tolist() == [2, 0, 6, 5]
    assert solve(units, 100).choice == (5,)
    assert solve(units, 7).choice == (0,)


def test_ties_take_fewer_bytes_then_lower_options():
    assert solve(units_of([(1, 1.0), (2, 0.5)], [(1, 1.0), (3, 0.5)]), 4).choice == (1, 0)
    assert solve(units_of(*[[(1, 1.0), (2, 0.5)]] * 4), 6).choice == (0, 0, 1, 1)
    assert solve(units_of(*[[(2, 0.5), (1, 1.0)]] * 4), 6).choice == (0, 0, 1, 1)


def test_identical_units_in_bulk_are_solved_exactly():
    solution = solve(units_of(*[[(1, 1.0), (3, 0.25), (7, 0.0)]] * 60), 60 + 2 * 33 + 1)
    assert solution.loss == 27 + 33 * 0.25 and solution.nbytes == 126 and solution.proof == "integer"


def test_infeasible_says_the_smallest():
    units = units_of([(10**11, 1.0), (10**11 + 7, 0.0)], [(12_345_679, 1.0)])
    smallest = 10**11 + 12_345_679
    with pytest.raises(InfeasibleBudget) as caught:
        solve(units, smallest - 1)
    assert caught.value.smallest_bytes == smallest and caught.value.exit_code == 3
    assert str(smallest) in caught.value.message and "100 GB" in caught.value.message
    assert f"{smallest}B" in caught.value.hint
    assert solve(units, smallest).nbytes == smallest
    with pytest.raises(InfeasibleBudget):
        sweep(units, budgets=[smallest - 1, smallest])


def test_a_time_limit_of_nothing_is_feasible_and_says_unproven(monkeypatch):
    monkeypatch.setattr(solver, "CORE_SUMS", 0)
    rng = random.Random(0)
    units = random_units(rng, 40, 12, 10**6, lambda rng: rng.random())
    items = prepare(units)
    budget = items.base_bytes + int(items.extra_E[items.last_U].sum()) // 3
    hasty = solve(units, budget, time_limit_s=0.0)
    exact = solve(units, budget)
    assert hasty.proof == "none" and hasty.nbytes <= budget
    assert hasty.bound <= exact.loss <= hasty.loss and hasty.gap > 0
    assert exact.proof == "solver" and exact.gap <= 1e-9


@pytest.mark.parametrize("nbytes", [-1, 1.0, True, "1", None])
def test_bytes_that_are_not_whole(nbytes):
    with pytest.raises(UsageError, match="the bytes of option '0' of unit 'u1'"):
        solve(units_of([(1, 0.0)], [(nbytes, 0.0)]), 10)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, -1e-9])
def test_losses_that_are_not_finite_or_negative(loss):
    with pytest.raises(UsageError, match="the loss of option '1' of unit 'u0'"):
        solve(units_of([(1, 0.0), (2, loss)]), 10)


def test_nothing_to_choose_from_and_totals_beyond_exactness():
    with pytest.raises(UsageError, match="no units"):
        solve([], 10)
    with pytest.raises(UsageError, match="'u0' has no options"):
        solve(units_of([]), 10)
    with pytest.raises(UsageError, match="at most 9007199254740992"):
        solve(units_of([(2**53 + 1, 0.0)]), 2**60)
    with pytest.raises(UsageError, match="infinity"):
        solve(units_of(*[[(1, 1e308)]] * 3), 10)


@pytest.mark.parametrize("style", STYLES)
def test_sweep_is_the_whole_front(style):
    rng = random.Random(style)
    methods = set()
    for _ in range(8):
        units = random_units(rng, 4, 5, *STYLES[style])
        found = sweep(units, num_points=50)
        methods.add(found.method)
        front = [best_of(all_choices(units), point.budget_bytes) for point in found.points]
        assert [(p.choice, p.nbytes) for p in found.points] == [(c, b) for _, b, c in front]
        if found.method == "front":
            every = []
            for loss, nbytes, choice in sorted(all_choices(units), key=lambda e: (e[1], e[0], e[2])):
                if not every or loss < every[-1][0]:
                    every.append((loss, nbytes, choice))
            assert [p.choice for p in found.points] == [choice for _, _, choice in every]
    assert methods == {"front"} or style == "wide"


def test_losses_over_six_hundred_orders_of_magnitude():
    """Beside a huge total, tiny losses are below counting: the sum is still the least one to 2^-60."""
    rng = random.Random(0)
    for _ in range(40):
        units = random_units(rng, 4, 5, 10**11, lambda rng: rng.randint(0, 3) * 10.0 ** rng.randint(-300, 300))
        choices = list(all_choices(units))
        for budget in (rng.choice(choices)[1], 10**15):
            found = solve(units, budget)
            assert found.nbytes <= budget and found.proof != "none"
            assert found.loss == pytest.approx(float(best_of(choices, budget)[0]), rel=1e-15, abs=0)
    assert sweep(units_of([(0, 1e300), (1, 1.0), (2, 0.0)])).method == "grid"


@pytest.mark.parametrize("limit", [0, None])
def test_sweep_is_monotone_and_each_point_is_solve_at_its_budget(monkeypatch, limit):
    if limit is not None:
        monkeypatch.setattr(solver, "FRONT_SUMS", limit)
    rng = random.Random(3)
    units = random_units(rng, 6, 4, 40, lambda rng: rng.random())
    found = sweep(units, num_points=12)
    assert found.method == ("grid" if limit == 0 else "front")
    points = found.points
    assert 2 <= len(points) <= (12 if limit == 0 else 10**4)
    assert all(a.nbytes < b.nbytes and a.loss > b.loss for a, b in itertools.pairwise(points))
    for point in points[:: max(1, len(points) // 12)]:
        same = solve(units, point.budget_bytes)
        assert (same.choice, same.nbytes, same.loss) == (point.choice, point.nbytes, point.loss)
    items = prepare(units)
    assert points[0].nbytes == items.base_bytes
    assert points[-1].nbytes == items.base_bytes + int(items.extra_E[items.last_U].sum())


def test_sweep_over_given_budgets():
    units = units_of([(1, 1.0), (2, 0.5)], [(1, 1.0), (4, 0.1)])
    found = sweep(units, budgets=[9, 3, 2, 3, 5])
    assert found.method == "grid"
    assert [(p.budget_bytes, p.nbytes) for p in found.points] == [(2, 2), (3, 3), (5, 5), (9, 6)]
    with pytest.raises(UsageError, match="at least 2"):
        sweep(units_of(*[[(1, 1.0), (2, 1e-300), (3, 0.0)]]), num_points=1)


def large_units(num_units):
    """As a real model's: 24 options whose bytes fall into few values and whose losses spread widely."""
    rng = random.Random(num_units)
    rows = []
    for _ in range(num_units):
        weight = math.exp(rng.gauss(0, 2))
        rows.append(
            [
                (bits * 524_288 + 16_777_216 // group, weight * 4.0**-bits * rng.uniform(0.7, 1.3))
                for bits in (1, 2, 3, 4, 8, 16)
                for group in (32, 64, 128, 256)
            ]
        )
    return units_of(*rows)


def as_json(num_units):
    units = large_units(num_units)
    solution = solve(units, int(num_units * 2.4 * 2**20))
    return json.dumps([solution.choice, solution.nbytes, solution.loss, solution.bound, solution.gap])


def test_same_answer_in_another_process():
    code = "import sys; sys.path[:0] = sys.argv[1:]\nimport test_solver as t\nprint(t.as_json(160))"
    here = os.path.dirname(__file__)
    command = [sys.executable, "-c", code, here, os.path.dirname(os.path.dirname(here))]
    env = dict(os.environ, PYTHONHASHSEED="7")
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert run.stdout.strip() == as_json(160)


@pytest.mark.parametrize("num_units", [160, 1280])
def test_large_problems_are_certified(num_units):
    units = large_units(num_units)
    solution = solve(units, int(num_units * 2.4 * 2**20))
    assert solution.proof == "integer" and solution.gap <= 1e-9
    picked = [unit.options[i] for unit, i in zip(units, solution.choice, strict=True)]
    assert sum(option.nbytes for option in picked) == solution.nbytes <= solution.budget_bytes
    assert math.fsum(option.loss for option in picked) == solution.loss
