"""Draft tokens, which a cache verifies several at a time and takes back: bytes and results of one token at a
time."""

import random

import pytest
import torch
from cache_cases import HEAD_DIM, attended, padded, random_ids, random_qkv, tiny_llama
from static_cases import plan_for
from torch import Tensor

from kvcal import PlanCache, attached
from kvcal.errors import UnsupportedModel, UsageError
from kvcal.plan.page_format import num_pages
from kvcal.store.paged_tensor import PagedTensor
from kvcal.store.step import LayerStep

DRAFTS = 7
NAMES = ("kitty", "variance", "different sinks", "clamped window", "16 bits", "rotated")


def cache_of(name: str, max_tokens: int | None, lookahead: int = DRAFTS) -> PlanCache:
    return PlanCache(plan_for(name), tiny_llama(2, 1).config, max_tokens=max_tokens, lookahead=lookahead)


def rounds(start: int, stop: int, seed: int) -> list[tuple[int, int]]:
    """(tokens fed, tokens rejected) until ``stop`` tokens are kept."""
    draw, found = random.Random(seed), []
    while start < stop:
        fed = min(draw.randint(1, 1 + DRAFTS), stop - start)
        rejected = draw.randint(0, fed - 1)
        found.append((fed, rejected))
        start += fed - rejected
    return found


def held(part: PagedTensor, row: int, length: int) -> list[Tensor]:
    """All that a part holds of a row: pages, sinks, and the tokens of a ring without room for drafts."""
    pages = part.pool.records[part.pool.slots([(row, 0, num_pages(length))])]
    recent = torch.arange(max(0, length - part.format.ring_tokens()), length) % part.ring.shape[2]
    return [pages, part.sinks[row, :, :length], part.ring[row][:, recent]]


def assert_same_bytes(cache: PlanCache, other: PlanCache) -> None:
    assert cache.lengths == other.lengths
    for ours, theirs in zip(cache.paged_layers, other.paged_layers, strict=True):
        for part, like in zip(ours.parts, theirs.parts, strict=True):
            for row, length in enumerate(cache.lengths):
                for found, expected in zip(held(part, row, length), held(like, row, length), strict=True):
                    assert torch.equal(found, expected), (part.codec.side, row)


@pytest.mark.parametrize("name", NAMES)
def test_steps_with_drafts_are_steps_of_one_token(name: str) -> None:
    """Two rows of a static cache; drafts are others than the tokens that come in the end. Outputs are those
    of a cache that knows no drafts, and so is every byte after each crop."""
    given, wrong = random_qkv(2, 2, 270), random_qkv(2, 2, 270, seed=4)
    cache, plain = cache_of(name, 450), cache_of(name, 450, lookahead=0)
    for one in (cache, plain):
        attended(one, *(x[:, :, :240] for x in given))
    columns = 240
    for fed, rejected in rounds(columns, 270, seed=len(name)):
        kept = fed - rejected
        new = [torch.cat([x[:, :, columns : columns + kept], y[:, :, columns + kept : columns + fed]], 2)
               for x, y in zip(given, wrong, strict=True)]  # fmt: skip
        found = attended(cache, *new)
        cache.crop(-rejected)
        expected = attended(plain, *(x[:, :, columns : columns + kept] for x in given), range(1, kept))
        assert torch.equal(found[:, :, :kept], expected), columns
        columns += kept
        if rejected or num_pages(columns) != num_pages(columns - kept):
            assert_same_bytes(cache, plain)
    assert cache.lengths == [270, 270]


def test_every_draft_sees_what_it_would_alone() -> None:
    """All of a step's outputs, rejected or not, where pages fill and come to be read, in rows that differ."""
    plan, config = plan_for("kivi"), tiny_llama(2, 1).config
    rows = [random_qkv(1, 2, tokens, seed=tokens) for tokens in (260, 131, 9)]
    more = random_qkv(3, 2, 136, seed=5)
    outputs = []
    for step in (8, 1):
        batch = [padded([row[i][0] for row in rows], 260, "left") for i in range(3)]
        cache = PlanCache(plan, config, batch[0][1], max_tokens=400, lookahead=DRAFTS)
        attended(cache, *(x for x, _ in batch))
        outputs.append(attended(cache, *more, range(step, 136, step)))
        assert cache.lengths == [396, 267, 145]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)


def test_a_step_with_drafts_reads_no_page_as_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes the way of a step: what a prompt would read densely is never asked for."""
    cache, given = cache_of("kivi", 300), random_qkv(1, 2, 208)
    attended(cache, *(x[:, :, :200] for x in given))
    monkeypatch.setattr(type(cache.paged_layers[0].store), "read", None)
    attended(cache, *(x[:, :, 200:] for x in given))
    assert cache.lengths == [208]


@pytest.mark.parametrize("name", NAMES)
def test_rejected_tokens_leave_no_trace(name: str) -> None:
    """Dynamic: tokens come, others are taken back, and all bytes are those without them."""
    given, wrong = random_qkv(2, 2, 300), random_qkv(2, 2, 300, seed=4)
    for columns in (121, 127, 255):
        cache, plain = cache_of(name, None), cache_of(name, None, lookahead=0)
        attended(cache, *(x[:, :, :columns] for x in given))
        attended(cache, *(x[:, :, :DRAFTS] for x in wrong))
        cache.crop(-DRAFTS)
        attended(plain, *(x[:, :, :columns] for x in given))
        assert_same_bytes(cache, plain)
        for one in (cache, plain):
            attended(one, *(x[:, :, columns : columns + 10] for x in given), range(1, 10))
        assert_same_bytes(cache, plain)


@pytest.mark.parametrize("max_tokens", [None, 400])
def test_bytes_are_the_plans_and_those_of_the_room(max_tokens: int | None) -> None:
    cache, plan = cache_of("kitty", max_tokens), plan_for("kitty")
    attended(cache, *random_qkv(2, 2, 300))
    room = DRAFTS * 2 * 2 * 2 * HEAD_DIM * 2  # drafts, rows, heads, sides, channels of 2 bytes
    assert cache.nbytes == plan.nbytes([max_tokens or 300] * 2, max_tokens or 300) + room


@pytest.mark.parametrize("wrong", [-1, 8, 1.0])
def test_a_lookahead_that_is_none(wrong: object) -> None:
    with pytest.raises(UsageError, match="expected an integer of 0 to 7"):
        cache_of("kivi", 100, lookahead=wrong)


def test_layers_that_cannot_take_drafts_back() -> None:
    for max_tokens in (None, 100):
        with pytest.raises(UnsupportedModel, match="queries choose: queries of rejected drafts stay counted"):
            cache_of("queries", max_tokens)


@torch.inference_mode()
def test_prompt_lookup_gives_the_tokens_of_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """``generate``, through steps with drafts, some of which are rejected."""
    model, plan, widths, decode = tiny_llama(2, 2), plan_for("uniform", num_layers=2), set[int](), LayerStep.attend

    def counted(self: LayerStep, q: Tensor, *args: object) -> Tensor:
        widths.add(1 if q.dim() == 3 else q.shape[1])
        return decode(self, q, *args)

    monkeypatch.setattr(LayerStep, "attend", counted)
    ids, found = random_ids(1, 20).repeat(1, 6)[:, :110], []
    for lookahead in (0, 7):
        cache = PlanCache(plan, model.config, max_tokens=256, lookahead=lookahead)
        lookup: dict[str, int] = {"prompt_lookup_num_tokens": lookahead} if lookahead else {}
        with attached(model):
            lookup |= {"max_new_tokens": 40, "do_sample": False, "disable_compile": True}
            found.append(model.generate(ids, past_key_values=cache, **lookup))
        assert cache.lengths == [149]
    assert torch.equal(*found) and max(widths) > 1
