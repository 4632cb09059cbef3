"""A plan in the real SGLang, on a CPU, in fp32: greedy tokens are those of ``generate`` with ``PlanCache``,
for the same tokens in the same chunks. ``make engines`` runs these tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from attention_recorder import VARIABLE
from engine_replay import assert_attended, assert_replayed
from served_models import LENGTHS, Served, damages_of, prompts
from sglang_cases import VERSION, arguments, refused, run, serve
from sglang_cases import served as served
from sglang_environment import recorded, run_sglang, without_discarded

from kvcal.plan.damage import save_damage

pytestmark = pytest.mark.engines


@pytest.mark.parametrize(("chunk", "has_windows"), [(4096, False), (256, False), (256, True)])
def test_cold_and_behind_the_radix_trees_prefixes(
    chunk: int, has_windows: bool, served: Served, tmp_path: Path
) -> None:
    """The second time around, prompts begin after the pages that the first time filled."""
    given, plan = prompts(*LENGTHS), served.with_copies(has_sinks=False) if has_windows else served.plan
    rounds = serve(served, tmp_path, [given, given], plan=plan, chunked_prefill_size=chunk)
    assert [one["cached"] for one in rounds[0]] == [0, 0, 0, 0]
    assert [one["cached"] for one in rounds[1]] == [0, 128, 256, 640]


def test_attention_in_bases(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From SGLang's own queries, keys and values, in chunks, cold and after prefixes; one bit more tells."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "attention"))
    plan, given = served.in_bases(), prompts(*LENGTHS)
    found, _ = run(served, tmp_path, [given, given], plan, chunked_prefill_size=256)
    assert [one["cached"] for one in found["rounds"][1]] == [0, 128, 256, 640]
    assert_attended(tmp_path / "attention", without_discarded(found["steps"]), served.model, plan, 300)


def test_requests_together_and_pages_that_are_used_again(served: Served, tmp_path: Path) -> None:
    """Four requests decode together, over the ends of pages; 12 pages serve them round after round."""
    rounds = [prompts(100, 120, 250, 130, seed=seed) for seed in range(3)]
    found = serve(served, tmp_path, rounds, together=True, max_total_tokens=1536)
    assert not any(one["cached"] for answers in found for one in answers)


def test_sinks_and_windows_without_the_radix_tree(served: Served, tmp_path: Path) -> None:
    """Prompts in chunks; requests that decode together, and whose rings the next round has."""
    plan, without = served.with_copies(), {"disable_radix_cache": True, "chunked_prefill_size": 256}
    given = prompts(*LENGTHS)
    (alone, again) = serve(served, tmp_path, [given, given], plan=plan, **without)
    assert alone == again and not any(one["cached"] for one in alone)
    rounds = [prompts(60, 20, 100, 70, seed=seed) for seed in range(3)]
    serve(served, tmp_path, rounds, together=True, plan=plan, max_total_tokens=1536, **without)


def test_requests_that_are_retracted(served: Served, tmp_path: Path) -> None:
    """Eight pages are too few for four requests: SGLang takes those of one back, and computes it again
    later."""
    rounds = [prompts(100, 110, 90, 105, seed=7)]
    few = {"max_total_tokens": 1024, "schedule_conservativeness": 0.01}
    found, log = run(served, tmp_path, rounds, tokens=200, together=True, **few)
    assert "Retract requests" in log, log[-4000:]
    assert assert_replayed(recorded(found, rounds), served.model, served.plan).restarts > 0


def test_two_ranks_hold_a_head_each(served: Served, tmp_path: Path) -> None:
    """Cold, and after prefixes."""
    given = prompts(130, 300)
    _, again = serve(served, tmp_path, [given, given], tp_size=2)
    assert [one["cached"] for one in again] == [128, 256]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"page_size": 64}, "--page-size 64, expected 128 with a plan"),
        ({"max_running_requests": None}, "a plan needs --max-running-requests"),
        (
            {"disable_cuda_graph": False, "cuda_graph_backend_prefill": "breakable"},
            "started with CUDA graphs of prompts",
        ),
        ({"prefill_attention_backend": "torch_native"}, "started with --prefill-attention-backend torch_native, which"),
        ({"enable_torch_compile": True}, "started with --enable-torch-compile, which is not served"),
        ({"enable_hierarchical_cache": True}, "--hicache-mem-layout page_first, expected layer_first or page_first"),
    ],
)
def test_options_that_would_be_served_wrongly_are_refused(
    changes: dict[str, Any], says: str, served: Served, tmp_path: Path
) -> None:
    assert says in refused(served, tmp_path, **changes)


def test_images_whose_tokens_attend_both_ways_are_refused(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that makes such masks, if its backend is SGLang's Triton one. The plan is unchecked, too."""
    monkeypatch.setenv("KVCAL_TEST_IMAGES", "1")
    log = refused(served, tmp_path)
    assert "tokens of an image attend to each other both ways" in log, log
    assert "hint: serve it without images: leave --enable-multimodal out" in log


def test_the_log_says_what_a_plan_is_known_to_do(served: Served, tmp_path: Path) -> None:
    path = served.write("destroyed.safetensors")
    for damage, says in zip((None, *damages_of(served.plan)), ("is unchecked", "", "destroys the model"), strict=True):
        if damage is not None:
            save_damage(damage, Path(path))
        given = {"engine": arguments(served), "rounds": [], "tokens": 1, "together": False}
        _, log = run_sglang(VERSION, tmp_path, path, given)
        told = [line for line in log.splitlines() if f"{path}: the plan" in line]
        assert "serving the plan" in log and bool(told) == bool(says) and all(says in line for line in told), log


def test_a_plan_of_another_model_is_refused(served: Served, tmp_path: Path) -> None:
    identity = dataclasses.replace(served.plan.model, config_sha256="0" * 64)
    log = refused(served, tmp_path, dataclasses.replace(served.plan, model=identity))
    assert "the plan is for tiny, of sha256 of config.json 0000" in log, log
