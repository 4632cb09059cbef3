"""A run of a benchmark inside an engine, on a CPU, with a tiny model, and the checks of its table."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from vllm_environment import CHECKOUT

WORDS = "--caches kvcal --bits 3.5 --shape tiny --layers 2 --memory 3000000 --context 1024 512 --passes 1 --steps 3"


def timed_rows(python: Path, script: str, folder: Path, environment: dict[str, str]) -> list[dict[str, Any]]:
    """Rows of both contexts that ``lab/script`` times; AssertionError where its table does not name the plan."""
    done = subprocess.run(
        [str(python), str(CHECKOUT / "lab" / script), *WORDS.split(), "--out", "speed.json"], cwd=folder,
        env=os.environ | environment | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((folder / "speed.json").read_text())
    assert f"| {found['plans']['3.5 bits']} |" in done.stdout and "formats, sha256" in done.stdout
    rows = [row for results in found["results"].values() for row in results.values()]
    assert len(rows) == len(found["results"]) == 2
    for row in rows:
        assert len(row["passes"][0]["step_s"]) == 3 and row["shares"] is not None, row
    return rows
