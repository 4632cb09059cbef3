"""An interpreter beside kvcal's own, with other programs whose parsers read what kvcal exports.

Their pins would change kvcal's environment, so they are never installed there. $KVCAL_CONSUMERS names the interpreter;
`make consumers` makes one with compressed-tensors.
"""

from __future__ import annotations

import os
import subprocess

import pytest


def consumed(packages: tuple[str, ...], code: str, content: str) -> str:
    """What ``code`` prints in that interpreter, with ``content`` on stdin. Skips where it lacks one of ``packages``."""
    python = os.environ.get("KVCAL_CONSUMERS")
    if not python:
        pytest.skip("no interpreter with other programs: `make consumers`, then set KVCAL_CONSUMERS")
    for package in packages:
        look = f"import importlib.metadata as m; m.version({package!r})"
        if subprocess.run([python, "-c", look], capture_output=True).returncode:
            pytest.skip(f"KVCAL_CONSUMERS has no {package}")
    done = subprocess.run([python, "-c", code], input=content, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
