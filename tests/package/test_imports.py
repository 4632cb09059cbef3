"""Imports point one way, and running a plan needs none of the heavy libraries that making one needs."""

import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "kvcal"
# Files of systems that lie lower than their stages, by what they are.
OF_SYSTEMS = {
    name: {f"systems.{path.parent.name}.{path.stem}" for path in PACKAGE.glob(f"systems/*/{name}.py")}
    for name in ("layout", "transform", "recipe")
}
PAGES_OF_SYSTEMS = {
    "systems.basis.basis", "systems.basis.rotated", "systems.kitty.boost", "systems.kitty.tiered",
    "systems.kitty.scores", "systems.pm_kvq.shrink", "systems.aqua_kv.lattice", "systems.aqua_kv.predictor",
    "systems.kvmix.window_rule",
}  # fmt: skip
# A module may import its own level and those before it. Names are files or folders directly under kvcal/.
LEVELS = (
    {"errors", "quantities", "progress", "embedded", "lazy_torch"},
    {"strict", "stored_tensor", "artifact", "records", "distributed"},
    {"geometry"},
    {"data", "pages", "models", *PAGES_OF_SYSTEMS},
    {"plan.plain_format"},
    {"plan", *OF_SYSTEMS["layout"], *OF_SYSTEMS["transform"]},
    {"pages.codec"},
    {"recipe", "recipe_files", "folder", *OF_SYSTEMS["recipe"]},  # a recipe may fix a plan's formats
    {"kernels"},
    {"store"},
    {"cache"},
    {"stages", "systems", "engines"},
    {"commands", "console", "tables", "__main__", "report", "card"},
)
RUNTIME = (
    "errors", "lazy_torch", "strict", "stored_tensor", "geometry", "artifact", "records", "pages",
    "models.attention", "plan", "kernels", "store", "cache", "engines.support", "engines.shard",
    "engines.step", "engines.prefill",
)  # fmt: skip
TOO_HEAVY_FOR_THE_RUNTIME = {"cvxpy", "datasets", "highspy", "matplotlib", "optuna", "rich", "typer"}


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path) -> set[str]:
    """All that a module imports, anywhere in it; ``from a import b`` counts as a.b where that is a module."""
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: relative import"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names.update(name if name in MODULES else node.module for name in full)
    return names


MODULES = modules()
RUNTIME_MODULES = [name for name in MODULES if any(f"{name}.".startswith(f"kvcal.{room}.") for room in RUNTIME)]
GRAPH = {name: {i for i in imports(path) if i in MODULES} - {name} for name, path in MODULES.items()}


def level(module: str) -> int:
    """The place of a module's longest name in LEVELS."""
    parts = module.split(".")[1:]
    if parts == ["systems"]:  # the package alone, which finds them
        parts = ["records"]
    for end in range(len(parts), 0, -1):
        for i, names in enumerate(LEVELS):
            if ".".join(parts[:end]) in names:
                return i
    raise AssertionError(f"{module} has no level: give {parts[0]!r} a place in LEVELS")


@pytest.mark.parametrize("module", [name for name in MODULES if name != "kvcal"])
def test_a_module_imports_only_its_own_level_or_lower(module: str) -> None:
    wrong = [name for name in GRAPH[module] if name == "kvcal" or level(name) > level(module)]
    assert not wrong, f"{module} imports upwards: {wrong}"


def names_of(path: Path) -> set[str]:
    """Names that a module defines or lists in ``__all__``."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            found |= set(ast.literal_eval(node.value))
    return found


def test_names_are_imported_from_their_home() -> None:
    """Or from a module that lists them in ``__all__``."""
    homes = {name: names_of(path) for name, path in MODULES.items()}
    root = PACKAGE.parent
    for path in (
        path for folder in ("kvcal", "tests", "lab", "examples", "docs") for path in root.glob(f"{folder}/**/*.py")
    ):
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.module in homes:
                wrong = [
                    one.name
                    for one in node.names
                    if f"{node.module}.{one.name}" not in MODULES and one.name not in homes[node.module]
                ]
                assert not wrong, f"{path.relative_to(root)}:{node.lineno}: {wrong} from {node.module}"


def test_no_import_cycle() -> None:
    """Peel off the modules whose imports have all been peeled off; what never comes off is a cycle."""
    remaining = dict(GRAPH)
    while ready := [name for name, needs in remaining.items() if not (needs & remaining.keys())]:
        for name in ready:
            del remaining[name]
    assert not remaining, f"cycle among: {sorted(remaining)}"


@pytest.mark.parametrize("module", [name for name in GRAPH if "kvcal.lazy_torch" in GRAPH[name]])
def test_a_class_that_is_for_annotations_alone_is_not_used(module: str) -> None:
    """``lazy_torch.Tensor`` is no class at run time: it has neither methods nor instances."""
    for node in nodes(MODULES[module]):
        asked: list[ast.expr] = [node.value] if isinstance(node, ast.Attribute) else []
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"isinstance", "issubclass", "map", "partial"}:
            asked = node.args
        names = {name.id for one in asked for name in ast.walk(one) if isinstance(name, ast.Name)}
        assert "Tensor" not in names, f"{module}:{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("module", RUNTIME_MODULES)
def test_the_runtime_names_no_heavy_library(module: str) -> None:
    named = {name.split(".")[0] for name in imports(MODULES[module])}
    assert not named & TOO_HEAVY_FOR_THE_RUNTIME


def test_nothing_is_read_that_could_run_code() -> None:
    """No module unpickles or evaluates what a file holds; ``safetensors.torch.load`` reads plain bytes."""
    for name, path in MODULES.items():
        text = path.read_text().replace("from pickle import UnpicklingError\n", "")
        assert not re.search(r"^\s*(import|from) (cloudpickle|dill|joblib|marshal|pickle|shelve|yaml)\b", text, re.M), (
            name
        )
        calls = [node.func for node in nodes(path) if isinstance(node, ast.Call)]
        called = {ast.unparse(function) for function in calls}
        assert not called & {"eval", "exec", "torch.load", "numpy.load", "np.load", "pandas.read_pickle"}, name


def test_importing_the_runtime_loads_no_heavy_library() -> None:
    """In a fresh process, all runtime modules at once; what transformers itself loads where it is installed
    is its own affair."""
    code = "import importlib, sys\nfor n in sys.argv[1:]: importlib.import_module(n)\nprint(*sys.modules)"
    code = "import sys, transformers.cache_utils, safetensors.torch\nbefore = set(sys.modules)\n" + code
    code = code.replace("*sys.modules", "*set(sys.modules) - before")
    run = subprocess.run(
        [sys.executable, "-c", code, "kvcal", "kvcal.data.sequences", *RUNTIME_MODULES],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    loaded = set(run.stdout.split())
    assert "kvcal.cache.plan_cache" in loaded and not loaded & TOO_HEAVY_FOR_THE_RUNTIME
    assert not loaded & {"kvcal.stages", "kvcal.stages.pipeline", "kvcal.__main__", "kvcal.models.load"}
