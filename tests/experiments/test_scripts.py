"""Scripts that print the tables of the docs: the shorter ones run to their end on a small model."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import save_llama
from transformers import PreTrainedTokenizerBase

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SMALL = "--texts 1 --tokens 256"
SCRIPTS = {
    "show_allocation": "--quick",
    "show_kitty": "--quick",
    "show_kvmix": "--quick",
    "show_objectives": f"{SMALL} --problems 1 --new-tokens 32",
    "show_progressive": "--quick",
}
LONGER = ("show_aqua_kv", "show_feedback", "show_mixkvq", "show_reparam")  # mypy reads their calls


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A random Llama of two layers and two KV heads of 64, with the embedded tokenizer."""
    shape = {"head_dim": 64, "hidden_size": 256, "max_position_embeddings": 8192}
    return save_llama(tmp_path_factory.mktemp("small"), tokenizer, dtype=torch.float32, **shape)


@pytest.fixture
def run(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str, str], Any]:
    """Runs a script with these arguments in an empty folder; the JSON that it writes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXPERIMENTS)

    def run_one(script: str, arguments: str) -> Any:
        out = tmp_path / f"{script}.json"
        given = [*arguments.split(), "--model", str(small_model), "--device", "cpu", "--out", str(out)]
        monkeypatch.setattr(sys, "argv", [script, *given])
        runpy.run_path(str(EXPERIMENTS / f"{script}.py"), run_name="__main__")
        assert "|---" in capsys.readouterr().out
        return json.loads(out.read_text(encoding="utf-8"))

    return run_one


@pytest.mark.parametrize("script", SCRIPTS)
def test_runs_to_its_end(script: str, run: Callable[[str, str], Any]) -> None:
    assert run(script, SCRIPTS[script])


@pytest.mark.parametrize("script", LONGER)
def test_imports_what_is_there(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    assert "main" in runpy.run_path(str(EXPERIMENTS / f"{script}.py"))
