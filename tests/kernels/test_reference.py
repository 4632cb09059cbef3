"""The operators of a step on a CPU, against loops over what each token was, in fp64."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from kernel_oracle import PAIRS, POISON, Paged, pair_variant, states
from torch import Tensor

from kvcal.kernels.reference import NO_ROOM, NON_FINITE
from kvcal.plan.page_format import SIDES, Side
from kvcal.systems.kitty.scores import channel_scores
from kvcal.systems.kitty.tiered import TieredLayout

HEADS, GROUP, DIM, SCALE = 2, 2, 16, 0.2
STEPS = 300
ALL = slice(None)


class History:
    """The tokens of a batch, and what has to become of them. ``ahead``: steps that row 1 has more than row 0."""

    def __init__(self, name: str, num_tokens: int, ahead: int = 38, group: int = GROUP, **more: object) -> None:
        flags = {key: more.pop(key) for key in ("rescale", "offset") if key in more}
        self.variant, self.group = pair_variant(name, group=group, **flags), group
        self.paged = Paged(self.variant, 2, 4, **more)
        self.x = {"k": states(2, num_tokens, HEADS, DIM), "v": states(2, num_tokens, HEADS, DIM, 1)}
        self.q = states(2, num_tokens, HEADS * group, DIM, 2)
        self.ahead = ahead
        # A page's record and what it reads back as depend on the tokens alone.
        self.record, self.page = functools.cache(self._record), functools.cache(self._page)

    def feed(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            rows = slice(1, 2) if step < self.ahead else ALL
            self.paged.step(rows, *self.taken(rows))

    def taken(self, rows: slice) -> list[Tensor]:
        """The next token of every row, and its queries."""
        at = self.paged.place.lengths[rows].long().cpu()
        row_numbers = torch.arange(2)[rows]
        return [x[row_numbers, at].to(self.paged.device) for x in (self.x["k"], self.x["v"], self.q)]

    def query_mean(self, row: int, page: int) -> Tensor:
        """Of the steps in which the page was filled: a sum in fp32, token by token."""
        total = torch.zeros(HEADS, DIM)
        for token in range(128 * page, 128 * (page + 1)):
            total = total + self.q[row, token].float().abs().unflatten(0, (HEADS, self.group)).sum(1)
        return total / (128 * self.group)

    def _record(self, side: Side, row: int, page: int) -> Tensor:
        """[n, record_bytes]."""
        fmt, last = self.variant.format(side), self.x[side].shape[1] - 1
        numbers, stripe = range(128 * page, 128 * page + 128), fmt.stripe_tokens
        tokens = [max(token, min(fmt.num_sink_tokens, token // stripe * stripe + stripe - 1)) for token in numbers]
        values = torch.stack([self.x[side][row, min(token, last)] for token in tokens], dim=1)  # [n, 128, D]
        rescale, offset, *_ = self.paged.transform
        mean = self.query_mean(row, page) if self.variant.k.needs_queries else None
        if side == "k" and self.variant.offset:
            values = values.float() - offset[:, None]
        if side == "k" and self.variant.rescale:
            values, mean = values.float() / rescale[:, None], None if mean is None else mean * rescale
        layout = self.variant.layout(side)
        if isinstance(layout, TieredLayout):
            return layout.encode(values, channel_scores(self.variant.k.boost.score, values, mean))
        return layout.encode_pages(values, self.operands(side))

    def operands(self, side: Side) -> dict[str, Tensor]:
        return {"signs": self.paged.transform.signs(side).cpu()}

    def read(self, side: Side, row: int, token: int, length: int) -> Tensor:
        """[n, D] fp64: a token as attention of the step at ``length`` reads it."""
        fmt, page = self.variant.format(side), token // 128
        if token < fmt.num_sink_tokens or token >= fmt.tokens_read(length):
            return self.x[side][row, token].double()
        return self.page(side, row, page)[:, token % 128]

    def _page(self, side: Side, row: int, page: int) -> Tensor:
        """[n, 128, D] fp64: as it is read back."""
        layout, record = self.variant.layout(side), self.record(side, row, page)
        values = layout.decode_pages(record, HEADS, self.operands(side)).double()
        rescale, offset, *_ = self.paged.transform
        if side == "k" and self.variant.rescale:
            values = values * rescale.double()[:, None]
        return values + offset.double()[:, None] if side == "k" and self.variant.offset else values

    def attention(self, row: int, length: int) -> Tensor:
        """[n G, D] fp64."""
        keys, values = (
            torch.stack([self.read(side, row, token, length) for token in range(length + 1)]) for side in SIDES
        )
        outputs = []
        for head, query in enumerate(self.q[row, length].double()):
            scores = [float(key[head // self.group] @ query) * SCALE for key in keys]
            weights = [math.exp(score - max(scores)) for score in scores]
            total = sum(weight * value[head // self.group] for weight, value in zip(weights, values, strict=True))
            outputs.append(total / sum(weights))
        return torch.stack(outputs)

    def check(self) -> None:
        """Everything that is stored."""
        for row, length in enumerate(self.paged.place.lengths.tolist()):
            for side in SIDES:
                memory, fmt = self.paged.memory[side], self.variant.format(side)
                records = self.paged.records(side, row)
                for page in range(length // 128):
                    assert torch.equal(records[page], self.record(side, row, page)), (row, page)
                begun = length // 128
                if length % 128 // fmt.stripe_tokens:  # stripes of a page that is not complete, and zeros
                    packed = length % 128 // fmt.stripe_tokens * fmt.stripe_tokens
                    layout, operands = self.variant.layout(side), self.operands(side)
                    found = layout.decode_pages(records[begun], HEADS, operands)
                    whole = layout.decode_pages(self.record(side, row, begun), HEADS, operands)
                    assert torch.equal(found[:, :packed], whole[:, :packed]), (row, begun)
                    nothing = layout.decode_pages(torch.zeros_like(records[begun]), HEADS, operands)
                    assert torch.equal(found[:, packed:], nothing[:, packed:]), (row, begun)
                    begun += 1
                assert bool((records[begun:] == POISON).all())
                for token in range(max(0, length - fmt.ring_tokens()), length):
                    assert torch.equal(memory.ring[row, :, token % fmt.ring_tokens()].cpu(), self.x[side][row, token])
                held = min(length, fmt.num_sink_tokens)
                assert torch.equal(memory.sinks[row, :, :held].cpu(), self.x[side][row, :held].transpose(0, 1))
                assert bool((memory.sinks[row, :, held:] == POISON).all())
            if self.variant.k.needs_queries:
                assert self.paged.queries.since[row].tolist() == [length // 128 * 128] * HEADS


@pytest.mark.parametrize("name", PAIRS)
def test_a_step_stores_and_reads_every_token_where_it_belongs(name: str) -> None:
    history, start = History(name, STEPS + 1), 0
    for stop in (1, 127, 128, 129, 165, 256, 258, STEPS):
        history.feed(start, stop)
        start = stop
        taken = history.taken(ALL)
        before = [x.clone() for x in (*history.paged.memory["k"], *history.paged.memory["v"], *history.paged.queries)]
        history.paged.append(ALL, *taken)
        found = history.paged.decode(ALL, taken[-1].float(), SCALE)
        for row, length in enumerate(history.paged.place.lengths.tolist()):
            expected = history.attention(row, length)
            assert float((found[row] - expected).norm() / expected.norm()) < 1e-5, (row, length)
        now = (*history.paged.memory["k"], *history.paged.memory["v"], *history.paged.queries)
        for tensor, held in zip(now, before, strict=True):
            tensor.copy_(held)  # the step is taken again by ``feed``
    history.check()
    assert int(history.paged.error) == 0


@pytest.mark.parametrize("name", ["query scores", "rotated"])
def test_transforms_are_applied_to_pages_alone(name: str) -> None:
    history = History(name, 260, rescale=True, offset=True)
    history.feed(0, 259)
    history.check()
    taken = history.taken(slice(0, 1))
    history.paged.append(slice(0, 1), *taken)
    found, expected = history.paged.decode(slice(0, 1), taken[-1].float(), SCALE), history.attention(0, 221)
    assert float((found[0] - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("group", [1, 7])
def test_groups_of_query_heads_read_rotated_pages(group: int) -> None:
    history = History("rotated", 260, ahead=0, group=group)
    history.feed(0, 259)
    taken = history.taken(slice(0, 1))
    history.paged.append(slice(0, 1), *taken)
    found, expected = history.paged.decode(slice(0, 1), taken[-1].float(), SCALE), history.attention(0, 259)
    assert float((found[0] - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("name", ["unequal windows", "query scores"])
def test_where_pages_lie_changes_nothing(name: str) -> None:
    plain, other = History(name, STEPS + 1), History(name, STEPS + 1, seed=5, is_slice=True)
    for history in (plain, other):
        history.feed(0, STEPS)
    assert not torch.equal(plain.paged.place.table, other.paged.place.table)
    other.check()
    taken = plain.taken(ALL)
    for history in (plain, other):
        history.paged.append(ALL, *taken)
    found = [history.paged.decode(ALL, taken[-1], SCALE) for history in (plain, other)]
    assert torch.equal(*found)


@pytest.mark.parametrize("side", [0, 1])
def test_a_page_that_cannot_be_stored_is_noted_in_the_step_that_completes_it(side: int) -> None:
    history = History("2 bits", 130, ahead=0)
    history.x[SIDES[side]][1, 60, 1, 9] = torch.nan
    history.feed(0, 127)
    assert int(history.paged.error) == 0
    history.feed(127, 128)
    assert int(history.paged.error) == NON_FINITE


def test_a_page_without_room_is_noted_and_reading_stays_inside() -> None:
    history = History("sinks", 500, ahead=0)
    history.paged.place = history.paged.place._replace(table=history.paged.place.table[:, :1])
    history.feed(0, 255)
    assert int(history.paged.error) == 0
    history.feed(255, 256)
    assert int(history.paged.error) == NO_ROOM
    history.feed(256, 480)
    assert bool(history.paged.decode(ALL, history.taken(ALL)[-1], SCALE).isfinite().all())


@pytest.mark.parametrize("name", ["2 bits", "rotated values"])
def test_what_a_prompt_packs_is_what_steps_pack(name: str) -> None:
    history = History(name, 256, ahead=0, seed=3, is_slice=True)
    history.feed(0, 256)
    from kvcal.kernels import ops

    for number, side in enumerate(SIDES):
        memory = history.paged.memory[side]
        pages, x = torch.full_like(memory.pages, POISON), history.x[side].transpose(1, 2)
        slots, transform, mean = history.paged.place.table[:, :2], list(history.paged.transform), torch.empty(0)
        ops.pack(x, pages, slots, 0, mean, transform, history.paged.error, number, history.variant.number)
        assert torch.equal(pages, memory.pages)
        out = torch.empty(2, HEADS, 256, DIM)
        ops.unpack(pages, slots, out, transform, number, history.variant.number)
        for token in (0, 127, 128, 255):
            assert torch.equal(out[1, :, token].double(), history.read(side, 1, token, 256))
