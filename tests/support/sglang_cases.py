"""A plan in the real SGLang, on a CPU: fixtures, and runs whose tokens are compared with ``PlanCache``'s."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_replay import begin_sums, decode_windows
from served_models import Served
from sglang_environment import python_with_sglang, run_sglang
from vllm_environment import needed

from kvcal import Plan, PlanCache, attached
from kvcal.engines.support import TESTED

VERSION = TESTED["sglang"][-1]
TOKENS = 40


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    needed(python_with_sglang, VERSION)
    return Served(tmp_path_factory.mktemp("model"))


def arguments(served: Served, **more: Any) -> dict[str, Any]:
    """Of SGLang's Engine."""
    return {
        "model_path": str(served.folder), "dtype": "float32", "skip_tokenizer_init": True, "device": "cpu",
        "page_size": 128, "attention_backend": "kvcal", "max_running_requests": 4, "max_total_tokens": 8192,
        "context_length": 2048, "disable_cuda_graph": True, "mem_fraction_static": 0.3, "log_level": "info",
    } | more  # fmt: skip


def run(
    served: Served, folder: Path, rounds: Sequence[list[list[int]]], plan: Plan | None = None, tokens: int = TOKENS,
    together: bool = False, weights: str | None = None, **more: Any,
) -> tuple[dict[str, Any], str]:  # fmt: skip
    """SGLang's record, and its log; ``together``: requests of a round run at once; ``weights``: see sglang_host."""
    given = {"rounds": rounds, "tokens": tokens, "together": together, "weights": weights}
    given["engine"] = arguments(served, **more)
    found, log = run_sglang(VERSION, folder, served.write("plan.safetensors", plan), given)
    assert found is not None, log[-4000:]
    return found, log


def refused(served: Served, folder: Path, plan: Plan | None = None, **more: Any) -> str:
    """The log of SGLang, which does not start."""
    given = {"engine": arguments(served, **more), "rounds": [], "tokens": 1, "together": False}
    found, log = run_sglang(VERSION, folder, served.write("plan.safetensors", plan), given)
    assert found is None, "SGLang has started"
    return log[-4000:]


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


def serve(
    served: Served, folder: Path, rounds: Sequence[list[list[int]]], plan: Plan | None = None, **more: Any
) -> list[list[dict[str, Any]]]:
    """Answers to rounds of prompts, whose tokens are all :func:`expected`."""
    found, _ = run(served, folder, rounds, plan, **more)
    for given, answers in zip(rounds, found["rounds"], strict=True):
        for prompt, one in zip(given, answers, strict=True):
            chunk = more.get("chunked_prefill_size", 4096)
            assert one["output"] == expected(served, prompt, one["cached"], chunk, plan)
    return found["rounds"]
