"""Models with states in the real SGLang, on a CPU, in fp32, without its radix tree: states lie in its own pool,
and attention is ``PlanCache``'s for the same tokens in the same chunks. Convolutions are stand-ins, as SGLang
has kernels for GPUs alone. ``make engines`` runs these tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_replay import assert_replayed
from served_models import LENGTHS, prompts
from sglang_cases import VERSION, refused, run
from sglang_environment import python_with_sglang, recorded
from test_vllm_hybrids import Hybrid
from vllm_environment import needed

from kvcal.engines.support import NO_TREE

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    needed(python_with_sglang, VERSION)
    return Hybrid(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(autouse=True)
def convolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCAL_TEST_CONVOLUTIONS", "1")
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float32")


def test_cold_and_in_chunks(hybrid: Hybrid, tmp_path: Path) -> None:
    """Sinks and windows, and requests that decode together, in rings and states that others had before."""
    plan, rounds = hybrid.with_copies(), [prompts(*LENGTHS), prompts(60, 20, 100, 70, seed=1)]
    more = {"chunked_prefill_size": 256, "disable_radix_cache": True}
    found, _ = run(hybrid, tmp_path, rounds, plan, together=True, **more)
    replay = assert_replayed(recorded(found, rounds), hybrid.model, plan)
    assert replay.restarts == 0


def test_the_radix_tree_is_refused(hybrid: Hybrid, tmp_path: Path) -> None:
    """SGLang itself refuses these pages with states of convolutions; of other models it keeps them on GPUs."""
    log = refused(hybrid, tmp_path)
    assert "no_buffer only supports page_size=1" in log or NO_TREE in log, log
