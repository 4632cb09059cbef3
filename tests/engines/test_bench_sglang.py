"""The benchmark inside SGLang, on a CPU: a plan made there, in a process of its own as when it serves. ``make
engines`` runs this test."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from sglang_environment import CHECKOUT, python_with_sglang, variables_in_sglang
from vllm_environment import Unavailable

from kvcal.engines.support import TESTED

pytestmark = pytest.mark.engines


def test_every_row_names_the_plan_that_it_times(tmp_path: Path) -> None:
    try:
        python = python_with_sglang(TESTED["sglang"][-1])
    except Unavailable as reason:
        pytest.skip(str(reason))
    words = "--caches kvcal --bits 3.5 --shape tiny --layers 2 --memory 3000000 --context 1024 512 --passes 1 --steps 3"
    words += " --out speed.json"
    on_cpu = {"HF_HUB_OFFLINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0"}
    done = subprocess.run(
        [str(python), str(CHECKOUT / "lab" / "bench_sglang.py"), *words.split()], cwd=tmp_path,
        env=os.environ | variables_in_sglang(tmp_path) | on_cpu, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "speed.json").read_text())
    for results in found["results"].values():
        (row,) = results.values()
        assert len(row["passes"][0]["step_s"]) == 3 and row["shares"] is not None, row
        assert row["passes"][0]["tokens_per_s"] > 0 and row["sequences"] > 1
    assert f"| {found['plans']['3.5 bits']} |" in done.stdout and "formats, sha256" in done.stdout
