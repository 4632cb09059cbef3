"""Chunks, steps, drafts, crops, reordered rows and resets in any order: what is read is every token itself.

The oracle is a list of tokens. Each has a random vector of its own, and formats are fine, so that what is
read of a token is near its vector and far from any other's. Tokens that no page was packed of are exact."""

from dataclasses import replace

import pytest
import torch
from cache_cases import HEAD_DIM, attended, llama_plan, tiny_llama
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as some
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from static_cases import with_transforms
from torch import Tensor

from kvcal import PlanCache
from kvcal.cache import paged_layer
from kvcal.plan.page_format import RAW, SIDES, Boost, Format, Side, Tier
from kvcal.plan.plan import Plan

HEADS, POOL, MAX_TOKENS = 2, 4000, 640
FINE = Format(8, "token", 32, recent_window=9)
ROTATED = replace(FINE, num_sink_tokens=4, quantizer="rotated")
STRIPES = replace(ROTATED, num_sink_tokens=21, recent_window=23, stripe_tokens=16)
TIERED = Format(4, "channel", 32, 5, 20, boost=Boost("magnitude", (Tier(16, 0.25), Tier(8, 0.25))))
FORMATS: dict[str, tuple[Format, Format]] = {
    "uniform": (Format(8, "channel", 128, 3), FINE),
    "rotated": (ROTATED, replace(ROTATED, recent_window=70)),
    "basis": (ROTATED, replace(ROTATED, recent_window=70)),
    "stripes": (STRIPES, STRIPES),
    "stripes, basis": (STRIPES, STRIPES),
    "tiered": (TIERED, FINE),
    "lattice": (Format(4, lattice_dim=2, num_sink_tokens=3), Format(4, lattice_dim=2, recent_window=33)),
    "16 bits": (RAW, RAW),
}
# Errors of a token that is read, over its length: another token's is 1 or more. In a basis, 16 bits round
# twice.
NEAR, EXACT = 0.3, 0.02
# Of each row's prompt, columns of padding before it.
PADDINGS = ((0, 0), (0, 40))
TOKENS: dict[Side, Tensor] = {
    side: torch.randn(POOL, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(seed)).bfloat16().float()
    for seed, side in enumerate(SIDES)
}


def plan_of(name: str) -> Plan:
    """Gains near 1, which are not undone when pages are read."""
    plan = llama_plan(*FORMATS[name], HEADS, "bfloat16", 1)
    if not name.endswith("basis"):
        return plan
    plan = with_transforms(plan, name, 0.05)
    gain = {"layers.0.v_gain": 1 + plan.tensors["layers.0.v_gain"] / 32}
    return replace(plan, tensors={**plan.tensors, **gain})


class AnyOrder(RuleBasedStateMachine):
    """One layer of a cache of two rows. ``rows``: the token of every column, None at padding; ``new``:
    columns after the last crop."""

    name, max_tokens, lookahead, has_steps = "", None, 0, False

    @initialize(padding=some.sampled_from(PADDINGS), prompt=some.integers(50, 420))
    def begin(self, padding: tuple[int, ...], prompt: int) -> None:
        self.mask = torch.tensor([[column >= first for column in range(prompt)] for first in padding]).long()
        mask = self.mask if any(padding) else None
        config = tiny_llama(HEADS, 1).config
        self.cache = PlanCache(plan_of(self.name), config, mask, self.max_tokens, lookahead=self.lookahead)
        self.cache.state.is_stepping = self.has_steps
        self.used, self.prompt = 0, prompt
        self.start()

    def start(self) -> None:
        self.rows: list[list[int | None]] = [[], []]
        self.real, self.exact_from = self.mask.tolist(), 0
        self.feed(self.prompt)

    @property
    def columns(self) -> int:
        return len(self.rows[0])

    def feed(self, count: int) -> None:
        count = min(count, MAX_TOKENS - self.columns)
        if not count:
            return
        fed = torch.arange(self.used, self.used + 2 * count).view(2, count) % POOL
        self.used += 2 * count
        states = (TOKENS[side][fed].transpose(1, 2) for side in SIDES)
        attended(self.cache, torch.zeros(2, 8, count, HEAD_DIM), *states)
        for row, real, tokens in zip(self.rows, self.real, fed.tolist(), strict=True):
            has_token = [column >= len(real) or real[column] for column in range(len(row), len(row) + count)]
            row += [token if there else None for token, there in zip(tokens, has_token, strict=True)]

    @rule(count=some.integers(1, 150))
    def chunk(self, count: int) -> None:
        self.feed(count)

    @rule(count=some.integers(1, 20))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.feed(1)

    @precondition(lambda self: self.lookahead)
    @rule(counts=some.lists(some.tuples(some.integers(0, 5), some.integers(0, 5)), min_size=1, max_size=6))
    def drafts(self, counts: list[tuple[int, int]]) -> None:
        for given, rejected in counts:
            self.feed(1 + min(given, self.lookahead))
            self.crop(min(given, rejected))

    @rule(counts=some.lists(some.integers(0, 260), min_size=1, max_size=3))
    def crops(self, counts: list[int]) -> None:
        for count in counts:
            self.crop(count)

    def crop(self, count: int) -> None:
        kept = max(0, self.columns - count)
        self.cache.crop(kept - self.columns)
        self.rows = [row[:kept] for row in self.rows]
        self.exact_from = kept if count else self.exact_from

    @rule(order=some.sampled_from([[1, 0], [0, 0], [1, 1]]))
    def reorder(self, order: list[int]) -> None:
        self.cache.reorder_cache(torch.tensor(order))
        self.rows, self.real = [list(self.rows[row]) for row in order], [self.real[row] for row in order]

    @rule(prompt=some.integers(1, 300))
    def reset(self, prompt: int) -> None:
        self.cache.reset()
        self.prompt = prompt
        self.start()

    @invariant()
    def every_token_is_itself(self) -> None:
        lengths = [sum(token is not None for token in row) for row in self.rows]
        assert self.cache.lengths == lengths and self.columns == int(self.cache.get_seq_length())
        if not self.columns:
            return
        layer = self.cache.paged_layers[0]
        for side in SIDES:
            fmt = layer.plan.format(side)
            found = layer.store.read(side, self.cache.padding.rows, self.columns, 0, torch.float32)
            for number, (row, length) in enumerate(zip(self.rows, lengths, strict=True)):
                columns = [column for column, token in enumerate(row) if token is not None]
                expected = TOKENS[side][[row[column] for column in columns]].flatten(1)
                read = found[number][:, columns].transpose(0, 1).flatten(1)
                errors = [*((read - expected).norm(dim=1) / expected.norm(dim=1)).tolist()]
                assert max(errors, default=0.0) < NEAR, side
                exact = range(fmt.tokens_read(length), length)
                assert all(errors[number] < EXACT for number in exact if columns[number] >= self.exact_from), side


SETTINGS = settings(
    max_examples=8, stateful_step_count=12, deadline=None, derandomize=True, database=None,
    phases=[Phase.generate], suppress_health_check=list(HealthCheck),
)  # fmt: skip
CASES = [
    (name, max_tokens, lookahead)
    for name in FORMATS
    for max_tokens in (None, MAX_TOKENS)
    for lookahead in (0, 5)
    if name != "lattice" or not max_tokens  # which a static cache refuses
]


def run(**given: object) -> None:
    run_state_machine_as_test(type("Machine", (AnyOrder,), given), settings=SETTINGS)


@pytest.mark.parametrize(("name", "max_tokens", "lookahead"), CASES)
def test_every_token_is_itself_in_any_order(name: str, max_tokens: int | None, lookahead: int) -> None:
    run(name=name, max_tokens=max_tokens, lookahead=lookahead)


@pytest.mark.parametrize("lookahead", [0, 5])
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "lattice"])
def test_steps_of_a_dynamic_cache_by_the_operators(name: str, lookahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_layer, "STEPPED", {"cpu"})
    run(name=name, lookahead=lookahead, has_steps=True)
