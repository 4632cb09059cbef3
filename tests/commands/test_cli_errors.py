"""Bad input at the command line: a clear message, the right exit code, nothing half-written."""

from __future__ import annotations

import errno
import io
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from cli_cases import RECIPE, ran_well, run_kvcal, save_falcon, save_llama
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from kvcal.__main__ import app
from kvcal.artifact import COMMANDS
from kvcal.folder import Folder, Job
from kvcal.run import formats, pipeline
from kvcal.stages import profile as profile_stage

Files = tuple[Path, Path]  # the model's folder, the recipe
KEYS = """
[search]
values = [{{ num_bits = 2 }}]
keys = [{{ num_bits = 2, boost = {{ score = "magnitude", tiers = [{{ {} }}] }} }}]
[cache]
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Files:
    folder = tmp_path_factory.mktemp("errors")
    recipe = folder / "small.toml"
    recipe.write_text(RECIPE)
    return save_llama(folder / "tiny-llama", tokenizer), recipe


@pytest.fixture(scope="module")
def run_folder(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every artifact but the evaluation."""
    from kvcal.models.load import load
    from kvcal.progress import Silent
    from kvcal.recipe_files import load_recipe

    folder = Folder.create(tmp_path_factory.mktemp("run"))
    recipe, loaded = load_recipe(str(files[1])), load(str(files[0]))
    formats.profile_folder(loaded, folder, recipe)
    formats.allocate_recipe(Job(recipe, loaded, folder, Silent()))
    pipeline.compile_folder(folder)
    return folder.path


def no_temporary_files(folder: Path) -> bool:
    return not [path for path in folder.rglob("*") if path.name.endswith(".tmp")]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["run", "no-such-recipe"], 2, "no-such-recipe"),
        (["profile", "./no/such/model", "--out", "{tmp}"], 2, "no/such/model"),
        (["allocate", "{tmp}", "--bits", "3"], 5, "does not exist"),
        (["allocate", "{tmp}", "--bits", "3"], 5, "hint: check the path, or make it first: kvcal profile"),
        (["compile", "{tmp}"], 5, "does not exist"),
        (["compile", "{tmp}"], 5, "hint: check the path, or make it first: kvcal allocate"),
        (["reparam", "{tmp}", "--model", "{model}"], 5, "hint: check the path, or make it first: kvcal allocate"),
        (["inspect", "{tmp}/none.safetensors"], 5, "hint: check the path, or make it first: kvcal compile"),
        (["inspect", "{tmp}/none.safetensors"], 5, "does not exist"),
        (["inspect", "{recipe}"], 5, "not a safetensors file"),
        (["allocate", "{run}", "--budget", "24 parsecs"], 2, "parsecs"),
        (["allocate", "{run}", "--bits", "3", "--set", "allocate.granularity=neuron"], 2, "neuron"),
        (
            ["allocate", "{run}", "--bits=3", "--set=allocate.granularity=head", "--set=allocate.objective=kl"],
            2,
            "per layer",
        ),
        (["allocate", "{run}", "--set", "allocate.same_bytes_as=default"], 2, "is no recipe of [formats] alone"),
        (["allocate", "{run}", "--bits", "1e308"], 2, "bits = 1e+308: Input should be less than or equal to 4096"),
        (["allocate", "{run}", "--bits", "4.2", "--context", "256"], 3, "raise the bits, or --context"),
        (["compile", "{run}", "-o", "{tmp}"], 5, "{tmp}"),
        (["profile", "{model}", "--out", "{tmp}", "--recipe", "{recipe}", "--seq-len", "5000"], 2, "context"),
        (["profile", "{model}", "--out", "{tmp}", "--recipe", "{recipe}", "--data", "{tmp}/none.txt"], 2, "none.txt"),
        (["profile", "{model}", "--out", "{recipe}/folder", "--recipe", "{recipe}"], 2, "cannot make this folder"),
        (["generate", "--model", "{model}", "--plan", "{run}/plan.safetensors", "--prompt", " "], 2, "empty"),
        (["generate", "--model", "{model}", "--plan", "{run}/plan.safetensors", "--prompt", "a", "--chat"], 2, "chat"),
        (
            ["generate", "--model", "{model}", "--plan", "{run}/plan.safetensors", "--prompt", "a",
             "--max-new-tokens", "4000"],
            2,
            "context",
        ),
        (
            ["eval", "{run}/plan.safetensors", "--model={model}", '--set=evaluate.against=["none"]', "--out={tmp}"],
            2,
            "none",
        ),
        (["eval", "{run}/plan.safetensors", "--model", "reasoner-10m", "--out", "{tmp}"], 5, "reasoner-10m"),
        (["verify", "{run}/plan.safetensors", "--model", "reasoner-10m"], 5, "reasoner-10m"),
        (["run"], 2, "Missing argument"),
    ],
)  # fmt: skip
def test_refusals(
    arguments: list[str],
    code: int,
    says: str,
    files: Files,
    run_folder: Path,
    tmp_path: Path,
) -> None:
    places = {"tmp": tmp_path, "model": files[0], "recipe": files[1], "run": run_folder}
    done = run_kvcal(*(argument.format(**places) for argument in arguments))
    assert (done.code, says.format(**places) in done.err) == (code, True), done.err
    assert "Traceback" not in done.err and done.out == ""
    assert no_temporary_files(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("context = 512", "contxt = 512", "unknown key 'allocate.contxt' (allowed: budget, kv_budget, bits, same_by"),
        ("context = 512", "contxt = 512", "hint: did you mean 'context'?"),
        ("[allocate]", "[alocate]", "unknown key 'alocate' (allowed: name, description, model, formats, data, profile"),
        ("[allocate]", "[alocate]", "hint: did you mean 'allocate'"),
        ("num_samples = 2, seq_len = 224", "num_sampels = 2", "unknown key 'evaluate.data.num_sampels' (allowed: sou"),
        ("num_samples = 2, seq_len = 224", "num_sampels = 2", "hint: did you mean 'num_samples'?"),
        ("[cache]", "[tune]\nobjectve = 1\n[cache]", "unknown key 'tune.objectve' (allowed: tasks, "),
        ("[cache]", KEYS.format("bits = 4"), "'search.keys.0.boost.tiers.0.bits' (allowed: num_bits, share, above)"),
        ("[cache]", KEYS.format("bits = 4"), "hint: did you mean 'num_bits'?"),
        ("[cache]", KEYS.format("x = 1"), "unknown key 'search.keys.0.boost.tiers.0.x' (allowed: num_bits, sh"),
        ("batch = 2", "batch = 0", "allocate.batch = 0: Input should be greater than or equal to 1"),
        ("num_bits = [2, 4]", "num_bits = [2, 5]", "profile.num_bits"),
        ('same_bytes_as = "kivi-2"', "", "exactly one of"),
        ("[data]", "[data", "not TOML"),
        ('tasks = ["chain"]', 'tasks = ["chess"]', "chess"),
        ("max_size = 20", "max_size = 12", "max_size = 12 is out of range: choose 20 to 5000"),
    ],
)
def test_bad_recipes(old: str, new: str, says: str, files: Files, tmp_path: Path) -> None:
    recipe = tmp_path / "bad.toml"
    assert old in RECIPE
    recipe.write_text(RECIPE.replace(old, new))
    done = run_kvcal("run", recipe, "--model", files[0], "--out", tmp_path / "out")
    assert done.code == 2 and says in done.err and str(recipe) in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["generate", "pack-prefix"])
def test_a_prompt_that_is_no_text(
    command: str,
    files: Files,
    run_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a terminal's stdin is read, and as a lenient one is."""
    for errors in ("strict", "surrogateescape"):
        stdin = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\x00bad"), encoding="utf-8", errors=errors)
        monkeypatch.setattr(sys, "stdin", stdin)
        output = ("-o", tmp_path / "p.kv") if command == "pack-prefix" else ()
        given = ("--model", files[0], "--plan", run_folder / "plan.safetensors", "--prompt", "-", *output)
        done = run_kvcal(command, *given)
        assert done.code == 2 and "stdin is not UTF-8" in done.err, done.err


def test_unsupported_model(files: Files, tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    falcon = save_falcon(tmp_path / "falcon", tokenizer)
    done = run_kvcal("profile", falcon, "--out", tmp_path / "out", "--recipe", files[1])
    assert done.code == 4 and "bypasses" in done.err


def test_missing_tokenizer(files: Files, tmp_path: Path) -> None:
    bare = shutil.copytree(files[0], tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    done = run_kvcal("profile", bare, "--out", tmp_path / "out", "--recipe", files[1])
    assert done.code == 2 and "tokenizer" in done.err


def test_empty_data(files: Files, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    arguments = ("--out", tmp_path / "out", "--recipe", files[1], "--data", tmp_path / "empty.txt")
    done = run_kvcal("profile", files[0], *arguments)
    assert done.code == 2 and "empty" in done.err


def test_nan_activations(files: Files, tmp_path: Path) -> None:
    broken = shutil.copytree(files[0], tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"][3, 5] = torch.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    done = run_kvcal("profile", broken, "--out", tmp_path / "out", "--recipe", files[1])
    assert done.code == 4 and "layer 1" in done.err
    assert not (tmp_path / "out" / "profile.safetensors").exists()


@pytest.mark.parametrize("stage", ["profile", "allocation", "plan"])
def test_truncated_and_flipped_artifacts(stage: str, files: Files, run_folder: Path, tmp_path: Path) -> None:
    commands = {
        "profile": ("allocate", "{}", "--bits", 4),
        "allocation": ("compile", "{}"),
        "plan": ("inspect", "{}/plan.safetensors"),
    }
    for number, damage in enumerate((lambda data: data[: len(data) // 2], lambda data: flipped(data))):
        copy = Path(shutil.copytree(run_folder, tmp_path / str(number)))
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
    "run, fixed formats": "run kivi-2 --model {other} --out {run}",
    "profile": "profile {other} --recipe {recipe} --out {run}",
    "profile, other data": "profile {other} --recipe {recipe} --set data.seed=9 --out {run}",
    "allocate": "allocate {run} --bits 5",
    "reparam": "reparam {run} --model {other} --samples 1 --seq-len 256",
    "fit-predictors": "fit-predictors {run} --model {other} --samples 2 --seq-len 256",
    "compile --fold": "compile {run} --fold {run}/folded --model {other}",
    "search": "search best --model {other} --data {text} --samples 2 --seq-len 64 --set data.min_len=64 --out {run}",
    "tune": "tune mixkvq --model {other} --out {run}",
}


@pytest.mark.parametrize("command", OTHERS.values(), ids=OTHERS)
def test_folder_of_another_model(
    command: str,
    files: Files,
    run_folder: Path,
    other_model: Path,
    tmp_path: Path,
) -> None:
    """Whatever else differs, too: the folder is left alone. `kvcal allocate`'s model is its profile's."""
    folder = Path(shutil.copytree(run_folder, tmp_path / "out"))
    if command.startswith("allocate"):
        run_kvcal("profile", other_model, "--recipe", files[1], "--out", tmp_path / "of-other")
        shutil.copy(tmp_path / "of-other" / "profile.safetensors", folder)
    (text := tmp_path / "text.txt").write_text("one two three four five six seven\n" * 4000)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    places = {"recipe": files[1], "other": other_model, "run": folder, "text": text}
    done = run_kvcal(*(argument.format(**places) for argument in command.split()))
    assert done.code == 5 and "was made from another model: model.weights_sha256" in done.err, done.err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_an_unfinished_stage_of_another_model(
    files: Files,
    other_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    out = ("--out", tmp_path / "out", "--recipe", files[1])
    with monkeypatch.context() as patched:
        patched.setattr(profile_stage, "divergence_means", interrupt)
        assert run_kvcal("profile", files[0], *out).code == 130
    partial = tmp_path / "out" / "profile.partial.safetensors"
    before = partial.read_bytes()
    done = run_kvcal("profile", other_model, *out)
    assert done.code == 5 and f"{partial} was made from another model" in done.err
    assert partial.read_bytes() == before
    assert "goes on after" in run_kvcal("profile", files[0], *out).err


def test_full_disk(
    files: Files,
    run_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy = Path(shutil.copytree(run_folder, tmp_path / "out"))
    before = {path.name: path.read_bytes() for path in copy.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    for arguments in (
        ("allocate", copy, "--bits", 5),
        ("compile", copy, "-o", copy / "other.safetensors"),
        ("profile", files[0], "--out", copy, "--recipe", files[1], "--set", "data.seed=9"),
        ("eval", copy / "plan.safetensors", "--model", files[0], "--recipe", files[1], "--out", copy),
    ):
        done = run_kvcal(*arguments)
        assert done.code == 5 and "No space left" in done.err, done.err
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before


@pytest.mark.parametrize("stage", ["profile", "allocate", "compile", "evaluate"])
def test_interrupt_in_every_stage_and_resume(
    stage: str,
    files: Files,
    run_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C at a stage's first write of a result (and, for the profile, after its first sample)."""
    out = tmp_path / "out"

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if stage == "profile":
            patched.setattr(profile_stage, "divergence_means", interrupt)
        elif stage == "allocate":
            patched.setattr(formats.allocation_stage, "save", interrupt)
        elif stage == "compile":
            patched.setattr(pipeline, "save_plan", interrupt)
        else:
            patched.setattr("kvcal.stages.evaluate.measure_tasks", interrupt)
        stopped = run_kvcal("run", files[1], "--model", files[0], "--out", out)
    assert stopped.code == 130 and "interrupted" in stopped.err
    assert no_temporary_files(out)
    done = ran_well("run", files[1], "--model", files[0], "--out", out)
    if stage == "profile":
        assert "goes on after" in done.err
    assert (out / "plan.safetensors").read_bytes() == (run_folder / "plan.safetensors").read_bytes()


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Its tokens have no embeddings, which torch tells with an IndexError."""
    model = save_llama(tmp_path / "model", tokenizer, vocab_size=100)
    done = run_kvcal("profile", model, "--data", "tasks", "--out", tmp_path / "out")
    assert done.code == 2 and f"has {tokenizer.vocab_size} tokens, and the model embeddings for 100" in done.err


def test_the_commands_of_hints_exist() -> None:
    from typer.main import get_command

    assert {command.removeprefix("kvcal ") for command in COMMANDS.values()} <= set(get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "command",
    [
        "plan no-model --bits 3",
        "compile no-folder",
        "pack-prefix --plan no-plan --model no-model --prompt text",
        "export no-plan --to kvtuner",
    ],
)
def test_an_output_that_would_replace_weights_is_refused_before_any_work(tmp_path: Path, command: str) -> None:
    weights = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(2)}, weights)
    before = weights.read_bytes()
    done = run_kvcal(*command.split(), "-o", weights)
    assert done.code == 5 and f"{weights} is a safetensors file of another program" in done.err
    assert weights.read_bytes() == before
