"""A plan in the real vLLM, on a CPU: fixtures, and runs that are replayed with ``PlanCache``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_replay import Replay, assert_replayed
from served_models import Served
from vllm_environment import needed, python_with_vllm, run_in

from kvcal import Plan
from kvcal.engines.capacity import capacity as capacity_of
from kvcal.engines.support import TESTED

TOKENS = 40
# A request of this model takes four blocks for its rings besides those of its tokens. Three of 300 tokens fit
# into these blocks (one is nobody's); of 400 tokens, two.
SHORT = {"num_gpu_blocks_override": 24, "max_model_len": 1024}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
ALONE = 6  # a token with its drafts


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("gemma"), window=96)


@pytest.fixture(params=TESTED["vllm"])
def version(request: pytest.FixtureRequest) -> str:
    needed(python_with_vllm, request.param)
    return request.param


def serve(
    version: str, folder: Path, served: Served, requests: list[dict], plan: Plan | None = None, **arguments: Any
) -> tuple[dict, Replay]:
    given = served.arguments(served.write("plan.safetensors", plan), **arguments)
    found = run_in(version, folder, "vllm_host.py", {"llm": given, "requests": requests})
    assert "error" not in found, found
    is_greedy = not any(request.get("temperature") for request in requests)
    alone = ALONE if "speculative_config" in arguments else 1
    return found, assert_replayed(found, served.model, plan or served.plan, is_greedy, alone)


def assert_capacity(found: dict[str, Any], plan: Plan, lookahead: int = 0, **more: int) -> None:
    """vLLM has the blocks that kvcal predicts, of the bytes that it predicts; ``more``: of ``capacity``."""
    capacity = capacity_of("vllm", plan, 64 << 20, 1, 2048, lookahead, **more)
    says = f"{capacity.num_blocks} blocks of {capacity.block_tokens} tokens: the plan takes {capacity.page_bytes} bytes"
    assert any(line.startswith(says) and line.endswith(f"{capacity.block_bytes} a block") for line in found["log"])
