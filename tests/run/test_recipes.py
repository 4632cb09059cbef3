"""The recipes that come with kvcal: the layers they give are those that their descriptions promise. Every one
runs from its profile to its evaluated table, on a tiny model with fewer texts, problems and trials.

What a recipe does is left as it is: formats, budget, stages, and more sequences at once than its workload
has."""

import itertools
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli_cases import save_llama
from tiny_models import measured
from transformers import PreTrainedTokenizerBase

from kvcal.errors import UsageError
from kvcal.folder import Folder
from kvcal.models.load import LoadedModel, load
from kvcal.plan.layer import LayerPlan, bare_layers, fixed_layers
from kvcal.plan.page_format import SIDES
from kvcal.plan.plan import Workload, load_plan
from kvcal.plan.tensors import layout_tensors
from kvcal.progress import Silent
from kvcal.recipe import Recipe
from kvcal.recipe_files import find_recipe, load_recipe, recipe_names, with_knobs
from kvcal.stages.pipeline import build_plan, evaluate_plan, run


def layers_of(recipe: str, model: str) -> tuple[LayerPlan, ...]:
    """The layers that a recipe with [formats] gives a tiny model."""
    formats = load_recipe(recipe).formats
    assert formats is not None
    return fixed_layers(formats, bare_layers(measured(model)))


@pytest.mark.parametrize("recipe", ["aqua-kv", "higgs-2"])
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_the_first_paged_layer_has_4_bits_and_all_others_2(recipe: str, model: str) -> None:
    layers = layers_of(recipe, model)
    first, *others = [layer for layer in layers if layer.is_paged]
    assert [first.k.num_bits, first.v.num_bits] == [4, 4]
    assert all((layer.k.num_bits, layer.v.num_bits) == (2, 2) for layer in others)
    assert all(fmt.num_sink_tokens == 4 for layer in (first, *others) for fmt in layer.formats)
    assert all(not layer.k and not layer.v for layer in layers if not layer.is_paged)


def test_every_side_of_every_layer_has_signs_of_its_own() -> None:
    """Half of them are negative; as many agree with another side's as of two independent draws."""
    wide = replace(measured("llama").layers[0], num_kv_heads=8, k_head_dim=128, v_head_dim=128)
    formats = load_recipe("higgs-2").formats
    assert formats is not None
    layers = fixed_layers(formats, tuple(LayerPlan(replace(wide, index=i), formats.k, formats.v) for i in range(3)))
    tensors = layout_tensors(layers)
    signs = [tensors[f"layers.{layer.geometry.index}.{side}_signs"] for layer in layers for side in SIDES]
    for one in signs:
        assert one.shape == (1024,) and set(one.tolist()) == {-1, 1}
        assert abs(int(one.sum())) < 5 * 32  # five standard deviations
    for one, other in itertools.combinations(signs, 2):
        assert abs(int((one.int() * other.int()).sum())) < 5 * 32
    again = layout_tensors(layers)
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


def test_every_section_of_a_recipe_is_read_by_a_stage_that_runs() -> None:
    """A section that no stage of the recipe reads would promise what does not happen."""
    for name in recipe_names():
        given = set(tomllib.loads(find_recipe(name).read_text())) - {"description", "model", "evaluate"}
        recipe = load_recipe(name)
        measures = recipe.importance is not None or (recipe.allocate is not None and recipe.search is None)
        transforms = {"reparam", "predictors", "basis", "feedback"}
        read = {"formats", "importance", "allocate", "search", "progressive", "tune"} | transforms
        read |= {"profile"} if measures else set()
        read |= {"cache"} if measures or recipe.search is not None else set()
        read |= {"data"} if measures or ({"search", "tune"} | transforms) & given else set()
        assert given <= read, name
        assert recipe.description and recipe.description[-1] != "."


def test_a_recipe_is_found_by_its_name_or_its_file() -> None:
    path = find_recipe("aqua-kv")
    for spelled in ("aqua-kv.toml", "recipes/aqua-kv.toml", "recipes/aqua-kv"):
        assert find_recipe(spelled).samefile(path)
    with pytest.raises(UsageError, match="'aqua' is neither a file nor one of .*'aqua-kv'"):
        find_recipe("aqua")
    with pytest.raises(UsageError):
        find_recipe("elsewhere/kivi-2")


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
    if recipe.basis is not None:
        found = replace(found, basis=replace(recipe.basis, num_samples=2, seq_len=320))
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
EVALUATED = (
    "aqua-kv", "best", "default", "higgs-2", "kitty-feedback", "kivi-2", "kvmix", "mixkvq", "pm-kvq", "sensitivity",
)  # fmt: skip


@pytest.mark.parametrize("name", EVALUATED)
def test_a_shipped_recipe_runs_to_its_table(name: str, model: LoadedModel, tmp_path: Path) -> None:
    result = run(model, Folder.create(tmp_path), shortened(load_recipe(name)))
    row = next(row for row in result.evaluation.rows if row.name == name)
    recipe = load_recipe(name)
    is_profiled = recipe.importance is not None or (recipe.allocate is not None and recipe.search is None)
    assert (tmp_path / "profile.safetensors").exists() == is_profiled
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
    recipe = shortened(with_knobs(load_recipe("pm-kvq-2"), {"reparam": None}))
    built = build_plan(model, Folder.create(tmp_path), recipe, Workload(8, 300))
    with pytest.raises(UsageError, match="a text of 320 tokens, .* are scheduled for 300"):
        evaluate_plan(recipe, model, built, Folder.create(tmp_path), Silent())
    assert not (tmp_path / "evaluation.json").exists()
