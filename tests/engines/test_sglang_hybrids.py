"""Models with states in the real SGLang, on a CPU, in fp32, without its radix tree: states lie in its own pool,
and attention is ``PlanCache``'s for the same tokens in the same chunks. Convolutions are stand-ins, as SGLang
has kernels for GPUs alone. ``make engines`` runs these tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_replay import assert_replayed
from sglang_environment import python_with_sglang, recorded, run_sglang
from test_sglang import LENGTHS, VERSION, arguments, prompts
from test_vllm_hybrids import Hybrid
from vllm_environment import Unavailable

from kvcal.engines.support import NO_TREE

pytestmark = pytest.mark.engines

WITHOUT = {"disable_radix_cache": True}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    try:
        python_with_sglang(VERSION)
    except Unavailable as reason:
        pytest.skip(str(reason))
    return Hybrid(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(autouse=True)
def convolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCAL_TEST_CONVOLUTIONS", "1")
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float32")


def test_cold_and_in_chunks(hybrid: Hybrid, tmp_path: Path) -> None:
    """Sinks and windows, and requests that decode together, in rings and states that others had before."""
    plan, rounds = hybrid.with_copies(), [prompts(*LENGTHS), prompts(60, 20, 100, 70, seed=1)]
    engine = arguments(hybrid, chunked_prefill_size=256, **WITHOUT)
    given = {"engine": engine, "rounds": rounds, "tokens": 40, "together": True}
    found, log = run_sglang(VERSION, tmp_path, hybrid.write("plan.safetensors", plan), given)
    assert found is not None, log[-4000:]
    replay = assert_replayed(recorded(found, rounds), hybrid.model, plan)
    assert replay.restarts == 0


def test_the_radix_tree_is_refused(hybrid: Hybrid, tmp_path: Path) -> None:
    """SGLang itself refuses these pages with states of convolutions; of other models it keeps them on GPUs."""
    given = {"engine": arguments(hybrid), "rounds": [], "tokens": 1, "together": False}
    found, log = run_sglang(VERSION, tmp_path, hybrid.write("plan.safetensors"), given)
    assert found is None and ("no_buffer only supports page_size=1" in log or NO_TREE in log), log[-4000:]
