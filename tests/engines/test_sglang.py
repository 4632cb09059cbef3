"""A plan in the real SGLang, on a CPU, in fp32: greedy tokens are those of ``generate`` with ``PlanCache``,
for the same tokens in the same chunks. ``make engines`` runs these tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_replay import assert_replayed, begin_sums, decode_windows
from sglang_environment import python_with_sglang, recorded, run_sglang
from test_vllm import LENGTHS, Served, damages_of, prompts
from vllm_environment import Unavailable

from kvcal import Plan, PlanCache, attached
from kvcal.engines.support import TESTED
from kvcal.plan.damage import save_damage

pytestmark = pytest.mark.engines

VERSION = TESTED["sglang"][-1]
TOKENS = 40


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    try:
        python_with_sglang(VERSION)
    except Unavailable as reason:
        pytest.skip(str(reason))
    return Served(tmp_path_factory.mktemp("model"))


def arguments(served: Served, **more: Any) -> dict[str, Any]:
    """Of SGLang's Engine."""
    return {
        "model_path": str(served.folder), "dtype": "float32", "skip_tokenizer_init": True, "device": "cpu",
        "page_size": 128, "attention_backend": "kvcal", "max_running_requests": 4, "max_total_tokens": 8192,
        "context_length": 2048, "disable_cuda_graph": True, "mem_fraction_static": 0.3, "log_level": "info",
    } | more  # fmt: skip


def serve(
    served: Served, folder: Path, rounds: list[list[list[int]]], together: bool = False, plan: Plan | None = None,
    **more: Any,
) -> list[list[dict]]:  # fmt: skip
    given = {"engine": arguments(served, **more), "rounds": rounds, "tokens": TOKENS, "together": together}
    found, log = run_sglang(VERSION, folder, served.write("plan.safetensors", plan), given)
    assert found is not None, log[-4000:]
    return found["rounds"]


@torch.no_grad()
def expected(served: Served, prompt: list[int], cached: int, chunk: int = 4096, plan: Plan | None = None) -> list[int]:
    """Greedy tokens after ``cached`` tokens that were computed before, all in chunks of at most ``chunk``."""
    model, ids = served.model, torch.tensor([prompt])
    cache = PlanCache(plan or served.plan, model.config)
    with attached(model):
        if cached:
            for part in ids.split(chunk, dim=1):
                model(part, past_key_values=cache)
            cache.crop(cached)
            begin_sums(cache, cached)
            decode_windows(cache, cached)
        cuts = range(cached, len(prompt), chunk)
        for start, stop in zip(cuts, cuts[1:], strict=False):
            model(ids[:, start:stop], past_key_values=cache)
        options = {"max_new_tokens": TOKENS, "do_sample": False, "past_key_values": cache}
        return model.generate(ids, **options)[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("chunk", "has_windows"), [(4096, False), (256, False), (256, True)])
def test_cold_and_behind_the_radix_trees_prefixes(
    chunk: int, has_windows: bool, served: Served, tmp_path: Path
) -> None:
    """The second time around, prompts begin after the pages that the first time filled."""
    given, plan = prompts(*LENGTHS), served.with_copies(has_sinks=False) if has_windows else served.plan
    rounds = serve(served, tmp_path, [given, given], plan=plan, chunked_prefill_size=chunk)
    assert [one["cached"] for one in rounds[0]] == [0, 0, 0, 0]
    assert [one["cached"] for one in rounds[1]] == [0, 128, 256, 640]
    for found in rounds:
        for prompt, one in zip(given, found, strict=True):
            assert one["output"] == expected(served, prompt, one["cached"], chunk, plan)


def test_requests_together_and_pages_that_are_used_again(served: Served, tmp_path: Path) -> None:
    """Four requests decode together, over the ends of pages; 12 pages serve them round after round."""
    rounds = [prompts(100, 120, 250, 130, seed=seed) for seed in range(3)]
    found = serve(served, tmp_path, rounds, together=True, max_total_tokens=1536)
    for given, round_ in zip(rounds, found, strict=True):
        for prompt, one in zip(given, round_, strict=True):
            assert one["cached"] == 0 and one["output"] == expected(served, prompt, 0)


def test_sinks_and_windows_without_the_radix_tree(served: Served, tmp_path: Path) -> None:
    """Prompts in chunks; requests that decode together, and whose rings the next round has."""
    plan, without = served.with_copies(), {"disable_radix_cache": True, "chunked_prefill_size": 256}
    given = prompts(*LENGTHS)
    (alone, again) = serve(served, tmp_path, [given, given], plan=plan, **without)
    assert alone == again
    for prompt, one in zip(given, alone, strict=True):
        assert one["cached"] == 0 and one["output"] == expected(served, prompt, 0, 256, plan)
    rounds = [prompts(60, 20, 100, 70, seed=seed) for seed in range(3)]
    found = serve(served, tmp_path, rounds, together=True, plan=plan, max_total_tokens=1536, **without)
    for given, round_ in zip(rounds, found, strict=True):
        for prompt, one in zip(given, round_, strict=True):
            assert one["output"] == expected(served, prompt, 0, plan=plan)


def test_requests_that_are_retracted(served: Served, tmp_path: Path) -> None:
    """Eight pages are too few for four requests: SGLang takes those of one back, and computes it again
    later."""
    rounds = [prompts(100, 110, 90, 105, seed=7)]
    few = arguments(served, max_total_tokens=1024, schedule_conservativeness=0.01)
    given = {"engine": few, "rounds": rounds, "tokens": 200, "together": True}
    found, log = run_sglang(VERSION, tmp_path, served.write("plan.safetensors"), given)
    assert found is not None and "Retract requests" in log, log[-4000:]
    assert assert_replayed(recorded(found, rounds), served.model, served.plan).restarts > 0


def test_two_ranks_hold_a_head_each(served: Served, tmp_path: Path) -> None:
    """Cold, and after prefixes."""
    given = prompts(130, 300)
    for found in serve(served, tmp_path, [given, given], tp_size=2):
        for prompt, one in zip(given, found, strict=True):
            assert one["output"] == expected(served, prompt, one["cached"])


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
        ({"enable_hierarchical_cache": True}, "--hicache-mem-layout page_first, expected layer_first or page_first"),
    ],
)
def test_options_that_would_be_served_wrongly_are_refused(
    changes: dict[str, Any], says: str, served: Served, tmp_path: Path
) -> None:
    given = {"engine": arguments(served, **changes), "rounds": [], "tokens": 1, "together": False}
    found, log = run_sglang(VERSION, tmp_path, served.write("plan.safetensors"), given)
    assert found is None and says in log, log[-4000:]


def test_images_whose_tokens_attend_both_ways_are_refused(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that makes such masks, if its backend is SGLang's Triton one. The plan is unchecked, too."""
    monkeypatch.setenv("KVCAL_TEST_IMAGES", "1")
    given = {"engine": arguments(served), "rounds": [], "tokens": 1, "together": False}
    found, log = run_sglang(VERSION, tmp_path, served.write("plan.safetensors"), given)
    assert found is None and "tokens of an image attend to each other both ways" in log, log[-4000:]
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
    given = {"engine": arguments(served), "rounds": [], "tokens": 1, "together": False}
    identity = dataclasses.replace(served.plan.model, config_sha256="0" * 64)
    other = served.write("other.safetensors", dataclasses.replace(served.plan, model=identity))
    found, log = run_sglang(VERSION, tmp_path, other, given)
    assert found is None and "the plan is for tiny, of sha256 of config.json 0000" in log, log[-4000:]
