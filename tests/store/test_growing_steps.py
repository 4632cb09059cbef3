"""Arguments of kernels in the steps of a dynamic cache follow the lengths and slots that the host knows."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcal.errors import NonFiniteActivations
from kvcal.kernels.operands import Place
from kvcal.kernels.reference import NON_FINITE
from kvcal.plan.page_format import Format
from kvcal.store.growing_steps import FIRST_TOKENS, GrowingSteps
from kvcal.systems.kvmix.window_rule import WindowRule

FMT = Format(2, "token", 32, window_rule=WindowRule("clamped", 0.25, 100, 10))


class Cache:
    """Its steps, with the lengths and slots that they are told."""

    def __init__(self, *lengths: int) -> None:
        self.steps, self.lengths = GrowingSteps(len(lengths), torch.device("cpu")), list(lengths)
        self.pool: Any = SimpleNamespace(version=0, table=[[row] for row in range(len(lengths))])
        self.rows: Any = SimpleNamespace(batch=len(lengths), lengths=lambda columns: list(self.lengths))

    def place(self, columns: int, tokens: int = 1) -> Place:
        return self.steps.place(self.rows, columns, tokens, self.pool, FMT, FMT)


def test_lengths_go_on_and_rows_change_places() -> None:
    cache = Cache(150, 120)
    for columns, lengths in enumerate(([150, 120], [151, 121], [121, 121], [151, 122])):
        cache.lengths = lengths
        assert cache.place(columns).lengths.tolist() == lengths


def test_slots_follow_the_pool_within_a_step_and_errors_are_awaited_there() -> None:
    cache = Cache(150, 120)
    assert cache.place(0).table.tolist() == [[0], [1]]
    cache.pool.version, cache.pool.table = 1, [[0, 2], [1]]
    assert cache.place(0).table.tolist() == [[0, 2], [1, 0]]
    cache.steps.scratch.error.fill_(NON_FINITE)
    cache.lengths = [151, 121]
    cache.place(1)
    cache.pool.version = 2
    with pytest.raises(NonFiniteActivations):
        cache.place(2)
    cache.steps.scratch.error.fill_(NON_FINITE)
    with pytest.raises(NonFiniteActivations):
        cache.steps.check()


def test_window_rules_reach_the_last_of_the_new_tokens() -> None:
    cache = Cache(FIRST_TOKENS - 2)
    few, many = (cache.place(columns, tokens)[2] for columns, tokens in ((0, 2), (1, 3)))
    assert many[len(few) - 1] == FMT.read_at(2 * FIRST_TOKENS)[len(few) - 1] and len(many) > len(few)


def test_bytes_on_the_device_are_lengths_slots_and_scratch() -> None:
    cache = Cache(150, 120)
    cache.place(0)
    assert cache.steps.nbytes == 2 * 4 + 2 * 4 + sum(tensor.nbytes for tensor in cache.steps.scratch.tensors) > 20
