"""A plan in SGLang on a GPU: tokens are those of ``PlanCache`` on a CPU, and CUDA graphs give the eager run's
to the bit. SGLang is the one of the interpreter that runs the tests."""

from __future__ import annotations

import importlib.util
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_replay import Replay, assert_near, assert_replayed
from served_models import LENGTHS, Served, prompts, with_sinks, without_queries
from sglang_cases import arguments
from sglang_environment import answer_of_sglang, recorded
from test_sglang_drafts import drafting
from test_sglang_hierarchy import HOST

from kvcal import Plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="no SGLang in this environment"),
]

TOKENS = 20
EAGER = {"disable_cuda_graph": True}
# Of steps that only decode.
GRAPHS = {"disable_cuda_graph": False, "disable_prefill_cuda_graph": True}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Its model computes in fp32, as the reference does; the kernels store bf16."""
    return Served(tmp_path_factory.mktemp("model"), head_dim=64, cache_dtype="bfloat16")


def serve(
    served: Served, folder: Path, rounds: list[list[list[int]]], together: bool = False, plan: Plan | None = None,
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """A run of SGLang."""
    folder.mkdir(exist_ok=True)
    on_gpu = {"device": "cuda", "sampling_backend": "pytorch", "mem_fraction_static": 0.5}
    engine = arguments(served, **on_gpu | more)
    given = {"engine": engine, "rounds": rounds, "tokens": TOKENS, "together": together}
    variables = {}
    if engine["attention_backend"] == "kvcal":
        variables["KVCAL_PLAN"] = served.write("copies.safetensors" if plan else "plan.safetensors", plan)
    if engine["dtype"] == "float32":  # SGLang's kernels for norms, RoPE and activations are for 16 bits
        variables["SGLANG_FORCE_FUSED_OP_BACKEND"] = "torch"
    found, log = answer_of_sglang(
        Path(sys.executable), folder, given, [os.environ.get("PYTHONPATH", "")], variables, seconds=600
    )
    assert found is not None, log[-6000:]
    return found


def replayed(served: Served, found: dict[str, Any], rounds: list[list[list[int]]], plan: Plan | None = None) -> Replay:
    """Of equal logits, either token is right."""
    replay = assert_replayed(recorded(found, rounds), served.model, plan or served.plan, is_greedy=False)
    print(f"log-probabilities differ by at most {max(replay.distances)}, of {len(replay.distances)} tokens")
    return replay


@pytest.mark.parametrize("chunk", [4096, 256])
def test_cold_and_behind_the_radix_trees_prefixes(chunk: int, tmp_path: Path, served: Served) -> None:
    rounds = [prompts(*LENGTHS)] * 2
    found = serve(served, tmp_path, rounds, chunked_prefill_size=chunk)
    assert [[one["cached"] for one in round_] for round_ in found["rounds"]] == [[0, 0, 0, 0], [0, 128, 256, 640]]
    replayed(served, found, rounds)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_give_what_the_eager_run_gives(dtype: str, tmp_path: Path, served: Served) -> None:
    """Tokens and log-probabilities of four requests, three and one, over the ends of pages, cold and
    cached."""
    rounds = [prompts(*LENGTHS), prompts(120, 250, 380, seed=1), prompts(*LENGTHS), prompts(125, seed=2)]
    with ThreadPoolExecutor() as pool:
        both = {"eager": EAGER, "graphs": GRAPHS | {"cuda_graph_bs_decode": [1, 2, 3, 4]}}
        eager, graphs = pool.map(
            lambda name: serve(served, tmp_path / name, rounds, together=True, dtype=dtype, **both[name]), both
        )
    assert "cuda graph: True" in (tmp_path / "graphs" / "log").read_text()
    assert [[one[:3] for one in step] for step in eager["steps"]] == [
        [one[:3] for one in step] for step in graphs["steps"]
    ]
    assert eager["rounds"] == graphs["rounds"]
    if dtype == "float32":
        replayed(served, graphs, rounds)


def test_a_graph_of_more_requests_than_there_are(tmp_path: Path, served: Served) -> None:
    rounds = [prompts(5, 120, 250), prompts(380, 125, seed=1), prompts(5, 120, 250)]
    found = serve(served, tmp_path, rounds, together=True, **GRAPHS, cuda_graph_bs_decode=[4])
    replayed(served, found, rounds)


def test_sinks_and_windows(tmp_path: Path, served: Served) -> None:
    """Without the radix tree; prompts in chunks, and CUDA graphs."""
    plan, rounds = served.with_copies(), [prompts(5, 120, 250, 380), prompts(60, 20, 100, 70, seed=1)]
    without = {"disable_radix_cache": True, "chunked_prefill_size": 256}
    found = serve(served, tmp_path, rounds, together=True, plan=plan, **without, **GRAPHS)
    replayed(served, found, rounds, plan)


@pytest.mark.parametrize("more", [EAGER | {"chunked_prefill_size": 256}, GRAPHS], ids=["chunks", "graphs"])
def test_sinks_and_windows_with_the_radix_tree(more: dict[str, Any], tmp_path: Path, served: Served) -> None:
    """Between the two times, all rings are others'. One prompt's first page is filled by decoding."""
    plan, given = served.with_copies(), prompts(*LENGTHS, 120, 129)
    rounds = [given, prompts(*LENGTHS, seed=9), given]
    found = serve(served, tmp_path, rounds, plan=plan, **more)
    assert [one["cached"] for one in found["rounds"][2]] == [0, 128, 256, 640, 0, 128]
    replayed(served, found, rounds, plan)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("gemma"), head_dim=64, cache_dtype="bfloat16", window=96)


@pytest.mark.parametrize("more", [EAGER, GRAPHS | {"cuda_graph_bs_decode": [4]}], ids=["eager", "graphs"])
def test_layers_with_a_sliding_window(more: dict[str, Any], tmp_path: Path, gemma: Served) -> None:
    """Gemma-3, whose windows are SGLang's own, in its pool and its Triton backend: prompts and answers shorter and
    longer than the window, in chunks, together, cold and after prefixes. A graph is of more requests than there
    are."""
    given = prompts(5, 80, 250, 380)
    rounds = [given, prompts(90, 120, 700, seed=1), given]
    found = assert_as_without_a_plan(gemma, tmp_path, rounds, chunked_prefill_size=256, **more)
    assert sorted(one["cached"] for one in found["rounds"][2]) == [0, 0, 128, 256]


def test_sliding_windows_in_few_pages(tmp_path: Path, gemma: Served) -> None:
    """Prefixes in windows are lost before those in pages."""
    bases, ends = prompts(*[600] * 3), prompts(*[60] * 8)
    rounds = [[bases[n % 3][: 200 + 50 * n] + end for n, end in enumerate(ends)]] * 3
    few = {"max_total_tokens": 128 * 24, "swa_full_tokens_ratio": 0.5, "chunked_prefill_size": 256}
    found = assert_as_without_a_plan(gemma, tmp_path, rounds, **few, **GRAPHS)
    assert sum(one["cached"] for round_ in found["rounds"] for one in round_) > 0


def assert_as_without_a_plan(gemma: Served, folder: Path, rounds: list[list[list[int]]], **more: Any) -> dict[str, Any]:
    """A run with pages of 16 bits gives the log-probabilities that SGLang alone gives. In decode steps its Triton
    backend reads a token less of a window than transformers does."""
    plan = gemma.plan.unquantized()
    found, alone = (
        serve(gemma, folder / name, rounds, together=True, plan=plan, **more | own)
        for name, own in (("plan", {}), ("alone", {"attention_backend": "triton"}))
    )
    for number, answers in enumerate(found["rounds"]):
        for one, other in zip(answers, alone["rounds"][number], strict=True):
            assert_near((one["output"], one["chances"]), (other["output"], other["chances"]), 0.01)
    return found


IN_GRAPHS = pytest.param(
    GRAPHS | {"cuda_graph_bs_decode": [4]},
    marks=pytest.mark.skipif(importlib.util.find_spec("flash_mla") is None, reason="SGLang's capture needs flash_mla"),
)


@pytest.mark.parametrize("graphs", [EAGER, IN_GRAPHS], ids=["eager", "graphs"])
def test_drafts_change_no_token(graphs: dict[str, Any], tmp_path: Path, served: Served) -> None:
    """The model drafts for itself, without the plan, in SGLang's Triton backend; cold, and after prefixes, with
    sinks. Products of other shapes may decide a tie."""
    plan, rounds = with_sinks(without_queries(served)), [prompts(5, 120, 250, 380)] * 2
    drafts = drafting(served.folder, speculative_draft_attention_backend="triton")
    plain, drafted = (
        serve(served, tmp_path / name, rounds, together=True, plan=plan, **graphs, **more)["rounds"]
        for name, more in (("plain", {}), ("drafts", drafts))
    )
    assert sorted(one["cached"] for one in drafted[1]) == [0, 0, 128, 256]
    pairs = list(zip(sum(plain, []), sum(drafted, []), strict=True))
    assert sum(one["output"] == other["output"] for one, other in pairs) >= len(pairs) - 1
    assert all(0 < other["verified"] < TOKENS for _, other in pairs)


@pytest.mark.parametrize(("layout", "io"), [("layer_first", "kernel"), ("page_first_direct", "direct")])
def test_pages_come_back_from_the_host_to_the_bit(layout: str, io: str, tmp_path: Path, served: Served) -> None:
    """Others take all of the 12 pages in between. Answers are those of a pool that no page has to leave."""
    if "transfer_embedding_ranges_direct" not in vars(pytest.importorskip("sgl_kernel.kvcacheio")):
        pytest.skip("this sglang-kernel is older than rows of pages on the host")
    plan, given = served.with_copies(), prompts(*LENGTHS)
    rounds, host = [given, prompts(700, 600, seed=9), given], HOST | {"hicache_mem_layout": layout}
    few = {"max_total_tokens": 1536, "hicache_io_backend": io}
    with ThreadPoolExecutor() as pool:
        both = {"host": host | few, "device": {}}
        left, stayed = pool.map(
            lambda name: serve(served, tmp_path / name, rounds, plan=plan, **GRAPHS, **both[name])["rounds"], both
        )
    assert [one["cached"] for one in left[2]] == [0, 128, 256, 640] and left == stayed


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("graphs", [EAGER, GRAPHS], ids=["eager", "graphs"])
def test_two_ranks_hold_a_head_each(graphs: dict[str, Any], tmp_path: Path, served: Served) -> None:
    """Cold, and after prefixes."""
    rounds = [prompts(5, 130, 300)] * 2
    found = serve(served, tmp_path, rounds, together=True, tp_size=2, disable_custom_all_reduce=True, **graphs)
    assert sorted(one["cached"] for one in found["rounds"][1]) == [0, 128, 256]
    replayed(served, found, rounds)
