"""compute-sanitizer over every kernel of a static cache: no access outside of what was allocated, and no
hazard between the threads of a block."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from filelock import FileLock
from sanitizer_calls import CASES, LENGTHS, STEPS, main

FOLDER = Path(__file__).parents[1] / "support"
SANITIZER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
FOUND = 99
# memcheck also reports calls of the driver's API that fail, of which cuda.core makes some to see what the
# driver has. And it knows allocations, not tensors: so every tensor is one, and what lies between them is
# nobody's.
TOOLS = {"memcheck": ("--report-api-errors", "no", "--padding", str(1 << 20)), "racecheck": ()}
ALONE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


@pytest.mark.gpu
@pytest.mark.skipif(SANITIZER is None, reason="no compute-sanitizer on PATH or in /usr/local/cuda/bin")
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("case", CASES)
def test_the_sanitizer_finds_nothing(case: str, tool: str) -> None:
    assert SANITIZER is not None
    command = [SANITIZER, "--tool", tool, *TOOLS[tool], "--error-exitcode", str(FOUND), sys.executable]
    environment = {**os.environ, **ALONE, "PYTHONPATH": os.pathsep.join([str(FOLDER.parent), str(FOLDER), *sys.path])}
    command += [str(FOLDER / "sanitizer_calls.py"), case]
    # Of each tool one at a time, whichever worker of the suite asks: of many at once, some were killed.
    with FileLock(Path(tempfile.gettempdir()) / f"kvcal-{tool}.lock"):
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode != FOUND, run.stdout
    assert run.returncode == 0 and "done" in run.stdout, run.stdout + run.stderr


@pytest.mark.parametrize("case", CASES)
def test_the_calls_run_on_the_reference_too(case: str) -> None:
    main(case, "cpu")
    formats = CASES[case]
    for fmt in formats or ():
        assert all(fmt.pages_read(length + STEPS - 1) > fmt.pages_read(length) for length in LENGTHS)
