"""The search's logic against brute force on small problems, with a KL that is a plain function of the choice."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from kvcal.errors import InfeasibleBudget, UsageError
from kvcal.formats import RAW, Boost, Tier
from kvcal.geometry import AttentionGeometry, Geometry, ModelIdentity
from kvcal.plan import Plan, Workload
from kvcal.plan_tensors import tensors_nbytes
from kvcal.recipe import CacheSpec
from kvcal.specs import KeyChoice, PredictorSpec, SearchSpec, ValueChoice
from kvcal.stages.compositions import Materials, Unit, composed_layers
from kvcal.stages.search import Choice, Problem, background_of, problem_of, search
from kvcal.stages.search_record import SearchReport

GEOMETRY = Geometry("llama", "bfloat16", tuple(AttentionGeometry(index, 8, 2, 16, 16) for index in range(3)))
WORKLOAD = Workload(2, 1000)
BOOST = Boost("magnitude", (Tier(4, 0.25),))
KEYS = (KeyChoice(2, "channel", 128), KeyChoice(2, "channel", 128, BOOST), KeyChoice(3, "token", 64, rescale=True))
VALUES = (ValueChoice(2), ValueChoice(4))
SPEC = SearchSpec(KEYS, VALUES, proxy_plans=8, refine_rounds=3, neighbours=1)
CACHE = CacheSpec(num_sink_tokens=2, k_recent_window=0, v_recent_window=0)
LAMBDAS = {2: {index: torch.full((2, 16), 1.5 + index) for index in range(3)}}


def problem(share: float = 0.5, spec: SearchSpec = SPEC, per_head: bool = False, cache: CacheSpec = CACHE) -> Problem:
    """A budget ``share`` of the way from the smallest to the largest compositions."""
    wide = problem_of(GEOMETRY, spec, cache, None, WORKLOAD, 10**9, per_head)
    low, high = (sum(pick(sizes) for sizes in wide.nbytes) for pick in (min, max))
    return replace(wide, capacity=low + int(share * (high - low)))


def measured(kl: Callable[[Choice], float], seen: list[Choice] | None = None):
    def measure(choices: Sequence[Choice], what: str) -> list[float]:
        if seen is not None:
            seen.extend(choices)
        return [kl(choice) for choice in choices]

    return measure


def additive(which: Problem, seed: int = 0) -> Callable[[Choice], float]:
    draw = random.Random(seed)
    table = [[draw.random() for _ in options] for options in which.options]
    return lambda choice: 1.0 + sum(row[option] for row, option in zip(table, choice, strict=True))


def brute_force(which: Problem, kl: Callable[[Choice], float]) -> float:
    choices = itertools.product(*(range(len(options)) for options in which.options))
    return min(kl(choice) for choice in choices if which.size(choice) <= which.capacity)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9])
def test_additive_costs_are_solved_exactly(share):
    small = problem(share)
    for seed in range(3):
        kl = additive(small, seed)
        outcome = search(small, SPEC, measured(kl))
        assert outcome.kl == pytest.approx(brute_force(small, kl), abs=1e-12)
        assert outcome.kl == kl(outcome.choice) and small.size(outcome.choice) <= small.capacity
        for predicted, found in outcome.proxy:
            assert predicted == pytest.approx(found, abs=1e-9)


def interacting(which: Problem, seed: int) -> Callable[[Choice], float]:
    """A cost for every option, and one for every pair of options of two units."""
    draw = random.Random(seed)
    alone = [[draw.random() for _ in options] for options in which.options]
    pairs = {
        (i, j): [[draw.uniform(-0.5, 0.5) for _ in which.options[j]] for _ in which.options[i]]
        for i, j in itertools.combinations(range(len(which.options)), 2)
    }

    def kl(choice: Choice) -> float:
        both = sum(table[choice[i]][choice[j]] for (i, j), table in pairs.items())
        return 10 + both + sum(row[option] for row, option in zip(alone, choice, strict=True))

    return kl


def test_refinement_improves_on_the_additive_proxy_where_errors_interact():
    better = 0
    for seed in range(12):
        small = problem(0.4)
        kl = interacting(small, seed)
        plain = search(small, replace(SPEC, refine_rounds=0), measured(kl))
        refined = search(small, SPEC, measured(kl))
        assert brute_force(small, kl) <= refined.kl <= plain.kl
        assert refined.history[:2] == plain.history and min(refined.history) == refined.history[-1] == refined.kl
        assert list(refined.history[1:]) == sorted(refined.history[1:], reverse=True)
        better += refined.kl < plain.kl
    assert better >= 3


@pytest.mark.parametrize("rounds", [0, 3])
def test_the_best_plan_is_the_best_of_all_that_were_measured_within_the_budget(rounds):
    for seed in range(6):
        small, seen = problem(0.4), []
        kl = interacting(small, seed)
        outcome = search(small, replace(SPEC, refine_rounds=rounds), measured(kl, seen))
        assert outcome.kl == min(kl(choice) for choice in seen if small.size(choice) <= small.capacity)
        assert outcome.kl == kl(outcome.choice) and small.size(outcome.choice) <= small.capacity


def test_refinement_starts_from_a_random_plan_that_is_better_than_background_and_the_solvers():
    small = problem(0.4)
    plain = additive(small)
    batches: dict[str, list[Choice]] = {}

    def searched(lucky: Choice | None, rounds: int):
        def measure(choices: Sequence[Choice], what: str) -> list[float]:
            batches[what] = list(choices)
            return [0.5 if choice == lucky else plain(choice) for choice in choices]

        return search(small, replace(SPEC, refine_rounds=rounds), measure)

    before = searched(None, 0)
    single = {*batches["compositions"], *batches["the solver's plan"]}
    lucky = next(choice for choice in batches["random plans"] if choice not in single)
    found = searched(lucky, 0)
    assert (found.choice, found.kl, found.history) == (lucky, 0.5, before.history)
    found = searched(lucky, 3)
    assert (found.choice, found.kl, found.history) == (lucky, 0.5, (*before.history, 0.5))
    for choice in batches["round 1"]:
        assert sum(option != other for option, other in zip(choice, lucky, strict=True)) == 1


def test_every_measured_random_and_chosen_plan_fits_the_budget_in_bytes():
    small, seen = problem(0.3), []
    outcome = search(small, SPEC, measured(additive(small), seen))
    assert len(outcome.proxy) == SPEC.proxy_plans
    for choice in [outcome.choice, *(c for c in seen if small.size(c) <= small.capacity)]:
        layers, tensors = composed_layers(GEOMETRY, small.chosen(choice), Materials(LAMBDAS, {}))
        plan = Plan(ModelIdentity("m", "llama", "", "", ""), "bfloat16", layers, WORKLOAD, {}, tensors)
        assert plan.predicted_bytes == small.size(choice) <= small.capacity
        assert tensors_nbytes(tensors) == 2 * 16 * 4 * sum(layer.k_rescale for layer in layers)


def test_the_same_seed_measures_the_same_plans():
    small, runs = problem(), []
    for _ in range(2):
        seen: list[Choice] = []
        search(small, SPEC, measured(additive(small), seen))
        runs.append(seen)
    assert runs[0] == runs[1]
    other: list[Choice] = []
    search(small, replace(SPEC, seed=1), measured(additive(small), other))
    assert other != runs[0]


def test_background_is_the_largest_single_composition_that_fits():
    small = problem(0.5)
    names = {(unit.side, option.name) for unit, option in small.chosen(background_of(small)).items()}
    assert len(names) == 2
    sizes = {}
    for k, v in itertools.product(range(4), range(3)):
        choice = tuple(k if unit.side == "k" else v for unit in small.units)
        sizes[choice] = small.size(choice)
    assert small.size(background_of(small)) == max(size for size in sizes.values() if size <= small.capacity)


def test_heads_apart_share_one_lambda_tensor_with_ones_for_those_without():
    small = problem(0.5, per_head=True)
    assert small.units[:3] == (Unit(0, "k", 0), Unit(0, "k", 1), Unit(0, "v", 0))
    choice = [0] * len(small.units)
    choice[1] = 2
    layers, tensors = composed_layers(GEOMETRY, small.chosen(tuple(choice)), Materials(LAMBDAS, {}))
    assert [fmt.axis for fmt in layers[0].k] == ["channel", "token"]
    assert tensors["layers.0.k_rescale"].tolist() == [[1.0] * 16, [1.5] * 16]


def test_lattice_bytes_are_counted_with_signs_and_shared_points():
    spec = replace(SPEC, values=(ValueChoice(2, lattice_dim=2), ValueChoice(3)))
    roomy = problem_of(GEOMETRY, spec, CACHE, None, WORKLOAD, 10**7, False)
    choice = (0,) * len(roomy.units)
    layers, tensors = composed_layers(GEOMETRY, roomy.chosen(choice), Materials(LAMBDAS, {}))
    plan = Plan(ModelIdentity("m", "llama", "", "", ""), "bfloat16", layers, WORKLOAD, {}, tensors)
    assert 10**7 - roomy.capacity == 16 * 2 * 4
    assert plan.predicted_bytes == roomy.size(choice) + 16 * 2 * 4


def test_sixteen_bits_is_always_an_option_unless_something_is_predicted():
    assert all(options[-1].format == RAW for options in problem().options)
    spec = replace(SPEC, keys=(*KEYS, KeyChoice(2, "token", 64, predicted=True)))
    predicted = problem_of(GEOMETRY, spec, CACHE, PredictorSpec(), WORKLOAD, 10**9, False)
    assert all(option.format != RAW for options in predicted.options for option in options)
    assert [
        len(options) for unit, options in zip(predicted.units, predicted.options, strict=True) if unit.side == "k"
    ] == [3, 4, 4]


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (KeyChoice(3, "channel", 128, BOOST), "boost needs"),
        (KeyChoice(2, "token", 128, BOOST), "boost needs"),
        (KeyChoice(4, "token", 128, lattice_dim=4), "lattice_dim = 4 takes"),
        (KeyChoice(2, predicted=True), r"no \[predictors\]"),
    ],
)
def test_choices_that_cannot_be_composed_are_refused_by_name(choice, reason):
    with pytest.raises(UsageError, match=reason):
        problem_of(GEOMETRY, replace(SPEC, keys=(choice,)), CACHE, None, WORKLOAD, 10**9, False)


def test_budget_below_the_smallest_compositions():
    with pytest.raises(InfeasibleBudget) as caught:
        problem_of(GEOMETRY, SPEC, CACHE, None, WORKLOAD, 1000, False)
    enough = caught.value.smallest_bytes
    assert enough is not None and enough > 1000
    exact = problem_of(GEOMETRY, SPEC, CACHE, None, WORKLOAD, enough, False)
    assert exact.capacity == sum(min(sizes) for sizes in exact.nbytes)


def test_rank_correlation_of_the_proxy():
    report = SearchReport((), 0.0, "searched", 0.0, None, (), ((1.0, 10.0), (2.0, 30.0), (3.0, 20.0)), 0)
    assert report.proxy_correlation == pytest.approx(0.5)
    assert replace(report, proxy=((1.0, 1.0),)).proxy_correlation is None


@pytest.mark.parametrize(
    ("kl", "shipped", "searched_kl", "refitted_kl"),
    [
        (2.0, "refitted", 2.0, 2.0),
        (1.0, "searched", 2.0, 1.0),
        (3.0, "refitted", 2.0, 3.0),
        (1.0, "searched", 2.0, None),
    ],
)
def test_a_report_ships_the_plan_of_less_kl_and_says_its_kl(kl, shipped, searched_kl, refitted_kl):
    with pytest.raises(ValidationError, match="shipped = "):
        SearchReport((), kl, shipped, searched_kl, refitted_kl, (), (), 0)
    for refitted, expected in ((None, ("searched", 2.0)), (2.0, ("searched", 2.0)), (1.5, ("refitted", 1.5))):
        report = SearchReport((), expected[1], expected[0], 2.0, refitted, (), (), 0)
        assert report.kl == min(2.0, refitted or 2.0)
