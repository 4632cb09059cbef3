"""The kvcal compare command, with the pipeline itself, on a tiny random model."""

import re
from pathlib import Path

import pytest
from cli_cases import Outcome, ran_well, run_kvcal, save_llama
from compare_cases import BASELINE_NAMES, by_name, write_recipes
from transformers import PreTrainedTokenizerBase

from kvcal.plan.plan import Workload
from kvcal.stages.compare import load_comparison
from kvcal.strict import dump

Finished = tuple[Path, list[object], Outcome]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Finished:
    """Two recipes compared at three budgets, one too small: folder, arguments and outcome."""
    folder = tmp_path_factory.mktemp("compare")
    small_recipes = write_recipes(folder)
    model = save_llama(folder / "tiny-llama", tokenizer)
    arguments: list[object] = ["compare", *small_recipes, "--model", model, "--recipe", small_recipes[0]]
    arguments += ["--batch", 2, "--context", 4096, "--out", folder / "out"]
    done = run_kvcal(*arguments, "--bits", 5, "--bits", 1, "--bits", 4, "--json")
    return folder / "out", arguments, done


def test_command_measures_every_recipe(finished: Finished) -> None:
    out, _, done = finished
    assert done.code == 0, done.err
    stored = load_comparison(out / "compare.json")
    assert done.json == dump(stored)
    assert {path.name for path in out.iterdir()} == {"compare.json", "evaluation.json", "plans", "report.html"}
    entries = by_name(stored)
    assert list(entries) == [*BASELINE_NAMES, "small @ 1", "small @ 4", "small @ 5", "fixed"]
    refusal = entries["small @ 1"].refusal
    assert refusal is not None and refusal.exit_code == 3 and "too small" in refusal.message
    assert len(stored.measured) == 6
    for entry, row in stored.measured:
        assert entry.bits is None or entry.bits - 1 < row.bits_per_value <= entry.bits
        assert row.workload == Workload(2, 4096) and len(row.tasks) == 1
    plans = out / "plans" / "small"
    assert {path.name for path in plans.iterdir()} == {"profile.safetensors", "1", "4", "5"}  # one profile for all
    assert done.err.count("profile: profile.safetensors is current") == 1


def test_second_command_prints_the_table(finished: Finished) -> None:
    out, arguments, _ = finished
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    listing = {path: path.stat().st_mtime_ns for path in [out, *out.rglob("*")]}
    done = ran_well(*arguments, "--bits", 5, "--bits", 1, "--bits", 4)
    assert done.err.count("is measured already") == 6
    assert "profile: profile.safetensors is current" in done.err
    for words in ("plan", "small @ 5", "small @ 1 is refused: ", "too small"):
        assert words in done.out
    assert re.search(r"^(fixed|small @ [45]): .*'?s? KL.* bytes$", done.out, re.M)
    [winner] = re.findall(r"^next: kvcal generate .* --plan (\S+)", done.err, re.M)
    assert Path(winner).is_file()
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert listing == {path: path.stat().st_mtime_ns for path in [out, *out.rglob("*")]}  # nor is anything written


def test_the_tasks_and_their_limit_are_those_of_the_command_line(finished: Finished, tmp_path: Path) -> None:
    """And where nothing but baselines is measured, the command ends with the recipe's error."""
    _, arguments, _ = finished
    given = [argument for argument in arguments[:-2] if not str(argument).endswith("fixed.toml")]
    done = run_kvcal(*given, "--bits", 1, "--tasks", "times,chain", "--limit", 2, "--out", tmp_path)
    assert done.code == 3 and "too small" in done.out and "kivi-2" in done.out
    for _, row in load_comparison(tmp_path / "compare.json").measured:
        assert [(task.task, task.num_problems) for task in row.tasks] == [("times", 2), ("chain", 2)]
