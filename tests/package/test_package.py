"""What is installed: the wheel carries the model, the recipes and the command; the lock fits the ranges."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return zipfile.ZipFile(next(folder.glob("kvcal-*.whl")))


def test_the_wheel_carries_the_package_the_model_and_the_recipes(wheel: zipfile.ZipFile) -> None:
    package = {f"kvcal/{p.relative_to(ROOT / 'kvcal').as_posix()}" for p in (ROOT / "kvcal").rglob("*.py")}
    model = {
        f"kvcal/embedded/reasoner-10m/{name}"
        for name in ("config.json", "model.safetensors", "tokenizer.json", "README.md")
    }
    recipes = {f"kvcal/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.toml")}
    assert recipes
    assert package | model | recipes <= set(wheel.namelist())


def test_the_wheel_carries_nothing_else_and_names_the_command(wheel: zipfile.ZipFile) -> None:
    information = f"kvcal-{PROJECT['version']}.dist-info"
    assert {name.split("/")[0] for name in wheel.namelist()} == {"kvcal", information}
    assert not [name for name in wheel.namelist() if "__pycache__" in name]
    assert b"kvcal = kvcal.cli:main" in wheel.read(f"{information}/entry_points.txt")


def test_the_lock_pins_every_requirement_inside_its_range() -> None:
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if line[:1] != "#"]
    pins = {}
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.]+", line), line
        name, version = line.split("==")
        pins[canonicalize_name(name)] = version
    for text in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), text
