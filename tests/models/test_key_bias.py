"""Large biases of key projections are told on every way to a plan, and so is that they could not be checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cli_cases import RECIPE, exit_code, save_falcon, save_family
from evaluation_cases import Notes, as_loaded
from reparam_cases import outlier_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, Qwen2Config

from kvcal.models.key_bias import LARGE_BIAS, bias_findings, warn_of_biases
from kvcal.models.taps import tap
from kvcal.run import pipeline

FIXED = RECIPE[: RECIPE.index("[profile]")] + "[formats]\nk = { num_bits = 16 }\nv = { num_bits = 16 }\n"


class Reached(Exception):
    """The formats are about to be chosen."""


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages are not run."""

    def stop(*_: object) -> None:
        raise Reached

    monkeypatch.setattr(pipeline, "run_stages", stop)


@pytest.mark.parametrize("command", ["run", "search"])
def test_every_command_warns(
    command: str, stopped: None, tmp_path: Path, tokenizer: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_family(tmp_path / "model", tokenizer, "qwen2")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.bias.fill_(20.0)
    model.save_pretrained(folder)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(FIXED if command == "run" else f"{RECIPE}[search]\n")
    with pytest.raises(Reached):
        exit_code(command, recipe, "--model", folder, "--out", tmp_path / "out")
    said = capsys.readouterr().err
    assert "layer 1: the bias of its key projection is 1" in said and "layer 0" not in said


def test_unknown_projections_are_told(
    stopped: None, tmp_path: Path, tokenizer: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_falcon(tmp_path / "model", tokenizer)
    (tmp_path / "fixed.toml").write_text(FIXED)
    with pytest.raises(Reached):
        exit_code("run", tmp_path / "fixed.toml", "--model", folder, "--out", tmp_path / "out")
    assert "biases of key projections could not be checked: " in capsys.readouterr().err


def test_share_is_the_bias_s_part_of_the_keys_energy() -> None:
    """Against the keys of the taps; a model without biases is not run, and one with small ones says nothing."""
    model = outlier_model(2, 1.0, Qwen2Config)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.bias.fill_(30.0)
    loaded, notes = as_loaded(model), Notes()
    tokens_T = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(5))
    keys = {}
    with torch.no_grad(), tap(model, lambda seen: keys.update({seen.layer: seen.k_post_BNTD[0]}), loaded.geometry):
        model(input_ids=tokens_T[None], use_cache=False)
    energy = {layer: float(k_post_NTD.double().square().sum() / 40) for layer, k_post_NTD in keys.items()}
    share, warning = bias_findings(loaded, energy)[0]
    assert share == pytest.approx(2 * 16 * 30.0**2 / energy[0]) and share > LARGE_BIAS
    assert bias_findings(loaded, energy)[1][0] < LARGE_BIAS and bias_findings(loaded, energy)[1][1] is None
    warn_of_biases(loaded, lambda: tokens_T, notes)
    assert notes.messages == [warning]
    plain = as_loaded(outlier_model(2, 1.0))
    warn_of_biases(plain, lambda: pytest.fail("a model without biases is run"), notes)
    assert notes.messages == [warning] and bias_findings(plain, {0: 1.0}) == {0: (None, None)}
