"""``kvcal inspect``: what takes a plan's bytes, layers that it leaves as they are, and its provenance if
asked."""

from pathlib import Path

import pytest
from cli_cases import ran_well, save_family
from transformers import PreTrainedTokenizerBase

from kvcal.models.load import load
from kvcal.plan.layer import bare_layers, fixed_layers
from kvcal.plan.plan import Plan, Workload, save_plan
from kvcal.recipe_files import load_recipe

COMMITTED = Path(__file__).parents[2] / "artifacts" / "plans" / "schema-3" / "plan.safetensors"


@pytest.fixture
def sliding(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A plan of a model some of whose layers are sliding windows."""
    loaded = load(str(save_family(tmp_path / "gemma3", tokenizer, "gemma3")), device="cpu")
    formats = load_recipe("uniform-2").formats
    assert formats is not None
    layers = fixed_layers(formats, bare_layers(loaded.geometry))
    save_plan(Plan(loaded.identity, loaded.geometry.cache_dtype, layers, Workload(8, 1024), {}), tmp_path / "p.plan")
    return tmp_path / "p.plan"


def test_what_sliding_layers_take_is_told(sliding: Path) -> None:
    value = ran_well("inspect", sliding, "--json").json
    windows, bounded = value["parts"]["sliding_windows"], [one for one in value["layers"] if not one["k"]]
    assert sum(value["parts"].values()) == value["bytes"] > windows > 0
    assert windows == sum(b for b, one in zip(value["layer_bytes"], value["layers"], strict=True) if one in bounded)
    shown = " ".join(ran_well("inspect", sliding).out.split())
    paged = len(value["layers"]) - len(bounded)
    assert f"sliding windows: {len(bounded)} of {len(value['layers'])} layers stay as the model has them" in shown
    assert f"all-in bits per value of {paged} layers" in shown
    assert shown.index("x smaller than 16 bits") < shown.index("of which") < shown.index("all-in bits")


def test_provenance_is_shown_when_it_is_asked_for() -> None:
    plain, full = (ran_well("inspect", COMMITTED, *more).out for more in ((), ("--provenance",)))
    assert full.startswith(plain) and "recipe_sha256" not in plain and "transformers" not in plain
    assert "recipe_sha256" in (rest := full.removeprefix(plain)) and "transformers" in rest
    assert "stay as the model has them" not in plain and "all-in bits per value of" not in plain
