"""Sinks and windows in the real vLLM where prefixes are cached: a request that begins after blocks of another
has the sinks of the first one, as ``PlanCache`` has them, and its window decoded from pages. ``make engines``
runs these tests."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

import pytest
from served_models import LENGTHS, Served, prompts, random_requests, with_sinks
from vllm_cases import SHORT, TOKENS, assert_capacity, serve
from vllm_cases import gemma as gemma
from vllm_cases import served as served
from vllm_cases import version as version
from vllm_environment import python_with_vllm, run_in, variables_in

pytestmark = pytest.mark.engines


@pytest.mark.parametrize("has_windows", [False, True], ids=["sinks", "windows"])
def test_cold_and_behind_cached_prefixes(has_windows: bool, version: str, tmp_path: Path, served: Served) -> None:
    """The second time around, all rings are others' and hold no sinks of these prompts. A prompt of 129
    tokens begins with one new token, as if it decoded; the first page of short prompts is filled by
    decoding."""
    plan = served.with_copies() if has_windows else with_sinks(served.plan)
    given = prompts(*LENGTHS, 120, 129, 2)
    requests = [
        {"prompt": ids, "tokens": TOKENS, "at": at}
        for at, all_ in ((0, given), (130, prompts(*LENGTHS, seed=9)), (230, given)) for ids in all_
    ]  # fmt: skip
    requests.append({"after": 4, "prompt": prompts(3)[0], "tokens": TOKENS, "at": 370})  # 120 and 40 tokens, and 3
    requests.append({"prompt": given[5], "tokens": TOKENS, "at": 430})  # in a step that only decodes
    found, replay = serve(version, tmp_path, served, requests, plan)
    assert sorted(replay.cached.values())[-6:] == [128, 128, 128, 128, 256, 640]
    assert_capacity(found, plan)


@pytest.mark.parametrize("has_windows", [False, True], ids=["sinks", "windows"])
def test_requests_of_one_step(has_windows: bool, version: str, tmp_path: Path, served: Served) -> None:
    """A request begins after pages that another fills in the same step: whole, in chunks, and with one new
    token."""
    (base,), plan = prompts(300), served.with_copies() if has_windows else with_sinks(served.plan)
    for number, more in enumerate(({}, {"max_num_batched_tokens": 256})):
        requests = [{"prompt": base[:n], "tokens": 20} for n in (300, 129, 257, 200)]
        _, replay = serve(version, tmp_path / str(number), served, requests, plan, **more)
        assert sum(replay.cached.values()) >= 128


@pytest.mark.parametrize("has_windows", [False, True], ids=["sinks", "windows"])
def test_random_requests_in_few_blocks(has_windows: bool, version: str, tmp_path: Path, served: Served) -> None:
    """Eviction, aborts, samples of a prompt; then requests that lose their blocks, and are computed again."""
    plan = served.with_copies() if has_windows else with_sinks(served.plan)
    _, replay = serve(version, tmp_path, served, random_requests(200), plan, **SHORT, max_num_batched_tokens=512)
    assert sum(replay.cached.values()) > 1000
    requests = [{"prompt": ids, "tokens": 150} for ids in prompts(300, 310, 320, 330)]
    three = {**SHORT, "num_gpu_blocks_override": 26}  # fit until they have grown
    _, replay = serve(version, tmp_path, served, requests, plan, **three)
    assert replay.restarts > 0


def test_sinks_beside_sliding_windows(version: str, tmp_path: Path, gemma: Served) -> None:
    """In vLLM's groups of blocks lie pages of 128 tokens, windows of fewer, rings and sinks."""
    plan, more = with_sinks(gemma.plan), {**SHORT, "max_num_batched_tokens": 256}
    _, replay = serve(version, tmp_path, gemma, random_requests(80), plan, **more)
    assert sum(replay.cached.values()) > 1000


NOTED = """
from types import SimpleNamespace as Some
from kvcal.engines.vllm.serving import Serving
known = Some(req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set())
new = [Some(req_id=str(past), num_computed_tokens=past, block_ids=([1, 2], [3])) for past in (0, 130, 128)]
counts = dict.fromkeys(("0", "130", "128"), 9)
step = Some(scheduled_cached_reqs=known, scheduled_new_reqs=new, num_scheduled_tokens=counts)
serving = Some(first=Some(layer_name="pages"), ring=Some(name="rings"), sinks=[], pages_of=list, device="cpu")
Serving.note(serving, [Some(layer_names=["pages"]), Some(layer_names=["rings"])], step)
print("NOTED", [(one.num_past, one.total, one.table.tolist(), one.rings.tolist()) for one in serving.begun])
"""


def test_a_session_that_goes_on_within_a_page_keeps_its_ring(version: str, tmp_path: Path) -> None:
    """vLLM says of a session with new input what it says of a new request, and it has computed tokens
    already."""
    variables = os.environ | variables_in(tmp_path)
    done = subprocess.run(
        [python_with_vllm(version), "-c", NOTED], env=variables, capture_output=True, text=True, timeout=300
    )
    assert "NOTED [(128, 137, [1, 2], [3])]" in done.stdout, done.stderr[-2000:]


def test_two_ranks(version: str, tmp_path: Path, served: Served) -> None:
    """vLLM's scheduler is another process than its workers, and reads what they say of their layers."""
    requests = [{"prompt": ids, "tokens": 20, "at": at} for at in (0, 25) for ids in prompts(130, 300)]
    arguments = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    _, replay = serve(version, tmp_path, served, requests, served.with_copies(), **arguments)
    assert sorted(replay.cached.values()) == [0, 0, 128, 256]


def test_what_a_first_page_is_too_small_for_needs_no_prefix_caching(
    version: str, tmp_path: Path, served: Served
) -> None:
    """As many sinks as a page has tokens."""
    first, *others = served.plan.layers
    first = dataclasses.replace(first, v=dataclasses.replace(first.v, num_sink_tokens=128))
    many = served.write("many", dataclasses.replace(served.plan, layers=(first, *others)))
    found = run_in(version, tmp_path, "vllm_host.py", {"starts": [served.arguments(many)]})["starts"][0]
    assert "128 sinks or more" in found["message"] and "--no-enable-prefix-caching" in found["message"], found


@pytest.mark.parametrize("case", ["windows", "most sinks"])
def test_a_page_that_is_filled_by_decoding(version: str, tmp_path: Path, served: Served, case: str) -> None:
    """A request comes in the very step in which another one decodes the last token of the page that both
    begin with, or in the next one. The blocks had others' pages before."""
    plan, arguments = served.with_copies(has_sinks=False), {"max_num_seqs": 8}
    if case == "most sinks":
        layers = [dataclasses.replace(layer, v=dataclasses.replace(layer.v, num_sink_tokens=127))
                  for layer in served.plan.layers]  # fmt: skip
        plan = dataclasses.replace(served.plan, layers=tuple(layers))
    others, (begins,) = prompts(300, 300, 300, seed=5), prompts(100)
    requests = [{"prompt": ids, "tokens": 30} for ids in others] + [{"prompt": begins, "tokens": 60, "at": 40}]
    answer, _ = serve(version, tmp_path / "answer", served, requests, plan, **arguments)
    page = begins + answer["outputs"]["3"][0][:28]
    for number, at in enumerate((68, 69)):
        more = [*requests, {"prompt": [*page, 7], "tokens": 20, "at": at}]
        found, replay = serve(version, tmp_path / str(number), served, more, plan, **arguments)
        assert replay.cached["4"] == 128 * number
        [step] = [step for step in found["steps"] if any(row[:2] == ["3", 127 + number] for row in step)]
        assert [name for name, *_ in step] == ["3", "4"]
