"""A plan in the real vLLM, on a CPU, in fp32: every token of every request is the one that ``PlanCache``
gives for the same tokens in the same chunks. ``make engines`` runs these tests; they are no part of ``make
check``."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import transformers as hf
from attention_recorder import VARIABLE
from engine_replay import MOST, assert_attended
from served_models import (
    LENGTHS,
    VOCABULARY,
    Served,
    damages_of,
    fmt,
    prompts,
    random_requests,
    without_queries,
)
from vllm_cases import ALONE, DRAFTS, SHORT, TOKENS, assert_capacity, serve
from vllm_cases import gemma as gemma
from vllm_cases import served as served
from vllm_cases import version as version
from vllm_environment import run_in

from kvcal import Plan
from kvcal.engines.capacity import capacity as capacity_of
from kvcal.engines.shard import HeadShard, stages_of
from kvcal.models.load import identity_of
from kvcal.models.supported_layers import geometry_of
from kvcal.plan.damage import save_damage
from kvcal.plan.plan import LayerPlan, Workload, save_plan

pytestmark = pytest.mark.engines


def test_cold_and_behind_cached_prefixes(version: str, tmp_path: Path, served: Served) -> None:
    """The second time around, prompts begin after the blocks that the first time filled."""
    given = prompts(*LENGTHS)
    requests = [{"prompt": ids, "tokens": TOKENS, "at": at} for at in (0, TOKENS + 5) for ids in given]
    found, replay = serve(version, tmp_path, served, requests)
    assert sorted(replay.cached.values()) == [0, 0, 0, 0, 0, 128, 256, 640]
    assert sum(len(output) for _, output in found["requests"].values()) == 8 * TOKENS
    assert replay.restarts == 0


def test_blocks_run_short(version: str, tmp_path: Path, served: Served) -> None:
    """Requests lose their blocks and are computed again."""
    requests = [{"prompt": ids, "tokens": 150} for ids in prompts(300, 310, 320, 330)]
    _, replay = serve(version, tmp_path, served, requests, **SHORT, enable_prefix_caching=False)
    assert replay.restarts > 0


@pytest.mark.parametrize("case", ["shared prefixes", "sinks and windows", "bases"])
def test_attention_of_every_layer(version: str, tmp_path: Path, served: Served, case: str) -> None:
    """From the engine's own queries, keys and values: no layer adds to what another one rounds. Prompts in
    chunks that begin anywhere in a page, after prefixes, and again after their blocks were lost. One bit more
    tells."""
    has_copies, file = case == "sinks and windows", tmp_path / "attention"
    plan = served.with_copies() if has_copies else served.in_bases() if case == "bases" else served.plan
    given = [*prompts(*LENGTHS), *(prompts(300, 310, 320, 330) if has_copies else prompts(*LENGTHS))]
    requests = [{"prompt": ids, "tokens": 100, "at": 120 * (n // 4)} for n, ids in enumerate(given)]
    more = {**SHORT, "max_num_batched_tokens": 256, "enable_prefix_caching": not has_copies}
    llm = served.arguments(served.write("attention.safetensors", plan), **more)
    found = run_in(version, tmp_path, "vllm_host.py", {"llm": llm, "requests": requests}, {VARIABLE: str(file)})
    assert "error" not in found, found
    replay = assert_attended(file, found["steps"], served.model, plan, 500)
    assert replay.restarts > 0 if has_copies else sum(replay.cached.values()) > 0


def test_drafts_change_no_token(version: str, tmp_path: Path, served: Served) -> None:
    """Prompts that repeat themselves, and others; cold, and after cached prefixes; some of these are
    answers."""
    plan = without_queries(served)
    given = [*prompts(*LENGTHS), prompts(9, seed=5)[0] * 15]
    requests = [{"prompt": ids, "tokens": 140, "at": at} for at in (0, 150) for ids in given]
    requests += [{"prompt": ids, "after": n, "tokens": 60, "at": 310} for n, ids in enumerate(prompts(3, 50, 20))]
    found, replay = serve(version, tmp_path / "drafts", served, requests, plan, speculative_config=DRAFTS)
    plain, _ = serve(version, tmp_path / "plain", served, requests, plan)
    equal = 0
    for name, (tokens, chances) in plain["outputs"].items():
        ours, our_chances = found["outputs"][name]
        if found["requests"][name][0] == plain["requests"][name][0]:  # not after an answer that differs
            first = next((n for n, (a, b) in enumerate(zip(tokens, ours, strict=True)) if a != b), None)
            assert first is None or abs(chances[first] - our_chances[first]) <= 2 * MOST, (name, first)  # a tie
            equal += first is None
    assert equal >= 10
    assert len(found["steps"]) < len(plain["steps"])
    assert_capacity(plain, plan)
    assert_capacity(found, plan, ALONE - 1)
    assert replay.accepted > 100 and replay.rejected > 100 and replay.split > 0, vars(replay)
    assert sorted(replay.cached.values()) == [0, 0, 0, 0, 0, 0, 128, 128, 128, 256, 256, 384, 640]


def test_random_requests_with_drafts(version: str, tmp_path: Path, served: Served) -> None:
    """Prompts in chunks, few blocks, aborts and samples, with windows; then with sinks, too, without
    prefixes."""
    more = {**SHORT, "max_num_batched_tokens": 256, "speculative_config": DRAFTS}
    plan = without_queries(served, served.with_copies(has_sinks=False))
    _, replay = serve(version, tmp_path, served, random_requests(60, temperature=0.2), plan, **more)
    assert replay.accepted > 20 and replay.rejected > 100 and sum(replay.cached.values()) > 1000, vars(replay)
    greedy = [{"prompt": ids, "tokens": 150} for ids in prompts(300, 310, 320, 330)]
    plan = without_queries(served, served.with_copies())
    _, replay = serve(version, tmp_path, served, greedy, plan, **more, enable_prefix_caching=False)
    assert replay.restarts > 0 and replay.split > 0 and replay.accepted > 20, vars(replay)


def test_200_random_requests(version: str, tmp_path: Path, served: Served) -> None:
    """Few blocks, and samples that share the blocks of their prompt."""
    _, replay = serve(version, tmp_path, served, random_requests(200), **SHORT, max_num_batched_tokens=512)
    assert sum(replay.cached.values()) > 1000


def test_layers_with_a_sliding_window(version: str, tmp_path: Path, gemma: Served) -> None:
    """Gemma-3, whose windows are vLLM's own: prompts and answers shorter and longer than the window, in
    chunks, cold and after cached prefixes; then few blocks, lost ones, aborts, samples."""
    given = prompts(*LENGTHS, 97)
    requests = [{"prompt": ids, "tokens": 120, "at": 5 * n + at} for at in (0, 180) for n, ids in enumerate(given)]
    found, replay = serve(version, tmp_path, gemma, requests, max_num_batched_tokens=256)
    assert sorted(replay.cached.values()) == [0] * 7 + [128, 256, 640]
    assert_capacity(found, gemma.plan)
    _, replay = serve(version, tmp_path, gemma, random_requests(100), **SHORT, max_num_batched_tokens=512)
    assert sum(replay.cached.values()) > 1000
    requests = [{"prompt": ids, "tokens": 150} for ids in prompts(300, 310, 320, 330)]
    three = {**SHORT, "num_gpu_blocks_override": 26, "max_num_batched_tokens": 256}  # fit until they have grown
    _, replay = serve(version, tmp_path, gemma, requests, **three)
    assert replay.restarts > 0


def test_sliding_windows_with_drafts_and_on_two_ranks(version: str, tmp_path: Path, gemma: Served) -> None:
    requests = [{"prompt": ids * 3, "tokens": 60, "at": at} for at in (0, 80) for ids in prompts(5, 50, 100)]
    found, replay = serve(version, tmp_path, gemma, requests, speculative_config=DRAFTS)
    assert_capacity(found, gemma.plan, ALONE - 1)
    assert replay.accepted > 20 and replay.rejected > 10 and sum(replay.cached.values()) >= 384, vars(replay)
    arguments = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    requests = [{"prompt": ids, "tokens": 20, "at": at} for at in (0, 25) for ids in prompts(130, 300)]
    _, replay = serve(version, tmp_path, gemma, requests, **arguments)
    assert sorted(replay.cached.values()) == [0, 0, 128, 256]


def test_attention_to_dense_blocks_is_refused(version: str, tmp_path: Path, gemma: Served) -> None:
    """As vLLM's on a CPU would be."""
    start = {"starts": [gemma.arguments()]}
    found = run_in(version, tmp_path, "vllm_host.py", start, {"KVCAL_TEST_DENSE": "1"})
    assert "with CPU_ATTN, which does not read blocks of layers that lie side by side" in found["starts"][0]["message"]


def test_sliding_windows_leave_the_memory_that_a_plan_saves(version: str, tmp_path: Path) -> None:
    """Gemma-3's 5 to 1, windows of 1,024 tokens, requests of 32,768 as vLLM counts them: in fp32, and with 2
    to 4 bits in the other layers. In vLLM's memory lie as many blocks as predicted."""
    wide = Served(tmp_path / "wide", layers=24, head_dim=64, window=1024, every=6)
    more = {"max_model_len": 32768, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 512 << 20}
    fitting = []
    for path in ({}, {"kvcal_plan": wide.write("wide.safetensors")}):
        start = {"starts": [wide.arguments(**more, additional_config=path)]}
        found = run_in(version, tmp_path, "vllm_host.py", start)
        assert "error" not in found["starts"][0], found
        fitting.append(float(re.findall(r"tokens per request: ([0-9.]+)x", (tmp_path / "log").read_text())[0]))
    capacity = capacity_of("vllm", wide.plan, 512 << 20, 1, 32768)
    assert found["starts"][0]["blocks"] == capacity.num_blocks
    assert fitting[1] > 2 * fitting[0]
    assert fitting[1] == pytest.approx(capacity.concurrency, rel=0.2)  # vLLM counts the tokens of a step, too


def test_sinks_and_windows_without_prefix_caching(version: str, tmp_path: Path, served: Served) -> None:
    """Prompts in chunks; requests that lose their blocks and are computed again; aborts, and samples."""
    plan, without = served.with_copies(), {"enable_prefix_caching": False, "max_num_batched_tokens": 256}
    given = [*prompts(*LENGTHS), *prompts(300, 310, 320, 330)]
    requests = [{"prompt": ids, "tokens": 100, "at": 120 * (n // 4)} for n, ids in enumerate(given)]
    found, replay = serve(version, tmp_path, served, requests, plan, **SHORT, **without)
    assert replay.restarts > 0 and sum(len(output) for _, output in found["requests"].values()) == 800
    rings = sum(HeadShard(plan).ring_bytes(index) for index in range(4))
    assert any(f"and {rings} a request" in line for line in found["log"]), found["log"]
    serve(version, tmp_path, served, random_requests(60), plan, **SHORT, **without)


def test_the_log_says_predicted_and_allocated_bytes(version: str, tmp_path: Path, served: Served) -> None:
    found, _ = serve(version, tmp_path, served, [{"prompt": ids, "tokens": 2} for ids in prompts(5)])
    predicted = served.plan.nbytes((128,)) - served.plan.nbytes((0,))
    assert any(f"the plan takes {predicted} bytes a block" in line for line in found["log"])


def test_the_log_says_what_a_plan_is_known_to_do(version: str, tmp_path: Path, served: Served) -> None:
    """Unchecked, sound, destroyed: the record lies next to the plan."""
    paths = [served.write(name) for name in ("unchecked.safetensors", "sound.safetensors", "destroyed.safetensors")]
    for path, damage in zip(paths[1:], damages_of(served.plan), strict=True):
        save_damage(damage, Path(path))
    run_in(version, tmp_path, "vllm_host.py", {"starts": [served.arguments(path) for path in paths]})
    log = (tmp_path / "log").read_text()
    assert all(f"serving the plan {path}" in log for path in paths)
    assert f"{paths[0]}: the plan is unchecked" in log and f"{paths[2]}: the plan destroys the model: KL 9" in log
    assert f"{paths[1]}: " not in log


def test_tensor_parallel(version: str, tmp_path: Path, served: Served) -> None:
    """Two processes, a KV head each."""
    given = prompts(130, 300)
    requests = [{"prompt": ids, "tokens": 20, "at": at} for at in (0, 25) for ids in given]
    arguments = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    _, replay = serve(version, tmp_path, served, requests, **arguments)
    assert sorted(replay.cached.values()) == [0, 0, 128, 256]


@pytest.mark.parametrize("partition", [None, "1,3"], ids=["halves", "1 and 3 layers"])
def test_stages_of_a_pipeline(
    partition: str | None, version: str, tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes, whose layers have rings of unequal bytes: sinks in one, windows in both. Cold, behind cached
    prefixes, and with blocks that run short. The same tokens as of one process."""
    plan, stages = served.with_copies(), stages_of(4, 2) if partition is None else (range(1), range(1, 4))
    given = prompts(*LENGTHS, 120)
    requests = [{"prompt": ids, "tokens": TOKENS, "at": at} for at in (0, TOKENS + 25) for ids in given]
    whole, _ = serve(version, tmp_path / "whole", served, requests, plan)
    monkeypatch.setenv("KVCAL_TEST_STAGES", "1")
    if partition is not None:
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
    arguments = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    found, replay = serve(version, tmp_path / "stages", served, requests, plan, **arguments)
    assert sorted(replay.cached.values())[5:] == [0, 0, 128, 256, 640]
    assert {name: ids for name, (ids, _) in found["outputs"].items()} == {
        name: ids for name, (ids, _) in whole["outputs"].items()
    }
    assert found["blocks"] == capacity_of("vllm", plan, 64 << 20, 1, 2048, stages=stages).num_blocks
    log = (tmp_path / "stages" / "log").read_text()
    assert all(f"stage {n} of 2: layers {own[0]} to {own[-1]}" in log for n, own in enumerate(stages))
    requests = [{"prompt": ids, "tokens": 150} for ids in prompts(300, 310, 320, 330)]
    short = {**SHORT, "max_num_batched_tokens": 256, "enable_prefix_caching": False}
    short |= {} if partition is None else {"num_gpu_blocks_override": 14}  # its four requests fit into 24
    _, replay = serve(version, tmp_path / "short", served, requests, plan, **short, **arguments)
    assert replay.restarts > 0


def test_what_is_not_served_in_stages_of_a_pipeline(
    version: str, tmp_path: Path, served: Served, gemma: Served
) -> None:
    stages = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    plan = served.write("plain.safetensors", without_queries(served))
    offload = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both",
               "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20}}  # fmt: skip
    refused = [
        (served.arguments(plan, **stages, speculative_config=DRAFTS), "drafts in 2 stages of a pipeline"),
        (served.arguments(plan, **stages, kv_transfer_config=offload), "a KV connector in 2 stages of a pipeline"),
        (gemma.arguments(**stages), "have a sliding window or a state, which was not tried in 2 stages of a pipeline"),
    ]
    for number, (arguments, text) in enumerate(refused):
        found = run_in(version, tmp_path / str(number), "vllm_host.py", {"starts": [arguments]})
        assert "error" in found["starts"][0]
        assert text in (tmp_path / str(number) / "log").read_text(), text


def test_spawned_processes_have_the_backend(version: str, tmp_path: Path, served: Served) -> None:
    """`vllm serve` spawns its engine, which reads its configuration before it loads plug-ins."""
    spawned = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    start = {"starts": [served.arguments(attention_backend="KVCAL")]}
    found = run_in(version, tmp_path, "vllm_host.py", start, spawned)
    assert "error" not in found["starts"][0], found
    assert "serving the plan" in (tmp_path / "log").read_text()


def test_ranks_with_unequal_plans_are_refused(
    version: str, tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes, whose file of the same name differs, as on two machines."""
    *layers, last = served.plan.layers
    other = dataclasses.replace(served.plan, layers=(*layers, dataclasses.replace(last, v=fmt(4, "token"))))
    monkeypatch.setenv("KVCAL_TEST_PLAN_OF_RANK_1", served.write("other.safetensors", other))
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    found = run_in(version, tmp_path, "vllm_host.py", {"starts": [served.arguments(**ranks)]})
    assert "error" in found["starts"][0]
    assert "the ranks have unequal plans" in (tmp_path / "log").read_text()


def test_what_is_not_served_is_refused_at_start(version: str, tmp_path: Path, served: Served) -> None:
    other = Served(tmp_path / "other", layers=2)
    foreign = dataclasses.replace(served.plan.model, config_sha256="0" * 64)
    refused = [
        (served.arguments(other.write("plan.safetensors")), "of layers 2, but vLLM serves"),
        (
            served.arguments(served.write("foreign", dataclasses.replace(served.plan, model=foreign))),
            "sha256 of config",
        ),
        (
            served.arguments(sliding_plan(tmp_path / "sliding"), model=str(tmp_path / "sliding")),
            "no layer has full attention",
        ),
        (served.arguments(str(tmp_path / "nothing")), "nothing"),
        (served.arguments(block_size=64), "blocks of 64 tokens, expected 128"),
        (served.arguments(additional_config={"kvcal_plam": "x"}), "'kvcal_plam', expected 'kvcal_plan'"),
        (served.arguments(attention_backend="KVCAL", additional_config={}), "--attention-backend KVCAL without a plan"),
        (served.arguments(kv_cache_dtype="fp8"), "--kv-cache-dtype fp8"),
        (served.arguments(hf_overrides={"rswa_window": 64}), "R-SWA not supported"),
        (served.arguments(hf_overrides={"is_mm_prefix_lm": True}), "tokens of an image attend to each other both ways"),
        (
            served.arguments(speculative_config=DRAFTS),
            "with 5 drafts: layers 2: k pages with tiers that queries choose: queries of rejected drafts",
        ),
        (
            served.arguments(
                speculative_config=DRAFTS | {"num_speculative_tokens_per_batch_size": [(1, 2, 5), (3, 4, 2)]}
            ),
            "drafts whose number follows the batch",
        ),
        (served.arguments(speculative_config=DRAFTS | {"num_speculative_tokens": 8}), "8 drafts, expected at most 7"),
    ]
    found = run_in(version, tmp_path, "vllm_host.py", {"starts": [arguments for arguments, _ in refused]})
    for start, (_, text) in zip(found["starts"], refused, strict=True):
        assert text in start["message"], start


def test_batch_invariance_and_context_parallelism_are_refused(version: str, tmp_path: Path, served: Served) -> None:
    start = {"starts": [served.arguments()]}
    found = run_in(version, tmp_path / "invariance", "vllm_host.py", start, {"VLLM_BATCH_INVARIANT": "1"})
    assert "batch invariance not supported" in found["starts"][0]["message"], found
    ranks = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "distributed_executor_backend": "mp"}
    start = {
        "starts": [served.arguments(**ranks, hf_overrides={"num_key_value_heads": 1})]
    }  # vLLM wants fewer than ranks
    found = run_in(version, tmp_path / "ranks", "vllm_host.py", start)
    assert "error" in found["starts"][0]
    assert "decode context parallelism of 2, which is not served" in (tmp_path / "ranks" / "log").read_text()


def sliding_plan(folder: Path) -> str:
    """A random Mistral in ``folder``, and a plan for its two layers, which both have a window."""
    config = hf.MistralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=VOCABULARY, sliding_window=64, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = hf.MistralForCausalLM(config).eval()
    model.save_pretrained(folder)
    layers = tuple(map(LayerPlan, geometry_of(model, cache_dtype="float32").layers))
    plan = Plan(identity_of(folder, "sliding"), "float32", layers, Workload(2, 300), {})
    path = folder / "plans" / "plan.safetensors"
    path.parent.mkdir()
    save_plan(plan, path)
    return str(path)
