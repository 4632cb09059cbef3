"""Sinks and windows in the real SGLang with its radix tree: a request that begins after pages of another has
the sinks that ``PlanCache`` has, and its window decoded from pages. ``make engines`` runs these tests."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from engine_replay import assert_replayed
from served_models import LENGTHS, Served, prompts, with_sinks
from sglang_cases import expected, run, serve
from sglang_cases import served as served
from sglang_environment import recorded

from kvcal.engines.capacity import capacity

pytestmark = pytest.mark.engines


@pytest.mark.parametrize("more", [{}, {"chunked_prefill_size": 256}, {"tp_size": 2}])
def test_sinks_cold_and_behind_the_radix_trees_prefixes(more: dict[str, int], served: Served, tmp_path: Path) -> None:
    """Between the two times, all rings are others'. The first page of a prompt of 120 tokens is filled by
    decoding; one of 129 begins again with one new token."""
    plan, given, others = served.with_copies(), prompts(*LENGTHS, 120, 129), prompts(*LENGTHS, seed=9)
    rounds = serve(served, tmp_path, [given, others, given], plan=plan, **more)
    assert [one["cached"] for one in rounds[2]] == [0, 128, 256, 640, 0, 128]


def test_requests_of_one_step_share_sinks_in_few_pages(served: Served, tmp_path: Path) -> None:
    """With hits and without, in 8 pages, so that prompts are evicted, and requests retracted and computed
    again."""
    plan, ((base,), (other,)) = served.with_copies(), (prompts(300, seed=seed) for seed in (1, 2))
    rounds = [[base, *prompts(90, seed=n), other[:129], base[:200], other, base[:257]] for n in range(2)]
    rounds.append(prompts(100, 110, 90, 105, seed=7))
    few = {"max_total_tokens": 1024, "schedule_conservativeness": 0.01}
    found, log = run(served, tmp_path, rounds, plan, tokens=170, together=True, **few)
    assert "Retract requests" in log, log[-4000:]
    replay = assert_replayed(recorded(found, rounds), served.model, plan)
    assert replay.restarts > 0 and sum(replay.cached.values()) > 500
    sized = re.search(r"(\d+) bytes hold (\d+) tokens", log)
    assert sized and 128 * capacity("sglang", plan, int(sized[1]), 1, 1, max_requests=4).num_blocks == int(sized[2])


@pytest.mark.parametrize("chunk", [256, 4096])
def test_random_requests_of_more_beginnings_than_places(chunk: int, served: Served, tmp_path: Path) -> None:
    """Pages may outlive their sinks. A prompt that is computed anew then goes on with the tree's pages for
    its own."""
    plan, pick, bases, ends = served.with_copies(), random.Random(chunk), prompts(*[600] * 30), prompts(*[60] * 24)
    rounds = [[pick.choice(bases)[: pick.randrange(100, 600)] + end for end in ends] for _ in range(4)]
    few = {"max_total_tokens": 128 * 40, "schedule_conservativeness": 0.1, "chunked_prefill_size": chunk}
    found, _ = run(served, tmp_path, rounds, plan, tokens=20, together=True, **few)
    replay = assert_replayed(recorded(found, rounds), served.model, plan)
    assert replay.moved > 0 and sum(replay.cached.values()) > 1000


def test_a_prompt_whose_sinks_are_gone_is_computed_anew(served: Served, tmp_path: Path) -> None:
    """One request at a time has places for eight beginnings. Then its pages are shared again."""
    plan, given = with_sinks(served.plan), prompts(*[130] * 9)
    asked = [given, [given[-1], given[0], given[0]]]
    rounds = serve(served, tmp_path, asked, plan=plan, max_running_requests=1)
    assert [one["cached"] for one in rounds[1]] == [128, 0, 128]


def test_other_weights_have_other_sinks(served: Served, tmp_path: Path) -> None:
    other, plan = Served(tmp_path / "other", seed=1), with_sinks(served.plan)
    found, _ = run(served, tmp_path, [prompts(130)] * 3, plan, weights=str(other.folder))
    for model, cached, (one,) in zip((served, other, other), (0, 0, 128), found["rounds"], strict=True):
        assert one["cached"] == cached and one["output"] == expected(model, prompts(130)[0], cached, plan=plan)
