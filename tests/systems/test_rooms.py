"""A system is a folder: one that is put there is found, and without one all the rest works. Each in a copy of
the package."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_cases import save_llama
from transformers import PreTrainedTokenizerBase

ROOT = Path(__file__).parents[2]
TOY = ROOT / "tests" / "support" / "toy_system"
WITHOUT = """
import importlib, pkgutil, kvcal
for module in pkgutil.walk_packages(kvcal.__path__, "kvcal."):
    if not module.name.startswith(("kvcal.engines.vllm", "kvcal.engines.sglang")):
        importlib.import_module(module.name)
from kvcal.plan.page_format import Format
from kvcal.plan.layer import LayerPlan
from kvcal.recipe import Recipe
keys = [set(record.__dataclass_fields__) for record in (Format, LayerPlan, Recipe)]
assert not {"lattice_dim", "k_predictor", "predictors"} & set.union(*keys), keys
from typer.testing import CliRunner
from kvcal.__main__ import COMMANDS, app
for name in COMMANDS:
    shown = CliRunner().invoke(app, [name, "--help"])
    assert "Usage" in shown.output, (name, shown)
print(kvcal.__file__)
"""
# The toy's keys, from a recipe to a cache.
WITH = """
import sys, torch
from dataclasses import replace
from pathlib import Path
from kvcal import PlanCache, load_plan, save_plan
from kvcal.errors import UnsupportedModel, UsageError
from kvcal import load_model
from kvcal.plan.plan import Workload
from kvcal.recipe_files import load_recipe
from kvcal.stages.formats import formats_plan
recipe, folder = load_recipe(sys.argv[1]), Path(sys.argv[2])
assert recipe.sections["mirror"].times == 3
loaded = load_model("reasoner-10m", device="cpu")
plan = formats_plan(recipe, loaded, Workload(1, 512))
save_plan(plan, folder / "toy.safetensors")
assert load_plan(folder / "toy.safetensors").sha256 == plan.sha256
plain = replace(plan, layers=tuple(replace(x, k=replace(x.k, mirrored=False)) for x in plan.layers))
ids, pages, seen = torch.arange(300)[None] % 200, [], []
for one in (plan, plain):
    cache = PlanCache(one, loaded.model.config)
    seen.append(loaded.model(input_ids=ids, past_key_values=cache).logits)
    assert cache.nbytes == one.nbytes([300])
    pages.append(cache.layers[0].sides["k"].pool.records)
assert pages[0].shape == pages[1].shape and not torch.equal(*pages)
try:
    PlanCache(plan, loaded.model.config, max_tokens=512)
except UnsupportedModel as refused:
    assert "k pages in a mirror: no kernel reads them" in str(refused), refused
else:
    raise AssertionError("a static cache took pages that no kernel reads")
try:
    load_recipe(sys.argv[3])
except UsageError as refused:
    assert "[feedback] and [mirror]: a mirror has two sides" in str(refused), refused
else:
    raise AssertionError("sections that exclude each other were taken")
"""
# Of plans, pages and caches, without a word of the system that is taken away.
OTHERS = ("tests/plan/test_plan.py", "tests/systems/kitty/test_tiered_cache.py", "tests/systems/pm_kvq/test_shift.py")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package's code, whose embedded model is a link, and its recipes."""
    folder = tmp_path_factory.mktemp("tree")
    copied = shutil.copytree(ROOT / "kvcal", folder / "kvcal", ignore=shutil.ignore_patterns("embedded"))
    (copied / "embedded").symlink_to(ROOT / "kvcal" / "embedded")
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    return folder


def ran(tree: Path, *arguments: object) -> str:
    """Standard output of Python with this package."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_a_folder_adds_a_system(tree: Path) -> None:
    shutil.copytree(TOY, tree / "kvcal" / "systems" / "toy", ignore=shutil.ignore_patterns("__pycache__"))
    formats = "[formats]\nk = { num_bits = 4, mirrored = true }\nv = { num_bits = 4 }\n[mirror]\ntimes = 3\n"
    (tree / "toy.toml").write_text(formats)
    (tree / "both.toml").write_text(formats + "[feedback]\n")
    ran(tree, "-c", WITH, tree / "toy.toml", tree, tree / "both.toml")
    assert "mirrored" in ran(tree, "-m", "kvcal", "inspect", tree / "toy.safetensors")
    rows = json.loads(ran(tree, "-m", "kvcal", "inspect", tree / "toy.safetensors", "--json"))["layers"]
    assert [row["k"][0]["mirrored"] for row in rows] == [True] * len(rows)


@pytest.fixture(scope="module")
def without(tree: Path) -> Path:
    """The copy without AQUA-KV, and without recipes that ask for it."""
    shutil.rmtree(tree / "kvcal" / "systems" / "toy", ignore_errors=True)
    shutil.rmtree(tree / "kvcal" / "systems" / "aqua_kv")
    for name in ("aqua-kv", "higgs-2", "best"):
        (tree / "recipes" / f"{name}.toml").unlink()
    return tree


def test_deleting_a_folder_removes_a_system(without: Path) -> None:
    assert ran(without, "-c", WITHOUT).strip() == str(without / "kvcal" / "__init__.py")


def test_plans_are_made_without_it(without: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    plan, model = without / "plan.safetensors", save_llama(without / "model", tokenizer, head_dim=64)
    sizes = ("--batch", 8, "--context", 4096, "--samples", 2, "--seq-len", 300, "--data", "tasks", "--allow-damage")
    ran(without, "-m", "kvcal", "plan", model, "--bits", 4, *sizes, "-o", plan, "--out", without / "out")
    assert "in basis with feedback" in ran(without, "-m", "kvcal", "inspect", plan)


def test_tests_of_others_pass_without_it(without: Path) -> None:
    files = [ROOT / name for name in OTHERS]
    # Golden and committed plans have the keys of all systems, at their defaults.
    said = ran(without, "-m", "pytest", "-q", "-c", ROOT / "pyproject.toml", "-p", "no:cacheprovider", *files,
               "-k", "not golden and not committed")  # fmt: skip
    assert " passed" in said and " failed" not in said
