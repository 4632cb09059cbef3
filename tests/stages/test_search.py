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
from kvcal.geometry import AttentionGeometry, Geometry, ModelIdentity
from kvcal.plan.page_format import RAW, Boost, Tier
from kvcal.plan.plan import Plan, Workload
from kvcal.plan.tensors import check_layers, tensors_nbytes
from kvcal.recipe import CacheSpec, KeyChoice, PredictorSpec, SearchSpec, ValueChoice
from kvcal.stages.search import problem as search_problem
from kvcal.stages.search.compositions import OptionTensors, Unit, composed_layers
from kvcal.stages.search.problem import Choice, Problem, problem_of, search, uniform_choices
from kvcal.stages.search.record import SearchReport

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
        layers, tensors = composed_layers(GEOMETRY, small.chosen(choice), OptionTensors(LAMBDAS, {}))
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


def uniform(which: Problem, k: int, v: int) -> Choice:
    return tuple(k if unit.side == "k" else v for unit in which.units)


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_every_uniform_plan_that_fits_is_measured_and_the_best_is_the_background(share):
    small, kl = problem(share), additive(problem(share), seed=4)
    batches: dict[str, list[Choice]] = {}

    def measure(choices: Sequence[Choice], what: str) -> list[float]:
        batches[what] = list(choices)
        return [kl(choice) for choice in choices]

    outcome = search(small, SPEC, measure)
    every = [uniform(small, k, v) for k, v in itertools.product(range(4), range(3))]
    fitting = sorted((c for c in every if small.size(c) <= small.capacity), key=small.size, reverse=True)
    assert batches["uniform plans"] == fitting and len(fitting) >= 2
    best = min(fitting, key=kl)
    assert outcome.history[0] == outcome.background_kl == kl(best) and (share < 0.5 or best != fitting[0])
    assert all(sum(a != b for a, b in zip(c, best, strict=True)) <= 1 for c in batches["compositions"])


def test_uniform_plans_are_bounded_to_the_largest_and_none_that_fits_leaves_the_smallest_options(monkeypatch):
    small = problem(0.8)
    whole = uniform_choices(small)
    monkeypatch.setattr(search_problem, "MAX_UNIFORM", 3)
    assert uniform_choices(small) == whole[:3] and len(whole) > 3
    mixed = replace(small, nbytes=tuple((1 + i % 2, 2 - i % 2, 9, 9)[: len(o)] for i, o in enumerate(small.options)))
    mixed = replace(mixed, capacity=len(mixed.units))
    assert uniform_choices(mixed) == [tuple(sizes.index(1) for sizes in mixed.nbytes)]


def test_where_the_first_layer_cannot_be_predicted_it_takes_the_smallest_and_the_largest_that_fit():
    """AQUA-KV's own composition: residuals at 2 bits behind a first layer at 4."""
    keys = (KeyChoice(2, "token", lattice_dim=2), KeyChoice(2, "token", lattice_dim=2, predicted=True))
    keys += (KeyChoice(4, "token", lattice_dim=2),)
    values = tuple(ValueChoice(c.num_bits, lattice_dim=2, predicted=c.predicted) for c in keys)
    spec = replace(SPEC, keys=keys, values=values)
    wide = problem_of(GEOMETRY, spec, CACHE, PredictorSpec(), WORKLOAD, 10**9, False)
    names = [[option.name for option in options] for options in wide.options]
    assert names[0] == ["2 lattice d2", "4 lattice d2"] and names[2][1] == "2 lattice d2 predicted"
    aqua, low = ((n, n, 1, 1, 1, 1) for n in (1, 0))
    assert set(uniform_choices(wide)) >= {aqua, low}
    tight = replace(wide, capacity=wide.size(aqua))
    assert uniform_choices(tight)[0] == aqua
    less = uniform_choices(replace(wide, capacity=wide.size(aqua) - 1))
    assert aqua not in less and {low, (1, 0, 1, 1, 1, 1)} <= set(less)


def test_a_round_of_refinement_solves_for_the_least_kl_around_the_best_plan():
    """Costs that change with the background: the round's plans follow its own measurements, downwards."""
    small = problem(0.5)
    before, after = additive(small, 1), additive(small, 2)
    known: dict[Choice, float] = {}
    rounds: dict[str, list[Choice]] = {}

    def measure(choices: Sequence[Choice], what: str) -> list[float]:
        rounds[what] = list(choices)
        if what.startswith("round"):
            best = min(known, key=known.__getitem__)
            return [after(choice) - after(best) + before(best) for choice in choices]
        known.update({choice: before(choice) for choice in choices if small.size(choice) <= small.capacity})
        return [before(choice) for choice in choices]

    search(small, replace(SPEC, neighbours=9, refine_rounds=1), measure)
    found = [after(choice) for choice in rounds["round 1, plans"]]
    assert min(found) == pytest.approx(brute_force(small, after), abs=1e-12)


def test_heads_apart_share_one_lambda_tensor_with_ones_for_those_without():
    small = problem(0.5, per_head=True)
    assert small.units[:3] == (Unit(0, "k", 0), Unit(0, "k", 1), Unit(0, "v", 0))
    choice = [0] * len(small.units)
    choice[1] = 2
    layers, tensors = composed_layers(GEOMETRY, small.chosen(tuple(choice)), OptionTensors(LAMBDAS, {}))
    assert [fmt.axis for fmt in layers[0].k] == ["channel", "token"]
    assert tensors["layers.0.k_rescale"].tolist() == [[1.0] * 16, [1.5] * 16]


def test_lattice_bytes_are_counted_with_signs_and_shared_points():
    spec = replace(SPEC, values=(ValueChoice(2, lattice_dim=2), ValueChoice(3)))
    roomy = problem_of(GEOMETRY, spec, CACHE, None, WORKLOAD, 10**7, False)
    choice = (0,) * len(roomy.units)
    layers, tensors = composed_layers(GEOMETRY, roomy.chosen(choice), OptionTensors(LAMBDAS, {}))
    plan = Plan(ModelIdentity("m", "llama", "", "", ""), "bfloat16", layers, WORKLOAD, {}, tensors)
    assert 10**7 - roomy.capacity == 16 * 2 * 4
    assert plan.predicted_bytes == roomy.size(choice) + 16 * 2 * 4


def has_raw(cache: CacheSpec, keys_predicted: bool, values_predicted: bool) -> str:
    """For every unit "x" where 16 bits is an option, else ".": K V of three layers."""
    keys = (*KEYS, *([KeyChoice(2, "token", 64, predicted=True)] if keys_predicted else []))
    values = (*VALUES, *([ValueChoice(2, 64, predicted=True)] if values_predicted else []))
    spec = replace(SPEC, keys=(*keys, KeyChoice(16)), values=(*values, ValueChoice(16)))
    found = problem_of(GEOMETRY, spec, cache, PredictorSpec(), WORKLOAD, 10**9, False)
    return "".join("x" if any(o.format == RAW for o in options) else "." for options in found.options)


def test_sixteen_bits_is_an_option_where_no_prediction_reads_pages_behind_sinks():
    assert all(options[-1].format == RAW for options in problem().options)
    assert has_raw(CACHE, False, False) == "xxxxxx"
    assert has_raw(CACHE, True, False) == ".x.xxx"
    assert has_raw(CACHE, False, True) == "x....x"
    assert has_raw(CACHE, True, True) == ".....x"
    assert has_raw(replace(CACHE, num_sink_tokens=0), True, True) == "xxxxxx"
    windows = replace(CACHE, num_sink_tokens=0, k_recent_window=64, v_recent_window=64)
    assert has_raw(windows, True, True) == ".....x"


@pytest.mark.parametrize("sinks", [0, 2])
def test_sixteen_bits_beside_predictions_make_a_plan(sinks):
    """Plans of random options, 16 bits too."""
    keys, values = (KeyChoice(2, predicted=True), KeyChoice(3)), (ValueChoice(2, predicted=True), ValueChoice(4))
    spec, cache = replace(SPEC, keys=keys, values=values), replace(CACHE, num_sink_tokens=sinks)
    wide = problem_of(GEOMETRY, spec, cache, PredictorSpec(), WORKLOAD, 10**9, False)
    draw, with_raw = random.Random(sinks), 0
    for _ in range(100):
        choice = tuple(draw.randrange(len(options)) for options in wide.options)
        layers, _ = composed_layers(GEOMETRY, wide.chosen(choice), OptionTensors({}, {}))
        check_layers(layers)
        predicted = any(layer.k_predictor or layer.v_predictor for layer in layers)
        with_raw += predicted and any(RAW in (*layer.k, *layer.v) for layer in layers)
    assert with_raw >= 20


def test_options_that_fit_in_no_plan_are_left_out():
    wide = problem_of(GEOMETRY, SPEC, CACHE, None, WORKLOAD, 10**9, False)
    smallest = sum(min(sizes) for sizes in wide.nbytes)
    room = sorted(wide.nbytes[0])[-2] - min(wide.nbytes[0])
    tight = problem_of(GEOMETRY, SPEC, CACHE, None, WORKLOAD, smallest + room, False)
    assert tight.capacity == smallest + room
    for options, sizes, every, all_sizes in zip(tight.options, tight.nbytes, wide.options, wide.nbytes, strict=True):
        fits = [size - min(all_sizes) <= room for size in all_sizes]
        assert options == tuple(itertools.compress(every, fits)) and sizes == tuple(itertools.compress(all_sizes, fits))
        assert 0 < len(options) < len(every)


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
