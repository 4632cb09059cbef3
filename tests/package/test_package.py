"""The installed package: the wheel carries the model, the recipes and the command; the lock fits the ranges."""

import itertools
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from evaluation_cases import make_plan
from form_cases import form_plan
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kvcal
from kvcal import artifact, load_plan
from kvcal.commands.decorators import COMPILE_PACKAGES
from kvcal.models.load import load
from kvcal.plan.plan import plan_record, save_plan

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
    recipes = {f"kvcal/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "recipes").rglob("*.toml")}
    assert "kvcal/recipes/default.toml" in recipes
    assert package | model | recipes | {"kvcal/py.typed", "kvcal/report.html", "kvcal/card.md"} <= set(wheel.namelist())


def test_the_wheel_carries_nothing_else_and_names_the_command(wheel: zipfile.ZipFile) -> None:
    information = f"kvcal-{PROJECT['version']}.dist-info"
    assert {name.split("/")[0] for name in wheel.namelist()} == {"kvcal", information}
    assert not [name for name in wheel.namelist() if "__pycache__" in name]
    assert b"kvcal = kvcal.__main__:main" in wheel.read(f"{information}/entry_points.txt")


def test_the_lock_pins_every_requirement_inside_its_range() -> None:
    locks = [(ROOT / name).read_text().splitlines() for name in ("requirements.lock", "docs/requirements.txt")]
    lines = [line for lock in locks for line in lock if line[:1] != "#"]
    pins = {}
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.]+", line), line
        name, version = line.split("==")
        pins[canonicalize_name(name)] = version
    for text in itertools.chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()):
        requirement = Requirement(text)
        if requirement.name == "kvcal":  # an extra of other extras
            assert requirement.extras <= PROJECT["optional-dependencies"].keys()
            continue
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), text


# Runs the command with these packages missing, then prints the modules that it has loaded.
CODE = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
MISSING = sys.argv[1].split(",")
sys.meta_path.insert(0, Missing())
sys.argv = ["kvcal", *sys.argv[2:]]
from kvcal.__main__ import main
try:
    main()
finally:
    print(*sys.modules)
"""


def without(missing: str, *command: object) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, without some packages."""
    return subprocess.run(
        [sys.executable, "-c", CODE, missing, *map(str, command)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip


def test_a_missing_extra_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    done = without("cvxpy,optuna", "run", "default", "--out", tmp_path / "out")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "needs packages that are not installed: cvxpy, optuna" in done.stderr
    assert "pip install 'kvcal[compile]'" in done.stderr and not (tmp_path / "out").exists()


def test_the_packages_of_the_extra_are_those_that_commands_look_for() -> None:
    names = {Requirement(text).name for text in PROJECT["optional-dependencies"]["compile"]}
    assert names == set(COMPILE_PACKAGES)
    assert {Requirement(text).name for text in PROJECT["dependencies"]} == {
        "numpy", "pydantic", "rich", "safetensors", "torch", "transformers", "typer",
    }  # fmt: skip


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.safetensors"
    save_plan(make_plan(load("reasoner-10m", device="cpu")), path)
    return path


@pytest.mark.parametrize("command", [("--help",), ("run", "--help")], ids=" ".join)
def test_help_and_the_version_load_no_heavy_library(command: tuple[str, ...]) -> None:
    done = without("torch,transformers,numpy,safetensors", *command)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "kvcal.__main__" in loaded and not {"torch", "numpy", "kvcal.strict"} & loaded


@pytest.mark.parametrize("tensors", ["int4, lattice", "one source of two layers, λ"])
def test_a_plan_is_read_with_neither_torch_nor_what_compiles_plans(tensors: str, tmp_path: Path) -> None:
    """Tensors included: their values are checked, their bytes are counted."""
    plan = tmp_path / "plan.safetensors"
    save_plan(form_plan(tensors), plan)
    done = without(",".join(("torch", "transformers", *COMPILE_PACKAGES)), "inspect", plan, "--json")
    assert done.returncode == 0, done.stderr
    *printed, loaded = done.stdout.splitlines()
    assert "kvcal.plan.plan" in loaded.split() and not {"kvcal.models.load", "kvcal.stages"} & set(loaded.split())
    assert json.loads("\n".join(printed))["bytes"] == load_plan(plan).predicted_bytes


def test_a_plan_with_a_wrong_tensor_is_refused_without_torch(tmp_path: Path) -> None:
    built = form_plan("one source of two layers, λ")
    wrong = {name: tensor * (-1 if name.endswith("rescale") else 1) for name, tensor in built.tensors.items()}
    content = artifact.Artifact("kv-quantization-plan", 3, {}, plan_record(built), wrong)
    artifact.write(tmp_path / "plan.safetensors", content)
    done = without("torch,transformers", "inspect", tmp_path / "plan.safetensors")
    assert done.returncode == 5 and "layers.0.k_rescale' holds values from -" in done.stderr


def test_a_plan_runs_without_what_compiles_plans(plan: Path) -> None:
    missing = ",".join(set(COMPILE_PACKAGES) - {"huggingface_hub", "jinja2"})  # which transformers and torch bring
    given = ("--plan", plan, "--prompt", "Times. 12 x 34", "--max-new-tokens", 2, "--model", "reasoner-10m")
    done = without(missing, "generate", *given, "--device", "cpu")
    assert done.returncode == 0, done.stderr


def test_importing_kvcal_and_its_plans_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, kvcal, kvcal.plan.plan\nfrom kvcal import Plan, load_plan, save_plan\nprint(*sys.modules)"
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    assert not {"torch", "transformers"} & set(done.stdout.split())


def test_a_test_module_is_imported_only_within_its_folder() -> None:
    """Else the tests of one folder would not run by themselves: what folders share is in tests/support."""
    tests = ROOT / "tests"
    folder_of = {path.stem: path.parent for path in tests.rglob("test_*.py")}
    for path in tests.rglob("*.py"):
        for name in re.findall(r"^\s*(?:from|import) (test_\w+)", path.read_text(), re.MULTILINE):
            assert folder_of.get(name) == path.parent, f"{path.relative_to(ROOT)} imports {name}"


def test_dir_shows_the_names_of_the_package() -> None:
    names = [name for name in dir(kvcal) if not name.startswith("_")]
    assert names == sorted(kvcal.__all__) and {"PlanCache", "load_plan", "build_plan", "attached"} <= set(names)
    assert all(getattr(kvcal, name) is not None for name in names)
