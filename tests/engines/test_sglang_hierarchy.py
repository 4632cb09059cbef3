"""A plan with SGLang's hierarchical cache, on a CPU: pages that have left the pool come back from the host and
from files, and attention goes on as ``PlanCache``'s. ``make engines`` runs these tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from served_models import LENGTHS, Served, prompts
from sglang_cases import serve
from sglang_cases import served as served

pytestmark = pytest.mark.engines

HOST = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0, "hicache_mem_layout": "layer_first"}


@pytest.mark.parametrize("more", [{}, {"tp_size": 2, "chunked_prefill_size": 256}])
def test_prompts_come_back_from_the_host(more: dict[str, int], served: Served, tmp_path: Path) -> None:
    """Others take all of the 12 pages in between."""
    plan, given = served.with_copies(), prompts(*LENGTHS)
    others = prompts(700, 600, seed=9)
    rounds = serve(served, tmp_path, [given, others, given], plan=plan, max_total_tokens=1536, **HOST, **more)
    assert [one["cached"] for one in rounds[2]] == [0, 128, 256, 640]


def test_files_are_read_under_their_plan_alone(served: Served, tmp_path: Path) -> None:
    """One folder, two plans: of the first one's pages the other one has no hit, and the first one all of
    them."""
    folder, given = tmp_path / "files", prompts(300, 700)
    storage = {"prefetch_threshold": 128, "file_storage_path": str(folder)}
    more = HOST | {
        "hicache_storage_backend": "file", "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps(storage),
    }  # fmt: skip
    plans = served.plan, served.with_copies(has_sinks=False), served.plan
    for plan, cached in zip(plans, ([0, 0], [0, 0], [256, 640]), strict=True):
        (found,) = serve(served, tmp_path, [given], plan=plan, **more)
        assert [one["cached"] for one in found] == cached
        names = {path.name for path in folder.iterdir()}
        assert any(plan.sha256 in name for name in names)
