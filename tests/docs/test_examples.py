"""Every example runs as its docstring says, on the embedded model."""

import json
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_cases import ran_well

from kvcal import load_plan
from kvcal.data.tasks import problems

ROOT = Path(__file__).parents[2]
EXAMPLES = {"generate", "budget", "own_data", "gpu_graph"}


@pytest.fixture
def run_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs an example in this process, which has imported torch already; returns its stdout."""

    def run(name: str, *arguments: object) -> str:
        path = str(ROOT / "examples" / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [path, *map(str, arguments)])
        with warnings.catch_warnings(action="default"):
            runpy.run_path(path, run_name="__main__")
        return capsys.readouterr().out

    return run


def test_every_example_is_tested_here() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == EXAMPLES


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_an_examples_docstring_says_how_to_run_it(name: str) -> None:
    text = (ROOT / "examples" / f"{name}.py").read_text()
    assert f"    python examples/{name}.py\n" in text
    for option in set(re.findall(r"(?<!\w)--[a-z-]+", text.split('"""')[1])):
        assert f'"{option}"' in text, f"{name}: {option} is in its docstring alone"


def test_budget_writes_a_plan_and_generate_runs_one(run_example: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "plan.safetensors"
    out = run_example("budget", "--kv-budget", "36MB", "--out", path)
    plan = load_plan(path)
    assert plan.predicted_bytes <= 36_000_000
    assert len({layer.k[0].num_bits for layer in plan.layers}) > 1
    for layer in plan.layers:
        expected = f"layer {layer.geometry.index}: K {layer.k[0].num_bits} bits, V {layer.v[0].num_bits} bits"
        assert expected in out
    out = run_example("generate")
    assert "Answer: 49926" in out and 314 * 159 == 49926
    assert "as the plan predicts" in out


def test_own_data_profiles_every_layer_of_a_jsonl(
    run_example: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that it runs is run in this process."""

    def run(command: list[str], stdout: int, text: bool) -> subprocess.CompletedProcess[str]:
        assert command[:3] == [sys.executable, "-m", "kvcal"] and (stdout, text) == (subprocess.PIPE, True)
        done = ran_well(*command[3:])
        return subprocess.CompletedProcess(command, done.code, done.out)

    monkeypatch.setattr(subprocess, "run", run)
    path = tmp_path / "mine.jsonl"
    lines = [json.dumps({"body": p.text}) for p in problems("chain", 60, seed=3)]
    path.write_text("\n".join(lines) + "\n")
    out = run_example("own_data", "--data", path, "--columns", "body", "--samples", 2, "--seq-len", 300)
    assert out.startswith("sensitivity to 2 bits on mine.jsonl\n")
    assert [f"layer {index}: " in out for index in range(10)] == [True] * 10


def test_gpu_graph_ends_well_without_a_gpu(run_example: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_example("gpu_graph") == "no GPU here: this example needs one\n"


@pytest.mark.gpu
def test_gpu_graph_multiplies_by_replays(run_example: Callable[..., str]) -> None:
    out = run_example("gpu_graph")
    assert "row 9: 9x4+0=36" in out
    assert "ms a step" in out
