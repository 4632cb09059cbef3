"""Prompts in one vLLM and answers in another one, each a process on a CPU, in fp32, with NIXL itself between them,
which reads packed blocks through UCX. Every token is the one that ``PlanCache`` gives for what both computed, one
after the other. ``make engines`` runs these tests."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
from engine_replay import FROM_PEER, PROMPTS, Replay, assert_replayed
from served_models import Served, prompts, without_queries
from test_vllm_offload import SIMPLE, connector
from vllm_cases import DRAFTS, SHORT
from vllm_cases import gemma as gemma
from vllm_cases import serve as serve_alone
from vllm_cases import served as served
from vllm_environment import answer_of, needed, python_with_nixl, run_in, variables_in

from kvcal import Plan
from kvcal.engines.support import TESTED
from kvcal.engines.vllm import PEERS, PEERS_MODULE

pytestmark = pytest.mark.engines

LENGTHS = 5, 127, 128, 129, 300, 700
# Blocks that nobody reads are free after so many seconds.
SOON: dict[str, Any] = {"kv_connector_extra_config": {"kv_lease_duration": 6}}
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.fixture(params=TESTED["vllm"])
def version(request: pytest.FixtureRequest) -> str:
    needed(python_with_nixl, request.param)
    return request.param


def peer(role: str, **more: Any) -> dict[str, Any]:
    return {"kv_connector": PEERS, "kv_connector_module_path": PEERS_MODULE, "kv_role": role} | more


def pair(
    version: str, folder: Path, served: Served, requests: list[dict], plans: tuple[Plan, Plan],
    prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, wait: int = 0, **transfer: Any,
) -> dict[str, Any]:  # fmt: skip
    """What both engines did; ``prefill``, ``decode``: more arguments of either."""
    scenario: dict[str, Any] = {"requests": requests, "wait": wait}
    own = {"prefill": prefill or {}, "decode": decode or {}}
    for (name, more), plan, role in zip(own.items(), plans, ("kv_producer", "kv_consumer"), strict=True):
        path = served.write(f"{name}.safetensors", plan)
        scenario[name] = served.arguments(path, **{"kv_transfer_config": peer(role, **transfer)} | more)
    python = python_with_nixl(version)
    kept = {"VLLM_CACHE_ROOT": str(python.parents[1] / "root")}  # what vLLM finds out about models, once
    kept |= {"KVCAL_TEST_OFFLOAD": "1"} if "kv_transfer_config" in own["decode"] else {}  # to the host's memory, too
    found = answer_of(python, folder, "vllm_pair.py", scenario, variables_in(folder) | kept)
    assert "error" not in found, found["trace"]
    for name, (first, last) in found["free"].items():
        assert first == last, (name, first, last)  # no block is lost
    return found


def replayed(found: dict[str, Any], served: Served, plan: Plan, alone: int = 1) -> Replay:
    return assert_replayed(found, served.model, plan, alone=alone)


def begun(replay: Replay, *numbers: int) -> list[int]:
    """The tokens with which these requests came to the second engine, or began there."""
    return [replay.cached[str(number)] for number in numbers]


def pages_read(found: dict[str, Any]) -> list[list[int]]:
    """By the second engine, of each request."""
    return [entry[3] for step in found["steps"] for entry in step if entry[0] is None and entry[4] == FROM_PEER]


def test_tokens_are_those_of_one_cache(version: str, tmp_path: Path, served: Served) -> None:
    """Windows and sinks; the same prompts again, when both engines have their pages, and others that begin alike."""
    plan = without_queries(served, served.with_copies())
    given = prompts(*LENGTHS)
    longer = [given[-1][:400] + prompts(77, seed=3)[0], given[-2] + prompts(400, seed=4)[0]]
    requests = [
        {"prompt": ids, "tokens": 40, "at": at} for at, all_ in ((0, given), (70, given + longer)) for ids in all_
    ]
    found = pair(version, tmp_path, served, requests, (plan, plan), decode={"max_num_batched_tokens": 256})
    replay = replayed(found, served, plan)
    assert begun(replay, *range(14)) == [n - 1 for n in (*LENGTHS, *LENGTHS, 477, 700)]
    assert not found["failed"] and len(found["outputs"]) == 14
    assert sum(map(len, pages_read(found))) == (1 + 1 + 1 + 2 + 3 + 6) + (6 * 1) + (1 + 4)
    assert sum(replay.cached[PROMPTS + str(number)] for number in range(6, 14)) == 128 + 256 + 640 + 384 + 256


def test_tokens_are_those_of_one_engine(version: str, tmp_path: Path, served: Served) -> None:
    """Of pages of 16 bits, with which it does not matter what a token has seen packed."""
    plan = served.plan.unquantized()
    requests = [{"prompt": ids, "tokens": 40} for ids in prompts(*LENGTHS)]
    found = pair(version, tmp_path / "two", served, requests, (plan, plan))
    alone, _ = serve_alone(version, tmp_path / "one", served, requests, plan)
    assert {name: ids for name, (ids, _) in found["outputs"].items()} == {
        name: ids for name, (ids, _) in alone["outputs"].items()
    }


def random_requests(count: int) -> list[dict]:
    """Shared beginnings, aborts in either engine."""
    chosen, prefixes = random.Random(11), prompts(128, 260, 400, seed=3)
    requests = []
    for number in range(count):
        ids = chosen.choice([[], *prefixes]) + prompts(chosen.randrange(1, 150), seed=100 + number)[0]
        request: dict[str, Any] = {"prompt": ids, "tokens": chosen.randrange(1, 60), "at": number * 2}
        if number % 4 == 0:
            where = "decode" if number % 8 else "prefill"
            request["abort"] = where, chosen.randrange(where == "decode", 4 if where == "prefill" else 12)
        requests.append(request)
    return requests


def test_aborts(version: str, tmp_path: Path, served: Served) -> None:
    """Few blocks in both engines, prompts in chunks, an engine for answers that is slow."""
    plan = without_queries(served, served.with_copies())
    short = {**SHORT, "max_num_batched_tokens": 256}
    requests = random_requests(24)
    found = pair(version, tmp_path, served, requests, (plan, plan), short, short, wait=1)
    replayed(found, served, plan)
    aborted = [number for number, request in enumerate(requests) if "abort" in request]
    assert len(requests) > len(found["outputs"]) >= len(requests) - len(aborted)
    assert not any(where == "decode" for where, _ in found["failed"].values())


def test_answers_lose_their_blocks(version: str, tmp_path: Path, served: Served) -> None:
    """The second engine computes a prompt itself, after what it still has of it."""
    plan = without_queries(served)
    requests = [{"prompt": ids, "tokens": 150} for ids in prompts(300, 310, 320, 330)]
    found = pair(version, tmp_path, served, requests, (plan, plan), decode=SHORT)
    replay = replayed(found, served, plan)
    assert replay.restarts > 0 and len(found["outputs"]) == 4


def test_another_plan_is_refused_and_its_blocks_are_not_read(version: str, tmp_path: Path, served: Served) -> None:
    """Of equal bytes, and other scales of keys. With "recompute" the second engine computes the prompts itself."""
    plan = without_queries(served)
    scales = {name: 2 * tensor if "rescale" in name else tensor for name, tensor in plan.tensors.items()}
    other = dataclasses.replace(plan, tensors=scales)
    requests = [{"prompt": ids, "tokens": 10} for ids in prompts(5, 300)]
    found = pair(version, tmp_path / "fail", served, requests, (other, plan), kv_load_failure_policy="fail", **SOON)
    assert found["failed"] == {"0": ["decode", "error"], "1": ["decode", "error"]}
    assert "NIXL compatibility hash mismatch" in (tmp_path / "fail" / "log").read_text()
    found = pair(
        version, tmp_path / "again", served, requests, (other, plan), kv_load_failure_policy="recompute", **SOON
    )
    steps = [[entry for entry in step if entry[0] in ("0", "1")] for step in found["steps"]]
    own = {name: ids for name, ids in found["requests"].items() if not name.startswith(PROMPTS)}
    replay = replayed(found | {"steps": steps, "requests": own}, served, plan)
    assert begun(replay, 0, 1) == [0, 0] and len(found["outputs"]) == 2


def test_ranks_are_refused_at_start(version: str, tmp_path: Path, served: Served) -> None:
    path = served.write("plain.safetensors", without_queries(served))
    given = served.arguments(path, kv_transfer_config=peer("kv_producer"), **TWO_RANKS)
    run_in(version, tmp_path, "vllm_host.py", {"starts": [given]})
    assert "PlanNixlConnector on 2 ranks (expected 1; more were not tried)" in (tmp_path / "log").read_text()


def test_several_connectors(version: str, tmp_path: Path, served: Served) -> None:
    """Blocks that the second engine has read go to its host's memory, too, and come back for requests that come to it
    without another engine's blocks."""
    plan = without_queries(served, served.with_copies())
    hosted = connector(SIMPLE)["kv_transfer_config"]
    several = {"kv_connector": "MultiConnector", "kv_role": "kv_consumer"}
    several |= {"kv_connector_extra_config": {"connectors": [peer("kv_consumer"), hosted]}}
    decode = {**SHORT, "kv_transfer_config": several}
    given, others = prompts(130, 300), prompts(700, 700, 700, 700, seed=9)
    parts = ((0, given, {}), (60, others, {}), (300, given, {"alone": True}))
    requests = [{"prompt": ids, "tokens": 20, "at": at, **more} for at, all_, more in parts for ids in all_]
    found = pair(version, tmp_path, served, requests, (plan, plan), decode=decode)
    replay = replayed(found, served, plan)
    assert begun(replay, 0, 1) == [129, 299] and begun(replay, 6, 7) == [128, 256] and replay.loaded >= 3


def test_what_is_refused_at_start(version: str, tmp_path: Path, served: Served, gemma: Served) -> None:
    plan = served.write("plain.safetensors", without_queries(served))

    def started(path: str | None = plan, of: Served = served, extra: dict[str, Any] | None = None, **more: Any) -> dict:
        transfer = peer("kv_consumer", kv_connector_extra_config=extra or {}) | more
        return of.arguments(path, kv_transfer_config=transfer)

    several = {"connectors": [peer("kv_both"), {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}]}
    refused = [
        (started(kv_connector="NixlConnector", kv_connector_module_path=None), "the KV connector NixlConnector"),
        (
            started(kv_connector="NixlPushConnector", kv_connector_module_path=None),
            "the KV connector NixlPushConnector",
        ),
        (started(extra={"enforce_handshake_compat": False}), "enforce_handshake_compat = False (expected True)"),
        (started(extra={"bidirectional_kv_xfer": True}), "bidirectional_kv_xfer = True (expected False)"),
        (started(kv_buffer_device="cuda"), "kv_buffer_device = 'cuda' (expected 'cpu'"),
        (started(None), "engines of their own, and channels that queries choose"),
        (started(None, gemma), "engines of their own, and layers with a sliding window"),
        (
            started(kv_connector="MultiConnector", kv_connector_module_path=None, extra=several),
            "the KV connector ExampleConnector",
        ),
        (started() | {"speculative_config": DRAFTS}, "PlanNixlConnector and drafts"),
        (started() | {"additional_config": {}}, "the KV connector PlanNixlConnector without a plan"),
    ]
    starts = [arguments for arguments, _ in refused]
    found = run_in(version, tmp_path, "vllm_host.py", {"starts": starts}, {"VLLM_NIXL_SIDE_CHANNEL_PORT": "0"})
    for start, (_, text) in zip(found["starts"], refused, strict=True):
        assert text in start["message"], start
