"""Shared by tests of commands that fail: a model, a recipe, and what its stages leave."""

from pathlib import Path

import pytest
from cli_cases import RECIPE, save_llama
from transformers import PreTrainedTokenizerBase

from kvcal.folder import Folder, Job
from kvcal.models.load import load
from kvcal.progress import Silent
from kvcal.recipe_files import load_recipe
from kvcal.stages.pipeline import compile_folder, run_stages


@pytest.fixture(scope="package")
def made(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A folder with a model, a recipe, and every artifact of it but the evaluation."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "small.toml").write_text(RECIPE)
    loaded, recipe = load(str(save_llama(folder / "model", tokenizer))), load_recipe(str(folder / "small.toml"))
    run = Folder.create(folder / "run")
    run_stages(Job(recipe, loaded, run, Silent()))
    compile_folder(run)
    return folder
