"""A plan in vLLM on a GPU: tokens are those of ``PlanCache`` on a CPU, and CUDA graphs give the eager run's
to the bit. vLLM is the one of the interpreter that runs the tests."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from engine_replay import MOST, assert_near, assert_replayed
from served_models import LENGTHS, Served, prompts, without_queries
from test_vllm_drafts import eagle
from test_vllm_hybrids import Hybrid
from test_vllm_nixl import peer
from test_vllm_offload import stored
from vllm_cases import ALONE, DRAFTS, TOKENS
from vllm_environment import answer_of, installed_checkout

from kvcal.engines.support import block_seed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM in this environment"),
]

# Steps that only decode are replayed.
GRAPHS = {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Its model computes in fp32, as the reference does; the kernels store bf16."""
    return Served(tmp_path_factory.mktemp("model"), head_dim=64, cache_dtype="bfloat16")


ON_GPU: dict[str, Any] = {
    "attention_backend": "KVCAL", "compilation_config": {}, "gpu_memory_utilization": 0.1,
    "kernel_config": {"enable_jit_warmup": False},
}  # fmt: skip


def serve(
    folder: Path, served: Served, requests: list[dict], runner: int = 2, seed: int | None = None, **more: Any
) -> dict[str, Any]:
    """A run of vLLM; ``seed``: of its names of blocks."""
    given = {"llm": served.arguments(**ON_GPU | more), "requests": requests}
    found = run(folder, "vllm_host.py", given, runner, {} if seed is None else {"PYTHONHASHSEED": str(seed)})
    assert "error" not in found, found["trace"]
    return found


def run(
    folder: Path, program: str, given: dict[str, Any], runner: int = 2, more: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """The answer of a program; ``runner``: vLLM has two model runners on a GPU, of which the second is the
    usual one; ``more``: variables."""
    paths = [*installed_checkout(folder / "meta", has_stubs=False), os.environ.get("PYTHONPATH", "")]
    variables = {
        "PYTHONPATH": os.pathsep.join(paths), "VLLM_USE_V2_MODEL_RUNNER": str(runner - 1),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }  # fmt: skip
    return answer_of(Path(sys.executable), folder, program, given, variables | more)


def twice(*lengths: int, tokens: int = TOKENS) -> list[dict]:
    """Requests of these lengths, and the same again after the blocks that the first ones filled."""
    return [{"prompt": ids, "tokens": tokens, "at": at} for at in (0, tokens + 5) for ids in prompts(*lengths)]


@pytest.mark.parametrize("runner", [1, 2])
def test_cold_and_behind_cached_prefixes(runner: int, tmp_path: Path, served: Served) -> None:
    found = serve(tmp_path, served, twice(*LENGTHS), runner)
    replay = assert_replayed(found, served.model, served.plan, is_greedy=False)  # of equal logits, either is right
    assert sorted(replay.cached.values()) == [0, 0, 0, 0, 0, 128, 256, 640]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_give_what_the_eager_run_gives(dtype: str, tmp_path: Path, served: Served) -> None:
    """Tokens and log-probabilities, over the ends of pages."""
    runs = [serve(tmp_path, served, twice(*LENGTHS), dtype=dtype, **more) for more in ({}, GRAPHS)]
    assert runs[0]["outputs"] == runs[1]["outputs"]


@pytest.mark.parametrize("runner", [1, 2])
def test_drafts_change_no_token(runner: int, tmp_path: Path, served: Served) -> None:
    """Of n-grams; over the ends of pages, cold and after cached prefixes."""
    plan = served.write("drafts.safetensors", without_queries(served))
    given = {"additional_config": {"kvcal_plan": plan}, "speculative_config": DRAFTS}
    found = serve(tmp_path, served, twice(5, 120, 250, 380), runner, **given)
    replay = assert_replayed(found, served.model, without_queries(served), False, alone=ALONE)
    assert replay.accepted > 20 and replay.rejected > 20 and replay.split > 0, vars(replay)


@pytest.mark.parametrize("runner", [1, 2])
def test_graphs_verify_drafts_as_the_eager_run_does(runner: int, tmp_path: Path, served: Served) -> None:
    plan = served.write("drafts.safetensors", without_queries(served))
    given = {"additional_config": {"kvcal_plan": plan}, "speculative_config": DRAFTS, "dtype": "bfloat16"}
    runs = [serve(tmp_path, served, twice(5, 120, 250, 380), runner, **given, **more) for more in ({}, GRAPHS)]
    assert runs[0]["outputs"] == runs[1]["outputs"]


@pytest.mark.parametrize("drafts", [{}, {"speculative_config": DRAFTS}], ids=["alone", "drafts"])
def test_sinks_and_windows(drafts: dict[str, Any], tmp_path: Path, served: Served) -> None:
    """Without prefix caching; prompts in chunks."""
    plan = without_queries(served, served.with_copies()) if drafts else served.with_copies()
    given = {"additional_config": {"kvcal_plan": served.write(f"copies{len(drafts)}.safetensors", plan)}, **drafts}
    requests = [{"prompt": ids, "tokens": TOKENS, "at": 5 * n} for n, ids in enumerate(prompts(5, 120, 250, 380))]
    found = serve(tmp_path, served, requests, **given, enable_prefix_caching=False, max_num_batched_tokens=256)
    assert_replayed(found, served.model, plan, False, alone=ALONE if drafts else 1)


@pytest.mark.parametrize("more", [{"max_num_batched_tokens": 256}, GRAPHS], ids=["chunks", "graphs"])
def test_sinks_and_windows_behind_cached_prefixes(more: dict[str, Any], tmp_path: Path, served: Served) -> None:
    """Between the two times, all rings are others'. One prompt's first page is filled by decoding."""
    plan, given = served.with_copies(), prompts(*LENGTHS, 120, 129)
    rounds = (0, given), (130, prompts(*LENGTHS, seed=9)), (230, given)
    requests = [{"prompt": ids, "tokens": TOKENS, "at": at} for at, round_ in rounds for ids in round_]
    requests.append({"prompt": given[-1], "tokens": TOKENS, "at": 370})  # in a step that only decodes
    path = served.write("sinks.safetensors", plan)
    found = serve(tmp_path, served, requests, additional_config={"kvcal_plan": path}, **more)
    replay = assert_replayed(found, served.model, plan, is_greedy=False)
    assert sorted(replay.cached.values())[-5:] == [128, 128, 128, 256, 640]


def test_layers_with_a_sliding_window(tmp_path: Path) -> None:
    """Gemma-3, whose windows are vLLM's own, prompts and answers shorter and longer than the window, cold and
    after cached prefixes; eager and in graphs. A step of three requests is filled up to a graph of four,
    whose products in fp32 round differently."""
    gemma = Served(tmp_path / "gemma", head_dim=64, cache_dtype="bfloat16", window=96)
    runs = [
        serve(tmp_path, gemma, twice(5, 80, 250, 380), max_num_batched_tokens=256, **graphs) for graphs in ({}, GRAPHS)
    ]
    for name, (tokens, chances) in runs[0]["outputs"].items():
        assert runs[1]["outputs"][name] == [tokens, pytest.approx(chances, abs=1e-4)]
    replay = assert_replayed(runs[0], gemma.model, gemma.plan, False)
    assert sorted(replay.cached.values()) == [0, 0, 0, 0, 0, 0, 128, 256]


@pytest.mark.parametrize("runner", [1, 2])
def test_states_beside_pages(runner: int, tmp_path: Path) -> None:
    """LFM2, with three pages a block: prompts in chunks, sinks and windows, cold and after cached prefixes, which
    end within blocks, too; eager and in graphs."""
    hybrid = Hybrid(tmp_path / "hybrid", channels=512, convolved=3, cache_dtype="bfloat16")
    plan = hybrid.with_copies()
    more = {"additional_config": {"kvcal_plan": hybrid.write("copies.safetensors", plan)}, "block_size": 384}
    runs = [
        serve(tmp_path, hybrid, twice(5, 380, 700, 1025), runner, max_num_batched_tokens=512, **more, **graphs)
        for graphs in ({}, GRAPHS)
    ]
    for name, (tokens, chances) in runs[0]["outputs"].items():
        assert runs[1]["outputs"][name] == [tokens, pytest.approx(chances, abs=1e-4)]
    replay = assert_replayed(runs[0], hybrid.model, plan, False)
    assert sum(replay.cached.values()) >= 384 + 768, replay.cached


@pytest.mark.parametrize("runner", [1, 2])
def test_drafts_beside_states(runner: int, tmp_path: Path) -> None:
    """The same with drafts of n-grams: a step stores states of all of its tokens, of which the next one takes that of
    the last accepted token."""
    hybrid = Hybrid(tmp_path / "hybrid", channels=512, convolved=3, cache_dtype="bfloat16", share=1 / 80)
    plan = without_queries(hybrid, hybrid.with_copies())
    more = {"additional_config": {"kvcal_plan": hybrid.write("copies.safetensors", plan)}, "block_size": 384}
    more |= {"speculative_config": DRAFTS, "max_num_batched_tokens": 512}
    requests = twice(5, 380, 700, 1025, tokens=60)
    for graphs in ({}, GRAPHS):
        replay = assert_replayed(serve(tmp_path, hybrid, requests, runner, **more, **graphs), hybrid.model, plan, False,
                                 alone=ALONE)  # fmt: skip
        assert sum(replay.cached.values()) >= 384 + 768, replay.cached
        assert replay.accepted > 20 and replay.rejected > 20, vars(replay)


@pytest.mark.parametrize("runner", [1, 2])
def test_a_model_that_drafts(runner: int, tmp_path: Path, served: Served) -> None:
    """The model itself, in bf16, with windows and sinks, cold and after cached prefixes; eager and in graphs, which
    are of more rows: what it drafts may differ there, then steps do, and roundings."""
    plan = without_queries(served, served.with_copies())
    drafts = {"method": "draft_model", "model": str(served.folder), "num_speculative_tokens": 3}
    given = {
        "additional_config": {"kvcal_plan": served.write("drafted.safetensors", plan)}, "dtype": "bfloat16",
        "speculative_config": drafts | {"attention_backend": "TRITON_ATTN"},
    }  # fmt: skip
    runs = [serve(tmp_path, served, twice(5, 120, 250, 380), runner, **given, **more) for more in ({}, GRAPHS)]
    for name, answer in runs[0]["outputs"].items():
        assert_near(answer, runs[1]["outputs"][name], MOST)
    steps = [entry for step in runs[0]["steps"] for entry in step if entry[4]]
    accepted = sum(entry[5] - entry[2] + entry[4] for entry in steps) / sum(entry[4] for entry in steps)
    assert accepted > 0.2, accepted


@pytest.mark.parametrize("runner", [1, 2])
def test_an_eagle_head_drafts(runner: int, tmp_path: Path, served: Served) -> None:
    """Cold and after cached prefixes; eager and in graphs."""
    plan = without_queries(served, served.with_copies())
    drafts = eagle(tmp_path / "eagle", served) | {"attention_backend": "TRITON_ATTN"}
    path = served.write("eagle.safetensors", plan)
    given = {"additional_config": {"kvcal_plan": path}, "dtype": "bfloat16", "speculative_config": drafts}
    runs = [serve(tmp_path, served, twice(5, 120, 250, 380), runner, **given, **more) for more in ({}, GRAPHS)]
    assert runs[0]["outputs"] == runs[1]["outputs"]
    assert sum(entry[4] for step in runs[0]["steps"] for entry in step) > 100


def test_stored_blocks_are_read_under_their_own_plan_alone(tmp_path: Path, served: Served) -> None:
    """Engines, one after the other, of one folder."""
    plan = served.with_copies(has_sinks=False)
    scales = {name: 2 * tensor if "rescale" in name else tensor for name, tensor in plan.tensors.items()}
    requests = [{"prompt": ids, "tokens": 20} for ids in prompts(300, 130, 700)]
    requests.append({"prompt": prompts(5, seed=9)[0], "tokens": 200})  # until all that is stored lies there
    begun = []
    for which in (plan, plan, dataclasses.replace(plan, tensors=scales)):
        path = served.write("stored.safetensors", which)
        given = {"additional_config": {"kvcal_plan": path}, "max_num_seqs": 1, **stored(tmp_path / "blocks")}
        found = serve(tmp_path, served, requests, seed=block_seed(which), **given)
        firsts: dict[str, int] = {}
        for name, first, *_ in (entry for step in found["steps"] for entry in step if entry[0] is not None):
            firsts.setdefault(name, first)
        begun.append([firsts[name] for name in ("0", "1", "2")])
    assert begun == [[0, 0, 0], [256, 128, 640], [0, 0, 0]]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("graphs", [{}, GRAPHS], ids=["eager", "graphs"])
def test_two_ranks_hold_a_head_each(graphs: dict[str, Any], tmp_path: Path, served: Served) -> None:
    """With sinks and windows, cold and after cached prefixes."""
    plan = served.with_copies()
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "disable_custom_all_reduce": True}
    given = {"additional_config": {"kvcal_plan": served.write("ranks.safetensors", plan)}, **ranks, **graphs}
    replay = assert_replayed(serve(tmp_path, served, twice(130, 300), **given), served.model, plan, is_greedy=False)
    assert sorted(replay.cached.values()) == [0, 0, 128, 256]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("graphs", [{}, GRAPHS], ids=["eager", "graphs"])
def test_two_stages_of_a_pipeline(graphs: dict[str, Any], tmp_path: Path, served: Served) -> None:
    """Likewise."""
    plan = served.with_copies()
    stages = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    given = {"additional_config": {"kvcal_plan": served.write("stages.safetensors", plan)}, **stages, **graphs}
    replay = assert_replayed(serve(tmp_path, served, twice(130, 300), **given), served.model, plan, is_greedy=False)
    assert sorted(replay.cached.values()) == [0, 0, 128, 256]


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="no NIXL in this environment")
@pytest.mark.parametrize("gpus", [1, 2])
def test_prompts_in_one_engine_and_answers_in_another(gpus: int, tmp_path: Path, served: Served) -> None:
    """NIXL reads packed blocks from one GPU's memory into its own or another one's, cold, and when both engines have
    pages of the prompts; with sinks and windows, in graphs."""
    if torch.cuda.device_count() < gpus:
        pytest.skip("one GPU")
    plan = without_queries(served, served.with_copies())
    path = served.write("peers.safetensors", plan)
    own = {
        name: served.arguments(path, kv_transfer_config=peer(role), **ON_GPU | GRAPHS)
        for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer"))
    }
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    requests = [{"prompt": ids, "tokens": 40, "at": at} for at in (0, 70) for ids in prompts(5, 129, 300, 700)]
    scenario = own | {"requests": requests, "gpus": {"prefill": visible[0], "decode": visible[gpus - 1]}}
    found = run(tmp_path, "vllm_pair.py", scenario)
    assert "error" not in found, found["trace"]
    assert not found["failed"] and len(found["outputs"]) == 8
    assert all(first == last for first, last in found["free"].values()), found["free"]
    replay = assert_replayed(found, served.model, plan, is_greedy=False)
    assert [replay.cached[str(number)] for number in range(8)] == [4, 128, 299, 699] * 2
