"""The core of the engines against ``PlanCache``: the same tokens in the same chunks, in random blocks and
rings; and decodes with unequally many drafts as rows of equal length."""

from __future__ import annotations

import copy
import dataclasses
import logging
import random

import pytest
import torch
from cache_cases import attended
from engine_cases import (
    PAGE,
    POISON,
    TRANSFORMED,
    UNSHARED,
    Memory,
    Sequence,
    based,
    cache_records,
    decode,
    plan_for,
    random_tokens,
    transformed,
)
from engine_replay import decode_windows
from tiny_models import built
from torch import Tensor

from kvcal import Plan, PlanCache
from kvcal.engines import prefill, scratch
from kvcal.engines import step as stepping
from kvcal.engines.scratch import Decoded
from kvcal.engines.shard import HeadShard
from kvcal.errors import UnsupportedModel
from kvcal.plan.page_format import SIDES

TOLERANCE = 2e-5
# One of every way to store a side; those that differ in bits or scores alone are the pages' own tests.
STORED = ("2 bits by channel", "3 bits by channel", "keys by token", "16 bits", "keys of 16 bits", "values of 16 bits",
          "query_range", "variance", "three tiers", "rotated values")  # fmt: skip
PLANS = {name: plan_for(name) for name in STORED} | {f"{n}, λ": transformed(plan_for(n)) for n in TRANSFORMED}
PLANS["rotated, basis"] = based(plan_for("rotated"))
BESIDE = {name: plan_for(name) for name in UNSHARED} | {"windows, λ": transformed(plan_for("windows"))}
BESIDE["stripes, basis"] = based(plan_for("stripes"))


def config(plan: Plan):
    return built("llama").config.__class__(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=8, head_dim=8, vocab_size=64,
        num_key_value_heads=plan.layers[0].attention.num_kv_heads,
    )  # fmt: skip


class Both:
    """One sequence, served by an engine's memory and by a dynamic cache."""

    def __init__(self, memory: Memory, plan: Plan, seed: int, shared: Both | None = None, pages: int = 0) -> None:
        self.plan, self.cache = plan, PlanCache(plan, config(plan))
        self.sequence = Sequence(memory, plan, shared.sequence.blocks[:pages] if shared else None)
        self.tokens = random_tokens(1200, plan.layers[0].attention.num_kv_heads, seed)
        if shared is not None:  # the same first tokens, which the engine does not compute again
            for own, theirs in zip(self.tokens, shared.tokens, strict=True):
                own[: PAGE * pages] = theirs[: PAGE * pages]
            self.by_cache(slice(0, PAGE * pages))
            there = min(pages, shared.length // PAGE)
            for own, theirs in zip(self.cache.layers[0].parts, shared.cache.layers[0].parts, strict=True):
                own.pool.records[:there] = theirs.pool.records[:there]  # channels chosen in other chunks

    @property
    def length(self) -> int:
        return self.sequence.length

    def by_cache(self, new: slice) -> Tensor:
        """[T, H, D]."""
        states = (x[new].transpose(0, 1).unsqueeze(0) for x in self.tokens)
        return attended(self.cache, *states)[0].transpose(0, 1)

    def extend(self, count: int) -> None:
        new = slice(self.length, self.length + count)
        found = self.sequence.extend(*(x[new] for x in self.tokens))
        torch.testing.assert_close(found, self.by_cache(new), atol=TOLERANCE, rtol=TOLERANCE)

    def check_pages(self) -> None:
        for side in SIDES:
            pages = self.plan.layers[0].format(side).num_pages(self.length)
            held = self.sequence.memory.pages(side, self.sequence.blocks[:pages])
            for ours, theirs in zip(held, cache_records(self.cache, side), strict=True):
                assert torch.equal(ours, theirs)


def decode_all(every: list[Both]) -> None:
    """A token for each."""
    rows = [slice(both.length, both.length + 1) for both in every]
    pairs = list(zip(every, rows, strict=True))
    given = (torch.cat([both.tokens[number][row] for both, row in pairs]) for number in range(3))
    found = decode([both.sequence for both in every], *given)
    expected = torch.cat([both.by_cache(row) for both, row in pairs])
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


def check(memory: Memory, every: list[Both]) -> None:
    """Pages have the cache's bytes, and nothing foreign was written."""
    for both in every:
        both.check_pages()
    untouched = memory.blocks[[0, *memory.free_blocks]], memory.rings[[0, *memory.free_rings]]
    assert all(bool((part == POISON).all()) for part in untouched)
    assert int(memory.scratch.error) == 0


@pytest.mark.parametrize("name", PLANS)
def test_ragged_sequences_are_what_the_cache_gives(name: str) -> None:
    """Prompts that end before, at and after the end of a page, decoded together over the next pages; in
    chunks; with blocks that another one filled. Nothing that nobody wrote is read, nothing foreign is
    written."""
    plan = PLANS[name]
    memory = Memory(HeadShard(plan))
    every = [Both(memory, plan, seed) for seed in range(4)]
    for both, prompt in zip(every, (1, 127, 128, 129), strict=True):
        both.extend(prompt)
    for _ in range(3):
        decode_all(every)
    for count in (100, 28, 300):  # chunks that begin and end anywhere
        every[0].extend(count)
    every.append(Both(memory, plan, 9, shared=every[0], pages=2))
    every[-1].extend(60)
    for _ in range(10):
        decode_all(every[1:])
    decode_all(every)
    check(memory, every)


@pytest.mark.parametrize("name", BESIDE)
def test_sinks_and_windows_are_those_of_the_cache(name: str) -> None:
    """Prompts that end within the sinks, at and before the end of a page, decoded over it; chunks that begin
    and end anywhere; nothing that nobody wrote is read."""
    plan = BESIDE[name]
    memory = Memory(HeadShard(plan))
    every = [Both(memory, plan, seed) for seed in range(5)]
    for both, prompt in zip(every, (3, 118, 128, 250, 700), strict=True):
        both.extend(prompt)
    for _ in range(16):
        decode_all(every[:4])
    for count in (1, 100, 28, 300, 2, 60):
        every[0].extend(count)
        every[4].extend(count // 5 + 1)
    decode_all(every)
    check(memory, every)


# Where a step with drafts differs: what a page of a head needs besides its tokens, and where the tokens lie.
DRAFTED = ["2 bits by channel", "values of 16 bits", "three tiers", "rotated, basis", "variance, λ", "sinks",
           "window rules"]  # fmt: skip


@pytest.mark.parametrize("name", DRAFTED)
def test_drafts_are_tokens_that_come_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 7 drafts after a token, of which any number is right, over the end of a page; chunks in between.
    The outputs of right ones are those of single tokens, pages have their bytes, and wrong ones write nowhere
    else."""
    plan = (PLANS | BESIDE)[name]
    memories = [Memory(HeadShard(plan, step_tokens=8))]
    monkeypatch.setattr(stepping, "long_step_reasons", lambda variant: [])  # as where the fast kernels serve a range
    memories.append(Memory(HeadShard(plan, step_tokens=8)))
    every = [Both(memories[0], plan, seed) for seed in range(3)]
    in_one_call = [Sequence(memories[1], plan) for _ in every]
    for both, sequence, prompt in zip(every, in_one_call, (100, 122, 372), strict=True):
        sequence.extend(*(x[:prompt] for x in both.tokens))
        both.extend(prompt)
    draw, wrong = random.Random(len(name)), [x.flip(0) for x in every[0].tokens]
    for number in range(16):
        drafts, kept = (1 + number) % 8, []
        given: list[list[Tensor]] = [[], [], []]
        for both in every:
            kept.append(draw.randint(1, 1 + drafts))
            right, other = (slice(n, n + 1 + drafts) for n in (both.length, 7 * number))
            for parts, x, y in zip(given, both.tokens, wrong, strict=True):
                parts.append(torch.cat([x[right][: kept[-1]], y[other][kept[-1] :]]))
        expected = [[both.by_cache(slice(n, n + 1)) for n in range(both.length, both.length + count)]
                    for both, count in zip(every, kept, strict=True)]  # fmt: skip
        for sequences in ([both.sequence for both in every], in_one_call):
            found = decode(sequences, *map(torch.stack if drafts else torch.cat, given), kept=kept)
            found = found if drafts else found.unsqueeze(1)
            for row, parts in enumerate(expected):
                torch.testing.assert_close(found[row, : len(parts)], torch.cat(parts), atol=TOLERANCE, rtol=TOLERANCE)
        if number == 8:
            chunk = slice(every[0].length, every[0].length + 20)
            in_one_call[0].extend(*(x[chunk] for x in every[0].tokens))
            every[0].extend(20)
    assert [both.length // PAGE for both in every] == [1, 1, 3]
    check(memories[0], every)
    for both, sequence in zip(every, in_one_call, strict=True):
        both.sequence = sequence
    check(memories[1], every)


def test_a_ring_and_a_block_serve_another_request_after_the_first() -> None:
    """As an engine hands them out again, with what they held."""
    plan = BESIDE["window rules"]
    memory = Memory(HeadShard(plan), num_blocks=4, num_rings=2)
    for seed in range(3):
        both = Both(memory, plan, seed)
        both.extend(250 + seed)
        for _ in range(8):
            decode_all([both])
        both.check_pages()
        memory.free_blocks += both.sequence.blocks
        memory.free_rings.append(both.sequence.ring)


def with_windows(plan: Plan, keys: int, values: int) -> Plan:
    (layer,) = plan.layers
    k, v = dataclasses.replace(layer.k, recent_window=keys), dataclasses.replace(layer.v, recent_window=values)
    return dataclasses.replace(plan, layers=(dataclasses.replace(layer, k=k, v=v),))


# With windows of 1 and 129 tokens the first step reads of the ring what the next one reads of a page.
@pytest.mark.parametrize("name", ["three tiers, λ", "windows, λ", "windows, bf16", "1 and 129"])
def test_a_sequence_begins_behind_blocks_that_are_filled_in_the_same_step(name: str) -> None:
    """One of a chunk, one of a single token; both are stored before the one that fills the blocks. Then their
    windows are decoded from these."""
    more = {"windows, bf16": plan_for("windows", cache_dtype="bfloat16")}
    more["1 and 129"] = with_windows(plan_for("windows"), 1, 129)
    plan = (PLANS | BESIDE | more)[name]
    memory = Memory(HeadShard(plan))
    first = Both(memory, plan, 0)
    first.extend(50)
    first.sequence.grow(300)
    others = [Both(memory, plan, seed, shared=first, pages=2) for seed in (1, 2)]
    new = [slice(256, 257), slice(256, 300), slice(50, 350)]
    every, step = [*others, first], memory.step
    given = [[x[rows] for x in both.tokens] for both, rows in zip(every, new, strict=True)]
    once = prefill.Logits(1.0)
    others[0].sequence.grow(1)
    lengths, rings = (torch.tensor([n], dtype=torch.int32) for n in (256, others[0].sequence.ring))
    place = scratch.Decodes(lengths, others[0].sequence.table.unsqueeze(0), rings)
    queries = step.append(*given[0], place)
    chunks = [both.sequence.chunk(len(q)) for both, (q, _, _) in zip(every[1:], given[1:], strict=True)]
    held = [step.store(*x, chunk) for x, chunk in zip(given[1:], chunks, strict=True)]
    step.begin(scratch.Chunk(256, others[0].sequence.table, rings), 257)
    step.begin(chunks[0], 300)
    unlike = step.begun_tail(chunks[0], held[0].tail, torch.tensor([False]))
    torch.testing.assert_close(unlike, held[0].tail, rtol=0, atol=0, equal_nan=True)
    held[0] = held[0]._replace(tail=step.begun_tail(chunks[0], held[0].tail, torch.tensor([True])))
    found = [step.attend(queries, place, once, given[0][0].dtype)]
    found += [step.attend_chunk(one, chunk, once, torch.float32) for one, chunk in zip(held, chunks, strict=True)]
    expected = [first.by_cache(new[2])]
    for both, rows in zip(others, new[:2], strict=True):
        both.cache = copy.deepcopy(first.cache)
        both.cache.crop(256 - 350)
        decode_windows(both.cache, 256)
        expected.insert(-1, both.by_cache(rows))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


def test_past_pages_are_decoded_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 2 pages, and scores of a few queries at once. The newest tokens are in the last tile where there is
    room, and one part more where there is none."""
    parts: list[int] = []
    attend_part = prefill.attend_part

    def counted(q: Tensor, k: Tensor, *args: object, **more: object) -> prefill.Part:
        parts.append(k.shape[1])
        return attend_part(q, k, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(prefill, "attend_part", counted)
    for module in (stepping, scratch):
        monkeypatch.setattr(module, "TILE_TOKENS", 256)
    monkeypatch.setattr(prefill, "SCORES_AT_ONCE", 8 * 256 * 7)
    plan = PLANS["three tiers, λ"]
    both = Both(Memory(HeadShard(plan)), plan, 1)
    for count, expected in ((700, []), (130, [256, 256, 188]), (50, [256, 256, 256, 62])):
        both.extend(count)
        assert parts == [count, *expected]
        parts.clear()
    assert both.sequence.memory.scratch.past("k", 4, 8, torch.float32).shape == (4, 256, 8)


def test_parts_of_16_bits_are_merged_in_fp32() -> None:
    """As parts that were fp32 from the start are, to the bit."""
    generator = torch.Generator().manual_seed(1)
    outs = [torch.randn(4, 7, 8, generator=generator).bfloat16() for _ in range(3)]
    lses = [torch.randn(4, 7, generator=generator) * 3 for _ in range(3)]
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        first, *others = (prefill.Part(out.to(dtype).clone(), lse) for out, lse in zip(outs, lses, strict=True))
        for other in others:
            first = first.merged(other)
        results.append(first)
    assert results[0].out.dtype == torch.float32
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    weights = torch.stack(lses).softmax(0).unsqueeze(-1)
    torch.testing.assert_close(results[0].out, (weights * torch.stack(outs).float()).sum(0), rtol=1e-6, atol=1e-6)


def test_softcap_and_sink_logits_of_a_chunk_are_those_of_single_steps() -> None:
    plan = PLANS["2 bits by channel"]
    q, k, v = random_tokens(150, 4, 5)
    logits = prefill.Logits(0.7, 5.0, torch.linspace(-1, 2, 8))
    results = []
    for cuts in ((140, 150), (140, *range(141, 151))):
        sequence, start, found = Sequence(Memory(HeadShard(plan)), plan), 0, []
        for stop in cuts:
            new = slice(start, stop)
            sequence.grow(stop - start)
            step, ring = sequence.memory.step, torch.tensor([sequence.ring], dtype=torch.int32)
            if stop - start == 1:
                place = scratch.Decodes(torch.tensor([start], dtype=torch.int32), sequence.table.unsqueeze(0), ring)
                found.append(step.decode(q[new], k[new], v[new], place, logits))
            else:
                chunk = scratch.Chunk(start, sequence.table, ring)
                found.append(step.extend(q[new], k[new], v[new], chunk, logits))
            sequence.length = start = stop
        results.append(torch.cat(found))
    torch.testing.assert_close(*results, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", ["variance, λ", "sinks and window", "rotated, basis"])
@pytest.mark.parametrize("size", [2, 8])
def test_shards_together_are_the_whole(name: str, size: int) -> None:
    """Blocks of all ranks have the same bytes; 8 ranks of 4 KV heads hold each twice."""
    plan = (PLANS | BESIDE)[name]
    q, k, v = random_tokens(260, 4, 2)
    whole = _served(HeadShard(plan), q, k, v)
    if size == 8 and plan.needs_queries:
        with pytest.raises(UnsupportedModel, match="8 ranks share the queries of each of its 4 KV heads"):
            HeadShard(plan, 0, size).block_bytes(0)
        return
    parts = []
    for rank in range(size):
        shard = HeadShard(plan, rank, size)
        heads, queries = shard.heads(0), slice(rank * 8 // size, (rank + 1) * 8 // size)
        assert shard.block_bytes(0) == HeadShard(plan, 0, size).block_bytes(0)
        parts.append(_served(shard, q[:, queries], k[:, heads], v[:, heads]))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=TOLERANCE, rtol=TOLERANCE)


def _served(shard: HeadShard, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """250 tokens in two chunks, then one by one."""
    sequence = Sequence(Memory(shard), shard.plan)
    found = [sequence.extend(*(x[new] for x in (q, k, v))) for new in (slice(0, 90), slice(90, 250))]
    found += [decode([sequence], *(x[n : n + 1] for x in (q, k, v))) for n in range(250, len(q))]
    return torch.cat(found)


@pytest.mark.parametrize("name", PLANS | BESIDE)
def test_blocks_and_rings_take_the_bytes_of_the_plan(name: str) -> None:
    for dtype in ("float32", "bfloat16"):
        plan = dataclasses.replace((PLANS | BESIDE)[name], cache_dtype=dtype)
        shard = HeadShard(plan)
        assert shard.block_bytes(0) % 16 == 0
        for pages in (0, 1, 5):
            expected = plan.layers[0].nbytes(dtype, (PAGE * pages,), PAGE * pages)
            expected += 16 * shard.blocks[0].needs_queries  # the tokens at which sums begin
            assert pages * shard.block_bytes(0) + shard.ring_bytes(0) == expected
        token = sum(layer.attention.values_per_token for layer in plan.layers) * (4 if dtype == "float32" else 2)
        assert HeadShard(plan, step_tokens=6).ring_bytes(0) == shard.ring_bytes(0) + 5 * token


def test_nan_in_a_page_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    plan = PLANS["2 bits by channel"]
    sequence = Sequence(Memory(HeadShard(plan)), plan)
    q, k, v = random_tokens(130, 4, 2)
    k[5, 0, 0] = torch.nan
    sequence.extend(q, k, v)
    assert int(sequence.memory.scratch.error) == 1
    for _ in range(2):
        sequence.memory.scratch.report_errors(logging.getLogger("kvcal.test"))
    assert len(caplog.records) == 1 and "a page holds NaN" in caplog.text


CPU = torch.device("cpu")


@pytest.mark.parametrize("counts", [[1], [6], [1, 1, 1], [6, 6], [2], [1, 6, 3], [6, 1, 1, 2, 5], []])
def test_requests_are_filled_up_with_their_last_token_and_cut_again(counts: list[int]) -> None:
    decoded = Decoded.of_counts(torch.tensor(counts, dtype=torch.int32), 6, CPU)
    x = torch.randn(sum(counts) + 3, 2, 4)  # after the decodes, a chunk of 3 tokens
    found = decoded.of_rows(x)
    if max(counts, default=1) == 1:
        assert decoded.tokens == 1 and torch.equal(found, x[: len(counts)])
    else:
        assert found.shape == (len(counts), 6, 2, 4)
        for row, own in zip(found, x[: sum(counts)].split(counts), strict=True):
            assert torch.equal(row[: len(own)], own) and bool((row[len(own) :] == own[-1]).all())
    output = torch.zeros_like(x)
    decoded.to_rows(found, output)
    assert torch.equal(output[: sum(counts)], x[: sum(counts)]) and not output[sum(counts) :].any()


def test_equally_many_drafts_are_not_copied() -> None:
    """As CUDA graphs have them, whose tensors stay where they are."""
    x = torch.randn(12, 2, 4)
    decoded = Decoded.of_counts(torch.tensor([6, 6], dtype=torch.int32), 6, CPU)
    assert decoded.taken is None and decoded.of_rows(x).data_ptr() == x.data_ptr()


def test_scratch_lies_where_it_is_asked_for() -> None:
    """Engines build a model under a default device."""
    with torch.device("meta"):
        own = scratch.Scratch(1, 16, torch.device("cpu"))
    own.report_errors(logging.getLogger("kvcal"))
