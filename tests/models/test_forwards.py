"""Forwards side by side: the order in which they run, and what becomes of them when one fails or none is
wanted."""

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch

from kvcal.models.forwards import reach, side_by_side

CPU = torch.device("cpu")


def calls_of(seen: list[tuple[str, int]], **layers: tuple[int, ...]) -> list[Callable[[], str]]:
    """Calls by name that come to these layers, and note them."""

    def call(name: str) -> str:
        for layer in layers[name]:
            reach(layer)
            seen.append((name, layer))
        return name

    return [partial(call, name) for name in layers]


def test_no_call_is_a_layer_ahead_and_the_first_goes_first() -> None:
    seen: list[tuple[str, int]] = []
    calls = calls_of(seen, a=(0, 1, 2), b=(1, 1, 2), c=(), d=(0, 2))
    results = side_by_side(calls, CPU)
    assert next(results) == "a"
    # d and b wait in front of the last layer until they are asked for.
    assert seen == [("a", 0), ("d", 0), ("a", 1), ("b", 1), ("b", 1), ("a", 2)]
    assert list(results) == ["b", "c", "d"] and seen[-2:] == [("b", 2), ("d", 2)]


def test_one_call_at_a_time_computes() -> None:
    running, most = [0], [0]

    def call() -> None:
        for layer in range(20):
            running[0] += 1
            most[0] = max(most[0], running[0])
            running[0] -= 1
            reach(layer)

    assert list(side_by_side([call] * 4, CPU)) == [None] * 4 and most == [1]


def test_an_error_is_the_callers_and_ends_the_others() -> None:
    seen: list[tuple[str, int]] = []
    before = set(threading.enumerate())  # those of models that are gone may end meanwhile

    def fail(held: torch.Tensor) -> str:
        reach(1)
        raise torch.OutOfMemoryError(f"{held.numel()} values")

    given = torch.zeros(3)
    calls = calls_of(seen, a=(0, 1, 2))
    held = weakref.ref(given)
    calls.insert(0, partial(fail, given))
    del given
    with pytest.raises(torch.OutOfMemoryError, match="3 values"):
        list(side_by_side(calls, CPU))
    calls.clear()
    gc.collect()
    assert seen == [("a", 0)] and before.issuperset(threading.enumerate()) and held() is None


def test_calls_that_nobody_waits_for_end() -> None:
    seen: list[tuple[str, int]] = []
    before = set(threading.enumerate())  # those of models that are gone may end meanwhile
    results = side_by_side(calls_of(seen, a=(0, 1), b=(0, 1)), CPU)
    assert next(results) == "a"
    results.close()
    assert seen == [("a", 0), ("b", 0), ("a", 1)] and before.issuperset(threading.enumerate())


def test_a_call_alone_does_not_stop() -> None:
    reach(3)


@pytest.mark.gpu
def test_calls_run_on_the_device_and_stream_of_their_model() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)

    def call() -> tuple[int, torch.cuda.Stream]:
        return torch.cuda.current_device(), torch.cuda.current_stream()

    [found] = side_by_side([call], device)
    assert found == (device.index, torch.cuda.default_stream(device))
