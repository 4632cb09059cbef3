"""Data on the command line: spelled alike, used where the command says, and told when they are toys or
shared."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cli_cases import RECIPE, Outcome, ran_well, run_kvcal, save_llama
from transformers import PreTrainedTokenizerBase

from kvcal.__main__ import PANELS
from kvcal.commands.options import BudgetOptions, RecipeOptions, users_evaluation
from kvcal.data.sequences import DataSpec
from kvcal.errors import UsageError
from kvcal.plan.plan import load_plan
from kvcal.recipe import ProfileSpec, Recipe
from kvcal.recipe_files import load_recipe, recipe_names, with_knobs
from kvcal.strict import dump
from kvcal.systems.pm_kvq.recipe import ReparamSpec

TOY, NOTE = "embedded toy tasks", "calibrated on installed packages' text"
COMMANDS = {name: command for panel in PANELS.values() for name, command in panel.items()}
NO_TASKS = ("--set", "evaluate.tasks=[]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A tiny model, a small recipe, a file of pairs, and the same pairs under other names."""
    folder = tmp_path_factory.mktemp("data")
    save_llama(folder / "tiny", tokenizer)
    (folder / "small.toml").write_text(RECIPE)
    pairs = [(f"What follows {i}?", " ".join(str(60 * i + n) for n in range(60))) for i in range(200)]
    for name, keys in (("pairs.jsonl", ("question", "answer")), ("renamed.jsonl", ("q", "a"))):
        (folder / name).write_text("".join(json.dumps(dict(zip(keys, pair, strict=True))) + "\n" for pair in pairs))
    return folder


@pytest.fixture(scope="module")
def done(folder: Path) -> Outcome:
    """`kvcal run` on the file, once for all tests."""
    given = ("--model", folder / "tiny", "--out", folder / "out", "--data", folder / "pairs.jsonl")
    return ran_well("run", folder / "small.toml", *given, *NO_TASKS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    assert "Example" in ran_well(command, "--help").out


def test_options_change_what_was_given_and_nothing_else() -> None:
    base = load_recipe("sensitivity")
    assert RecipeOptions().change(base) == base
    given = RecipeOptions(data=["a.jsonl,columns=q+a"], samples=3, seq_len=64, sets=["data.seed=7"])
    changed = given.change(base)
    assert changed.data == DataSpec("a.jsonl,columns=q+a", 3, 64, 7)
    evaluate = base.evaluate.data
    assert changed.evaluate.data == DataSpec("a.jsonl,columns=q+a", evaluate.num_samples, 64, evaluate.seed)
    assert RecipeOptions(data=["a.jsonl"]).change(base).evaluate.data.min_len == 0 < evaluate.min_len
    assert RecipeOptions(seq_len=64).change(base).evaluate.data.min_len == 64
    basis = load_recipe("default")  # whose Hessians have 2,048 tokens
    assert RecipeOptions(seq_len=1500).change(basis).basis.seq_len == 1500
    assert RecipeOptions(seq_len=1500, sets=["basis.seq_len=1800"]).change(basis).basis.seq_len == 1800
    assert replace(given, sets=["evaluate.data.source=b.txt"]).change(base).evaluate.data.source == "b.txt"


def test_data_may_be_given_several_times() -> None:
    base = load_recipe("sensitivity")
    both = ["python:code", "a.jsonl,columns=q"]
    changed = RecipeOptions(data=both).change(base)
    assert changed.data.source == changed.evaluate.data.source == tuple(both)
    assert with_knobs(base, {"data.source": both}).data.sources == changed.data.sources  # as a recipe has it
    set_ = RecipeOptions(sets=[f"data.source={json.dumps(both)}"]).change(base)
    assert set_.data.sources == changed.data.sources and set_.evaluate.data == base.evaluate.data


def test_profile_on_several_sources(folder: Path, tmp_path: Path) -> None:
    arguments = ("profile", folder / "tiny", "--recipe", folder / "small.toml", "--out", tmp_path, "--samples", 4)
    arguments += ("--data", folder / "pairs.jsonl", "--data", "tasks")
    done = ran_well(*arguments, "--data", "python:code")
    assert "profile: pairs.jsonl 2, tasks 1, python:code 1 (pool fit): 4 sequences" in done.err and TOY not in done.err
    again = ran_well(*arguments, "--data", "python:code")
    assert "profile: profile.safetensors is current, skipped" in again.err


def test_a_model_of_the_users_is_calibrated_on_installed_text(folder: Path, tmp_path: Path) -> None:
    text = (folder / "small.toml").read_text().replace('source = "tasks"\n', "", 1)
    (tmp_path / "small.toml").write_text(text)
    told = ran_well("profile", folder / "tiny", "--recipe", tmp_path / "small.toml", "--out", tmp_path / "out")
    assert "profile: python:docs 1, python:code 1" in told.err and NOTE in told.err and TOY not in told.err


def test_recipes_of_kvcals_measure_a_model_of_the_users_on_installed_text() -> None:
    """On the embedded model's ledgers and tasks no longer; --data and --set count more."""
    base, knobs = load_recipe("sensitivity"), users_evaluation("default", "folder")
    found = RecipeOptions().change(base, knobs).evaluate
    assert (found.data.source, found.data.min_len, found.tasks) == ("auto", 0, ())
    set_ = RecipeOptions(data=["a.txt"], sets=["evaluate.tasks=['ledger']"]).change(base, knobs).evaluate
    assert (set_.data.source, set_.tasks) == ("a.txt", ("ledger",))
    assert users_evaluation("default", "reasoner-10m") == users_evaluation("mine.toml", "folder") == {}


def test_any_knob_is_set_and_the_strict_recipe_decides() -> None:
    base = load_recipe("sensitivity")
    sets = ["allocate.bits=2.5", "evaluate.tasks=[]", "profile.k_axes=['token']", "reparam.num_steps=9", "model=a b"]
    changed = RecipeOptions(sets=sets).change(base)
    assert changed.allocate is not None and (changed.allocate.bits, changed.allocate.same_bytes_as) == (2.5, None)
    assert changed.evaluate == replace(base.evaluate, tasks=()) and changed.profile.k_axes == ("token",)
    assert changed.reparam == ReparamSpec(num_steps=9) and changed.model == "a b"
    rest = {"allocate", "evaluate", "profile", "reparam", "model"}
    assert {k: v for k, v in dump(changed).items() if k not in rest} == {
        k: v for k, v in dump(base).items() if k not in rest
    }
    restored = RecipeOptions(sets=["profile.k_axes=", "data.min_len="]).change(changed)
    assert restored.profile == ProfileSpec(num_bits=base.profile.num_bits) and restored.data.min_len == 0
    tiers = RecipeOptions(sets=["formats.k.boost.score=variance"]).change(load_recipe("kitty")).formats
    assert tiers is not None and tiers.k.boost is not None and tiers.k.boost.score == "variance"
    for name in recipe_names():
        recipe = load_recipe(name)
        assert with_knobs(recipe, {"data.seed": recipe.data.seed}) == recipe


def test_samples_bound_the_texts_of_all_stages_and_refusals_name_options() -> None:
    base = load_recipe("default")
    assert base.basis is not None and base.basis.num_samples == 16
    for samples, fitted in ((2, 2), (64, 16)):
        changed = RecipeOptions(samples=samples).change(base)
        assert changed.basis is not None and (changed.data.num_samples, changed.basis.num_samples) == (samples, fitted)
    with pytest.raises(UsageError, match="^--samples = 0: ") as caught:
        RecipeOptions(samples=0).change(base)
    assert "recipe" in str(caught.value.hint)
    with pytest.raises(UsageError, match="^--set data.num_samples: data.num_samples = 0: "):
        RecipeOptions(sets=["data.num_samples=0"]).change(base)
    with pytest.raises(UsageError, match="^--bits and --budget|^--budget and --bits"):
        BudgetOptions(bits=3.0, budget="1GB")


def test_run_calibrates_and_evaluates_on_the_file(folder: Path, done: Outcome) -> None:
    assert done.code == 0, done.err
    assert "profile: pairs.jsonl (pool fit): 2 sequences" in done.err and TOY not in done.err
    plan = load_plan(folder / "out" / "plan.safetensors")
    record = plan.provenance["calibration"]["profile"]
    assert (record["purpose"], record["source"], len(record["sequences"])) == ("fit", "pairs.jsonl", 2)
    stored = json.loads((folder / "out" / "evaluation.json").read_text())["body"]
    assert stored["data"].startswith("pairs.jsonl (pool report)")
    assert "evaluate: the plan was calibrated on pairs.jsonl, too (profile); no text is in both samples" in done.err


def test_eval_says_that_the_plan_saw_the_source(folder: Path, done: Outcome, tmp_path: Path) -> None:
    shown = ("eval", folder / "out" / "plan.safetensors", "--model", folder / "tiny", "--recipe", folder / "small.toml")
    shown += (*NO_TASKS, "--out", tmp_path)
    again = ran_well(*shown, "--data", folder / "pairs.jsonl")
    assert "calibrated on pairs.jsonl, too" in again.err
    other = ran_well(*shown, "--data", f"{folder / 'renamed.jsonl'},columns=q+a", "--samples", 3)
    assert "calibrated on" not in other.err and "3 sequences" in other.out


@pytest.mark.parametrize(
    ("arguments", "stage"),
    [(("search", "best"), "kvcal.stages.pipeline.build_plan"), (("tune", "mixkvq"), "kvcal.stages.formats.tune_plan")],
)
def test_search_and_tune_get_the_given_data(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    arguments: tuple[str, ...], stage: str,
) -> None:  # fmt: skip
    given: list[Recipe] = []

    def stop(*values: object, **_: object) -> None:
        given.extend(value for value in values if isinstance(value, Recipe))
        raise UsageError("seen")

    monkeypatch.setattr(stage, stop)
    common = ("--model", folder / "tiny", "--out", tmp_path, "--set", "data.seed=5")
    told = run_kvcal(*arguments, *common, "--data", folder / "pairs.jsonl", "--samples", 3, "--seq-len", 200)
    assert told.code == 2 and "seen" in told.err and TOY not in told.err and NOTE not in told.err
    assert given[0].data == DataSpec(str(folder / "pairs.jsonl"), 3, 200, 5)
    assert NOTE in run_kvcal(*arguments, *common).err
    assert TOY in run_kvcal(*arguments, *common, "--data", "tasks").err


def test_a_plan_is_not_measured_on_its_own_sequences(folder: Path, done: Outcome, tmp_path: Path) -> None:
    """Records that are equal up to the cut lie in every pool: only the digests can tell."""
    records = [json.dumps({"question": "again?", "answer": "and again " * 300 + str(i)}) for i in range(80)]
    (tmp_path / "same.jsonl").write_text("\n".join(records))
    arguments = ("run", folder / "small.toml", "--model", folder / "tiny", "--out", tmp_path / "out", *NO_TASKS)
    found = run_kvcal(*arguments, "--data", tmp_path / "same.jsonl", "--seq-len", 224)
    assert found.code == 2 and "2 of 2 sequences of same.jsonl" in found.err, found.err
    assert "pool fit of same.jsonl" in found.err and "raise seq_len" in found.err


def test_toy_data_are_told(folder: Path, tmp_path: Path) -> None:
    arguments = ("profile", folder / "tiny", "--recipe", folder / "small.toml", "--out")
    toy = ran_well(*arguments, tmp_path / "toy")
    assert f"note: tiny is calibrated on the {TOY}" in toy.err and "--data" in toy.err


def test_a_file_that_is_no_json_is_one_line_of_json(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\nb\n')
    given = ("--data", tmp_path / "broken.jsonl", "--seq-len", 64, "--out", tmp_path / "out")
    done = run_kvcal("profile", folder / "tiny", *given, "--json", "--quiet")
    error = json.loads(done.err)["error"]
    assert done.code == error["exit_code"] == 2 and "broken.jsonl cannot be read as json" in error["message"]
