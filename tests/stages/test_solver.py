"""The allocation solver against brute force in exact rational numbers, and its proofs, ties and refusals."""

import itertools
import math
import random
from fractions import Fraction

import pytest

from kvcal.errors import InfeasibleBudget, UsageError
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
    """Losses to the gap that is proven; bytes exactly, also where floats do not resolve them."""
    rng = random.Random(style)
    for _ in range(4):
        units = random_units(rng, rng.randint(1, 5), 5, *STYLES[style])
        choices = list(all_choices(units))
        some = rng.choice(choices)[1]
        optimum = best_of(choices, some)[1]
        for budget in {some, optimum, 10**15}:
            loss = float(best_of(choices, budget)[0])
            found = solve(units, budget)
            picked = [unit.options[i] for unit, i in zip(units, found.choice, strict=True)]
            assert sum(option.nbytes for option in picked) == found.nbytes <= budget
            assert math.fsum(option.loss for option in picked) == found.loss
            assert found.proof == "solver" and found.bound <= loss * (1 + 1e-9) + 1e-9
            assert loss <= found.loss <= loss * (1 + 1e-6) + 1e-9


def test_dominated_options_are_never_chosen_and_the_first_of_equals_is():
    units = units_of([(5, 1.0), (5, 1.0), (3, 2.0), (4, 2.0), (6, 1.0), (9, 0.5), (8, 0.7), (10, 0.5)])
    assert [solve(units, budget).choice for budget in (100, 8, 7, 3)] == [(5,), (6,), (0,), (2,)]


def test_no_time_is_feasible_and_says_unproven():
    units = large_units(40)
    budget = int(40 * 2.4 * 2**20)
    hasty = solve(units, budget, time_limit_s=0.0)
    exact = solve(units, budget)
    assert hasty.nbytes <= budget and hasty.bound <= exact.loss <= hasty.loss
    assert exact.proof == "solver" and (hasty.proof == "none" or hasty.gap <= 1e-6)


def test_a_sweep_falls_from_the_fewest_bytes_to_the_most_that_help():
    rng = random.Random(3)
    units = random_units(rng, 6, 4, 40, lambda rng: rng.random())
    points = sweep(units, 8)
    assert all(a.nbytes < b.nbytes and a.loss > b.loss for a, b in itertools.pairwise(points))
    for point in points:
        assert solve(units, point.budget_bytes).choice == point.choice
    assert points[0].nbytes == min(nbytes for _, nbytes, _ in all_choices(units))
    assert points[-1].loss == float(min(all_choices(units))[0])


def test_infeasible_says_the_smallest():
    units = units_of([(10**11, 1.0), (10**11 + 7, 0.0)], [(12_345_679, 1.0)])
    smallest = 10**11 + 12_345_679
    with pytest.raises(InfeasibleBudget) as caught:
        solve(units, smallest - 1)
    assert caught.value.smallest_bytes == smallest and caught.value.exit_code == 3
    assert str(smallest) in caught.value.message and "100 GB" in caught.value.message
    assert f"{smallest}B" in caught.value.hint
    assert solve(units, smallest).nbytes == smallest


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, -1e-9])
def test_losses_that_are_not_finite_or_negative(loss):
    with pytest.raises(UsageError, match="the loss of option '1' of unit 'u0'"):
        solve(units_of([(1, 0.0), (2, loss)]), 10)


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
