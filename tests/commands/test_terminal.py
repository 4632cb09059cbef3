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
from kvcal.progress import Phase
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


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_remaining_time_survives_slow_steps_and_other_work(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    reporter = TerminalReporter(clock=clock)

    def lines() -> list[str]:
        return [reporter.line(work) for work in reporter._open]

    reporter(3, 10, "plans")  # resumed: three of an earlier run
    assert lines() == ["plans: 3 of 10"]
    reporter(0, 4, "text")
    clock.now = 100.0
    reporter(1, 4, "text")
    assert lines() == ["plans: 3 of 10", "text: 1 of 4, about 5.0 min left"]
    clock.now = 150.0  # a slow step: it counts down
    assert lines()[1] == "text: 1 of 4, about 4.2 min left"
    clock.now = 220.0  # slower than the first: the others may be as slow
    assert lines()[1] == "text: 1 of 4, about 3.7 min left"
    reporter(4, 4, "text")
    reporter(0, 9, "problems")
    assert lines() == ["plans: 3 of 10", "problems: 0 of 9"]
    reporter(4, 10, "plans")  # ends what is within
    assert lines() == ["plans: 4 of 10, about 22.0 min left"]
    reporter(0, 4, "text")
    clock.now = 230.0
    reporter(2, 4, "text")
    assert lines()[1] == "text: 2 of 4, about 10 s left"  # begun anew
    reporter(10, 10, "plans")
    reporter(0, 2, "verify")
    assert lines() == ["verify: 0 of 2"]
    assert "plans: 3 of 10; text: 1 of 4, about 5.0 min left" in capsys.readouterr().err.splitlines()


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


def test_one_line_for_each_stage_tells_what_is_left_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    reporter = TerminalReporter(clock=clock)
    reporter.expect(
        [Phase("profile: gradients", 100.0), Phase("reparam: search", 50.0), Phase("evaluate: plans", 200.0)]
    )
    for done in range(5):
        clock.now = 10.0 * done
        reporter(done, 4, "profile: gradients")
    clock.now = 45.0
    reporter(0, 2, "evaluate: plans")  # the stage between is current
    clock.now = 100.0
    reporter(10, 90, "evaluate: text")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "stage 1 of 3: profile: gradients",
        "profile: gradients: 2 of 4, about 20 s left; about 2.0 min left in all",
        "profile: gradients: 4 of 4, about 0 s left; about 100 s left in all",
        "stage 3 of 3: evaluate: plans; the one before took 45 s; about 80 s left in all",
        "evaluate: plans: 0 of 2; evaluate: text: 10 of 90; about 52 s left in all",
    ]


def test_the_terminal_has_one_bar_above_the_others_for_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, drawn = Clock(), io.StringIO()
    terminal = Console(file=drawn, width=80, force_terminal=True)
    monkeypatch.setattr(console, "stderr", terminal)
    reporter = TerminalReporter(clock=clock)
    with reporter.running():
        reporter.expect([Phase("a", 30.0), Phase("b", 60.0)])
        reporter(0, 3, "a")
        clock.now = 60.0
        reporter(2, 3, "a")
        reporter._bars.refresh()
    shown = re.sub(r"\x1b\[[0-9;]*[a-zA-Z]", "", drawn.getvalue())
    last = [line for line in shown.splitlines() if "left" in line][-2:]
    assert last[0].startswith("all stages") and "0/2" in last[0] and "0:03:30 left" in last[0]
    assert last[1].startswith("a") and "2/3" in last[1] and "0:00:30 left" in last[1]
    assert max(map(len, last)) <= 80
