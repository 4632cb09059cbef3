"""The terminal: tables that fit 80 columns, the remaining time, a closed pipe, completion."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_cases import ran_well
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from kvcal import console
from kvcal.__main__ import app
from kvcal.commands.options import complete_model, complete_recipe
from kvcal.console import TerminalReporter
from kvcal.recipe_files import recipe_names

ROOT = Path(__file__).parents[2]
PLAN = sorted((ROOT / "artifacts/plans").iterdir())[-1] / "plan.safetensors"
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
LINES = ["inspect {plan}", "recipes --ablations", "models", "size reasoner-10m --memory 800MB --batch 48"]


@pytest.mark.parametrize("line", LINES)
def test_tables_fit_80_columns(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "stdout", Console(width=80, force_terminal=True))
    done = ran_well(*line.format(plan=PLAN).split())
    assert max(cell_len(row) for row in ESCAPE.sub("", done.out).splitlines()) <= 80


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


@pytest.mark.parametrize("line", [f"inspect {PLAN} --json", "--help"])
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
    ("line", "expected"), [("kvcal run aqua", "aqua-kv"), ("kvcal verify plan --model rea", "reasoner-10m")]
)
def test_the_shell_is_given_the_names(line: str, expected: str) -> None:
    count = len(line.split()) - 1
    asked = {"_KVCAL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(count)}
    done = CliRunner().invoke(app, [], env=asked, prog_name="kvcal")
    assert done.exit_code == 0 and expected in done.output.split()
