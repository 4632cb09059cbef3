"""Data on the command line: spelled alike, used where the command says, and told when they are toys or shared."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
from cli_cases import RECIPE, Outcome, run_kvcal, save_llama
from transformers import PreTrainedTokenizerBase

from kvcal.commands import compare, evaluate, fit_predictors, profile, reparam, run, search, tune
from kvcal.commands.options import DataOptions, with_data
from kvcal.data.sequences import DataSpec
from kvcal.errors import UsageError
from kvcal.plan.plan import load_plan
from kvcal.recipe import Recipe
from kvcal.recipe_files import load_recipe

TOY = "embedded toy tasks"
CALIBRATING = {
    "run": run.run, "search": search.search, "compare": compare.compare, "tune": tune.tune,
    "profile": profile.profile, "reparam": reparam.reparam, "fit-predictors": fit_predictors.fit_predictors,
}  # fmt: skip
NAMES = ("data", "columns", "split", "config", "samples", "seq_len", "seed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A tiny model, a small recipe, a file of pairs, and the same pairs under other names."""
    folder = tmp_path_factory.mktemp("data")
    save_llama(folder / "tiny", tokenizer)
    (folder / "small.toml").write_text(RECIPE)
    pairs = [(f"What follows {i}?", " ".join(str(i + n) for n in range(60))) for i in range(200)]
    for name, keys in (("pairs.jsonl", ("question", "answer")), ("renamed.jsonl", ("q", "a"))):
        (folder / name).write_text("".join(json.dumps(dict(zip(keys, pair, strict=True))) + "\n" for pair in pairs))
    return folder


@pytest.fixture(scope="module")
def done(folder: Path) -> Outcome:
    """`kvcal run` on the file, once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        return run_here(patch, folder, "run", folder / "small.toml", "--data", folder / "pairs.jsonl", "--task", "none")


def run_here(patch: pytest.MonkeyPatch, folder: Path, *arguments: object) -> Outcome:
    """As run_kvcal, in a fixture of the module."""
    from kvcal import console

    said: list[str] = []
    patch.setattr(console.TerminalReporter, "say", lambda self, message: said.append(message))
    patch.setattr(
        "sys.argv", ["kvcal", *map(str, arguments), "--model", str(folder / "tiny"), "--out", str(folder / "out")]
    )
    from kvcal import cli

    with pytest.raises(SystemExit) as end:
        cli.main()
    return Outcome(int(end.value.code or 0), "", "\n".join(said))


def test_options_are_spelled_alike() -> None:
    annotations = {name: inspect.signature(command).parameters for name, command in CALIBRATING.items()}
    annotations["eval"] = inspect.signature(evaluate.eval_command).parameters
    for option in NAMES:
        assert len({parameters[option].annotation for parameters in annotations.values()}) == 1
    for option in ("task", "problems"):
        assert len({annotations[name][option].annotation for name in ("run", "compare", "eval")}) == 1
    for name in CALIBRATING:
        assert inspect.signature(CALIBRATING[name]).parameters["data"].default is None


def test_options_change_what_was_given_and_nothing_else() -> None:
    base = load_recipe("default")
    assert with_data(base, DataOptions()) == base
    given = DataOptions("a.jsonl", "q, a", samples=3, seq_len=64, seed=7)
    changed = with_data(base, given)
    assert changed.data == DataSpec("a.jsonl", 3, 64, 7, ("q", "a"))
    evaluate = base.evaluate.data
    assert changed.evaluate.data == DataSpec("a.jsonl", evaluate.num_samples, 64, evaluate.seed, ("q", "a"))
    assert with_data(base, DataOptions("a.jsonl")).evaluate.data.min_len == 0 < evaluate.min_len
    assert with_data(base, DataOptions(seq_len=64)).evaluate.data.min_len == 64
    assert with_data(base, given, "b.txt").evaluate.data.source == "b.txt"
    hub = with_data(base, DataOptions("owner/name", split="test", config="en"))
    assert (hub.data.split, hub.data.config) == (hub.evaluate.data.split, hub.evaluate.data.config) == ("test", "en")
    assert with_data(hub, DataOptions("a.txt")).data.split is None  # another source has its own


def test_run_calibrates_and_evaluates_on_the_file(folder: Path, done: Outcome) -> None:
    assert done.code == 0, done.err
    assert "profile: pairs.jsonl (pool fit): 2 sequences" in done.err and TOY not in done.err
    plan = load_plan(folder / "out" / "plan.safetensors")
    record = plan.provenance["calibration"]["profile"]
    assert (record["purpose"], record["source"], len(record["sequences"])) == ("fit", "pairs.jsonl", 2)
    stored = json.loads((folder / "out" / "evaluation.json").read_text())["body"]
    assert stored["data"].startswith("pairs.jsonl (pool report)")
    assert "evaluate: the plan was calibrated on pairs.jsonl, too (profile); no text is in both samples" in done.err


def test_eval_says_that_the_plan_saw_the_source(
    folder: Path, done: Outcome, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shown = ("eval", folder / "out" / "plan.safetensors", "--model", folder / "tiny", "--recipe", folder / "small.toml")
    shown += ("--task", "none", "--out", tmp_path)
    again = run_kvcal(capsys, *shown, "--data", folder / "pairs.jsonl")
    assert again.code == 0 and "calibrated on pairs.jsonl, too" in again.err
    other = run_kvcal(capsys, *shown, "--data", folder / "renamed.jsonl", "--columns", "q,a", "--samples", 3)
    assert other.code == 0 and "calibrated on" not in other.err and "3 sequences" in other.out


@pytest.mark.parametrize(
    ("arguments", "stage"),
    [(("search", "best"), "kvcal.run.pipeline.build_plan"), (("tune", "mixkvq"), "kvcal.run.tune.tune_plan")],
)
def test_search_and_tune_get_the_given_data(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    arguments: tuple[str, ...], stage: str,
) -> None:  # fmt: skip
    given: list[Recipe] = []

    def stop(*values: object) -> None:
        given.extend(value for value in values if isinstance(value, Recipe))
        raise UsageError("seen")

    monkeypatch.setattr(stage, stop)
    common = ("--model", folder / "tiny", "--out", tmp_path, "--seed", 5)
    told = run_kvcal(capsys, *arguments, *common, "--data", folder / "pairs.jsonl", "--samples", 3, "--seq-len", 200)
    assert told.code == 2 and "seen" in told.err and TOY not in told.err
    assert given[0].data == DataSpec(str(folder / "pairs.jsonl"), 3, 200, 5)
    assert TOY in run_kvcal(capsys, *arguments, *common).err


def test_compare_measures_on_the_file(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ("compare", "uniform-4", "--model", folder / "tiny", "--recipe-evaluate", folder / "small.toml")
    arguments += ("--batch", 2, "--context", 256, "--out", tmp_path, "--task", "none")
    shown = run_kvcal(capsys, *arguments, "--data", folder / "renamed.jsonl", "--columns", "q,a")
    assert shown.code == 0 and "renamed.jsonl (pool report): 2 sequences" in shown.out and TOY not in shown.err
    assert "bits at 2 x 256" in shown.out and "bits at measured length (mean " in shown.out


def test_a_plan_is_not_measured_on_its_own_sequences(
    folder: Path, done: Outcome, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Records that are equal up to the cut lie in every pool: only the digests can tell."""
    records = [json.dumps({"question": "again?", "answer": "and again " * 300 + str(i)}) for i in range(80)]
    (tmp_path / "same.jsonl").write_text("\n".join(records))
    arguments = ("run", folder / "small.toml", "--model", folder / "tiny", "--out", tmp_path / "out", "--task", "none")
    found = run_kvcal(capsys, *arguments, "--data", tmp_path / "same.jsonl", "--seq-len", 224)
    assert found.code == 2 and "2 of 2 sequences of same.jsonl" in found.err, found.err
    assert "pool fit of same.jsonl" in found.err and "raise seq_len" in found.err


def test_toy_data_are_told(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ("profile", folder / "tiny", "--recipe", folder / "small.toml", "--out")
    toy = run_kvcal(capsys, *arguments, tmp_path / "toy")
    assert toy.code == 0 and f"note: tiny is calibrated on the {TOY}" in toy.err and "--data" in toy.err
    own = run_kvcal(capsys, *arguments, tmp_path / "own", "--data", folder / "renamed.jsonl", "--columns", "q,a")
    assert own.code == 0 and TOY not in own.err and "renamed.jsonl" in own.out


def test_a_recipe_without_calibration_has_nothing_to_tell(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ("run", "kivi-2", "--model", folder / "tiny", "--out", tmp_path / "out", "--task", "none")
    told = run_kvcal(capsys, *arguments, "--eval-data", folder / "pairs.jsonl")
    assert told.code == 0 and TOY not in told.err and "pairs.jsonl (pool report): 16 sequences" in told.out


def test_an_unknown_task_is_a_usage_error(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    told = run_kvcal(
        capsys, "run", folder / "small.toml", "--model", folder / "tiny", "--task", "sums", "--out", tmp_path
    )
    assert told.code == 2 and "sums" in told.err and "ledger" in told.err
