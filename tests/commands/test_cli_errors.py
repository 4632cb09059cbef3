"""Bad input at the command line: a clear message, the right exit code, nothing half-written."""

import errno
import io
import os
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from cli_cases import ran_well, run_kvcal, save_family, save_llama
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase
from typer.main import get_command

from kvcal.__main__ import app
from kvcal.artifact import COMMANDS
from kvcal.plan.plan import load_plan
from kvcal.stages import pipeline
from kvcal.stages.profile import stage as profile_stage


def no_temporary_files(folder: Path) -> bool:
    return not [path for path in folder.rglob("*") if path.name.endswith(".tmp")]


def test_a_prompt_that_is_no_text(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a terminal's stdin is read, and as a lenient one is."""
    for errors in ("strict", "surrogateescape"):
        stdin = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\x00bad"), encoding="utf-8", errors=errors)
        monkeypatch.setattr(sys, "stdin", stdin)
        given = ("--model", made / "model", "--plan", made / "run" / "plan.safetensors", "--prompt", "-")
        done = run_kvcal("generate", *given)
        assert done.code == 2 and "stdin is not UTF-8" in done.err, done.err


def test_unsupported_model(made: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    falcon = save_family(tmp_path / "falcon", tokenizer, "falcon")
    without_fit = ("plan", falcon, "--kv-budget", "1KB", "-o", tmp_path / "plan.safetensors")
    for command in (("profile", falcon, "--out", tmp_path / "out", "--recipe", made / "small.toml"), without_fit):
        done = run_kvcal(*command)
        assert done.code == 4 and "bypasses" in done.err


def test_nan_activations(made: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(made / "model", tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"][3, 5] = torch.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    done = run_kvcal("profile", broken, "--out", tmp_path / "out", "--recipe", made / "small.toml")
    assert done.code == 4 and "layer 1" in done.err
    assert not (tmp_path / "out" / "profile.safetensors").exists()


@pytest.mark.parametrize("stage", ["profile", "allocation", "plan"])
def test_truncated_and_flipped_artifacts(stage: str, made: Path, tmp_path: Path) -> None:
    commands = {
        "profile": ("allocate", "{}", "--bits", 4),
        "allocation": ("compile", "{}"),
        "plan": ("inspect", "{}/plan.safetensors"),
    }
    for number, damage in enumerate((lambda data: data[: len(data) // 2], lambda data: flipped(data))):
        copy = Path(shutil.copytree(made / "run", tmp_path / str(number)))
        path = copy / f"{stage}.safetensors"
        path.write_bytes(damage(path.read_bytes()))
        done = run_kvcal(*(str(argument).format(copy) for argument in commands[stage]))
        assert done.code == 5 and path.name in done.err, done.err


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    return save_llama(tmp_path_factory.mktemp("other") / "other-llama", tokenizer, seed=1)


OTHERS = {
    "run": "run {recipe} --model {other} --out {run}",
    "profile": "profile {other} --recipe {recipe} --out {run}",
    "allocate": "allocate {run} --bits 5",
    "transform": "transform {run} --model {other} --recipe aqua-kv --samples 2 --seq-len 256",
    "search": "search best --model {other} --data {text} --samples 2 --seq-len 64 --set data.min_len=64 --out {run}",
}


@pytest.mark.parametrize("command", OTHERS.values(), ids=OTHERS)
def test_folder_of_another_model(command: str, made: Path, other_model: Path, tmp_path: Path) -> None:
    """Whatever else differs, too: the folder is left alone. `kvcal allocate`'s model is its profile's."""
    folder = Path(shutil.copytree(made / "run", tmp_path / "out"))
    if command.startswith("allocate"):
        run_kvcal("profile", other_model, "--recipe", made / "small.toml", "--out", tmp_path / "of-other")
        shutil.copy(tmp_path / "of-other" / "profile.safetensors", folder)
    (text := tmp_path / "text.txt").write_text("one two three four five six seven\n" * 4000)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    places = {"recipe": made / "small.toml", "other": other_model, "run": folder, "text": text}
    done = run_kvcal(*(argument.format(**places) for argument in command.split()))
    assert done.code == 5 and "was made from another model: model.weights_sha256" in done.err, done.err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_an_unfinished_stage_of_another_model(
    made: Path, other_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = ("--out", tmp_path / "out", "--recipe", made / "small.toml")
    with monkeypatch.context() as patched:
        patched.setattr(profile_stage, "divergence_means", Mock(side_effect=KeyboardInterrupt))
        assert run_kvcal("profile", made / "model", *out).code == 130
    partial = tmp_path / "out" / "profile.partial.safetensors"
    before = partial.read_bytes()
    done = run_kvcal("profile", other_model, *out)
    assert done.code == 5 and f"{partial} was made from another model" in done.err
    assert partial.read_bytes() == before
    assert "goes on after" in run_kvcal("profile", made / "model", *out).err and no_temporary_files(tmp_path)
    ours, theirs = (folder / "profile.safetensors" for folder in (tmp_path / "out", made / "run"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_full_disk(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Path(shutil.copytree(made / "run", tmp_path / "out"))
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    for arguments in (
        ("allocate", copy, "--bits", 5),
        ("compile", copy, "-o", copy / "other.safetensors"),
        ("eval", copy / "plan.safetensors", "--model", made / "model", "--recipe", made / "small.toml", "--out", copy),
    ):
        done = run_kvcal(*arguments)
        assert done.code == 5 and "No space left" in done.err, done.err
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before


@pytest.mark.parametrize("stage", ["compile", "evaluate"])
def test_interrupt_in_every_stage_and_resume(
    stage: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at a stage's first write of a result; a profile's is in the test of another model."""
    out, interrupt = tmp_path / "out", Mock(side_effect=KeyboardInterrupt)
    with monkeypatch.context() as patched:
        if stage == "compile":
            patched.setattr(pipeline, "save_plan", interrupt)
        else:
            patched.setattr("kvcal.stages.evaluate.stage.measure_tasks", interrupt)
        stopped = run_kvcal("run", made / "small.toml", "--model", made / "model", "--out", out)
    assert stopped.code == 130 and "interrupted" in stopped.err
    assert no_temporary_files(out)
    ran_well("run", made / "small.toml", "--model", made / "model", "--out", out)
    assert (out / "plan.safetensors").read_bytes() == (made / "run" / "plan.safetensors").read_bytes()


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Its tokens have no embeddings, which torch tells with an IndexError."""
    model = save_llama(tmp_path / "model", tokenizer, vocab_size=100)
    done = run_kvcal("profile", model, "--data", "tasks", "--out", tmp_path / "out")
    assert done.code == 2 and f"has {tokenizer.vocab_size} tokens, and the model embeddings for 100" in done.err


def test_the_commands_of_hints_exist() -> None:
    commands = set(get_command(app).commands)  # type: ignore[attr-defined]
    assert {command.split()[1] for command in COMMANDS.values()} <= commands


@pytest.mark.parametrize(
    "command",
    ["plan no-model --bits 3 -o", "compile no-folder -o", "generate --plan no --model no --prompt text --pack"],
)
def test_an_output_that_would_replace_weights_is_refused_before_any_work(tmp_path: Path, command: str) -> None:
    weights = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(2)}, weights)
    before = weights.read_bytes()
    done = run_kvcal(*command.split(), weights)
    assert done.code == 5 and f"{weights} is a safetensors file of another program" in done.err
    assert weights.read_bytes() == before


@pytest.mark.parametrize(
    "command",
    [
        "plan {made}/none --bits 3 -o {file}/plan.safetensors",
        "compile {made}/run -o {file}/plan.safetensors",
        "generate --model {made}/none --plan {made}/run/plan.safetensors --prompt x --pack {file}/x.kv",
        "compare kitty --model {made}/none --out {file}/out",
        "eval {made}/run/plan.safetensors --model {made}/none --out {file}/out",
    ],
)
def test_outputs_are_checked_before_a_model_is_loaded(command: str, made: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    done = run_kvcal(*command.format(made=made, file=file).split())
    assert done.code in (2, 5) and "cannot make" in done.err and str(file) in done.err.replace("\n", "")
    assert done.code == 5 or "hint: choose one where you may write" in done.err


def test_folders_of_outputs_are_made(made: Path, tmp_path: Path) -> None:
    ran_well("compile", made / "run", "-o", tmp_path / "new" / "one" / "plan.safetensors")
    assert load_plan(tmp_path / "new" / "one" / "plan.safetensors") == load_plan(made / "run" / "plan.safetensors")
