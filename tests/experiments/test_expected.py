"""experiments/expected.py: the model of time says what was measured within the errors that docs/kernels.md states."""

import runpy
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def test_measured_rows_are_within_the_stated_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    script = runpy.run_path(str(EXPERIMENTS / "expected.py"))
    fit = script["fitted"]()
    fitted, checked = (script["errors"](script[rows], fit) for rows in ("FITTED", "CHECKED"))
    assert max(map(abs, fitted)) < 0.09 and max(map(abs, checked)) < 0.18
    # docs/benchmarks.md: an H200 with so many GB; 16 and 2 bits, tokens a second and batch
    for gb, raw, coded in ((24, (124, 1), (1116, 10)), (80, (666, 14), (4297, 99))):
        chip = script["CHIPS"]["H200"]._replace(gb=gb)
        for fmt, (rate, batch) in (("16", raw), ("2", coded)):
            expected, fits = script["tokens_a_second"](chip, fmt, fit)
            assert expected == pytest.approx(rate, rel=0.09) and abs(fits - batch) <= 3
    script["main"]()
    page, printed = (EXPERIMENTS.parent / "docs/kernels.md").read_text(), capsys.readouterr().out
    for name in script["CHIPS"]:  # the page's rows are those that the script prints
        (row,) = (line for line in printed.splitlines() if line.startswith(f"| {name} |"))
        assert row in page
