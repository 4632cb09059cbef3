"""The terminal: tables that fit 80 columns, the remaining time, a closed pipe, completion."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from artifact_subjects import profile
from cli_cases import ran_well
from report_cases import K3, UNIFORM, V2, V8, attention, evaluation, plan_of, row, with_tasks
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from kvcal import console, tables
from kvcal.__main__ import app
from kvcal.commands.values import complete_model, complete_recipe
from kvcal.console import LONG_CELL, TerminalReporter, View, show
from kvcal.geometry import StateGeometry
from kvcal.plan.plan import Format, LayerPlan
from kvcal.recipe_files import recipe_names
from kvcal.stages.allocate.stage import Choices, OptionCost
from kvcal.stages.compare import Comparison, Entry, Refusal

ROOT = Path(__file__).parents[2]
PLAN = sorted((ROOT / "artifacts/plans").iterdir())[-1] / "plan.safetensors"
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
LINES = ["inspect {plan}", "list recipes", "list models", "size reasoner-10m --memory 800MB --batch 48"]


@pytest.mark.parametrize("line", LINES)
def test_tables_fit_80_columns(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "stdout", Console(width=80, force_terminal=True))
    done = ran_well(*line.format(plan=PLAN).split())
    assert max(cell_len(row) for row in ESCAPE.sub("", done.out).splitlines()) <= 80


ROTATED = Format(2, "token", 128, 8, 64, quantizer="rotated")
SLIDING = (
    LayerPlan(attention(0, window=512)),
    LayerPlan(attention(1), ROTATED, ROTATED, k_basis=True, v_basis=True, k_feedback=True, v_feedback=True),
    LayerPlan(attention(2), K3, V2),
    LayerPlan(attention(3), Format(4, "token", 32), V2),
    LayerPlan(StateGeometry(4, 4096)),
)
ROWS = [
    with_tasks(row(name, UNIFORM, kl, 6)) for name, kl in (("16-bit", 1e-7), ("kivi-2", 0.05), ("a-long-name", 0.01))
]
REFUSED = Entry("mine @ 1", "mine", "r", 1.0, False, Refusal("build", "too small by far " * 20, None, 3))
COMPARISON = Comparison(
    "m", {}, "text", "f", 1, UNIFORM.workload,
    (REFUSED, *(Entry(one.name, one.name, "r", None, one is not ROWS[2], None, one) for one in ROWS)),
)  # fmt: skip
COSTS = Choices("kl loss", (OptionCost("layer 10 K and V", "2 rotated g128", 10**9, 0.5, 0.25, None, True),) * 3)
VIEWS = {
    "eval": lambda: tables.evaluation_table(evaluation(*ROWS)),
    "compare": lambda: tables.comparison_table(COMPARISON),
    "layers": lambda: tables.layer_table(SLIDING, "bfloat16", UNIFORM.workload),
    "plan": lambda: tables.plan_table(UNIFORM, UNIFORM.workload, None),
    "profile": lambda: tables.profile_table(profile()),
    "choices": lambda: tables.choices_table(COSTS),
}


def drawn(view: View, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(console, "stdout", Console(width=width, force_terminal=True))
    show(view)
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("name", VIEWS)
def test_columns_leave_in_order_and_cells_stay_whole(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    view = VIEWS[name]()
    text = ESCAPE.sub("", drawn(view, width, monkeypatch, capsys))
    assert max(map(cell_len, text.splitlines())) <= width
    [left_out] = re.findall(r"left out on \d+ columns: ((?:.|\n)*)", text) or [""]
    named = [header for header in " ".join(left_out.split()).split(", ") if header]
    shown = len(view.headers) - len(named)
    assert shown > 1 and named == list(view.headers[shown:])
    for cells in view.rows:
        for cell in cells[:shown]:
            assert cell_len(cell) > LONG_CELL or re.search(rf"[│┃] +{re.escape(cell)} +│|│ +│", text), cell
        assert all(word in text for cell in cells[:shown] for word in cell.split())
    assert all(word in text for header in view.headers[:shown] for word in header.split())
    assert all(word in text for word in view.legend.split())


def test_what_says_most_stays_on_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And with room nothing leaves: three tasks take fewer than 200 columns."""
    narrow, wide = (ESCAPE.sub("", drawn(VIEWS["eval"](), width, monkeypatch, capsys)) for width in (80, 200))
    [line] = [line for line in narrow.splitlines() if line.startswith("│ a-long-name")]
    assert [cell.strip() for cell in line.strip("│").split("│")][:4] == [
        "a-long-name", f"{UNIFORM.bits_per_value():.3f}", "0.01000 ± 0.01000", "75.0 ± 8.5",
    ]  # fmt: skip
    assert "left out" in narrow and "left out" not in wide and "75.0 ± 14.7" not in wide and "6 of 8" in wide


def test_formats_are_short_and_told_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = ESCAPE.sub("", drawn(VIEWS["layers"](), 80, monkeypatch, capsys))
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line[0] == "│"]
    assert [cells[1:4] for cells in rows] == [
        ["16", "16", "window 512"], ["2", "2", "basis"], ["3", "2", "uniform"], ["4", "2", "uniform 2"],
        ["", "", "state"],
    ]  # fmt: skip
    words = " ".join(text.split())
    for meaning in (
        "basis: rotated g128 in basis with feedback", "uniform: K channel g64, V token g32", "uniform 2: token g32"
    ):  # fmt: skip
        assert words.count(meaning) == 1
    assert tables.side_name(SLIDING[1], "k") == "2 rotated g128 in basis with feedback"


def test_bits_have_colours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    view = tables.layer_table(plan_of(LayerPlan(attention(0), K3, V8)).layers, "bfloat16", UNIFORM.workload)
    assert "\x1b[33m3\x1b[0m" in (text := drawn(view, 80, monkeypatch, capsys)) and "\x1b[35m8\x1b[0m" in text
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[3[0-7]m", drawn(view, 80, monkeypatch, capsys))


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
    """As `kvcal list recipes | head -1` does, or earlier."""
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
    ("line", "expected"), [("kvcal run aqua", "aqua-kv"), ("kvcal inspect plan --model rea", "reasoner-10m")]
)
def test_the_shell_is_given_the_names(line: str, expected: str) -> None:
    count = len(line.split()) - 1
    asked = {"_KVCAL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(count)}
    done = CliRunner().invoke(app, [], env=asked, prog_name="kvcal")
    assert done.exit_code == 0 and expected in done.output.split()
