"""The benchmark inside vLLM, on a CPU: a plan made there, in a process of its own as when it serves; and models
with states, and that draft, as far as no engine is needed. ``make engines`` runs the first test."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from engine_bench import timed_rows
from vllm_environment import CHECKOUT, needed, python_with_vllm, variables_in

from kvcal.engines.capacity import capacity
from kvcal.engines.support import TESTED, require_served
from kvcal.plan.plan import load_plan

sys.path.insert(0, str(CHECKOUT / "lab"))
import turns  # noqa: E402


@pytest.mark.engines
def test_every_row_names_the_plan_that_it_times(tmp_path: Path) -> None:
    python = needed(python_with_vllm, TESTED["vllm"][-1])
    timed_rows(python, "bench_vllm.py", tmp_path, variables_in(tmp_path) | {"VLLM_CACHE_ROOT": str(tmp_path / "root")})


def test_hybrid_shape_has_a_plan_and_counts_states_and_drafts(tmp_path: Path) -> None:
    """8 of its 48 layers: 2 with pages, 6 with states."""
    given = Namespace(shape="hybrid", layers=8, plan=[], bits=[3.0], drafts=0)
    (name,) = turns.write_model(tmp_path / "model", given)
    plan = load_plan(tmp_path / "model" / "plans" / f"{name}.safetensors")
    assert [layer.is_paged for layer in plan.layers] == [False, False, False, True] * 2
    assert plan.model.model_type == "qwen3_next" and 2.5 < plan.bits_per_value() <= 3.0
    require_served(plan, True)
    state = turns.state_of(json.loads((tmp_path / "model/config.json").read_text()), 0)
    assert state == 32 * 128 * 128 * 2 + 3 * 8192 * 2  # a matrix a head, and three tokens of a convolution
    counted = capacity("vllm", plan, 10**9, 1, 8192, 0, 0, state)
    assert counted.state_blocks > 0 and counted.block_tokens > 128
    draft = json.loads((tmp_path / "model" / turns.DRAFT / "config.json").read_text())
    assert draft["model_type"] == "llama" and draft["num_hidden_layers"] == 1 and draft["vocab_size"] == 151936
