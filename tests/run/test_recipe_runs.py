"""Every shipped recipe from its profile to its evaluated table, on a tiny model with fewer texts, problems and trials.

What a recipe does is left as it is: formats, budget, stages, and more sequences at once than its workload has.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli_cases import save_llama
from transformers import PreTrainedTokenizerBase

from kvcal.errors import UsageError
from kvcal.folder import Folder
from kvcal.models.load import LoadedModel, load
from kvcal.plan.plan import Workload, load_plan
from kvcal.progress import Silent
from kvcal.recipe import Recipe
from kvcal.recipe_files import load_recipe, recipe_names
from kvcal.stages.pipeline import build_plan, evaluate_plan, run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> LoadedModel:
    folder = save_llama(tmp_path_factory.mktemp("recipes") / "tiny", tokenizer, num_layers=3, head_dim=64)
    return load(str(folder), dtype="float32", device="cpu")


def shortened(recipe: Recipe) -> Recipe:
    """The recipe with as little to measure as shows that it works: two problems, a page or two of text."""
    found = replace(
        recipe,
        data=replace(recipe.data, num_samples=4, seq_len=320, min_len=0),
        profile=replace(recipe.profile, kl_samples=min(1, recipe.profile.kl_samples), kl_tokens=320),
        evaluate=replace(
            recipe.evaluate, against=(), tasks=("chain",), num_problems=2, max_steps=6, max_size=20, max_hops=4,
            max_digits=2, max_new_tokens=3, data=replace(recipe.evaluate.data, num_samples=2, seq_len=320, min_len=0),
        ),
    )  # fmt: skip
    if recipe.reparam is not None:
        found = replace(found, reparam=replace(recipe.reparam, num_samples=2, seq_len=320, num_steps=2))
    if recipe.feedback is not None:
        found = replace(found, feedback=replace(recipe.feedback, num_samples=2, seq_len=320))
    if recipe.search is not None:
        systems = ("kivi-2", "kvmix")  # those that solve have runs of their own
        search = replace(recipe.search, kl_samples=2, kl_tokens=320, systems=systems)
        found = replace(found, search=search, allocate=replace(found.allocate, bits=4.0))
    if recipe.tune is not None:
        found = replace(found, tune=replace(recipe.tune, num_trials=2, num_problems=2))
    return found


# Others differ from one of these in a number or a switch: their plans are made, and not evaluated.
EVALUATED = ("aqua-kv", "basis", "best", "default", "higgs-2", "kitty-feedback", "kivi-2", "kvmix", "mixkvq", "pm-kvq")


@pytest.mark.parametrize("name", EVALUATED)
def test_a_shipped_recipe_runs_to_its_table(name: str, model: LoadedModel, tmp_path: Path) -> None:
    result = run(model, Folder.create(tmp_path), shortened(load_recipe(name)))
    row = next(row for row in result.evaluation.rows if row.name == name)
    assert load_plan(tmp_path / "plan.safetensors").sha256 == row.plan_sha256 == result.plan.sha256
    assert row.total_bytes == result.plan.predicted_bytes
    assert [task.num_problems for task in row.tasks] == [2]
    assert torch.isfinite(torch.tensor([row.text.kl, row.text.perplexity])).all()


@pytest.mark.parametrize("name", sorted(set(recipe_names()) - set(EVALUATED)))
def test_another_shipped_recipe_makes_its_plan(name: str, model: LoadedModel, tmp_path: Path) -> None:
    recipe = shortened(load_recipe(name))
    plan = build_plan(model, Folder.create(tmp_path), recipe)
    assert load_plan(tmp_path / "plan.safetensors").sha256 == plan.sha256 and plan.provenance["recipe"] == name
    assert recipe.allocate is None or plan.bits_per_value() < 16


def test_texts_beyond_a_schedule_are_told_before_anything_is_measured(model: LoadedModel, tmp_path: Path) -> None:
    recipe = shortened(load_recipe("pm-kvq-2-no-reparam"))
    built = build_plan(model, Folder.create(tmp_path), recipe, Workload(8, 300))
    with pytest.raises(UsageError, match="a text of 320 tokens, .* on a schedule for 300"):
        evaluate_plan(recipe, model, built, Folder.create(tmp_path), Silent())
    assert not (tmp_path / "evaluation.json").exists()
