"""Time and peak memory of every stage on the embedded model, each command in a process of its own.

    make bench          or          python -m pytest lab/bench_stages.py -m bench -s

KVCAL_BENCH_MODEL names another model.

Prints wall seconds and peak resident memory; importing torch and transformers alone is the first row.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.bench


def spawn(arguments: list[str]) -> tuple[float, float]:
    """(wall seconds, peak resident MiB) of a Python process, which must succeed."""
    started = time.monotonic()
    quiet = os.open(os.devnull, os.O_WRONLY)
    actions = [(os.POSIX_SPAWN_DUP2, quiet, 1), (os.POSIX_SPAWN_DUP2, quiet, 2)]
    child = os.posix_spawn(sys.executable, [sys.executable, *arguments], os.environ, file_actions=actions)
    _, status, usage = os.wait4(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, arguments
    return time.monotonic() - started, usage.ru_maxrss / 1024


def test_stages(tmp_path: Path) -> None:
    folder, plan = str(tmp_path), str(tmp_path / "plan.safetensors")
    model = os.environ.get("KVCAL_BENCH_MODEL", "reasoner-10m")
    commands = {
        "import torch, transformers": ["-c", "import torch, transformers; transformers.AutoModelForCausalLM"],
        "--help": ["-m", "kvcal", "--help"],
        "profile": ["-m", "kvcal", "profile", model, "--out", folder],
        "allocate": ["-m", "kvcal", "allocate", folder, "--set", "allocate.same_bytes_as=kivi-2"],
        "compile": ["-m", "kvcal", "compile", folder],
        "inspect": ["-m", "kvcal", "inspect", plan],
        "inspect --model": ["-m", "kvcal", "inspect", plan, "--model", model],
        "eval, two plans": [
            "-m", "kvcal", "eval", plan, "--model", model, "--out", folder, "--set", 'evaluate.against=["kivi-2"]',
        ],
    }  # fmt: skip
    print(f"\n{'stage':28s} {'seconds':>8s} {'peak MiB':>9s}")
    for name, arguments in commands.items():
        seconds, peak = spawn(arguments)
        print(f"{name:28s} {seconds:8.1f} {peak:9.0f}")
