"""Budgets that ``kvcal plan`` cannot take as they are: too small for any plan, or so large that none is
needed; and the context that it plans for unless told."""

import json
import shlex
from pathlib import Path

import pytest
from cli_cases import ran_well, run_kvcal

from kvcal.folder import Folder, Job
from kvcal.models.load import load
from kvcal.plan.plan import load_plan
from kvcal.progress import SILENT
from kvcal.recipe_files import load_recipe
from kvcal.stages.fit_budget import closest_recipe
from kvcal.stages.profile import stage as profile_stage

SIZES = ("--batch", 2, "--context", 1024)


@pytest.mark.parametrize("budget", [("--bits=1.5",), ("--kv-budget", "1KB")])
def test_a_budget_that_is_too_small_is_answered_with_the_command_that_works(
    budget: tuple[str, ...], made: Path, tmp_path: Path
) -> None:
    line = ("plan", made / "model", *budget, "--recipe", made / "small.toml", "--out", tmp_path / "out", *SIZES)
    refused = run_kvcal(*line)
    assert refused.code == 3 and "codes " in refused.err and "open pages " in refused.err and not refused.out
    hint = " ".join(refused.err.split()).partition("hint: ")[2]
    assert hint.endswith("a longer --context or a larger --batch takes fewer bits") == ("bits" in budget[0])
    error = json.loads(run_kvcal(*line, "--json").err.splitlines()[-1])["error"]
    assert sum(error["parts"].values()) == error["smallest_bytes"] and error["least_bits"] > 1.5
    words = shlex.split(hint.partition(" makes the smallest plan, and so does --closest")[0])
    assert words[0] == "kvcal" and budget[-1].partition("=")[2] not in words[1:3]
    done = ran_well(*words[1:], "--json", "-o", tmp_path / "least.safetensors")
    assert done.json["verdict"] == "made"
    closest = ran_well(*line, "--closest", "--json", "-o", tmp_path / "closest.safetensors")
    assert closest.json["verdict"] == "closest" and closest.json["folder"] == done.json["folder"]
    assert "warning: a budget of" in closest.err and "makes the closest plan" in closest.err
    assert load_plan(tmp_path / "closest.safetensors") == load_plan(tmp_path / "least.safetensors")
    assert load_plan(tmp_path / "least.safetensors").predicted_bytes == error["smallest_bytes"]


def test_three_bits_of_four_short_texts_make_a_plan(tmp_path: Path) -> None:
    """Sinks and windows take a sixth of the budget."""
    knobs = {"basis.num_samples": 2, "basis.seq_len": 512, "data.num_samples": 2, "profile.kl_samples": 1}
    sets = [f"--set={name}={value}" for name, value in (knobs | {"profile.kl_tokens": 320}).items()]
    line = ("plan", "reasoner-10m", "--bits", 3, "--batch", 4, "--context", 4096, "--out", tmp_path, *sets, "--json")
    value = ran_well(*line).json
    plan = load_plan(value["plan"])
    assert value["verdict"] == "made" and 2.5 < plan.bits_per_value() <= 3
    assert (plan.workload.batch, plan.workload.context) == (4, 4096)


def test_a_budget_that_fits_is_not_changed_by_closest(made: Path) -> None:
    recipe = load_recipe(str(made / "small.toml"))
    job = Job(recipe, load(str(made / "model")), Folder(Path()), SILENT)
    assert closest_recipe(job) is recipe
    refused = run_kvcal("plan", made / "model", "--bits", 9, "--recipe", "best", "--closest")
    assert refused.code == 2 and "--closest with [search]" in refused.err


@pytest.mark.parametrize("budget", [("--bits", 16), ("--budget", "1GB"), ("--kv-budget", "1MB")])
def test_16_bits_that_fit_need_no_plan(
    budget: tuple[object, ...], made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_stage, "run_profile", lambda *_, **__: pytest.fail("measured"))
    monkeypatch.chdir(tmp_path)
    done = ran_well("plan", made / "model", *budget, *SIZES, "-o", tmp_path / "plan.safetensors", "--json")
    value, cache = done.json, 2 * 1024 * 2 * 2 * 2 * 16 * 2  # batch, tokens, layers, sides, heads, channels, bytes
    assert value["verdict"] == "16-bit-fits" and value["plan"] is None and not list(tmp_path.iterdir())
    assert (value["needed_bytes"] == cache) == (budget[0] != "--budget")
    assert value["budget_bytes"] == {"--bits": cache, "--budget": 10**9, "--kv-budget": 10**6}[str(budget[0])]
    assert "16 bits fit: " in done.err and "nothing was written" in done.err
    if budget[0] == "--bits":
        with pytest.raises(pytest.fail.Exception, match="measured"):
            run_kvcal("plan", made / "model", "--bits", 15.9, *SIZES, "--recipe", made / "small.toml")


def test_the_context_is_the_models_own_unless_it_is_given(made: Path) -> None:
    """Of a recipe of the user's, the recipe's."""
    line = ("plan", made / "model", "--bits", 16, "--json", "--batch", 1)
    told = {}
    for name, more in {
        "own": (), "given": ("--context", 512), "set": ("--set", "allocate.context=512"),
        "recipe": ("--recipe", made / "small.toml"),
    }.items():  # fmt: skip
        done = ran_well(*line, *more)
        told[name] = done.json["needed_bytes"] // (2 * 2 * 2 * 16 * 2), "the model's own maximum" in done.err
    assert told == {"own": (1024, True), "given": (512, False), "set": (512, False), "recipe": (512, False)}
