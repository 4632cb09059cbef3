"""--memory: the stages of a run write the same bytes with streamed layers, and says what it did."""

import re
from pathlib import Path

import pytest
from cli_cases import ran_well, run_kvcal, save_family
from transformers import PreTrainedTokenizerBase

from kvcal.models.load import load

RECIPE = """
description = "the stages that run the model, but for the profile"
data = { source = "tasks", num_samples = 6, seq_len = 300 }
reparam = { num_steps = 2, num_samples = 2, seq_len = 300 }
predictors = { min_explained = -1000.0, drop = false }
feedback = { num_samples = 2, seq_len = 300 }
[formats]
k = { num_bits = 2, axis = "token", num_sink_tokens = 2, recent_window = 0 }
v = { num_bits = 2, axis = "token", num_sink_tokens = 2, recent_window = 0 }
[evaluate]
against = ["16-bit"]
tasks = ["chain"]
num_problems = 2
max_size = 20
max_hops = 4
max_new_tokens = 4
data = { source = "tasks", num_samples = 2, seq_len = 224, seed = 1 }
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    return save_family(tmp_path_factory.mktemp("models") / "qwen2", tokenizer, "qwen2")


@pytest.fixture(scope="module")
def least(model: Path) -> int:
    found = load(str(model), device="cpu", memory=1 << 40, num_tokens=300).residence
    assert found is not None
    return found.shapes.least


def test_a_run_writes_the_same_bytes(model: Path, least: int, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    folders = []
    for name, options in (("whole", []), ("streamed", ["--memory", f"{least}B"])):
        folders.append(tmp_path / name)
        done = ran_well("run", recipe, "--model", model, "--device", "cpu", *options, "--out", folders[-1])
    assert "memory: 0 of 3 layers of" in done.err and "the other 3 take turns in 1 places" in done.err
    whole, streamed = ({path.name: path for path in folder.glob("*.safetensors")} for folder in folders)
    stages = {f"{stage}.safetensors" for stage in ("reparam", "predictors", "feedback", "plan")}
    assert whole.keys() == streamed.keys() >= stages
    for name, path in whole.items():
        assert path.read_bytes() == streamed[name].read_bytes(), name
    texts = [(folder / "evaluation.json").read_text() for folder in folders]
    evaluations = [re.sub(r'"(seconds|digest)": \S+', "", text) for text in texts]
    assert evaluations[0] == evaluations[1]
    ran_well("inspect", whole["plan.safetensors"], "--model", model, "--memory", "200MB")


def test_memory_for_no_layer_is_refused(model: Path, tmp_path: Path) -> None:
    given = ["--model", model, "--device", "cpu", "--memory", "100KB", "--out", tmp_path / "out"]
    done = run_kvcal("run", "uniform-4", *given)
    assert done.code != 0 and "not one of 3 layers" in done.err and "hint" in done.err
