"""The benchmark inside SGLang, on a CPU: a plan made there, in a process of its own as when it serves. ``make
engines`` runs this test."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_bench import timed_rows
from sglang_environment import python_with_sglang, variables_in_sglang
from vllm_environment import needed

from kvcal.engines.support import TESTED

pytestmark = pytest.mark.engines


def test_every_row_names_the_plan_that_it_times(tmp_path: Path) -> None:
    python = needed(python_with_sglang, TESTED["sglang"][-1])
    environment = variables_in_sglang(tmp_path) | {"SGLANG_CPU_OMP_THREADS_BIND": "0"}
    for row in timed_rows(python, "bench_sglang.py", tmp_path, environment):
        assert row["passes"][0]["tokens_per_s"] > 0 and row["sequences"] > 1
