"""``kvcal tune`` on a tiny model, every trial through the packed cache: its files, its resumption, its
refusals."""

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli_cases import ran_well, run_kvcal, save_llama
from evaluation_cases import as_loaded, make_plan, wordy_llama
from transformers import PreTrainedTokenizerBase
from tune_cases import DATA, LIMITS, PAIR, RECIPE, SPEC

from kvcal.data.pools import Purpose
from kvcal.data.reading import EvaluateSpec, TuneSpec
from kvcal.data.tasks import problems
from kvcal.errors import UsageError
from kvcal.folder import Folder, sequences
from kvcal.models.load import LoadedModel, load
from kvcal.plan.plan import Plan, Workload, bare_layers, load_plan, plan_bytes
from kvcal.progress import Silent
from kvcal.recipe import AllocateSpec
from kvcal.recipe_files import load_recipe
from kvcal.stages import tune as tune_objective
from kvcal.stages.allocate.budget import resolve_budget
from kvcal.stages.evaluate.tasks import TaskResult, measure_tasks
from kvcal.stages.pipeline import baseline_plan, build_plan
from kvcal.stages.tune import Outcome, TaskObjective, choose, load_tuning, tuned_bits
from kvcal.systems.mixkvq.tier_capacity import measure_scores

UNTUNED = RECIPE[: RECIPE.index("[tune]")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    return save_llama(tmp_path_factory.mktemp("model"), tokenizer)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path, recipe: Path) -> Path:
    """The folder of a study that ran through."""
    folder = tmp_path_factory.mktemp("whole")
    ran_well("tune", recipe, "--model", model, "--out", folder, "--quiet")
    return folder


@pytest.fixture(scope="module")
def wordy(tokenizer: PreTrainedTokenizerBase) -> tuple[LoadedModel, Plan]:
    """A model of all words, and a plan for it."""
    loaded = as_loaded(wordy_llama(len(tokenizer)), tokenizer)
    return loaded, make_plan(loaded, PAIR)


def test_a_study_leaves_a_plan_and_a_front(whole: Path, model: Path) -> None:
    tuning = load_tuning(whole)
    chosen = choose(tuning)
    assert list(tuning.inputs["search.thresholds"]) == ["tau_16", "tau_4"] and len(tuning.trials) == 4
    bits = {trial.outcome.bits_per_value for trial in tuning.trials}
    assert len(bits) > 1  # rooms follow the thresholds
    assert "(chosen)" in (whole / "report.html").read_text()
    plan = load_plan(whole / "plan.safetensors")
    assert plan.predicted_bytes == chosen.outcome.total_bytes
    assert plan.bits_per_value() == chosen.outcome.bits_per_value
    assert plan.provenance["thresholds"] == chosen.thresholds and plan.provenance["recipe"] == "tiny"
    for layer in plan.layers:
        boost = layer.k.boost
        assert boost is None or {t.above for t in boost.tiers} <= set(chosen.thresholds.values())
    assert plan.model == load(str(model)).identity


def test_a_trial_is_the_tasks_through_the_packed_cache(whole: Path, model: Path) -> None:
    """The file's outcomes, measured again by hand with the plans that stand for the thresholds."""
    loaded = load(str(model))
    tuning = load_tuning(whole)
    objective = TaskObjective(loaded, make_plan(loaded, PAIR, 4096), SPEC, LIMITS, DATA)
    assert {name: [*limits] for name, limits in objective.ranges().items()} == tuning.inputs["search.thresholds"]
    for trial in tuning.trials[:2]:
        plan = objective.plan_with(trial.thresholds)
        own = EvaluateSpec(tasks=("chain",), num_problems=2, max_size=22, max_hops=4, max_new_tokens=6, seed=2)
        (result,) = measure_tasks(loaded, plan, own, Silent(), "select")
        assert (trial.outcome.accuracy, trial.outcome.accuracy_se) == (result.accuracy, result.accuracy_se)
        assert 2 <= trial.outcome.facts["key_code_bits"] <= 16


def test_interrupted_and_resumed_through_the_command(whole: Path, model: Path, recipe: Path, tmp_path: Path) -> None:
    original, calls = TaskObjective.__call__, []

    def interrupt(self: TaskObjective, thresholds: Mapping[str, float]) -> Outcome:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self, thresholds)

    command = ("tune", recipe, "--model", model, "--out", tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskObjective, "__call__", interrupt)
        stopped = run_kvcal(*command)
    assert stopped.code == 130 and f"2 of 4 trials are kept in {tmp_path}" in stopped.err
    resumed = ran_well(*command, "--json")
    assert f"goes on after 2 trials in {tmp_path}" in resumed.err
    shown = resumed.json
    assert shown["chosen"]["number"] in shown["front"] and len(shown["trials"]) == 4
    table = ran_well(*command, "--quiet")  # nothing is left to do
    assert "Pareto front of 4 trials" in table.out and "(chosen)" in table.out
    assert "tau_16" in table.out and table.err == ""


def test_a_study_of_something_else_is_refused(
    whole: Path, model: Path, recipe: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase,
) -> None:  # fmt: skip
    other = save_llama(tmp_path / "other", tokenizer, seed=1)
    for its_model, knob, says in (
        (other, "tune.num_trials=4", "model.weights_sha256 is"),
        (model, 'tune.tasks=["times"]', 'tune.tasks is ["chain"], expected ["times"]'),
        (model, "tune.seed=8", "search.seed is"),
        (model, "tune.high=3.0", "tune.high is 2.0, expected 3.0"),
    ):
        refused = run_kvcal("tune", recipe, "--model", its_model, "--out", whole, "--set", knob)
        assert refused.code == 5 and "holds a study of something else" in refused.err and says in refused.err


def test_a_cap_that_nothing_fits_says_the_smallest(whole: Path, model: Path, recipe: Path) -> None:
    smallest = min(trial.outcome.total_bytes for trial in load_tuning(whole).trials)
    command = ("tune", recipe, "--model", model, "--out", whole, "--json")
    refused = run_kvcal(*command, "--set", "tune.max_bits=1.5")
    assert refused.code == 3 and f"{smallest} bytes" in refused.err and '"hint": "raise the cap' in refused.err
    fitting = ran_well(*command, "--kv-budget", smallest)
    assert fitting.json["predicted_bytes"] == smallest
    run_kvcal(*command)  # the whole study's own choice again


@pytest.mark.parametrize(
    ("content", "arguments", "reason"),
    [
        (RECIPE, ("--set", 'tune.tasks=["lm-eval:gsm8k"]'), "lm-evaluation-harness, of which lm_eval is not"),
        (UNTUNED + "[reparam]\n", (), "[tune] needs [formats], and no stage that works on its formats"),
        (RECIPE.replace(", above = 1.0", "").replace(", above = 0.5", ""), (), "no tier of the keys has a threshold"),
        (RECIPE.replace("seq_len = 300", "seq_len = 100"), (), "fill no page"),
    ],
)  # fmt: skip
def test_refusals(
    content: str, arguments: tuple[str, ...], reason: str, model: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "lm_eval" else find(name, *a))
    path = tmp_path / "recipe.toml"
    path.write_text(content)
    refused = run_kvcal("tune", path, "--model", model, "--out", tmp_path / "out", *arguments)
    assert refused.code == 2 and reason in refused.err
    assert not (tmp_path / "out" / "study.log").exists()


def test_a_trial_measures_the_tuned_plan_on_problems_of_its_own(
    wordy: tuple[LoadedModel, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, plan = wordy
    measured: list[Plan] = []
    monkeypatch.setattr(tune_objective, "require_lm_eval", lambda: None)
    monkeypatch.setattr(
        tune_objective, "measure_harness", lambda loaded, plan, *rest: measured.append(plan) or (harness_result(0.5),)
    )

    def measure(
        loaded: object, plan: Plan, spec: EvaluateSpec, reporter: object, purpose: Purpose
    ) -> tuple[TaskResult, ...]:
        assert purpose == "select"
        measured.append(plan)
        return measure_tasks(loaded, plan, spec, reporter, purpose)

    monkeypatch.setattr(tune_objective, "measure_tasks", measure)
    spec = TuneSpec(tasks=("chain", "lm-eval:arc"), num_problems=1)
    objective = TaskObjective(loaded, plan, spec, EvaluateSpec(max_new_tokens=2), DATA)
    outcome = objective({"tau_16": 0.03, "tau_4": 0.02})
    boosts = [[layer.k.boost for layer in one.layers] for one in measured]
    assert len(boosts) == 2
    assert all(
        tier.above in (0.03, 0.02) for one in boosts for boost in one if boost is not None for tier in boost.tiers
    )
    assert all(one.sha256 != plan.sha256 for one in measured)
    assert {one.predicted_bytes for one in measured} == {outcome.total_bytes}
    assert {one.bits_per_value() for one in measured} == {outcome.bits_per_value}

    def posed(spec: EvaluateSpec) -> set[str]:
        limits = {"max_steps": spec.max_steps, "max_size": spec.max_size, "max_hops": spec.max_hops}
        return {p.prompt for task in ("ledger", "chain") for p in problems(task, 20, spec.seed, **limits)}

    for evaluation_seed, tune_seed in ((1, 0), (0, 2**32 - 2)):
        limits = EvaluateSpec(seed=evaluation_seed)
        tuned = TaskObjective(loaded, plan, TuneSpec(seed=tune_seed), limits, DATA).tasks
        assert not posed(tuned) & posed(limits)


def harness_result(accuracy: float) -> TaskResult:
    return TaskResult("arc:acc", accuracy, 0.1, 1, None, None, 0, (9,))


def test_several_tasks_and_the_harness_share_the_mean(
    wordy: tuple[LoadedModel, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, plan = wordy
    spec = TuneSpec(tasks=("chain", "lm-eval:arc:acc", "times"), num_problems=1)
    monkeypatch.setattr(tune_objective, "require_lm_eval", lambda: None)
    monkeypatch.setattr(tune_objective, "measure_harness", lambda *given: (harness_result(0.75),))
    objective = TaskObjective(loaded, plan, spec, EvaluateSpec(max_new_tokens=2), DATA)
    own = measure_tasks(loaded, plan, objective.tasks, Silent(), "select")
    accuracy, accuracy_se = objective.accuracy(plan)
    assert accuracy == pytest.approx((sum(task.accuracy for task in own) + 0.75) / 3)
    assert accuracy_se == pytest.approx((sum(task.accuracy_se**2 for task in own) + 0.1**2) ** 0.5 / 3)


def test_what_cannot_be_tuned_is_refused(wordy: tuple[LoadedModel, Plan]) -> None:
    layer = wordy[1].layers[0]
    tensors = {"layers.0.k_rescale": torch.ones(layer.attention.num_kv_heads, layer.head_dim("k"))}
    with pytest.raises(UsageError, match="layer 0 has transforms of its keys"):
        tuned_bits(replace(wordy[1], layers=(replace(layer, k_rescale=True),), tensors=tensors))


def test_rooms_are_what_pages_need(whole: Path, model: Path) -> None:
    plan, thresholds = load_plan(whole / "plan.safetensors"), choose(load_tuning(whole)).thresholds
    loaded = load(str(model))
    scores = measure_scores(loaded, make_plan(loaded, PAIR), sequences(DATA, loaded), Silent())
    needs = 0
    for layer in plan.layers:
        boost = layer.k.boost
        rooms = {tier.num_bits: tier.num_channels(16) for tier in boost.tiers} if boost else {}
        for page in scores[layer.geometry.index].flatten(0, 1).tolist():
            above = sum(score > thresholds["tau_16"] for score in page)
            middle = sum(score > thresholds["tau_4"] for score in page) - min(above, rooms.get(16, 0))
            needs += above > rooms.get(16, 0) or middle > rooms.get(4, 0)
    num_pages = sum(values[..., 0].numel() for values in scores.values())
    assert needs / num_pages <= 2 * (1 - SPEC.page_share) + 2 / num_pages


def test_compare_builds_the_tuned_plan(whole: Path, model: Path, recipe: Path, tmp_path: Path) -> None:
    """By the function that ``kvcal compare`` is given, at the study's workload."""
    tuned = load_plan(whole / "plan.safetensors")
    plan = build_plan(load(str(model)), Folder.create(tmp_path), load_recipe(str(recipe)), tuned.workload)
    assert plan.provenance.pop("calibration").keys() == {"tune"}  # an artifact's inputs, which the command has not
    assert plan_bytes(plan) == plan_bytes(tuned)


def test_a_baseline_is_all_that_its_recipe_says_or_refused(model: Path) -> None:
    loaded = load(str(model))
    for name in ("mixkvq", "kvmix"):
        with pytest.raises(UsageError, match=f"'{name}' in evaluate.against needs stages of its own"):
            baseline_plan(load_recipe(name), loaded, Workload(1, 256))
        with pytest.raises(UsageError, match=f"same_bytes_as = '{name}' is no recipe of \\[formats\\] alone, its"):
            resolve_budget(AllocateSpec(same_bytes_as=name), bare_layers(loaded.geometry), "bfloat16", 0, 0)
    assert baseline_plan(load_recipe("kitty"), loaded, Workload(1, 256)).provenance["recipe"] == "kitty"


@pytest.mark.parametrize("name", ["mixkvq", "mixkvq-capped"])
def test_the_paper_s_recipe(name: str) -> None:
    """The paper's: K per channel g 32, tiers 16 / 4 over 2 by I S, V per token 2 bits g 32, R = a page."""
    formats = load_recipe(name).formats
    assert formats is not None
    boost = formats.k.boost
    assert boost is not None and boost.score == "query_range"
    assert [(tier.num_bits, tier.above is not None) for tier in boost.tiers] == [(16, True), (4, True)]
    assert (formats.k.num_bits, formats.k.axis, formats.k.group_size) == (2, "channel", 32)
    assert (formats.v.num_bits, formats.v.axis, formats.v.group_size) == (2, "token", 32)
    assert {fmt.num_sink_tokens + fmt.max_window for fmt in (formats.k, formats.v)} == {0}
