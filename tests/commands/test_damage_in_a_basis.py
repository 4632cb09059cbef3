"""A plan in a basis that destroys its model, in every command that measures damage: exit code 7 with the
layers, and nothing at --output. A plan that is kept has a mark next to it; without it, it is said to be
unchecked."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from cli_cases import Outcome, ran_well, run_kvcal
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from kvcal.plan.damage import concern, damage_path, load_damage
from kvcal.plan.plan import load_plan

SIZES = ("--bits", 3, "--batch", 8, "--context", 32768, "--samples", 2, "--seq-len", 512)
SHORT = ("basis.num_samples=2", "basis.seq_len=512", "data.min_len=128", "profile.kl_samples=1",
         "profile.kl_tokens=320")  # fmt: skip
SETS = [f"--set={knob}" for knob in SHORT]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Keys with a large constant in every seventh channel, which RoPE turns and a basis does not take out."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
    )  # fmt: skip
    made = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.12)
        for layer in made.model.layers:
            layer.self_attn.k_proj.weight[::7] = 0
            layer.self_attn.k_proj.bias[::7] = 200.0
    folder = tmp_path_factory.mktemp("constants") / "model"
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def refused(model: Path) -> Outcome:
    """`kvcal plan` without --allow-damage, which leaves its folder."""
    out = ("--out", model.parent, "--name", "three", "-o", model.parent / "o.safetensors")
    return run_kvcal("plan", model, *SIZES, *SETS, *out)


@pytest.fixture
def plan(model: Path, refused: Outcome, tmp_path: Path) -> Path:
    """A copy of the destroyed plan, with its mark."""
    for name in ("plan.safetensors", "plan.damage.json"):
        shutil.copy(model.parent / "three" / name, tmp_path / name)
    return tmp_path / "plan.safetensors"


def named(done: Outcome) -> bool:
    """Whether the command ended by the gate, and named the keys of a layer."""
    return done.code == 7 and "the plan destroys the model: KL" in done.err and "layer 0 K (alone: KL" in done.err


def test_plan_names_the_layers_and_writes_nothing(model: Path, refused: Outcome) -> None:
    output = model.parent / "o.safetensors"
    assert named(refused) and "hint: a larger budget" in refused.err
    assert not output.exists() and not damage_path(output).exists()
    kept = model.parent / "three" / "plan.safetensors"
    layers = load_plan(kept).layers
    assert all(layer.k_basis and layer.k_feedback and layer.v_basis and layer.v_feedback for layer in layers)
    found = load_damage(kept, load_plan(kept))
    assert found is not None and found.is_destroyed and len(found.worst) == 3


def test_what_is_allowed_is_written_and_marked(model: Path, refused: Outcome) -> None:
    output = model.parent / "allowed.safetensors"
    done = ran_well(
        "plan", model, *SIZES, *SETS, "--out", model.parent, "--name", "three", "-o", output, "--allow-damage"
    )
    assert "warning: the plan destroys the model" in done.err
    found = load_damage(output, load_plan(output))
    assert found is not None and found.is_destroyed and len(found.worst) == 3
    shown = ran_well("inspect", output)
    assert "the plan destroys the model" in shown.out
    assert ran_well("inspect", output, "--json").json["damage"]["kl"] == found.kl
    told = ran_well("generate", "--model", model, "--plan", output, "--prompt", "1", "--max-new-tokens", 1)
    assert "warning: the plan destroys the model" in told.err


def test_commands_that_make_a_plan_refuse_it(model: Path, tmp_path: Path) -> None:
    """Those that measure a plan are in test_damage.py."""
    out = ("--model", model, "--out", tmp_path / "out", *SIZES)
    knobs = ("tasks=[]", "against=[]", "data.num_samples=1", "data.seq_len=1024")
    assert named(run_kvcal("run", "default", *out, *SETS, *(f"--set=evaluate.{knob}" for knob in knobs)))
    assert named(run_kvcal("search", "best", *out, '--set=search.systems=["default"]', "--set=data.min_len=128"))


def test_compile_writes_no_output_either(model: Path, refused: Outcome, tmp_path: Path) -> None:
    folder, output = model.parent / "three", tmp_path / "o.safetensors"
    assert named(run_kvcal("compile", folder, "--model", model, "-o", output))
    assert not list(tmp_path.iterdir())
    ran_well("compile", folder, "--model", model, "-o", output, "--allow-damage")
    assert "destroys" in str(concern(load_damage(output, load_plan(output))))


def test_a_plan_without_its_mark_is_unchecked(model: Path, plan: Path) -> None:
    assert ran_well("inspect", plan, "--json").json["is_checked"]
    damage_path(plan).unlink()
    assert "the plan is unchecked" in ran_well("inspect", plan).out
    shown = ran_well("inspect", plan, "--json").json
    assert not shown["is_checked"] and shown["damage"] is None
    told = ran_well("generate", "--model", model, "--plan", plan, "--prompt", "1", "--max-new-tokens", 1)
    assert "warning: the plan is unchecked" in told.err
    checks = ran_well("inspect", plan, "--model", model, "--allow-damage", "--json").json["checks"]
    assert [check["name"] for check in checks][-2:] == ["unchecked", "damage"]
    assert "destroys" in str(concern(load_damage(plan, load_plan(plan))))  # which the check has kept
    checks = ran_well("inspect", plan, "--model", model, "--allow-damage", "--json").json["checks"]
    assert "unchecked" not in [check["name"] for check in checks]
    damage_path(plan).unlink()
    damage_path(plan).mkdir()  # as good as a folder that is only read
    assert "the measurement is not kept" in ran_well("inspect", plan, "--model", model, "--allow-damage").err
