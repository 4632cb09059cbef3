"""The search's logic against brute force on small problems, with a KL that is a plain function of choice and text."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvcal.errors import InfeasibleBudget, UsageError
from kvcal.geometry import AttentionGeometry, Geometry, ModelIdentity
from kvcal.plan.layer import LayerPlan, bare_layers
from kvcal.plan.page_format import RAW, SIDES, Boost, Format, Tier
from kvcal.plan.plan import Plan, Workload
from kvcal.plan.tensors import check_layers, tensors_nbytes
from kvcal.recipe import CacheSpec, KeyChoice, PredictorSpec, SearchSpec, ValueChoice
from kvcal.stages.search import compose as search_module
from kvcal.stages.search.compose import Candidate, Change, search
from kvcal.stages.search.compositions import (
    OptionTensors,
    choice_style,
    composed_layers,
    styles_of,
    system_plans,
)
from kvcal.stages.search.cost import planned
from kvcal.stages.search.judge import SIGNIFICANT, Pool, tiers_of
from kvcal.stages.search.problem import Choice, Problem, problem_of
from kvcal.stages.search.speed import slow_because, speed_of

GEOMETRY = Geometry("llama", "bfloat16", tuple(AttentionGeometry(index, 8, 2, 64, 64) for index in range(3)))
WORKLOAD = Workload(2, 1000)
BOOST = Boost("magnitude", (Tier(4, 0.25),))
KEYS = (KeyChoice(2, "channel", 128), KeyChoice(2, "channel", 128, BOOST), KeyChoice(3, "token", 64, rescale=True))
VALUES = (ValueChoice(2), ValueChoice(4))
SPEC = SearchSpec("storage", (), KEYS, VALUES)
CACHE = CacheSpec(num_sink_tokens=2, k_recent_window=0, v_recent_window=0)
LAMBDAS = {choice_style(KEYS[2], CACHE).format: {i: 1.5 + i + torch.arange(128.0).view(2, 64) / 128 for i in range(3)}}
IDENTITY = ModelIdentity("m", "llama", "", "", "")
KINDS = ("prose", "code") * 6


def wide_problem(
    spec: SearchSpec = SPEC,
    cache: CacheSpec = CACHE,
    predictors: PredictorSpec | None = None,
    geometry: Geometry = GEOMETRY,
    room: int = 10**9,
) -> Problem:
    plans = system_plans(geometry, spec, predictors).values()
    styles = {side: styles_of(side, spec, cache, predictors, plans) for side in SIDES}
    speed = speed_of(spec.serve, geometry.cache_dtype, WORKLOAD)
    return problem_of(geometry, styles, predictors, WORKLOAD, room, speed)


def problem(share: float = 0.5, **kwargs) -> Problem:
    """A budget ``share`` of the way from the smallest to the largest compositions."""
    wide = wide_problem(**kwargs)
    low, high = wide.size(wide.smallest), sum(max(sizes) for sizes in wide.nbytes)
    return replace(wide, capacity=low + int(share * (high - low)))


def maker(which: Problem) -> Callable[[str, Choice], Candidate]:
    def make(name: str, choice: Choice) -> Candidate:
        ways = {(u.side, row[o].style) for u, row, o in zip(which.units, which.options, choice, strict=True)}
        return Candidate(name, choice, len(ways), which.size(choice))

    return make


def pools(
    kl: Callable[[Choice], float], noise: float = 0.0, seed: int = 0, seen: list[Candidate] | None = None
) -> list[Pool[Candidate]]:
    """Selection and validation: KL of the choice, times noise that the texts of a plan share in half."""

    def table(name: str) -> Callable[[Sequence[Candidate], int, str], Tensor]:
        def measure(candidates: Sequence[Candidate], num_texts: int, what: str) -> Tensor:
            if seen is not None:
                seen.extend(candidates)
            out = []
            for candidate in candidates:
                draw = random.Random(f"{name}:{seed}:{candidate.choice}")
                level = kl(candidate.choice) if candidate.choice is not None else 1.0
                out.append([level * draw.lognormvariate(-(noise**2) / 2, noise) for _ in range(num_texts)])
            return torch.tensor(out, dtype=torch.float64)

        return measure

    reference = Candidate("reference", None, 2, 0)
    return [Pool(KINDS, tiers_of(KINDS), table(name), reference) for name in ("select", "validate")]


def additive(which: Problem, seed: int = 0) -> Callable[[Choice], float]:
    draw = random.Random(seed)
    table = [[draw.random() for _ in options] for options in which.options]
    return lambda choice: 1.0 + sum(row[option] for row, option in zip(table, choice, strict=True))


def brute_force(which: Problem, kl: Callable[[Choice], float]) -> float:
    choices = itertools.product(*(range(len(options)) for options in which.options))
    return min(kl(choice) for choice in choices if which.size(choice) <= which.capacity)


def run(
    which: Problem,
    judged: Sequence[Pool[Candidate]],
    rounds: int = 3,
    systems=(),
    earlier=(),
    finish=lambda one: (one, []),
):
    return search(which, rounds, *judged, systems, earlier, maker(which), finish)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9])
def test_additive_costs_without_noise_are_solved_exactly(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "_near", lambda p, position, current, *_: [
        option for option in range(len(p.options[position])) if option != current
    ])  # fmt: skip
    small = problem(share)
    for seed in range(3):
        kl = additive(small, seed)
        outcome = run(small, pools(kl))
        assert outcome.champion.choice is not None
        assert kl(outcome.champion.choice) == pytest.approx(brute_force(small, kl), abs=1e-12)
        assert small.size(outcome.champion.choice) <= small.capacity
        assert all(predicted == pytest.approx(found, abs=1e-9) for predicted, found in outcome.proxy)


def test_a_change_that_is_shrunk_away_is_tried_as_it_was_measured() -> None:
    """The layer that matters most is an outlier of its group, with the largest error."""
    small = problem(0.5)
    background = maker(small)("the smallest", small.smallest)
    pairs = [(n, o) for n, row in enumerate(small.options) for o in range(len(row)) if o != small.smallest[n]]
    tried = [(*small.smallest[:n], o, *small.smallest[n + 1 :]) for n, o in pairs]
    outlier = max(range(len(tried)), key=lambda at: (small.size(tried[at]) <= small.capacity, at))
    changes = [
        Change(*pair, -9.0, 3.0, -0.5, 0.5) if at == outlier else Change(*pair, -1.0, 0.1, -1.0 - at / 100, 0.1)
        for at, pair in enumerate(pairs)
    ]
    found = search_module.compositions(small, background, changes, maker(small), 1)
    assert tried[outlier] in {candidate.choice for candidate, _ in found}
    assert len(found) <= search_module.MAX_COMPOSED


@pytest.mark.parametrize("seed", range(6))
def test_no_composition_ships_where_all_are_worse(seed: int) -> None:
    """Noisy measurements of compositions that are all worse than one uniform plan."""
    small, seen = problem(0.5), list[Candidate]()
    simple = tuple(0 for _ in small.units)

    def kl(choice: Choice) -> float:
        changed = sum(a != b for a, b in zip(choice, simple, strict=True))
        return 1.0 if choice == simple else 3.0 if changed >= len(simple) / 2 else 1.1

    judged = pools(kl, 0.5, seed, seen)
    outcome = run(small, judged)
    assert outcome.champion.choice == simple
    few = {
        c.choice: float(judged[0].scores([c], 4).mean()) for c in tuple(seen) if c.nbytes <= small.capacity and c.choice
    }
    assert kl(min(few, key=few.__getitem__)) > 1.0  # the old rule: the least mean of all that were measured


@pytest.mark.parametrize("seed", range(8))
def test_what_ships_is_not_worse_on_the_validation_than_any_ingredient_within_error(seed: int) -> None:
    small = problem(0.5)
    draw = random.Random(seed)
    levels = {choice: draw.uniform(0.5, 1.5) for choice in itertools.product(*map(range, map(len, small.options)))}
    systems = [
        maker(small)(f"system {n}", choice)
        for n, choice in enumerate(c for c in draw.sample(sorted(levels), 12) if small.size(c) <= small.capacity)
    ]
    select, validate = pools(levels.__getitem__, 0.6, seed)
    outcome = run(small, (select, validate), 2, systems)
    for system in systems:
        change, error = validate.difference(system, outcome.champion)
        assert change >= -(SIGNIFICANT + 0.5) * error


@pytest.mark.parametrize("seed", range(6))
def test_more_bytes_are_never_worse_on_the_validation(seed: int) -> None:
    small, earlier = problem(0.3), list[Candidate]()
    select, validate = pools(additive(small, seed), 0.8, seed)
    scores = []
    for share in (0.2, 0.4, 0.6, 0.8):
        larger = replace(small, capacity=problem(share).capacity)
        outcome = run(larger, (select, validate), 1, (), earlier)
        scores.append(validate.score(outcome.champion))
        earlier.append(outcome.champion)
    assert scores == sorted(scores, reverse=True)


def test_a_single_change_ships_where_changes_do_not_add_up() -> None:
    small = problem(0.5)
    simple = tuple(0 for _ in small.units)

    def kl(choice: Choice) -> float:
        return {0: 1.0, 1: 0.9}.get(sum(map(bool, choice)), 3.0)

    outcome = run(small, pools(kl), 1)
    assert outcome.background is not None and outcome.background.choice == simple
    assert outcome.champion.choice is not None and kl(outcome.champion.choice) == 0.9


def test_a_smaller_budgets_plan_gives_way_to_what_is_better_than_it() -> None:
    """Nothing proves to be better than the simple plan, so the guard takes the earlier one, which is a little lower on
    the validation. Another plan is lower than that one on every text."""
    good = [0.2, 1.5, 0.9, 1.2] * 2
    kl = {"simple": [1.0] * 8, "good": good, "earlier": [1.04 * x for x in good]}

    def table(candidates: Sequence[Candidate], num_texts: int, what: str) -> Tensor:
        rows = [kl.get(candidate.name, [9.0] * 8)[:num_texts] for candidate in candidates]
        return torch.tensor(rows, dtype=torch.float64)

    judged = Pool(("x",) * 8, tiers_of(("x",) * 8), table, Candidate("simple", None, 2, 0))
    simple, better_one, earlier = (
        Candidate(name, None, number, 0) for number, name in enumerate(("simple", "good", "earlier"))
    )
    small = problem(0.5)
    outcome = run(small, (judged, judged), 0, [simple, better_one], [earlier])
    assert outcome.champion == better_one
    assert run(small, (judged, judged), 0, [simple, better_one]).champion == simple


@pytest.mark.parametrize(("validated", "shipped"), [(9.0, "good, finished"), (0.01, "earlier, finished")])
def test_what_ships_is_finished_whoever_wins(validated: float, shipped: str) -> None:
    """The champion before it meets the plans of smaller budgets, and one of these if it takes the champion's place."""
    kl = {"simple": 3.0, "good": 1.0, "good, finished": 0.5, "earlier, finished": 0.005}

    def pool(of_earlier: float) -> Pool[Candidate]:
        def table(candidates: Sequence[Candidate], num_texts: int, what: str) -> Tensor:
            levels = [(kl | {"earlier": of_earlier}).get(one.name, 9.0) for one in candidates]
            rows = [[level + n / 1e6 for n in range(num_texts)] for level in levels]
            return torch.tensor(rows, dtype=torch.float64)

        return Pool(("x",) * 8, tiers_of(("x",) * 8), table, Candidate("simple", None, 2, 0))

    def finish(one: Candidate) -> tuple[Candidate, list[Candidate]]:
        found, worse = (replace(one, name=f"{one.name}, {how}") for how in ("finished", "tried"))
        return found, [found, worse]

    simple, good, earlier = (Candidate(name, None, n, 0) for n, name in enumerate(("simple", "good", "earlier")))
    outcome = run(problem(0.5), (pool(9.0), pool(validated)), 0, [simple, good], [earlier], finish)
    names = [one.name for one in outcome.compared]
    assert outcome.champion.name == shipped and {shipped, "good, tried", "good, finished"} <= set(names)
    assert len(set(names)) == len(names)


def test_the_same_search_measures_the_same_plans_and_no_more_than_planned() -> None:
    small, runs = problem(0.5), []
    for _ in range(2):
        seen: list[Candidate] = []
        run(small, pools(additive(small), 0.4, 1, seen), 2)
        runs.append([candidate.choice for candidate in seen])
    assert runs[0] == runs[1]
    most = planned(small, tiers_of(KINDS), 0, 2)
    assert len(set(runs[0])) - 1 <= most.plans and most.texts >= most.plans
    heads = Geometry("llama", "bfloat16", tuple(AttentionGeometry(n, 32, 8, 64, 64) for n in range(32)))
    wide = wide_problem(geometry=heads, spec=replace(SPEC, serve="decode"))
    assert planned(wide, (5, 10, 20), 9, 2).plans <= 1300


def test_every_composition_fits_the_budget_in_bytes() -> None:
    small, seen = problem(0.3), list[Candidate]()
    outcome = run(small, pools(additive(small), 0.0, 0, seen))
    brought = OptionTensors(LAMBDAS, {})
    assert outcome.champion.choice is not None
    for choice in {outcome.champion.choice, *(c.choice for c in seen if c.name.startswith("composition"))}:
        layers, tensors = composed_layers(GEOMETRY, small.chosen(choice), brought)
        plan = Plan(IDENTITY, "bfloat16", layers, WORKLOAD, {}, tensors)
        assert plan.predicted_bytes == small.size(choice) <= small.capacity
        assert tensors_nbytes(tensors) == 2 * 64 * 4 * sum(layer.k_rescale for layer in layers)
        assert small.choice_of(layers) == choice


def test_equal_layers_share_one_lambda_tensor() -> None:
    """So that it is hashed once."""
    small = problem(1.0)
    brought = OptionTensors(LAMBDAS, {})
    first, second = (
        composed_layers(GEOMETRY, small.chosen(choice), brought)[1] for choice in ((2,) * 6, (2, 1, 2, 0, 2, 1))
    )
    assert first and all(first[name] is second[name] for name in first)


def test_for_decoding_options_and_pairs_are_those_that_attention_reads_as_stored() -> None:
    lattice = (KeyChoice(2, "token", lattice_dim=2), KeyChoice(2, "token", lattice_dim=2, predicted=True))
    spec = SearchSpec(
        "decode", ("kitty", "higgs-2", "aqua-kv"), (*KEYS, *lattice), (*VALUES, ValueChoice(3, num_sink_tokens=5))
    )
    fast = wide_problem(spec, predictors=PredictorSpec())
    slow = wide_problem(replace(spec, serve="storage"), predictors=PredictorSpec())
    assert all(o.format.lattice_dim is None and o.predictor is None for row in fast.options for o in row)
    assert any(o.predictor is not None for row in slow.options for o in row)
    raw = bare_layers(GEOMETRY)[0]
    for k, v, pairs in fast.couples:
        assert (len(fast.options[k]) - 1, len(fast.options[v]) - 1) in pairs  # 16 bits
        for i, j in itertools.product(range(len(fast.options[k])), range(len(fast.options[v]))):
            one, other = fast.options[k][i].format, fast.options[v][j].format
            equal = one.num_sink_tokens == other.num_sink_tokens or RAW in (one, other)
            assert ((i, j) in pairs) == equal
    for seed in range(3):
        layers, _ = composed_layers(GEOMETRY, fast.chosen(solved(fast, seed)), OptionTensors(LAMBDAS, {}))
        for layer in layers:
            assert slow_because(layer, "bfloat16") <= slow_because(raw, "bfloat16")


def solved(which: Problem, seed: int) -> Choice:
    draw = random.Random(seed)
    choice = which.solve([{o: draw.random() for o in range(len(row))} for row in which.options])
    assert choice is not None
    return choice


def test_rotated_pages_are_options_for_decoding() -> None:
    keys = (KeyChoice(2), KeyChoice(3, "token", quantizer="rotated"), KeyChoice(2, "token", quantizer="rotated"))
    values = (ValueChoice(2, quantizer="rotated"), ValueChoice(4, quantizer="rotated"), ValueChoice(4))
    spec = SearchSpec("decode", (), keys, values)
    wide = wide_problem(spec)
    assert [{o.format.quantizer for o in row} for row in wide.options] == [{"uniform", "rotated"}] * len(wide.units)
    for seed in range(4):
        choice = solved(wide, seed)
        layers, tensors = composed_layers(GEOMETRY, wide.chosen(choice), OptionTensors({}, {}))
        plan = Plan(IDENTITY, "bfloat16", layers, WORKLOAD, {}, tensors)
        assert plan.predicted_bytes == wide.size(choice)
        assert wide.choice_of(layers) == choice
    large = Geometry("llama", "bfloat16", tuple(AttentionGeometry(index, 8, 2, 256, 256) for index in range(2)))
    assert all(o.format.quantizer == "uniform" for row in wide_problem(spec, geometry=large).options for o in row)


def test_systems_are_plans_of_the_options() -> None:
    spec = SearchSpec("storage", ("kivi-2", "kitty-pro", "aqua-kv", "pm-kvq-2", "kvmix"), KEYS, VALUES)
    wide = wide_problem(spec, predictors=PredictorSpec())
    plans = system_plans(GEOMETRY, spec, PredictorSpec())
    assert list(plans) == ["kivi-2", "kitty-pro", "aqua-kv", "pm-kvq-2", "kvmix (few bits)", "kvmix (more bits)"]
    for name, layers in plans.items():
        choice = wide.choice_of(layers)
        assert choice is not None, name
        formats = {o.format for o in wide.chosen(choice).values()}
        assert formats == {fmt for layer in layers for side in SIDES for fmt in layer.formats(side)}
    assert [layer.k_predictor is not None for layer in plans["aqua-kv"]] == [False, True, True]
    assert all(layer.k_rescale and not layer.k[0].shrink_at for layer in plans["pm-kvq-2"])
    rotated = tuple(replace(layer, k_pages="pre") for layer in plans["kivi-2"])
    assert wide.choice_of(rotated) is None
    assert "aqua-kv" not in system_plans(GEOMETRY, spec, None)


def test_options_may_have_sinks_and_windows_of_their_own() -> None:
    keys = (KeyChoice(2, num_sink_tokens=32, recent_window=64), KeyChoice(2))
    wide = wide_problem(replace(SPEC, keys=keys))
    own, plain = (option.format for option in wide.options[0][:2])
    assert (own.num_sink_tokens, own.recent_window) == (32, 64)
    assert (plain.num_sink_tokens, plain.recent_window) == (2, 0)
    assert wide.nbytes[0][0] - wide.nbytes[0][1] == (30 + 64) * 64 * 2 * 2 * WORKLOAD.batch


def test_sixteen_bits_are_an_option_everywhere_and_make_plans_beside_predictions() -> None:
    keys, values = (KeyChoice(2, predicted=True), KeyChoice(3)), (ValueChoice(2, predicted=True), ValueChoice(4))
    wide = wide_problem(replace(SPEC, keys=keys, values=values), predictors=PredictorSpec())
    assert all(any(option.format == RAW for option in options) for options in wide.options)
    draw, with_raw = random.Random(0), 0
    for _ in range(100):
        choice = tuple(draw.randrange(len(options)) for options in wide.options)
        layers, _ = composed_layers(GEOMETRY, wide.chosen(choice), OptionTensors({}, {}))
        check_layers(layers)
        predicted = any(layer.k_predictor or layer.v_predictor for layer in layers)
        with_raw += predicted and any(RAW in (*layer.k, *layer.v) for layer in layers)
    assert with_raw >= 20


def test_every_layer_has_its_own_lambda() -> None:
    small = problem(0.5)
    choice = tuple(2 if unit.side == "k" else 0 for unit in small.units)
    _, tensors = composed_layers(GEOMETRY, small.chosen(choice), OptionTensors(LAMBDAS, {}))
    [lambdas] = LAMBDAS.values()
    assert len(tensors) == 3 and all(torch.equal(tensors[f"layers.{i}.k_rescale"], lambdas[i]) for i in range(3))


def test_lattice_bytes_are_counted_with_signs_and_shared_points() -> None:
    roomy = wide_problem(replace(SPEC, values=(ValueChoice(2, lattice_dim=2), ValueChoice(3))), room=10**7)
    choice = (0,) * len(roomy.units)
    layers, tensors = composed_layers(GEOMETRY, roomy.chosen(choice), OptionTensors(LAMBDAS, {}))
    plan = Plan(IDENTITY, "bfloat16", layers, WORKLOAD, {}, tensors)
    assert 10**7 - roomy.capacity == 16 * 2 * 4
    assert plan.predicted_bytes == roomy.size(choice) + 16 * 2 * 4


def test_options_that_fit_in_no_plan_are_left_out_but_sixteen_bits() -> None:
    wide = wide_problem()
    smallest = wide.size(wide.smallest)
    room = sorted(wide.nbytes[0])[-2] - min(wide.nbytes[0])
    tight = wide_problem(room=smallest + room)
    assert tight.capacity == smallest + room
    for options, every, sizes in zip(tight.options, wide.options, wide.nbytes, strict=True):
        kept = [o for o, size in zip(every, sizes, strict=True) if size - min(sizes) <= room or o.format == RAW]
        assert list(options) == kept
    assert any(len(options) < len(every) for options, every in zip(tight.options, wide.options, strict=True))


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (KeyChoice(3, "channel", 128, BOOST), "boost needs"),
        (KeyChoice(2, "token", 128, BOOST), "boost needs"),
        (KeyChoice(4, "token", 128, lattice_dim=4), "lattice_dim = 4 takes"),
        (KeyChoice(2, predicted=True), r"no \[predictors\]"),
        (KeyChoice(2, quantizer="rotated"), "rotated pages take fewer than 16 bits and axis 'token'"),
        (KeyChoice(2, quantizer="absmax"), "quantizer = 'absmax', expected one of"),
    ],
)
def test_choices_that_cannot_be_composed_are_refused_by_name(choice: KeyChoice, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        wide_problem(replace(SPEC, keys=(choice,)))


def test_budget_below_the_smallest_compositions() -> None:
    with pytest.raises(InfeasibleBudget) as caught:
        wide_problem(room=1000)
    enough = caught.value.smallest_bytes
    assert enough is not None and enough > 1000
    exact = wide_problem(room=enough)
    assert exact.capacity == exact.size(exact.smallest)


def test_a_plan_of_an_unknown_format_is_no_choice() -> None:
    layers = tuple(LayerPlan(layer.geometry, (Format(8),), (RAW,)) for layer in bare_layers(GEOMETRY))
    assert problem().choice_of(layers) is None
