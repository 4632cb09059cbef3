"""The table of mutants against the package as it is, and the outcomes of the runner."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import mutants
import pytest

PACKAGE = mutants.REPOSITORY / "kvcal"
MUTANTS = {mutant.name: mutant for mutant in mutants.load_mutants()}
FAST = MUTANTS["shift-without-rounding"]


@pytest.mark.parametrize("name", MUTANTS)
def test_the_old_text_is_there_once_and_becomes_other_python(name: str) -> None:
    mutant = MUTANTS[name]
    assert mutant.count(PACKAGE) == 1, f"kvcal/{mutant.file} has changed: mend mutants.toml"
    before = ast.dump(ast.parse((PACKAGE / mutant.file).read_text(encoding="utf-8")))
    assert ast.dump(ast.parse(mutant.mutated(PACKAGE))) != before


@pytest.mark.parametrize("name", MUTANTS)
def test_the_tests_named_exist(name: str) -> None:
    assert MUTANTS[name].tests
    for test in MUTANTS[name].tests:
        file, _, function = test.partition("::")
        source = (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
        assert f"def {function}(" in source if function else source


def test_a_fault_that_fails_its_test_is_killed(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutants.run([FAST])
    assert capsys.readouterr().out.startswith(f"killed    {FAST.name}  FAILED tests/")


def test_what_is_not_killed_is_told_apart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By pytest's exit codes: all passed, some failed, and not even collected."""
    codes = iter([0, 0, 1, 2])  # the first is of the package as it is
    monkeypatch.setattr(mutants, "run_pytest", lambda copy, tests: (next(codes), ""))
    unseen, seen, broken, gone = (replace(FAST, name=name) for name in ("unseen", "seen", "broken", "gone"))
    assert not mutants.run([unseen, seen, broken, replace(gone, old="no such text")])
    lines = capsys.readouterr().out.splitlines()
    outcomes = [["SURVIVED", "unseen"], ["killed", "seen"], ["BROKEN", "broken"], ["BROKEN", "gone"]]
    assert [line.split()[:2] for line in lines[:4]] == outcomes and lines[4:] == ["1 of 4 killed"]
    monkeypatch.setattr(mutants, "run_pytest", lambda copy, tests: (1, "FAILED tests/test_shift.py"))
    assert not mutants.run([FAST])
    assert capsys.readouterr().out == "the tests do not pass without a fault: FAILED tests/test_shift.py\n"
