"""Ranks: torchrun starts them, and the artifacts do not tell how many there were."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import tune_cases
from cli_cases import RECIPE, ran_well, run_kvcal, save_llama
from compare_cases import write_recipes
from kvcal_server import installed
from transformers import PreTrainedTokenizerBase

from kvcal import artifact, distributed
from kvcal.distributed import Parcel
from kvcal.errors import InfeasibleBudget, KvcalError, RankFailed, UsageError
from kvcal.stages.checkpoint import MAX_SHARDS, Mean, shards, summed

ROOT = Path(__file__).parents[2]
STAGES = """
[reparam]
num_samples = 5
seq_len = 256
num_steps = 2
[predictors]
drop = false
[feedback]
num_samples = 5
seq_len = 1000
[data]
source = "tasks:ledger"
num_samples = 5
seq_len = 1000
min_len = 800
"""


# A search of two systems and a few options, for plans that hold no more than a page.
SEARCH = """
[data]
source = "tasks:times"
num_samples = 4
seq_len = 300
[cache]
num_sink_tokens = 2
k_recent_window = 0
v_recent_window = 0
[allocate]
bits = 4.0
batch = 4
context = 20000
[search]
serve = "storage"
systems = ["kitty"]
keys = [{ num_bits = 2 }, { num_bits = 4 }]
values = [{ num_bits = 2, group_size = 32 }, { num_bits = 4 }]
kl_samples = 2
kl_tokens = 300
refine_rounds = 1
"""


def torchrun(num_ranks: int, *command: object) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return subprocess.run(
        [*launch, *map(str, command)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        timeout=600,
    )


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> tuple[Path, Path]:
    """A model and a recipe with all stages that measure."""
    folder = tmp_path_factory.mktemp("given")
    data = RECIPE.index("[data]"), RECIPE.index("[profile]")
    recipe = RECIPE[: data[0]] + RECIPE[data[1] :] + STAGES
    for old, new in (
        ('["channel"]', '["token"]'),
        ("kl_samples = 1", "kl_samples = 5"),
        ("kl_tokens = 256", "kl_tokens = 900"),
    ):
        assert old in recipe
        recipe = recipe.replace(old, new)
    (folder / "ranked.toml").write_text(recipe)
    return save_llama(folder / "model", tokenizer), folder / "ranked.toml"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, given: tuple[Path, Path]) -> Iterator[Path]:
    """The folder of one process; what runs in this one computes on one thread, too, as torchrun's ranks do."""
    folder, (model, recipe) = tmp_path_factory.mktemp("alone"), given
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ran_well("run", recipe, "--model", model, "--out", folder, "--device", "cpu")
    yield folder
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def kvcal() -> Iterator[Path]:
    """The program, for torchrun to start: it imports nothing."""
    with tempfile.TemporaryDirectory() as name, installed(Path(name)) as program:
        yield program


def digests(folder: Path) -> dict[str, str]:
    paths = sorted(folder.rglob("*.safetensors"))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def without_seconds(value: Any) -> Any:
    """JSON without the times that measurements took, and the digests that times are kept by."""
    if isinstance(value, dict):
        return {key: without_seconds(item) for key, item in value.items() if "seconds" not in key}
    return [without_seconds(item) for item in value] if isinstance(value, list) else value


def rows(folder: Path) -> Any:
    """All that was measured."""
    return without_seconds(json.loads((folder / "evaluation.json").read_text())["body"]["rows"])


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_artifacts_do_not_depend_on_the_number_of_ranks(
    num_ranks: int, given: tuple[Path, Path], alone: Path, kvcal: Path, tmp_path: Path
) -> None:
    """Five sequences, three batches of them, and three plans: ranks are not equally busy anywhere."""
    model, recipe = given
    arguments = ["run", recipe, "--model", model, "--out", tmp_path, "--json", "--device", "cpu"]
    done = torchrun(num_ranks, *(["-m", "kvcal"] if num_ranks == 2 else ["--no-python", kvcal]), *arguments)
    assert done.returncode == 0, done.stderr
    names = {"profile", "allocation", "reparam", "predictors", "feedback", "plan"}
    assert {name.removesuffix(".safetensors") for name in digests(alone)} == names
    assert digests(tmp_path) == digests(alone)
    assert rows(tmp_path) == rows(alone)
    assert json.loads(done.stdout)  # rank 0's alone
    assert done.stderr.count("evaluate: 16-bit (1 of 3)") == 1


@pytest.mark.gpu
def test_two_gpus_make_what_one_makes(given: tuple[Path, Path], tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than two GPUs")
    model, recipe = given
    for num_ranks in (1, 2):
        done = torchrun(num_ranks, "-m", "kvcal", "run", recipe, "--model", model, "--out", tmp_path / str(num_ranks))
        assert done.returncode == 0, done.stderr
    assert digests(tmp_path / "2") == digests(tmp_path / "1") and digests(tmp_path / "1")
    assert rows(tmp_path / "2") == rows(tmp_path / "1")


@pytest.mark.parametrize("command", ["plan", "search", "tune", "compare"])
def test_plans_and_trials_do_not_depend_on_the_number_of_ranks(
    command: str, given: tuple[Path, Path], alone: Path, kvcal: Path, tmp_path: Path
) -> None:
    """Here with one process and with two."""
    (tmp_path / "search.toml").write_text(SEARCH)
    (tmp_path / "tune.toml").write_text(tune_cases.RECIPE)
    arguments: list[object] = [command, tmp_path / f"{command}.toml"]
    if command == "compare":
        small, fixed = write_recipes(tmp_path)
        arguments = [command, small, fixed, "--recipe", small, "--bits", 5, "--bits", 1, "--batch", 2, "--context", 512]
    if command == "plan":
        arguments = [command, given[0], "--recipe", given[1], "--bits", 10, "--name", "small"]
    if command == "tune":
        arguments += ["--workers", 2]
    arguments += [] if command == "plan" else ["--model", given[0]]
    arguments += ["--device", "cpu", "--json", "--out"]
    done = ran_well(*arguments, tmp_path / "one")
    both = torchrun(2, "--no-python", kvcal, *arguments, tmp_path / "two")
    assert both.returncode == 0, both.stderr
    assert digests(tmp_path / "two") == digests(tmp_path / "one") and digests(tmp_path / "one")
    printed = both.stdout.replace(str(tmp_path / "two"), str(tmp_path / "one"))
    assert without_seconds(json.loads(printed)) == without_seconds(done.json)


@pytest.mark.parametrize(
    ("how", "message", "code"),
    [
        ("item", "error: sample 3: keys of layer 1 hold NaN or infinity", 4),
        ("alone", "error: weights.safetensors: Input/output error", 5),
        ("killed", None, -9),
    ],
)
def test_a_rank_that_fails_ends_all_and_the_run_resumes(
    how: str,
    message: str | None,
    code: int,
    given: tuple[Path, Path],
    alone: Path,
    kvcal: Path,
    tmp_path: Path,
) -> None:
    model, recipe = given
    for name in ("profile", "allocation"):
        shutil.copy(alone / f"{name}.safetensors", tmp_path)
    arguments = ["reparam", tmp_path, "--model", model, "--recipe", recipe, "--device", "cpu"]
    # What is forked is not what torchrun started: it can be killed in a process of its own alone.
    program = [] if how == "killed" else ["--no-python", kvcal]
    failed = torchrun(2, *program, ROOT / "tests/support/failing_ranks.py", how, *arguments)
    assert failed.returncode != 0
    assert len(re.findall("^error: ", failed.stderr, re.M)) == 1
    assert message is None or message in failed.stderr
    root_cause = failed.stderr.partition("Root Cause")[2]
    assert re.search(rf"exitcode  : {code} ", root_cause), failed.stderr
    partial = artifact.read(tmp_path / "reparam.partial.safetensors", "reparam-partial", 1)
    assert partial.body["done"]["statistics samples"] in (2, 3)  # of the round that failed, what comes before
    resumed = ran_well(*arguments)  # by one process
    assert "reparam.partial.safetensors: goes on after" in resumed.err
    assert digests(tmp_path)["reparam.safetensors"] == digests(alone)["reparam.safetensors"]


def test_what_ranks_tell_each_other(kvcal: Path, tmp_path: Path) -> None:
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "batches").mkdir()
    artifact.write(tmp_path / "artifacts/old.safetensors", artifact.Artifact("kind", 1, {}, {}, {}))
    done = torchrun(3, "--no-python", kvcal, ROOT / "tests/support/rank_checks.py", tmp_path)
    assert done.returncode == 0, done.stderr
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    squares = [[[item, item % 3], {"square": item**2}] for item in range(5)]
    for rank, report in enumerate(reports):
        assert report["files"] == ["made.safetensors", "old.safetensors"]
        assert report["is_changed"] == (rank > 0) and report["made"] == reports[0]["made"]
        assert report["environment"] == [] and report["all"] == squares
        assert report["first"] == (squares if rank == 0 else [[value, {}] for value, _ in squares])
        assert report["one"] == [[[7, 0], {"square": 49}]]
        assert report["nested"] == [[[[item, owner] for item in range(owner)], {}] for owner in range(3)]
        assert report["failing"] == ["InfeasibleBudget", "item 3", "a hint", "a place"]
        kind, message, *_ = report["elsewhere"]
        assert kind == "UsageError" and f"rank {rank} is at place {min(rank, 1)}, 0 of 6" in message
        most, total, count, steps, widths = report["batches"]
        assert (most, count, steps) == (16, 12, 12) and total == pytest.approx(288)
        # Rank 1 has no memory for the second four; the third four, measured beside them, are measured again.
        assert widths == [[[4], [2], [2]], [[2]], [[4], [2]]][rank]
        # Of four sequences each measures three together.
        assert report["together"] == [8, reports[0]["together"][1], 12, 12, [[1, 1, 1], [1]]]
        assert report["together"][1] == pytest.approx(288)
    assert not list(tmp_path.glob("**/*.partial*"))


def test_a_command_for_one_process_refuses_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused = run_kvcal("recipes")
    assert refused.code == 2 and "torchrun has started 2" in refused.err
    monkeypatch.setenv("WORLD_SIZE", "two")
    refused = run_kvcal("recipes")
    assert refused.code == 2 and "WORLD_SIZE = 'two'" in refused.err


def test_one_process_measures_items_as_they_are_asked_for() -> None:
    seen: list[int] = []

    def measure(item: int) -> Parcel:
        seen.append(item)
        return Parcel(item)

    found = distributed.in_turn("items", range(3), measure)
    assert next(found).value == 0 and seen == [0]
    assert [parcel.value for parcel in found] == [1, 2]
    assert distributed.from_first("one", lambda: Parcel("x")).value == "x"
    assert distributed.own_folder(Path("a")) == Path("a") and not distributed.same_file(Path("a"))


def test_a_parcel_comes_out_as_it_went_in() -> None:
    shared = torch.arange(6, dtype=torch.float64).reshape(2, 3)
    tensors = {
        "": torch.tensor(0.1, dtype=torch.float64),
        "a": shared,
        "turned": shared.T,
        "bits": torch.tensor([True, False]),
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "none": torch.empty(0, 3),
    }
    found = distributed._from_bytes(distributed._to_bytes(tensors))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    assert distributed._from_bytes(distributed._to_bytes({})) == {}


@pytest.mark.parametrize("kind", sorted(distributed.ERRORS))
def test_an_error_of_an_item_reaches_all_ranks_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"message": "m", "hint": "h"} | ({"smallest_bytes": 7} if kind == "InfeasibleBudget" else {})
    error = distributed.ERRORS[kind](**given).at("a place")

    def measure(_: object) -> Parcel:
        raise error

    if kind == "RankFailed":  # the end of all, not of an item
        with pytest.raises(RankFailed):
            distributed._outcome(measure, None)
        return
    outcome = distributed._outcome(measure, None)
    monkeypatch.setattr(distributed, "_broadcast", lambda data, owner: data)
    with pytest.raises(type(error)) as caught:
        distributed._sent(outcome, 0, True)
    assert vars(caught.value) == vars(error) and caught.value.exit_code == error.exit_code
    assert not isinstance(error, InfeasibleBudget) or caught.value.smallest_bytes == 7


def test_all_errors_of_the_package_are_known() -> None:
    def kinds(kind: type[KvcalError]) -> set[str]:
        return {kind.__name__}.union(*map(kinds, kind.__subclasses__()))

    # A benchmark is not dealt out: it alone raises Interrupted.
    assert kinds(KvcalError) - {"KvcalError", "Interrupted"} == distributed.ERRORS.keys() - {"Interrupted"}


@pytest.mark.parametrize("count", [0, 1, 5, MAX_SHARDS, MAX_SHARDS + 1, 300, 512])
def test_shards_are_all_items_in_order(count: int) -> None:
    runs = shards(count)
    assert [number for run in runs for number in run] == list(range(count))
    assert len(runs) <= MAX_SHARDS and len({len(run) for run in runs[:-1]}) <= 1
    assert count > MAX_SHARDS or all(len(run) == 1 for run in runs)


def test_a_run_sums_up_its_items_in_order() -> None:
    means = summed(lambda number: {"all": Mean(torch.tensor(0.1 * number), 1), f"{number % 2}": Mean.empty(())})
    found = means(range(2, 6))
    assert found["all"].count == 4 and float(found["all"].total) == float(
        sum(torch.tensor(0.1 * n) for n in range(2, 6))
    )
    assert found.keys() == {"all", "0", "1"}


def test_a_rank_takes_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert distributed.device("auto") == "auto"
    ranks = distributed._Ranks(rank=3, size=4, local=1, on_node=2, store=None, stack=ExitStack())
    monkeypatch.setattr(distributed, "_ranks", ranks)
    assert distributed.device("cpu") == "cpu"
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert distributed.device("auto") == distributed.device("cuda") == "cuda:1" and chosen == [1, 1]
    with pytest.raises(UsageError, match="a GPU of its own"):
        distributed.device("cuda:0")
    monkeypatch.setattr(distributed, "_ranks", replace(ranks, local=2))
    with pytest.raises(UsageError, match="which has 2 GPUs"):
        distributed.device("auto")


def test_the_artifacts_of_a_folder_are_copied_and_nothing_else(alone: Path, tmp_path: Path) -> None:
    for name in ("plan.safetensors", "evaluation.json"):
        shutil.copy(alone / name, tmp_path)
        (tmp_path / "plans/a").mkdir(parents=True, exist_ok=True)
        shutil.copy(alone / name, tmp_path / "plans/a")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "picture.png").write_bytes(b"")
    found = [str(path) for path in distributed._kept(tmp_path, ())]
    assert found == ["evaluation.json", "plan.safetensors"]
    found = [str(path) for path in distributed._kept(tmp_path, ("plans/*",))]
    assert found == ["evaluation.json", "plan.safetensors", "plans/a/evaluation.json", "plans/a/plan.safetensors"]
