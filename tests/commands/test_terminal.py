"""The terminal: tables that fit 80 columns, the remaining time, a closed pipe, completion."""

from __future__ import annotations

import io
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_cases import RECIPE, ran_well, run_kvcal, save_llama
from rich.cells import cell_len
from rich.console import Console
from transformers import PreTrainedTokenizerBase
from typer.testing import CliRunner

from kvcal import console
from kvcal.__main__ import app
from kvcal.commands.options import complete_model, complete_recipe
from kvcal.console import TerminalReporter
from kvcal.recipe_names import recipe_names

ROOT = Path(__file__).parents[2]
PLAN = sorted((ROOT / "artifacts/plans").iterdir())[-1] / "plan.safetensors"
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
LINES = [
    "inspect {plan}",
    "inspect {plan} --batch 64 --context 131072",
    "diff {plan} {folder}/tiny/plan.safetensors",
    "recipes --ablations",
    "models",
    "size reasoner-10m --memory 800MB --batch 48 --context 4096",
    "profile {model} --recipe {folder}/small.toml --out {folder}",
    "allocate {folder} --bits 8",
    "allocate {folder} --sweep",
    "inspect {folder}/tiny/plan.safetensors --why 0",
    "eval {folder}/tiny/plan.safetensors --model {model} --recipe {folder}/small.toml --max-kl 9 --out {folder}/tiny",
    "verify {folder}/tiny/plan.safetensors --model {model}",
]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns."""
    monkeypatch.setattr(console, "stdout", Console(width=80, force_terminal=True))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> dict[str, Path]:
    """A model, and a folder of `kvcal plan` for it."""
    folder = tmp_path_factory.mktemp("terminal")
    model = save_llama(folder / "model", tokenizer)
    (folder / "small.toml").write_text(RECIPE)
    command = ["plan", model, "--recipe", folder / "small.toml", "--bits", "8", "--out", folder, "--name", "tiny"]
    ran_well(*command)
    return {"model": model, "folder": folder, "plan": PLAN}


def words(text: str) -> set[str]:
    """Of tables, their rules apart."""
    return set(re.sub("[┏━┳┓┃┡╇┩│└─┴┘]", " ", ESCAPE.sub("", text)).split())


@pytest.mark.parametrize("line", LINES)
def test_tables_fit_80_columns(
    narrow: None, line: str, places: dict[str, Path], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """And break no word that the wide table has; words of more than 24 characters may be broken."""
    arguments = line.format(**places).split()
    done = ran_well(*arguments)
    assert max(cell_len(row) for row in ESCAPE.sub("", done.out).splitlines()) <= 80
    monkeypatch.setattr(console, "stdout", Console(width=400, force_terminal=False))
    wide = words(run_kvcal(*arguments).out)
    long = "".join(word for word in wide if len(word) > 24)
    new = {word for word in words(done.out) - wide if word.rstrip(",") not in wide and word not in long}
    assert new <= {"not", "shown", "in", "80", "columns:"}


def test_any_table_fits_with_its_words_whole(narrow: None, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(0)

    def text(most: int) -> str:
        return " ".join("x" * rng.randint(1, 18) for _ in range(rng.randint(0, most)))

    for width in (40, 80, 120):
        console.stdout.width = width
        for _ in range(60):
            num_columns = rng.randint(1, 9)
            headers = [text(3) for _ in range(num_columns)]
            rows = [[text(rng.choice((1, 2, 9))) for _ in range(num_columns)] for _ in range(rng.randint(0, 4))]
            console.show(("t", headers, rows))
            drawn = ESCAPE.sub("", capsys.readouterr().out)
            assert max(map(cell_len, drawn.splitlines())) <= width
            table, _, note = drawn.partition("not shown")
            assert words(table) <= words(" ".join(["t", *headers, *(cell for row in rows for cell in row)]))
            assert bool(note) or sum(map(len, headers)) <= width * 3


def test_brackets_and_colons_of_a_table_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    cell = "pip install 'kvcal[cuda]' :key:"
    console.show(("of [model]", ("k [bold]",), [(cell,)]))
    drawn = capsys.readouterr().out
    assert cell in drawn and "of [model]" in drawn and "k [bold]" in drawn


def test_work_within_work_keeps_its_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    drawn = io.StringIO()
    monkeypatch.setattr(console, "stderr", Console(file=drawn, width=80, force_terminal=True, get_time=lambda: now[0]))
    reporter = TerminalReporter()
    reporter._bars.get_time = lambda: now[0]
    with reporter.running():
        reporter(3, 10, "plans")  # resumed: three of an earlier run
        assert reporter.lines() == ["plans: 3 of 10"]
        reporter(0, 4, "text")
        now[0] = 100.0
        reporter(1, 4, "text")
        now[0] = 200.0
        reporter(2, 4, "text")
        assert reporter.lines() == ["plans: 3 of 10", "text: 2 of 4, about 3.3 min left"]
        reporter(4, 4, "text")
        reporter(0, 9, "problems")
        assert reporter.lines() == ["plans: 3 of 10", "problems: 0 of 9"]
        reporter(4, 10, "plans")  # ends what is within
        assert [line.split(",")[0] for line in reporter.lines()] == ["plans: 4 of 10"]
        reporter(0, 10, "plans")  # begun again
        reporter(10, 10, "plans")
        reporter(0, 2, "verify")
        assert reporter.lines() == ["verify: 0 of 2"]
        reporter._bars.refresh()
    assert "verify" in drawn.getvalue() and "0/2" in drawn.getvalue()


def test_without_a_terminal_a_line_comes_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "PLAIN_SECONDS", 0.0)
    reporter = TerminalReporter()
    reporter(0, 3, "evaluate: plans")
    reporter(1, 4, "evaluate: text")
    TerminalReporter(quiet=True)(1, 4, "quiet")
    assert capsys.readouterr().err.splitlines() == ["evaluate: plans: 0 of 3; evaluate: text: 1 of 4"]


@pytest.mark.parametrize("line", ["recipes", "recipes default", f"inspect {PLAN} --json", "--help", "models"])
def test_a_closed_pipe_ends_a_command_without_a_word(line: str) -> None:
    """As `kvcal recipes | head -1` does, or earlier."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "kvcal", *line.split()], stdout=write, stderr=subprocess.PIPE, cwd=ROOT
    )
    os.close(write)
    assert done.stderr == b"" and done.returncode == (1 if line == "--help" else 0)


def test_names_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("mine.toml", "mine.txt", ".hidden.toml"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert {"mixkvq", "mine/", "mine.toml"} < set(complete_recipe("mi")) and "mine.txt" not in complete_recipe("mi")
    assert set(recipe_names()) < set(complete_recipe(""))
    assert complete_model("re") == ["reasoner-10m"] and complete_model("m") == ["mine/"]
    assert complete_model(f"{tmp_path}/mi") == [f"{tmp_path}/mine/"] and complete_recipe("none/") == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("kvcal run aqua", "aqua-kv"),
        ("kvcal eval plan --recipe uniform-", "uniform-2"),
        ("kvcal plan reas", "reasoner-10m"),
        ("kvcal verify plan --model rea", "reasoner-10m"),
        ("kvcal recipes pm", "pm-kvq"),
    ],
)
def test_the_shell_is_given_the_names(line: str, expected: str) -> None:
    count = len(line.split()) - 1
    asked = {"_KVCAL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(count)}
    done = CliRunner().invoke(app, [], env=asked, prog_name="kvcal")
    assert done.exit_code == 0 and expected in done.output.split()
