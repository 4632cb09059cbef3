"""Layers with a sliding window in the real SGLang, on a CPU, in fp32: they lie in its own pool, and layers with
full attention in the plan's. ``make engines`` runs these tests."""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path
from typing import Any

import pytest
from attention_recorder import VARIABLE, attended_in
from engine_replay import AttentionReplay, assert_replayed
from sglang_environment import python_with_sglang, recorded, run_sglang, without_discarded
from test_sglang import LENGTHS, VERSION, Served, arguments, prompts
from test_sglang_hierarchy import HOST
from vllm_environment import Unavailable

from kvcal import Plan
from kvcal.engines.capacity import capacity

pytestmark = pytest.mark.engines

WINDOW = 96


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Served:
    try:
        python_with_sglang(VERSION)
    except Unavailable as reason:
        pytest.skip(str(reason))
    return Served(tmp_path_factory.mktemp("gemma"), window=WINDOW)


def with_copies(plan: Plan) -> Plan:
    """The plan with sinks and windows of its own besides its pages."""
    more = {"num_sink_tokens": 4, "recent_window": 64}
    layers = [
        dataclasses.replace(one, k=dataclasses.replace(one.k, **more), v=dataclasses.replace(one.v, **more))
        if one.is_paged else one for one in plan.layers
    ]  # fmt: skip
    return dataclasses.replace(plan, layers=tuple(layers))


def serve(
    gemma: Served, folder: Path, rounds: list[list[list[int]]], plan: Plan, tokens: int = 40, **more: Any
) -> tuple[dict[str, Any], str]:  # fmt: skip
    """What SGLang did, and its log; ``together``: requests of a round run at once."""
    together = more.pop("together", False)
    given = {"engine": arguments(gemma, **more), "rounds": rounds, "tokens": tokens, "together": together}
    found, log = run_sglang(VERSION, folder, gemma.write("plan.safetensors", plan), given)
    assert found is not None, log[-4000:]
    return found, log


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
    found, log = serve(gemma, tmp_path, rounds, plan, 60, chunked_prefill_size=256)
    assert [one["cached"] for one in found["rounds"][2]] == [0, 128, 256, 640, 0]
    assert_replayed(recorded(found, rounds), gemma.model, plan)
    nbytes, tokens, in_windows = sizes(log)
    fitting = capacity("sglang", plan, nbytes, 1, 1, max_requests=4, window_ratio=0.8)
    assert (128 * fitting.num_blocks, fitting.window_tokens) == (tokens, in_windows)
    steps = without_discarded(found["steps"])
    calls = [call for call, _ in attended_in(tmp_path / "attention")]
    replay = AttentionReplay(gemma.model, plan)
    replay.attend(steps, steps, calls)
    assert max(replay.errors) < 8 and len(replay.errors) > 800, max(replay.errors)
    *layers, last = plan.layers
    finer = dataclasses.replace(last, v=dataclasses.replace(last.v, num_bits=4))
    other = AttentionReplay(gemma.model, dataclasses.replace(plan, layers=(*layers, finer)))
    other.attend(steps, steps, calls)
    assert max(other.errors) > 1000


def test_random_requests_of_few_pages(gemma: Served, tmp_path: Path) -> None:
    """Prefixes in windows are lost before those in pages; requests are retracted and computed again."""
    plan, pick, bases, ends = with_copies(gemma.plan), random.Random(1), prompts(*[600] * 3), prompts(*[60] * 8)
    rounds = [[pick.choice(bases)[: pick.randrange(200, 600)] + end for end in ends] for _ in range(4)]
    rounds.append(prompts(100, 110, 90, 105, seed=7))
    few = {"max_total_tokens": 128 * 24, "swa_full_tokens_ratio": 0.5, "chunked_prefill_size": 256}
    more = {"together": True, "schedule_conservativeness": 0.01}
    found, _ = serve(gemma, tmp_path, rounds, plan, 120, **few, **more)
    replay = assert_replayed(recorded(found, rounds), gemma.model, plan)
    assert sum(replay.cached.values()) > 1000


def test_two_ranks_and_no_radix_tree(gemma: Served, tmp_path: Path) -> None:
    """Without a tree SGLang makes its pool of windows as large as the requests that may run need it."""
    rounds = [prompts(130, 300), prompts(60, 20, 100, seed=1)]
    more = {"tp_size": 2, "disable_radix_cache": True, "chunked_prefill_size": 256}
    found, _ = serve(gemma, tmp_path, rounds, gemma.plan, together=True, **more)
    assert_replayed(recorded(found, rounds), gemma.model, gemma.plan)


def test_the_hierarchical_cache_is_refused(gemma: Served, tmp_path: Path) -> None:
    given = {"engine": arguments(gemma, **HOST), "rounds": [], "tokens": 1, "together": False}
    found, log = run_sglang(VERSION, tmp_path, gemma.write("plan.safetensors"), given)
    assert found is None and "which was not tried with sliding windows and a plan" in log, log[-4000:]
