"""lab/rivals.py: a small model through every rival's format, and what each of them reads at 16 bits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import save_llama
from transformers import PreTrainedTokenizerBase

from kvcal import load_model
from kvcal.models.attention import replaced_attention


@pytest.fixture
def folder(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> str:
    return str(save_llama(tmp_path / "model", tokenizer, dtype=torch.float32, head_dim=64, hidden_size=128))


def test_every_rival_is_measured_next_to_plans(
    lab_script: Callable[..., dict[str, Any]],
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("KVCAL_DATA", raising=False)
    given = ["--quick", "--model", folder, "--out", tmp_path, "--tokens", 512, "--problems", 2]
    lab_script("rivals", *given, "--plans", "kivi-2", "--device", "cpu", "--texts", 1)
    found, printed = json.loads((tmp_path / "rivals.json").read_text()), capsys.readouterr().out
    kl = {name: sum(text.get("kl", 0) for text in of["512:0"]) for name, of in found["measured"].items()}
    bits = {name: plan["bits"] for name, plan in found["plans"].items()}
    assert all(f"| {name} | {bits[name]:.2f} |" in printed for name in bits)
    assert bits["tq-3"] == 16 and kl["tq-3"] < 1e-6  # four layers stay at 16 bits, and this model has two
    assert min(kl.values()) >= 0 and min(kl["fp8"], kl["int4"], kl["oscar"], kl["wush"]) > 0
    assert kl["int4"] < kl["tq-k3v4-all"] < kl["tq-3-all"] and kl["wush-3"] < kl["wush-2"]
    # 3 bits, a norm, a scale and a minimum over 2 x 64 values; 2 bits, two halves over 64, 320 tokens of
    # 32768
    assert bits["tq-3-all"] == 3 + 48 / 128 and bits["oscar"] == pytest.approx(2.5 + 13.5 * 320 / 32768)


def test_windows_keep_what_they_say(lab_script: Callable[..., dict[str, Any]], folder: str) -> None:
    """A format that loses nothing changes nothing; one that loses all, nothing within the window."""
    loaded = load_model(folder, device="cpu")
    ids = torch.randint(0, 500, (1, 200), generator=torch.Generator().manual_seed(0))
    exact = loaded.model(input_ids=ids, use_cache=False).logits
    for codec, first in ((lambda x, layer, side: x, 200), (lambda x, layer, side: 0 * x, 60)):
        rival = lab_script("rivals")["Rival"](codec, 2, 2, sinks=4, window=49, flush=8)
        with replaced_attention(loaded.model, "rival_", rival.attention(2)):
            read = loaded.model(input_ids=ids, use_cache=False).logits
        distance = (read - exact).abs().amax(-1)[0]
        assert distance[:first].max() < 1e-4
        assert first == 200 or distance[first:].min() > 1e-3
