"""Ranks: torchrun starts them; they make the plan of one process, within rounding."""

import json
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import tune_cases
from cli_cases import RECIPE, ran_well, run_kvcal, save_llama
from compare_cases import write_recipes
from kvcal_server import installed
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from kvcal import distributed, load_plan
from kvcal.errors import InfeasibleBudget, KvcalError, UsageError
from kvcal.stages.checkpoint import MAX_SHARDS, Mean, shards, summed
from kvcal.stages.evaluate.stage import load_evaluation

ROOT = Path(__file__).parents[2]
STAGES = """
[reparam]
num_samples = 5
seq_len = 200
num_steps = 2
[predictors]
drop = false
[feedback]
num_samples = 5
seq_len = 700
[data]
source = "tasks:ledger"
num_samples = 5
seq_len = 700
min_len = 550
"""
# A search of three systems, of which one is profiled, in plans that hold no more than a page.
SEARCH = """
data = { source = "tasks:times", num_samples = 4, seq_len = 300 }
cache = { num_sink_tokens = 2, k_recent_window = 0, v_recent_window = 0 }
allocate = { bits = 6.0, batch = 4, context = 20000 }
search = { systems = ["kitty", "kivi-2", "kvmix"], kl_samples = 5, kl_tokens = 300 }
"""


def torchrun(num_ranks: int, *command: object, program: Path | None = None) -> subprocess.CompletedProcess[str]:
    """``program`` with the arguments ``command`` on each rank; without one, of a Python of its own."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    launch += ["-m", "kvcal"] if program is None else ["--no-python", str(program)]
    return subprocess.run(
        [*launch, *map(str, command)], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        timeout=600,
    )  # fmt: skip


def ranks(count: int, program: Path, *command: object) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each rank, started as by torchrun, whose imports take seconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    common |= {"LOCAL_WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    arguments = [str(program), *map(str, command)]
    started = [
        subprocess.Popen(
            arguments, env=common | {"RANK": str(number), "LOCAL_RANK": str(number)}, cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for number in range(count)
    ]  # fmt: skip
    with ThreadPoolExecutor(count) as pool:
        told = list(pool.map(lambda process: process.communicate(timeout=600), started))
    return [(process.returncode, *texts) for process, texts in zip(started, told, strict=True)]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> tuple[Path, Path]:
    """A model and a recipe with all stages that measure."""
    folder = tmp_path_factory.mktemp("given")
    data = RECIPE.index("[data]"), RECIPE.index("[profile]")
    recipe = RECIPE[: data[0]] + RECIPE[data[1] :] + STAGES
    for old, new in (
        ('["channel"]', '["token"]'),
        ("kl_samples = 1", "kl_samples = 5"),
        ("kl_tokens = 256", "kl_tokens = 500"),
    ):
        assert old in recipe
        recipe = recipe.replace(old, new)
    (folder / "ranked.toml").write_text(recipe)
    return save_llama(folder / "model", tokenizer), folder / "ranked.toml"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, given: tuple[Path, Path]) -> Iterator[Path]:
    """The folder of one process, which computes on one thread, as torchrun's ranks do."""
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


def require_alike(found: Path, expected: Path) -> None:
    """The same choices, and statistics within the rounding of sums."""
    assert load_plan(found / "plan.safetensors").layers == load_plan(expected / "plan.safetensors").layers
    for path in expected.glob("*.safetensors"):
        ours, theirs = load_file(found / path.name), load_file(path)
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            torch.testing.assert_close(ours[key], tensor, rtol=1e-5, atol=1e-9)


def test_two_ranks_make_the_plan_of_one_process(
    given: tuple[Path, Path], alone: Path, kvcal: Path, tmp_path: Path
) -> None:
    """Five sequences, three batches of them, and three plans: ranks are not equally busy anywhere."""
    model, recipe = given
    done = torchrun(2, "run", recipe, "--model", model, "--out", tmp_path, "--json", "--device", "cpu", program=kvcal)
    assert done.returncode == 0, done.stderr
    names = {"profile", "allocation", "reparam", "predictors", "feedback", "plan"}
    assert {path.stem for path in alone.glob("*.safetensors")} == names
    require_alike(tmp_path, alone)
    found, expected = (load_evaluation(folder / "evaluation.json").rows for folder in (tmp_path, alone))
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.name, ours.total_bytes) == (theirs.name, theirs.total_bytes)
        assert ours.text.kl == pytest.approx(theirs.text.kl, rel=1e-3, abs=1e-6)
    assert json.loads(done.stdout)  # rank 0's alone
    assert done.stderr.count("evaluate: 16-bit (1 of 3)") == 1


@pytest.mark.gpu
def test_two_gpus_make_what_one_makes(given: tuple[Path, Path], tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than two GPUs")
    model, recipe = given
    for num_ranks in (1, 2):
        done = torchrun(num_ranks, "run", recipe, "--model", model, "--out", tmp_path / str(num_ranks))
        assert done.returncode == 0, done.stderr
    require_alike(tmp_path / "2", tmp_path / "1")


@pytest.mark.parametrize("command", ["plan", "search", "tune", "compare"])
def test_every_command_that_measures_runs_on_two_ranks(
    command: str, given: tuple[Path, Path], kvcal: Path, tmp_path: Path
) -> None:
    small, _ = write_recipes(tmp_path)
    (tmp_path / "search.toml").write_text(SEARCH)
    (tmp_path / "tune.toml").write_text(tune_cases.RECIPE)
    arguments: list[object] = [command, tmp_path / f"{command}.toml", "--model", given[0]]
    if command == "compare":
        arguments[1:2] = [small, "--recipe", small, "--bits", 12, "--bits", 1, "--batch", 2, "--context", 512]
    if command == "plan":
        arguments = [command, given[0], "--recipe", small, "--bits", 12]
    arguments += ["--device", "cpu", "--json", "--out", tmp_path / "out"]
    (code, out, err), other = ranks(2, kvcal, *arguments)
    assert (code, other[0]) == (0, 0), (err, other[2])
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.safetensors")}
    again = ran_well(*arguments)  # by one process: nothing is left to do
    assert json.loads(out).keys() == again.json.keys() and not other[1]
    assert written == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.safetensors")} != {}


@pytest.mark.parametrize(
    ("how", "message", "codes"),
    [
        ("item", "error: sample 3: keys of layer 1 hold NaN or infinity", (4, 4)),
        ("alone", "error: weights.safetensors: Input/output error", (8, 5)),
    ],
)
def test_a_rank_that_fails_ends_all_and_the_run_resumes(
    how: str, message: str, codes: tuple[int, int], given: tuple[Path, Path], alone: Path, kvcal: Path, tmp_path: Path
) -> None:
    """A rank that is killed breaks its connections as one that fails alone."""
    model, recipe = given
    for name in ("profile", "allocation"):
        shutil.copy(alone / f"{name}.safetensors", tmp_path)
    arguments = ["transform", tmp_path, "--model", model, "--recipe", recipe, "--device", "cpu"]
    failed = ranks(2, kvcal, ROOT / "tests/support/failing_ranks.py", how, *arguments)
    told = "".join(err for _, _, err in failed)
    assert tuple(code for code, _, _ in failed) == codes and message in told, told
    assert len(re.findall("^error: ", told, re.M)) == 1
    resumed = ran_well(*arguments)  # by one process
    assert "reparam: runs again" not in resumed.err
    found, expected = (load_file(folder / "reparam.safetensors") for folder in (tmp_path, alone))
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-5, atol=1e-9)


def test_what_ranks_tell_each_other(kvcal: Path, tmp_path: Path) -> None:
    (tmp_path / "batches").mkdir()
    for code, _, err in ranks(3, kvcal, ROOT / "tests/support/rank_checks.py", tmp_path):
        assert code == 0, err
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    for rank, report in enumerate(reports):
        assert report["environment"] == []
        assert report["all"] == [[item, item % 3, item**2] for item in range(5)]
        assert report["one"] == [7, 0, 49] and report["gathered"] == [0, 1, 2]
        assert report["nested"] == [[[item, owner, item**2] for item in range(owner)] for owner in range(3)]
        assert report["failing"] == ["InfeasibleBudget", "item 3", "a hint", "a place", 7]
        assert report["elsewhere"][:2] == ["UsageError", "the ranks differ in a number"]
        most, total, count, steps, widths = report["batches"]
        assert (most, count, steps) == (16, 12, 12) and total == pytest.approx(288)
        # Rank 1 has no memory for the second four; the third four, measured at the same time, are measured
        # again.
        assert widths == [[[4], [2], [2]], [[2]], [[4], [2]]][rank]
        # Of four sequences each measures three together.
        assert report["together"] == [8, reports[0]["together"][1], 12, 12, [[1, 1, 1], [1]]]
        assert report["together"][1] == pytest.approx(288)
    assert (tmp_path / "written").read_text() == "by rank 0"
    assert not list(tmp_path.glob("**/*.partial*"))


def test_a_command_for_one_process_refuses_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused = run_kvcal("list", "recipes")
    assert refused.code == 2 and "torchrun has started 2" in refused.err
    monkeypatch.setenv("WORLD_SIZE", "two")
    refused = run_kvcal("list", "recipes")
    assert refused.code == 2 and "WORLD_SIZE = 'two'" in refused.err


def test_one_process_measures_items_as_they_are_asked_for() -> None:
    seen: list[int] = []

    def measure(item: int) -> int:
        seen.append(item)
        return item

    found = distributed.map_over_ranks(range(3), measure)
    assert next(found) == 0 and seen == [0]
    assert list(found) == [1, 2]
    assert distributed.from_first(lambda: "x") == "x" and distributed.gather("y") == ["y"]


@pytest.mark.parametrize("kind", sorted(KvcalError.__subclasses__(), key=lambda kind: kind.__name__))
def test_an_error_of_an_item_reaches_all_ranks_whole(kind: type[KvcalError]) -> None:
    given = {"message": "m", "hint": "h"} | ({"smallest_bytes": 7} if kind is InfeasibleBudget else {})
    error = kind(**given).at("a place")
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is kind and vars(found) == vars(error) and str(found) == str(error)


def test_shards_are_all_items_in_order() -> None:
    for count in (0, 1, 5, MAX_SHARDS, MAX_SHARDS + 1, 300, 512):
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
    ranks = distributed._Ranks(rank=3, size=4, local=1, on_node=2, store=None)
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
