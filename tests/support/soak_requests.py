"""Random requests that programs of engines' environments serve for a while, in rounds (vllm_soak, sglang_soak).

Prompts share prefixes, arrive while others run, and some requests are aborted. When a round is over, the same probes
are served as after every other round: one after the other, cold, then behind their own blocks.

    {"engine": its arguments, "seconds": 60, "vocabulary": 128}
    -> {"requests": 640, "tokens": 9000, "aborted": 130, "preempted": 40, "cached": tokens of prompts found in blocks,
        "rounds": [{"is_equal": have the probes the first answers?, "resident": bytes, "on_device": bytes,
                    "free_blocks": 23}, ...]}
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple, Protocol

ROUND, SHARED = 40, (128, 260, 400)
PROBES, PROBE_TOKENS = (5, 130, 300), 20


class Request(NamedTuple):
    """``pause``: steps until the next request comes. This one is aborted then, if it is still there."""

    prompt: list[int]
    tokens: int
    temperature: float
    pause: int
    is_aborted: bool


class Soak(Protocol):
    """An engine, and what has been counted so far."""

    counts: dict[str, int]

    def serve(self, requests: Iterator[Request]) -> None: ...

    def answers(self, probes: list[list[int]]) -> list:
        """Tokens and log-probabilities of each."""

    def left(self) -> dict[str, int]:
        """What is there while no request is."""


def random_ids(chosen: random.Random, vocabulary: int, length: int) -> list[int]:
    return [chosen.randrange(3, vocabulary) for _ in range(length)]


def random_requests(chosen: random.Random, vocabulary: int, prefixes: list[list[int]]) -> Iterator[Request]:
    for _ in range(ROUND):
        prompt = chosen.choice(prefixes) + random_ids(chosen, vocabulary, chosen.randrange(1, 150))
        yield Request(
            prompt, chosen.randrange(1, 120), chosen.choice([0.0, 1.0]), chosen.randrange(12), chosen.random() < 0.2
        )


def soak(engine: Soak, seconds: float, vocabulary: int) -> None:
    """Prints the answer."""
    chosen = random.Random(0)
    prefixes = [[], *(random_ids(chosen, vocabulary, length) for length in SHARED)]
    probes = [random_ids(chosen, vocabulary, length) for length in PROBES]
    first, rounds, end = engine.answers(probes), [], time.monotonic() + seconds
    while time.monotonic() < end:
        engine.serve(random_requests(chosen, vocabulary, prefixes))
        rounds.append({"is_equal": engine.answers(probes) == first, **engine.left()})
    print("RESULT " + json.dumps({**engine.counts, "rounds": rounds}), flush=True)


def given() -> dict:
    return json.load(sys.stdin)
