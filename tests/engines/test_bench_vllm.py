"""The benchmark inside vLLM, on a CPU: a plan made there, in a process of its own as when it serves. ``make
engines`` runs this test."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from vllm_environment import CHECKOUT, Unavailable, python_with_vllm, variables_in

from kvcal.engines.support import TESTED

pytestmark = pytest.mark.engines


def test_every_row_names_the_plan_that_it_times(tmp_path: Path) -> None:
    try:
        python = python_with_vllm(TESTED["vllm"][-1])
    except Unavailable as reason:
        pytest.skip(str(reason))
    words = "--caches kvcal --bits 3.5 --shape tiny --layers 2 --memory 3000000 --context 1024 512 --passes 1 --steps 3"
    words += " --out speed.json"
    done = subprocess.run(
        [str(python), str(CHECKOUT / "lab" / "bench_vllm.py"), *words.split()], cwd=tmp_path,
        env=os.environ | variables_in(tmp_path) | {"HF_HUB_OFFLINE": "1", "VLLM_CACHE_ROOT": str(tmp_path / "root")},
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "speed.json").read_text())
    for results in found["results"].values():
        (row,) = results.values()
        assert len(row["passes"][0]["step_s"]) == 3 and row["shares"] is not None, row
    assert f"| {found['plans']['3.5 bits']} |" in done.stdout and "formats, sha256" in done.stdout
