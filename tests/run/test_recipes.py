"""The recipes that come with kvcal: the layers they give are those that their descriptions promise."""

import itertools
import tomllib
from dataclasses import replace

import pytest
import torch
from tiny_models import measured

from kvcal.errors import UsageError
from kvcal.plan.layer import LayerPlan, bare_layers, fixed_layers
from kvcal.plan.page_format import SIDES
from kvcal.plan.tensors import lattice_tensors
from kvcal.recipe_files import find_recipe, load_recipe, recipe_names


def layers_of(recipe: str, model: str) -> tuple[LayerPlan, ...]:
    """The layers that a recipe with [formats] gives a tiny model."""
    formats = load_recipe(recipe).formats
    assert formats is not None
    return fixed_layers(formats, bare_layers(measured(model)))


@pytest.mark.parametrize("recipe", ["aqua-kv", "aqua-kv-int4", "aqua-kv-uniform", "higgs-2"])
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_the_first_paged_layer_has_4_bits_and_all_others_2(recipe: str, model: str) -> None:
    layers = layers_of(recipe, model)
    first, *others = [layer for layer in layers if layer.is_paged]
    assert [first.k[0].num_bits, first.v[0].num_bits] == [4, 4]
    assert all((layer.k[0].num_bits, layer.v[0].num_bits) == (2, 2) for layer in others)
    assert all(fmt.num_sink_tokens == 4 for layer in (first, *others) for fmt in (*layer.k, *layer.v))
    assert all(not layer.k and not layer.v for layer in layers if not layer.is_paged)


def test_every_side_of_every_layer_has_signs_of_its_own() -> None:
    """Half of them are negative; as many agree with another side's as of two independent draws."""
    wide = replace(measured("llama").layers[0], num_kv_heads=8, k_head_dim=128, v_head_dim=128)
    formats = load_recipe("higgs-2").formats
    assert formats is not None
    layers = fixed_layers(
        formats, tuple(LayerPlan(replace(wide, index=i), (formats.k,), (formats.v,)) for i in range(3))
    )
    tensors = lattice_tensors(layers)
    signs = [tensors[f"layers.{layer.geometry.index}.{side}_signs"] for layer in layers for side in SIDES]
    for one in signs:
        assert one.shape == (1024,) and set(one.tolist()) == {-1, 1}
        assert abs(int(one.sum())) < 5 * 32  # five standard deviations
    for one, other in itertools.combinations(signs, 2):
        assert abs(int((one.int() * other.int()).sum())) < 5 * 32
    again = lattice_tensors(layers)
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


def test_every_section_of_a_recipe_is_read_by_a_stage_that_runs() -> None:
    """A section that no stage of the recipe reads would promise what does not happen."""
    for name in recipe_names():
        given = set(tomllib.loads(find_recipe(name).read_text())) - {"description", "model", "evaluate"}
        recipe = load_recipe(name)
        measures = recipe.importance is not None or (recipe.allocate is not None and recipe.search is None)
        transforms = {"reparam", "predictors", "feedback"}
        read = {"formats", "importance", "allocate", "search", "progressive", "tune"} | transforms
        read |= {"profile"} if measures else set()
        read |= {"cache"} if measures or recipe.search is not None else set()
        read |= {"data"} if measures or ({"search", "tune"} | transforms) & given else set()
        assert given <= read, name
        assert recipe.description and recipe.description[-1] != "."


def test_ablations_are_found_by_name_and_listed_apart() -> None:
    name = "aqua-kv-int4"
    path = find_recipe(name)
    assert path.parent.name == "ablations" and name in recipe_names()
    for spelled in (f"ablations/{name}", f"{name}.toml", f"recipes/ablations/{name}.toml", f"recipes/{name}.toml"):
        assert find_recipe(spelled).samefile(path)
    with pytest.raises(UsageError) as refused:
        find_recipe("aqua")
    shown, ablations = refused.value.message.split("nor of the ablations")
    assert "'aqua-kv'" in shown and name not in shown and name in ablations
    with pytest.raises(UsageError):
        find_recipe("elsewhere/kivi-2")
