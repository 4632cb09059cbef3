"""Drafts of a model in the real SGLang, on a CPU, in fp32: its layers have a pool of their own at 16 bits, and the
plan's verify chains of drafts. Greedy tokens are those of ``PlanCache``. Operators for CPUs and attention of the model
that drafts are stand-ins, as SGLang's are not built here. ``make engines`` runs these tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from served_models import Served, prompts, with_sinks, without_queries
from sglang_cases import expected, refused, run
from sglang_cases import served as served

from kvcal.engines.capacity import capacity

pytestmark = pytest.mark.engines


def drafting(model: Path, drafts: int = 3, **more: Any) -> dict[str, Any]:
    """SGLang's options of a model that drafts."""
    return {
        "speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(model), "speculative_eagle_topk": 1,
        "speculative_num_steps": drafts, "speculative_num_draft_tokens": 1 + drafts,
        "speculative_draft_attention_backend": "torch_native",
    } | more  # fmt: skip


def test_drafts_change_no_token(served: Served, tmp_path: Path) -> None:
    """The model drafts for itself, without the plan: some drafts are right and others not. Cold, and after
    prefixes, with sinks; the ends of pages are among drafts."""
    plan, given = with_sinks(without_queries(served)), prompts(5, 120, 300, 129)
    found, log = run(served, tmp_path, [given, given], plan, **drafting(served.folder), chunked_prefill_size=256)
    assert [one["cached"] for one in found["rounds"][1]] == [0, 0, 256, 128]
    for round_ in found["rounds"]:
        for prompt, one in zip(given, round_, strict=True):
            assert one["output"] == expected(served, prompt, one["cached"], 256, plan)
    steps = sum(one["verified"] for round_ in found["rounds"] for one in round_)
    assert 8 * 40 / 4 < steps < 8 * 30
    sized = re.search(r"(\d+) bytes hold (\d+) tokens", log)
    draft = 4 * 2 * 2 * 16 * 4  # bytes of a token in its layers
    assert sized
    fitting = capacity("sglang", plan, int(sized[1]), 1, 1, 3, max_requests=4, draft_bytes=draft)
    assert 128 * fitting.num_blocks == int(sized[2])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"speculative_draft_attention_backend": None}, "drafts without --speculative-draft-attention-backend"),
        ({"speculative_num_steps": 8, "speculative_num_draft_tokens": 9}, "8 drafts, expected at most 7"),
    ],
)
def test_other_drafts_are_refused(more: dict[str, Any], says: str, served: Served, tmp_path: Path) -> None:
    assert says in refused(served, tmp_path, without_queries(served), **drafting(served.folder, **more))
