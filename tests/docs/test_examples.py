"""Code that readers copy runs as it is written: every example, docs/api.md and docs/adding.md."""

import ast
import inspect
import json
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from cli_cases import ran_well

import kvcal
from kvcal import load_plan
from kvcal.data.tasks import problems
from kvcal.plan.page_format import Boost, Format, Tier
from kvcal.plan.plan import Plan
from kvcal.stages.allocate.record import Allocation
from kvcal.stages.profile.record import Profile
from kvcal.systems.kitty import scores

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
    assert len({layer.k.num_bits for layer in plan.layers}) > 1
    for layer in plan.layers:
        expected = f"layer {layer.geometry.index}: K {layer.k.num_bits} bits, V {layer.v.num_bits} bits"
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
    out = run_example("own_data", "--data", path, "--columns", "body", "--samples", 2, "--seq-len", 400)
    assert out.startswith("KL to 16 bits of 2 bits on mine.jsonl\n")
    assert [f"layer {index}: " in out for index in range(10)] == [True] * 10


def test_gpu_graph_ends_well_without_a_gpu(run_example: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_example("gpu_graph") == "no GPU here: this example needs one\n"


@pytest.mark.gpu
def test_gpu_graph_multiplies_by_replays(run_example: Callable[..., str]) -> None:
    out = run_example("gpu_graph")
    assert "row 9: 9x4+0=36" in out
    assert "ms a step" in out


PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
RETURNS = {"profile": Profile, "allocate": Allocation, "compile": Plan, "build_plan": Plan}


def test_the_page_runs_from_a_model_to_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in BLOCKS:
        exec(block, names)
    folder = tmp_path / "artifacts" / "api"
    plans = [kvcal.load_plan(place / "plan.safetensors") for place in (folder, tmp_path)]
    assert plans == [names["plan"]] * 2
    sizes = [kvcal.load_plan(folder / f"{bits}bits" / "plan.safetensors").bits_per_value() for bits in (3.25, 4)]
    assert sizes[0] <= 3.25 < sizes[1] <= 4 and names["plan"].bits_per_value() <= 3.5
    assert not (folder / "3.25bits" / "profile.safetensors").exists()  # one profile for all


def test_every_name_of_the_package_is_there_and_on_the_page() -> None:
    for name in kvcal.__all__:
        assert getattr(kvcal, name) is not None and re.search(rf"(`|\bkvcal\.){name}\b", PAGE), name
    with pytest.raises(AttributeError, match="module 'kvcal' has no attribute 'nonsense'"):
        kvcal.nonsense  # noqa: B018


@pytest.mark.parametrize("name", RETURNS)
def test_a_function_has_the_parameters_of_the_page_and_all_types(name: str) -> None:
    function = getattr(kvcal, name)
    signature = inspect.signature(function)
    assert f"| `{name}({', '.join(signature.parameters)})` |" in PAGE
    hints = get_type_hints(function)
    assert hints.keys() == {*signature.parameters, "return"} and hints["return"] is RETURNS[name]
    assert "Raises:" in function.__doc__


def test_the_commands_call_them() -> None:
    called = set()
    for path in (ROOT / "kvcal" / "commands").glob("*.py"):
        calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        called |= {ast.unparse(function).rpartition(".")[2] for function in calls}
    # `kvcal compile` measures a plan before it is written; what is written is the plan of ``compiled``, as in
    # compile.
    expected = {getattr(kvcal, name).__name__ for name in RETURNS} - {"compile_folder"} | {"compiled"}
    assert expected <= called


def test_a_new_score_chooses_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of docs/adding.md."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/adding.md").read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.setattr(scores, "SCORES", scores.SCORES)
    for name in ("peak", "query_peak"):
        monkeypatch.setitem(scores.SCORES, name, scores.SCORES["range"])  # undone when the test ends
    exec(code, vars(scores) | {})
    fmt = Format(2, "channel", boost=Boost("peak", (Tier(4, 0.125),)))
    assert fmt.label == "2 channel g128 +12.5%@4 peak" and not fmt.needs_queries
    assert Format(2, "channel", boost=Boost("query_peak", (Tier(4, 0.125),))).needs_queries
    keys = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
    keys[5, 3] = 40.0
    assert scores.channel_scores("peak", keys).argmax() == 3
