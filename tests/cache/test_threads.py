"""One context serves many threads: every request reads its own cache, whichever thread runs when."""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cache_cases import feed, random_ids, tiny_llama
from static_cases import plan_for
from tiny_models import built, measured
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from kvcal import PlanCache, attached
from kvcal.errors import UsageError
from kvcal.models.taps import Captured, tap

THREADS, REQUESTS, PROMPT, STEPS = 4, 12, 134, 5


@pytest.fixture(autouse=True)
def threads_take_turns() -> Iterator[None]:
    """As often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def test_a_compiled_step_serves_the_cache_that_it_is_called_with() -> None:
    model, plan = tiny_llama(2, 2), plan_for("kivi", num_layers=2)
    backend = CompileCounter()

    def step(token: Tensor, position: Tensor, cache: PlanCache) -> Tensor:
        return model(token, position_ids=position, past_key_values=cache).logits

    compiled = torch.compile(step, backend=backend)  # fullgraph counts the frames of all threads in one place

    def decoded(seed: int, one: Callable[[Tensor, Tensor, PlanCache], Tensor]) -> Tensor:
        cache, ids = PlanCache(plan, model.config, max_tokens=160), random_ids(1, PROMPT + STEPS, seed)
        feed(model, cache, ids[:, :PROMPT])
        with torch.no_grad():
            places = range(PROMPT, PROMPT + STEPS)
            return torch.cat([one(ids[:, i : i + 1], torch.full((1, 1), i), cache) for i in places], 1)

    with attached(model), ThreadPoolExecutor(THREADS) as pool:
        alone = [decoded(seed, step) for seed in range(REQUESTS)]
        for seed in range(3):  # what caches differ in is compiled once: two threads cannot compile at a time
            decoded(seed, compiled)
        together = list(pool.map(lambda seed: decoded(seed, compiled), range(REQUESTS)))
    assert all(torch.equal(found, expected) for found, expected in zip(together, alone, strict=True))
    assert backend.frame_count < 8  # one a request, or one a break of the graph in each, would be more


def test_one_thread_enters_the_context() -> None:
    """A second one says so, whether it comes later or at the same time; and both leave the model as it
    was."""
    model, start, rounds = tiny_llama(2, 1), threading.Barrier(THREADS, timeout=20), 20
    inside = threading.Barrier(THREADS, timeout=20)

    def entered(_: int) -> int:
        count = 0
        for _ in range(rounds):
            start.wait()
            try:
                with attached(model):
                    count += 1
                    inside.wait()
            except UsageError as error:
                assert "tapped already" in str(error) and "entered once, serves all threads" in str(error.hint)
                inside.wait()
        return count

    with ThreadPoolExecutor(THREADS) as pool:
        assert sum(pool.map(entered, range(THREADS))) == rounds
        with attached(model), pytest.raises(UsageError, match="tapped already"):
            pool.submit(attached(model).__enter__).result()
        with attached(model):  # another thread is served, without a context of its own
            cache = PlanCache(plan_for("kivi"), model.config, max_tokens=40)
            pool.submit(feed, model, cache, random_ids(1, 30)).result()
        assert cache.lengths == [30]
    assert model.config._attn_implementation == "sdpa" and not model.get_decoder()._forward_pre_hooks


def test_a_tap_tells_the_layers_of_a_thread_apart_from_anothers() -> None:
    model, geometry = built("llama"), measured("llama")
    seen: dict[int, list[Captured]] = {}

    def observe(captured: Captured) -> None:
        seen.setdefault(threading.get_ident(), []).append(captured)

    def tapped(seed: int) -> list[Captured]:
        seen[threading.get_ident()] = []
        with torch.no_grad():
            model(input_ids=random_ids(1, 9, seed), use_cache=False)
        return seen[threading.get_ident()]

    with tap(model, observe, geometry), ThreadPoolExecutor(THREADS) as pool:
        alone = [tapped(seed) for seed in range(REQUESTS)]
        together = list(pool.map(tapped, range(REQUESTS)))
    for found, expected in zip(together, alone, strict=True):
        assert [captured.layer for captured in found] == [0, 1, 2]
        for one, other in zip(found, expected, strict=True):
            assert one.k_pre_BNTD is not None and other.k_pre_BNTD is not None
            torch.testing.assert_close(one.k_pre_BNTD, other.k_pre_BNTD)
            torch.testing.assert_close(one.v_BNTD, other.v_BNTD)
