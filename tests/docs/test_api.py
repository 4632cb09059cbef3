"""docs/api.md runs as it is written, and names what the package exports; the commands call the same functions."""

import ast
import inspect
import re
from pathlib import Path
from typing import get_type_hints

import pytest

import kvcal
from kvcal.plan.plan import Plan
from kvcal.stages.allocate.record import Allocation
from kvcal.stages.profile.record import Profile

ROOT = Path(__file__).parents[2]
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
    sizes = [kvcal.load_plan(folder / f"{bits}bits" / "plan.safetensors").bits_per_value() for bits in (2.5, 4)]
    assert sizes[0] <= 2.5 < sizes[1] <= 4 and names["plan"].bits_per_value() <= 3
    assert not (folder / "2.5bits" / "profile.safetensors").exists()  # one profile for all


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
    assert {getattr(kvcal, name).__name__ for name in RETURNS} <= called
