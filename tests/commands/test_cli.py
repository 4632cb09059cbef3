"""The command line from a model to numbers, as a user would type it, on a tiny random model."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from cli_cases import RECIPE, ran_well, run_kvcal, save_family, save_llama
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

Run = tuple[Path, Path, Path]  # the model's folder, the recipe, the artifacts' folder of a finished run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Run:
    folder = tmp_path_factory.mktemp("cli")
    model = save_llama(folder / "tiny-llama", tokenizer)
    recipe = folder / "small.toml"
    recipe.write_text(RECIPE)
    (folder / "run.json").write_text(ran_well("run", recipe, "--model", model, "--out", folder / "out", "--json").out)
    return model, recipe, folder / "out"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_run_makes_every_artifact(finished: Run) -> None:
    names = {path.name for path in finished[2].iterdir()}
    assert names == {
        "profile.safetensors", "allocation.safetensors", "plan.damage.json", "plan.safetensors", "evaluation.json",
        "report.html",
    }  # fmt: skip
    result = json.loads((finished[2].parent / "run.json").read_text())
    rows = {row["name"]: row for row in result["evaluation"]["rows"]}
    assert rows["small"]["total_bytes"] <= rows["kivi-2"]["total_bytes"] < rows["16-bit"]["total_bytes"]
    assert rows["16-bit"]["text"]["kl"] < 1e-3
    assert result["allocation"]["split"]["budget"] == rows["kivi-2"]["total_bytes"]


def test_a_second_run_skips_and_writes_nothing(finished: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    model, recipe, out = finished
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))))
    again = ran_well("run", recipe, "--model", model, "--out", out)
    for stage in ("profile: profile.safetensors is current", "allocate: allocation.safetensors is current"):
        assert stage in again.err
    assert again.err.count("is measured already") == 3
    assert "kivi-2" in again.out and "16-bit" in again.out and "small" in again.out
    changed = run_kvcal("run", recipe, "--model", model, "--out", out, "--set", "evaluate.max_size=21")
    assert changed.code == 5 and "Read-only file system" in changed.err


SAME = """
import sys
from kvcal import Folder, build_plan, load_model, load_recipe
build_plan(load_model(sys.argv[1]), Folder.create(sys.argv[3]), load_recipe(sys.argv[2]))
"""


def test_same_recipe_same_bytes_in_another_process(finished: Run, tmp_path: Path) -> None:
    """With another seed of hashes."""
    model, recipe, out = finished
    command = [sys.executable, "-c", SAME, str(model), str(recipe), str(tmp_path)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], env={**os.environ, "PYTHONHASHSEED": "7"})
    for name in ("profile.safetensors", "plan.safetensors"):
        assert sha256(tmp_path / name) == sha256(out / name)


def test_changed_knob_is_named(finished: Run, tmp_path: Path) -> None:
    model, recipe, out = finished
    copy = shutil.copytree(out, tmp_path / "out")
    changed = tmp_path / "small.toml"
    changed.write_text(RECIPE.replace("context = 512", "context = 600"))
    again = ran_well("run", changed, "--model", model, "--out", copy)
    assert "allocate: runs again, allocate.context is 512, expected 600" in again.err
    assert "profile: profile.safetensors is current" in again.err


def test_allocate_whole_device(finished: Run, tmp_path: Path) -> None:
    copy = shutil.copytree(finished[2], tmp_path / "out")
    done = run_kvcal("allocate", copy, "--budget", "100MB", "--batch", 2, "--context", 512, "--json")
    split = done.json["split"]
    assert done.code == 0 and split["budget"] == 100_000_000
    parts = split["weights"] + split["workspace"] + split["fixed"] + split["paged"]
    assert parts <= split["budget"]
    tensors = load_file(finished[0] / "model.safetensors").values()
    buffers = 4 * 8 * 2  # the rotary frequencies and their originals, fp32, for half of 16 channels
    assert split["weights"] == sum(tensor.nbytes for tensor in tensors) + buffers
    table = run_kvcal("allocate", copy, "--budget", "100MB", "--batch", 2, "--context", 512).out
    assert "weights" in table and "workspace" in table and "left over" in table


def test_infeasible_budget_names_the_smallest(finished: Run, tmp_path: Path) -> None:
    copy = shutil.copytree(finished[2], tmp_path / "out")
    sizes = ("--batch", 2, "--context", 512)
    done = run_kvcal("allocate", copy, "--kv-budget", "20KB", *sizes, "--json")
    error = json.loads(done.err.splitlines()[-1])["error"]
    assert (done.code, error["kind"]) == (3, "InfeasibleBudget") and not done.out and "too small" in error["message"]
    smallest = int(error["message"].split(" bytes")[0].split("= ")[-1])
    assert error["smallest_bytes"] == smallest
    ran_well("allocate", copy, "--kv-budget", smallest, *sizes)
    assert run_kvcal("allocate", copy, "--kv-budget", smallest - 1, *sizes).code == 3
    done = run_kvcal("allocate", copy, "--bits", 2, *sizes)
    assert done.code == 3
    bits = float(done.err.split(" bits per cached value")[0].split(", ")[-1])
    ran_well("allocate", copy, "--bits", bits, *sizes)
    assert run_kvcal("allocate", copy, "--bits", bits - 0.01, *sizes).code == 3


def test_an_infeasible_budget_is_refused_before_anything_is_measured(finished: Run, tmp_path: Path) -> None:
    """With the allocate stage's own words; an engine's padding, too."""
    model, recipe, out = finished
    copy = shutil.copytree(out, tmp_path / "out")
    for options in (
        ["--kv-budget", "20KB"],
        ["--budget", "1MB"],
        ["--budget", "10KB"],
        ["--bits", "4", "--for-engine", "vllm", "--set", "cache.num_sink_tokens=0"],
    ):
        for command in (("plan", model, "--recipe", recipe), ("run", recipe, "--model", model)):
            early = run_kvcal(*command, "--out", tmp_path / "new", *options)
            assert early.code == 3 and not any((tmp_path / "new").iterdir())
        shutil.rmtree(copy)
        shutil.copytree(out, copy)
        if "cache" not in str(options):
            late = run_kvcal("allocate", copy, *options, "--batch", 2, "--context", 512)
            assert late.err.splitlines()[-2] == early.err.splitlines()[-2]
            assert sha256(copy / "allocation.safetensors") == sha256(out / "allocation.safetensors")
            assert "weights" in late.err or options[1] != "10KB"


def test_generate(finished: Run) -> None:
    model, _, out = finished
    arguments = ("--model", model, "--plan", out / "plan.safetensors", "--prompt", "Times. 12 x 34", "--json")
    greedy = [run_kvcal("generate", *arguments, "--max-new-tokens", 5) for _ in range(2)]
    assert greedy[0] == greedy[1] and json.loads(greedy[0].out)["new_tokens"] <= 5
    sampled = [run_kvcal("generate", *arguments, "--max-new-tokens", 20, "--temperature", 5, "--seed", s).out
               for s in (1, 1, 2)]  # fmt: skip
    assert sampled[0] == sampled[1] != sampled[2]


def test_a_family_with_sliding_layers_goes_through_the_same_commands(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    model = save_family(tmp_path / "gemma3", tokenizer, "gemma3")
    (tmp_path / "small.toml").write_text(RECIPE)
    out = tmp_path / "out"
    done = ran_well("run", tmp_path / "small.toml", "--model", model, "--out", out, "--json")
    rows = {row["name"]: row for row in done.json["evaluation"]["rows"]}
    assert rows["small"]["total_bytes"] <= rows["kivi-2"]["total_bytes"]
    assert rows["16-bit"]["text"]["kl"] < 1e-9 < rows["small"]["text"]["kl"]  # fp32 checkpoints: nothing is rounded
    ran_well("inspect", out / "plan.safetensors", "--model", model)
