"""Packed pages in vLLM that go to the host's memory and come back. Connectors, and what they do with blocks,
are vLLM's own, but for the copies (vllm_copies). ``make engines`` runs these tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from engine_replay import Replay, assert_replayed
from served_models import LENGTHS, Served, prompts, random_requests, with_sinks, without_queries
from vllm_cases import ALONE, DRAFTS, SHORT, TOKENS
from vllm_cases import gemma as gemma
from vllm_cases import served as served
from vllm_cases import version as version
from vllm_environment import run_in

from kvcal import Plan
from kvcal.engines.support import block_seed

pytestmark = pytest.mark.engines

SIMPLE, NATIVE = "SimpleCPUOffloadConnector", "OffloadingConnector"


def connector(name: str, nbytes: int = 64 << 20, **options: Any) -> dict[str, Any]:
    extra = {"cpu_bytes_to_use": nbytes} | options
    return {"kv_transfer_config": {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}}


def serve(
    version: str, folder: Path, served: Served, requests: list[dict], plan: Plan, **more: Any
) -> tuple[dict, Replay]:
    """In few blocks, so that those of finished requests are soon others'."""
    given = served.arguments(served.write("offload.safetensors", plan), **SHORT | more)
    found = run_in(version, folder, "vllm_host.py", {"llm": given, "requests": requests}, {"KVCAL_TEST_OFFLOAD": "1"})
    assert "error" not in found, found["trace"]
    is_greedy = not any(request.get("temperature") for request in requests)
    alone = ALONE if "speculative_config" in more else 1
    return found, assert_replayed(found, served.model, plan, is_greedy, alone)


def again_after_others() -> list[dict]:
    """Prompts; others that take all blocks; and the first ones again."""
    given, others = prompts(*LENGTHS), prompts(*LENGTHS, 700, 700, 700, seed=9)
    parts = ((0, given), (130, others), (500, given))
    return [{"prompt": ids, "tokens": TOKENS, "at": at} for at, all_ in parts for ids in all_]


# Lazy: blocks go to the host when they are about to be others'.
@pytest.mark.parametrize("case", ["simple", "lazy", "sinks", "native"])
def test_evicted_prefixes_come_back(version: str, tmp_path: Path, served: Served, case: str) -> None:
    """Without a connector, the same requests find nothing."""
    plan, requests = served.with_copies(has_sinks=case == "sinks"), again_after_others()
    more = connector(NATIVE) if case == "native" else connector(SIMPLE, lazy_offload=case == "lazy")
    _, replay = serve(version, tmp_path / "host", served, requests, plan, **more)
    assert sorted(replay.cached.values())[-4:] == [0, 128, 256, 640]
    assert 8 <= replay.loaded <= 8 + 3 * (case == "sinks")  # a block of sinks may have been one of pages
    _, plain = serve(version, tmp_path / "plain", served, requests, plan)
    assert plain.loaded == 0 == max(plain.cached.values())


@pytest.mark.parametrize("name", [SIMPLE, NATIVE])
@pytest.mark.parametrize("has_windows", [False, True], ids=["pages", "windows"])
def test_prompts_of_whole_pages_come_back_but_for_the_last(
    version: str, tmp_path: Path, served: Served, name: str, has_windows: bool
) -> None:
    """A request begins at the end of a page: no ring has the other tokens of the page of its prompt's last
    token."""
    plan = served.with_copies(has_sinks=False) if has_windows else served.plan
    given, others = prompts(128, 256, 384), prompts(700, 700, 700, 700, seed=9)
    parts = ((0, given), (60, others), (300, given))
    requests = [{"prompt": ids, "tokens": TOKENS, "at": at} for at, all_ in parts for ids in all_]
    _, replay = serve(version, tmp_path, served, requests, plan, **connector(name))
    assert [replay.cached[str(number)] for number in (7, 8, 9)] == [0, 128, 256] and replay.loaded == 3


@pytest.mark.parametrize("name", [SIMPLE, NATIVE])
def test_evicted_sliding_windows_come_back(version: str, tmp_path: Path, gemma: Served, name: str) -> None:
    more = {**connector(name), "max_num_batched_tokens": 256}
    _, replay = serve(version, tmp_path, gemma, again_after_others(), gemma.plan, **more)
    assert sorted(replay.cached.values())[-4:] == [0, 128, 256, 640] and replay.loaded == 8


@pytest.mark.parametrize("case", ["simple", "sinks", "native"])
def test_random_requests(version: str, tmp_path: Path, served: Served, case: str) -> None:
    """Chunks, aborts, samples of a prompt, and so little memory of the host's that blocks are evicted there,
    too."""
    plan = served.with_copies(has_sinks=case == "sinks")
    more = connector(NATIVE if case == "native" else SIMPLE, 4 << 20) | {"max_num_batched_tokens": 512}
    _, replay = serve(version, tmp_path, served, random_requests(150), plan, **more)
    assert replay.loaded > 10, vars(replay)


def test_besides_drafts(version: str, tmp_path: Path, served: Served) -> None:
    more = connector(SIMPLE) | {"max_num_batched_tokens": 256, "speculative_config": DRAFTS}
    requests = [*again_after_others(), *random_requests(40, temperature=0.2)]
    _, replay = serve(version, tmp_path, served, requests, without_queries(served), **more)
    assert replay.loaded > 8 and replay.rejected > 100, vars(replay)


@pytest.mark.parametrize("name", [SIMPLE, NATIVE])
def test_on_two_ranks(version: str, tmp_path: Path, served: Served, name: str) -> None:
    """Two processes, a KV head each; vLLM's scheduler is a third place."""
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    _, replay = serve(version, tmp_path, served, again_after_others(), served.plan, **ranks, **connector(name))
    assert replay.loaded == 8


def stored(folder: Path, **options: Any) -> dict[str, Any]:
    """Blocks go through the host's memory to a folder."""
    tier = {"type": "fs", "root_dir": str(folder), "n_read_threads": 1, "n_write_threads": 1}
    return connector(NATIVE, spec_name="TieringOffloadingSpec", secondary_tiers=[tier | options])


def test_stored_blocks_are_read_under_their_own_plan_alone(version: str, tmp_path: Path, served: Served) -> None:
    """Engines, one after the other, of one folder: the second one of a plan begins after what the first one has
    stored, to the bit; one of another plan of equal bytes, and other scales of keys, finds nothing. Requests
    come one at a time, so that steps have equal shapes."""
    plan = served.with_copies(has_sinks=False)
    scales = {name: 2 * tensor if "rescale" in name else tensor for name, tensor in plan.tensors.items()}
    other = dataclasses.replace(plan, tensors=scales)
    alone = [{"prompt": ids, "tokens": 20} for ids in prompts(300, 130, 700)]
    last = {"prompt": prompts(5, seed=9)[0], "tokens": 60}  # until all that is stored lies there

    def serve(which: Plan, requests: list[dict]) -> tuple[list[int], list[Any]]:
        """Tokens that came from blocks of others, and the outputs."""
        path = served.write("stored.safetensors", which)
        llm = served.arguments(path, **stored(tmp_path / "blocks"), max_num_seqs=1)
        variables = {"KVCAL_TEST_OFFLOAD": "1", "PYTHONHASHSEED": str(block_seed(which))}
        found = run_in(version, tmp_path, "vllm_host.py", {"llm": llm, "requests": [*requests, last]}, variables)
        assert "error" not in found, found["trace"]
        begun: dict[str, int] = {}
        for name, first, *_ in (entry for step in found["steps"] for entry in step if entry[0] is not None):
            begun.setdefault(name, first)
        if which is other or len(requests) > len(alone):  # what an engine has loaded another one has written
            assert_replayed(found, served.model, which)
        names = list(map(str, range(len(requests))))
        return [begun[name] for name in names], [found["outputs"][name] for name in names]

    cached, outputs = serve(plan, [*alone, *alone])
    assert cached == [0, 0, 0, 256, 128, 640] and outputs[:3] != outputs[3:]
    assert serve(plan, alone) == ([256, 128, 640], outputs[3:])
    cached, outputs = serve(other, alone)
    assert cached == [0, 0, 0]


@pytest.mark.parametrize("seed", [{}, {"PYTHONHASHSEED": "7"}], ids=["no seed", "another seed"])
def test_stored_blocks_need_the_plan_s_names(
    version: str, tmp_path: Path, served: Served, seed: dict[str, str]
) -> None:
    given = served.arguments(**stored(tmp_path / "blocks"))
    (start,) = run_in(version, tmp_path, "vllm_host.py", {"starts": [given]}, seed)["starts"]
    assert "their names do not say of which plan they are" in start["message"], start
    assert f"PYTHONHASHSEED={block_seed(served.plan)} vllm serve" in start["trace"]


def test_what_else_is_refused(version: str, tmp_path: Path, served: Served) -> None:
    sinks = served.write("sinks", with_sinks(served.plan))
    disk = {"kv_offload_backend": "disk", "disk_path": "x"}
    refused = [
        (served.arguments(**connector("ExampleConnector")), "the KV connector ExampleConnector"),
        (served.arguments(**connector(NATIVE, spec_name="Other")), "spec_name = 'Other'"),
        (served.arguments(**stored(tmp_path, type="p2p")), "a tier of the type 'p2p'"),
        (served.arguments(**stored(tmp_path, type="obj")), "a tier of the type 'obj'"),
        (served.arguments(**connector(SIMPLE, **disk)), "kv_offload_backend = 'disk'"),
        (served.arguments(**connector(SIMPLE), enable_prefix_caching=False), "but without prefix caching"),
        (served.arguments(sinks, **connector(NATIVE)), "a group of sinks has neither"),
    ]
    found = run_in(version, tmp_path, "vllm_host.py", {"starts": [arguments for arguments, _ in refused]})
    for start, (_, text) in zip(found["starts"], refused, strict=True):
        assert text in start["message"], start
