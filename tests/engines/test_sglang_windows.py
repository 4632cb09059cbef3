"""Layers with a sliding window in the real SGLang, on a CPU, in fp32: they lie in its own pool, and layers with
full attention in the plan's. ``make engines`` runs these tests."""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path

import pytest
from attention_recorder import VARIABLE
from engine_replay import assert_attended, assert_replayed
from served_models import LENGTHS, Served, prompts
from sglang_cases import VERSION, refused, run
from sglang_environment import python_with_sglang, recorded, without_discarded
from test_sglang_hierarchy import HOST
from vllm_environment import needed

from kvcal import Plan
from kvcal.engines.capacity import capacity

pytestmark = pytest.mark.engines

WINDOW = 96


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Served:
    needed(python_with_sglang, VERSION)
    return Served(tmp_path_factory.mktemp("gemma"), window=WINDOW)


def with_copies(plan: Plan) -> Plan:
    """The plan with sinks and windows of its own besides its pages."""
    more = {"num_sink_tokens": 4, "recent_window": 64}
    layers = [
        dataclasses.replace(one, k=dataclasses.replace(one.k, **more), v=dataclasses.replace(one.v, **more))
        if one.is_paged else one for one in plan.layers
    ]  # fmt: skip
    return dataclasses.replace(plan, layers=tuple(layers))


def sizes(log: str) -> tuple[int, int, int]:
    """Bytes that SGLang had for the cache, and the tokens of its two pools."""
    nbytes, tokens, in_windows = map(int, re.findall(r"(\d+) bytes hold (\d+) tokens and (\d+) of windows", log)[0])
    return nbytes, tokens, in_windows


def test_attention_cold_and_behind_the_radix_trees_prefixes(
    gemma: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks, and answers that go beyond the window; between the two times, all rings are others'.
    Attention from SGLang's own queries, keys and values; one bit more tells."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "attention"))
    plan, given = with_copies(gemma.plan), prompts(*LENGTHS, WINDOW + 1)
    rounds = [given, prompts(*LENGTHS, seed=9), given]
    found, log = run(gemma, tmp_path, rounds, plan, 60, chunked_prefill_size=256)
    assert [one["cached"] for one in found["rounds"][2]] == [0, 128, 256, 640, 0]
    assert_replayed(recorded(found, rounds), gemma.model, plan)
    nbytes, tokens, in_windows = sizes(log)
    fitting = capacity("sglang", plan, nbytes, 1, 1, max_requests=4, window_ratio=0.8)
    assert (128 * fitting.num_blocks, fitting.window_tokens) == (tokens, in_windows)
    assert_attended(tmp_path / "attention", without_discarded(found["steps"]), gemma.model, plan, 800)


def test_random_requests_of_few_pages(gemma: Served, tmp_path: Path) -> None:
    """Prefixes in windows are lost before those in pages; requests are retracted and computed again."""
    plan, pick, bases, ends = with_copies(gemma.plan), random.Random(1), prompts(*[600] * 3), prompts(*[60] * 8)
    rounds = [[pick.choice(bases)[: pick.randrange(200, 600)] + end for end in ends] for _ in range(4)]
    rounds.append(prompts(100, 110, 90, 105, seed=7))
    few = {"max_total_tokens": 128 * 24, "swa_full_tokens_ratio": 0.5, "chunked_prefill_size": 256}
    more = {"together": True, "schedule_conservativeness": 0.01}
    found, _ = run(gemma, tmp_path, rounds, plan, 120, **few, **more)
    replay = assert_replayed(recorded(found, rounds), gemma.model, plan)
    assert sum(replay.cached.values()) > 1000


def test_two_ranks_and_no_radix_tree(gemma: Served, tmp_path: Path) -> None:
    """Without a tree SGLang makes its pool of windows as large as the requests that may run need it."""
    rounds = [prompts(130, 300), prompts(60, 20, 100, seed=1)]
    more = {"tp_size": 2, "disable_radix_cache": True, "chunked_prefill_size": 256}
    found, _ = run(gemma, tmp_path, rounds, gemma.plan, together=True, **more)
    assert_replayed(recorded(found, rounds), gemma.model, gemma.plan)


def test_the_hierarchical_cache_is_refused(gemma: Served, tmp_path: Path) -> None:
    assert "which was not tried with sliding windows and a plan" in refused(gemma, tmp_path, **HOST)
