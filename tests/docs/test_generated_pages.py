"""Pages that come from the code are current: recipe keys, models, and the outputs that troubleshooting
quotes."""

import doctest
import re
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import built
from transformers import AutoModelForCausalLM

import kvcal.errors
from kvcal import PlanCache
from kvcal.embedded import model_folder
from kvcal.plan.page_format import Boost, Tier
from kvcal.plan.plan import Plan, load_plan

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
STALE = "stale: run python docs/generate.py"
sys.path.insert(0, str(DOCS))
import generate  # noqa: E402


def test_recipe_keys_are_current() -> None:
    assert (DOCS / "recipe-keys.md").read_text() == generate.recipe_keys(), STALE


def test_every_recipe_is_spelled_with_listed_keys() -> None:
    page = (DOCS / "recipe-keys.md").read_text()
    keys = set(re.findall(r"^\| `(\w+)` \|", page, re.M)) | set(re.findall(r"^## \[(\w+)\]", page, re.M))
    for path in (ROOT / "recipes").rglob("*.toml"):
        used = re.findall(r"^\[([\w.]+)\]|^(\w+) =", path.read_text(), re.M)
        names = {part for pair in used for name in pair for part in name.split(".") if part}
        assert names <= keys, path.name


@pytest.mark.filterwarnings("ignore")  # transformers' own, about models without an optional package
def test_supported_models_are_current() -> None:
    assert generate.FAMILIES.read_text() == generate.families(), STALE
    assert (DOCS / "models.md").read_text() == generate.models(generate.FAMILIES.read_text()), STALE


@pytest.mark.filterwarnings("ignore:.*")
def test_the_errors_of_troubleshooting_are_those_of_the_commands() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    with generate.workplace() as folder:
        generate.furnish(folder)
        assert generate.with_outputs(page) == page, STALE
    for code in (2, 3, 4, 5):
        assert f"[exit {code}]" in page


def test_troubleshooting_names_every_exit_code() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    codes = {error.exit_code for error in kvcal.errors.KvcalError.__subclasses__()} | {0, 130}
    assert codes <= {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.M)}


def by_queries(plan: Plan) -> Plan:
    """The plan with 2-bit keys, a quarter of whose channels queries choose for 4 bits, as in MixKVQ."""
    boost = Boost("query_magnitude", (Tier(4, 0.25),))
    layers = [replace(layer, k=replace(layer.format("k"), num_bits=2, boost=boost)) for layer in plan.layers]
    return replace(plan, layers=tuple(layers))


def test_the_errors_in_python_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    lines_of = traceback.format_exception_only  # up to Python 3.11.2, doctest compares its last line alone
    monkeypatch.setattr(traceback, "format_exception_only", lambda *error: ["".join(lines_of(*error))])
    page = (DOCS / "troubleshooting.md").read_text()
    ids, plan = torch.full((1, 8), 5), load_plan(ROOT / "artifacts/plans/schema-3/plan.safetensors")
    names = {
        "kvcal": kvcal, "PlanCache": PlanCache, "plan": plan, "mixkvq_plan": by_queries(plan),
        "model": AutoModelForCausalLM.from_pretrained(model_folder()), "another_model": built("qwen3"),
        "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
    }  # fmt: skip
    blocks = re.findall(r"^```pycon\n(.*?)^```$", page, re.M | re.S)
    assert len(blocks) == 3
    runner = doctest.DocTestRunner()
    for block in blocks:
        test = doctest.DocTestParser().get_doctest(block, dict(names), "block", "troubleshooting.md", 0)
        with torch.inference_mode():
            assert runner.run(test).failed == 0
