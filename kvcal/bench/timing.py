"""Time of work on the GPU: replays of a CUDA graph that holds one call for each of several caches.

One call of a kernel on one small cache would find it in L2, and on its own would be measured together with the launch
from Python. A graph over several different caches whose bytes exceed the L2 cache several times over has neither: its
time divided by the number of calls is what a call costs in the middle of a model's step, launch gaps of the device
included. The same holds for the baselines, which are measured by the same function.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import torch
from pydantic.dataclasses import dataclass

from kvcal.strict import STRICT

REPLAYS = 30
QUICK_REPLAYS = 20
# Enough for the clocks to rise and for every lazy initialisation.
WARM_UP_CALLS = 3
WARM_UP_REPLAYS = 5
# The working set is at least this many L2 caches.
L2_FACTOR = 4
CACHES = 32
# And at most this share of the device's memory.
MEMORY_SHARE = 0.25

Call = Callable[[], object]


@dataclass(frozen=True, config=STRICT)
class Times:
    """Microseconds of one call, over ``replays`` replays of a graph of ``calls`` calls: the median, and between which
    bounds the middle half of the replays lies."""

    median_us: float
    low_us: float
    high_us: float
    replays: int
    calls: int


def num_caches(nbytes: int, l2_bytes: int, memory_bytes: int, is_quick: bool = False) -> int:
    """How many caches of ``nbytes`` to rotate through: CACHES of them (in quick runs none for their own sake), more
    where those would nearly fit into L2, fewer where memory ends."""
    enough = math.ceil(L2_FACTOR * l2_bytes / nbytes)
    wanted = enough if is_quick else max(CACHES, enough)
    return max(1, min(wanted, int(MEMORY_SHARE * memory_bytes) // nbytes))


def graph_times(calls: Sequence[Call], replays: int = REPLAYS) -> Times:
    """Capture all ``calls`` in one graph and time its replays. What they return is thrown away.

    Raises whatever a call raises; such a call ran before the capture began, so that the device stays usable.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_CALLS):
            calls[0]()
        for call in calls[1:]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    try:
        milliseconds = replay_ms(graph.replay, replays)
    finally:
        graph.reset()
    return spread([1000 * total / len(calls) for total in milliseconds], len(calls))


def replay_ms(replay: Call, replays: int) -> list[float]:
    """Milliseconds of each of ``replays`` calls of ``replay``, by CUDA events, after a warm-up."""
    for _ in range(WARM_UP_REPLAYS):
        replay()
    torch.cuda.synchronize()
    return event_ms([replay] * replays)


def event_ms(calls: Sequence[Call]) -> list[float]:
    """Milliseconds of each call, in order; the host waits once, at the end."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    marks[0].record()
    for call, mark in zip(calls, marks[1:], strict=True):
        call()
        mark.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) for first, second in zip(marks, marks[1:], strict=False)]


def spread(microseconds: Sequence[float], calls: int) -> Times:
    """Median and quartiles of two measurements or more."""
    low, median, high = statistics.quantiles(microseconds, n=4, method="inclusive")
    return Times(median, low, high, len(microseconds), calls)
