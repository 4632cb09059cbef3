"""Runs tests against small faults of the package, one at a time: a fault that fails no test is a gap in the tests.

    python tests/support/mutants.py                 every mutant of mutants.toml against the tests named for it
    python tests/support/mutants.py NAME ...        these alone
    python tests/support/mutants.py --all-tests     against the whole suite

The package and its tests are copied to a temporary folder, and faults are made there. Prints a line for each mutant,
killed or SURVIVED, and a count. Exit code 1 where one survives, its old text is not in its file exactly once, or its
tests do not run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("mutants.toml")
NOT_COPIED = shutil.ignore_patterns(".*", "artifacts", "build", "dist")
TIMEOUT_S = 600
OUTCOMES = {0: "SURVIVED", 1: "killed"}  # pytest's exit codes: all tests passed, some failed


@dataclass(frozen=True)
class Mutant:
    """``old`` text, once in ``file`` of the package, becomes ``new``; ``tests`` (files of tests/, or tests in
    them) should fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def count(self, package: Path) -> int:
        """How often the old text is in its file."""
        return (package / self.file).read_text(encoding="utf-8").count(self.old)

    def mutated(self, package: Path) -> str:
        """The file's text with the fault."""
        return (package / self.file).read_text(encoding="utf-8").replace(self.old, self.new)


def load_mutants(path: Path = TABLE) -> tuple[Mutant, ...]:
    """The mutants of a table, in its order."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return tuple(Mutant(name, **fields | {"tests": tuple(fields["tests"])}) for name, fields in table.items())


def run_pytest(copy: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Exit code of the tests in a copy of the repository, and the line that names the first failure."""
    # Bytecode is not written: Python would take that of another mutant of the same second and size for current.
    environment = os.environ | {
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        *(f"tests/{test}" for test in tests),
    ]
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return 1, f"no end after {TIMEOUT_S} s"
    lines = done.stdout.splitlines()
    return done.returncode, next((line for line in lines if line.startswith(("FAILED", "ERROR"))), "")


def run_mutant(mutant: Mutant, copy: Path, tests: Sequence[str]) -> tuple[str, str]:
    """("killed", the test), ("SURVIVED", "") or ("BROKEN", why there is no answer); ``copy`` is left as it was."""
    file = copy / "kvcal" / mutant.file
    original = file.read_text(encoding="utf-8")
    count = mutant.count(copy / "kvcal")
    if count != 1:
        return "BROKEN", f"its old text is {count} times in kvcal/{mutant.file}, expected once"
    file.write_text(mutant.mutated(copy / "kvcal"), encoding="utf-8")
    try:
        code, failure = run_pytest(copy, tests)
    finally:
        file.write_text(original, encoding="utf-8")
    return OUTCOMES.get(code, "BROKEN"), failure


def run(mutants: Sequence[Mutant], all_tests: bool = False) -> bool:
    """Run and print; whether all were killed."""
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "repository"
        shutil.copytree(REPOSITORY, copy, ignore=NOT_COPIED)
        every = ["."] if all_tests else list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
        code, failure = run_pytest(copy, every)
        if code:
            print(f"the tests do not pass without a fault: {failure or f'exit code {code}'}")
            return False
        for mutant in mutants:
            outcome, why = run_mutant(mutant, copy, ["."] if all_tests else mutant.tests)
            outcomes.append(outcome)
            print(f"{outcome:8s}  {mutant.name}  {why}".rstrip(), flush=True)
    print(f"{outcomes.count('killed')} of {len(outcomes)} killed")
    return set(outcomes) <= {"killed"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants of the table; all without one")
    parser.add_argument("--all-tests", action="store_true", help="the whole suite instead of the tests named")
    given = parser.parse_args()
    mutants = {mutant.name: mutant for mutant in load_mutants()}
    unknown = sorted(set(given.names) - mutants.keys())
    if unknown:
        parser.error(f"mutants {unknown} unknown, expected some of {sorted(mutants)}")
    chosen = [mutants[name] for name in given.names] or list(mutants.values())
    return 0 if run(chosen, given.all_tests) else 1


if __name__ == "__main__":
    sys.exit(main())
