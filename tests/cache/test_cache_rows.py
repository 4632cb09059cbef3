"""Batches: padded rows equal the rows alone whatever stands in the padding; rows are selected, repeated,
cropped."""

import math
from dataclasses import replace

import pytest
import torch
from cache_cases import (
    HEAD_DIM,
    KINDS,
    KIVI_2,
    SINKS_3,
    after_crop,
    assert_exact_bytes,
    feed,
    llama_plan,
    padded,
    random_ids,
    random_states,
    tiny_llama,
)
from static_cases import with_transforms
from tier_formats import BASE_4, KITTY, THREE_TIERS, V

from kvcal import Plan, PlanCache
from kvcal.errors import ArtifactError, UsageError
from kvcal.plan.plan import SIDES, Format
from kvcal.stages.measuring.cache import DecodedCache
from kvcal.store.paged_tensor import PagedTensor
from kvcal.store.pool import Span

HEADS = 4
PLAN = llama_plan(KINDS["windows"][0], KINDS["sinks"][1], num_kv_heads=HEADS, num_layers=1)
LENGTHS = (300, 1, 129, 0, 129)
CROPPED = KINDS | {"no window": (Format(2, "channel", 32), Format(4, "token", 32)), "Kitty": (KITTY[0], V)}
CROPPED |= {"three tiers": (THREE_TIERS, V), "4 bits, boosted": (BASE_4, V)}


def empty_cache(plan: Plan = PLAN, mask: torch.Tensor | None = None) -> PlanCache:
    return PlanCache(plan, tiny_llama(plan.layers[0].attention.num_kv_heads, 1).config, mask)


def read(cache: PlanCache) -> tuple[torch.Tensor, torch.Tensor]:
    """All that layer 0 holds, [B, N, S, D] of K and V: an update with no new tokens."""
    batch = len(cache.lengths)
    nothing = torch.zeros(batch, cache.plan.layers[0].attention.num_kv_heads, 0, HEAD_DIM)
    return cache.update(nothing, nothing, 0)


def filled(plan: Plan, tokens: int, batch: int = 1, seed: int = 0) -> PlanCache:
    cache, states = empty_cache(plan), random_states(batch, plan.layers[0].attention.num_kv_heads, tokens, seed=seed)
    for part in states.split(97, dim=2):
        cache.update(part, part.flip(1), 0)
    return cache


@pytest.mark.parametrize(("side", "cuts"), [("left", (1, 170, 100, 29)), ("right", (299, 1))])
def test_padded_rows_equal_rows_alone_and_padding_is_ignored(side, cuts):
    """Rows of 300, 1, 129, 0 and 129 tokens, NaN in every padded column, then 150 tokens more for each."""
    prompts = [random_states(1, HEADS, length, seed=length)[0] for length in LENGTHS]
    more = random_states(len(LENGTHS), HEADS, 150, seed=9)
    states, mask = padded(prompts, 300, side, filling=math.nan)
    cache = empty_cache(mask=mask)
    for part in states.split(list(cuts), dim=2):
        cache.update(part, part.flip(1), 0)
    alone = []
    for row, prompt in enumerate(prompts):
        single = empty_cache()
        for part in (prompt.unsqueeze(0), *more[row : row + 1].split(50, dim=2)):
            if part.shape[2]:
                single.update(part, part.flip(1), 0)
        alone.append(read(single))
    for part in more.split(1, dim=2):
        cache.update(part, part.flip(1), 0)
    assert_exact_bytes(cache, [length + 150 for length in LENGTHS], 450)
    token_columns = torch.cat([mask, torch.ones(len(LENGTHS), 150, dtype=torch.long)], 1).bool()
    for together, single in zip(read(cache), zip(*alone, strict=True), strict=True):
        for row, columns in enumerate(token_columns):
            assert torch.equal(together[row][:, columns], single[row][0])
            assert not together[row][:, ~columns].any()


@pytest.mark.parametrize(("formats", "side"), [(KIVI_2, "left"), (SINKS_3, "right")], ids=["kivi", "sinks"])
def test_logits_of_padded_rows_equal_those_of_rows_alone(formats, side):
    model, plan = tiny_llama(), llama_plan(*formats)
    prompts = [random_ids(1, length, seed=length)[0] for length in (40, 200, 131)]
    ids, mask = padded(prompts, 200, side)
    more = random_ids(3, 140, seed=5)
    cache = PlanCache(plan, model.config, attention_mask=mask)
    full = torch.cat([mask, torch.ones_like(more)], 1)
    feed(model, cache, ids, mask=mask)
    logits = feed(model, cache, more, cuts=range(1, 140, 9), mask=full)
    assert_exact_bytes(cache, full.sum(1).tolist(), 340)
    for row, prompt in enumerate(prompts):
        single = PlanCache(plan, model.config)
        feed(model, single, prompt.unsqueeze(0))
        expected = feed(model, single, more[row : row + 1], cuts=range(1, 140, 9))
        difference, scale = (logits[row] - expected[0]).abs(), expected.abs().max()  # a last bit may change a code
        assert difference.median() <= 1e-6 * scale and difference.max() <= 1e-2 * scale


def test_masks_that_are_refused():
    with pytest.raises(UsageError, match="row 1 has holes") as caught:
        empty_cache(mask=torch.tensor([[1, 1, 1], [1, 0, 1]]))
    assert caught.value.exit_code == 2
    with pytest.raises(UsageError, match=r"shape \[1, 1, 3, 3\]"):
        empty_cache(mask=torch.ones(1, 1, 3, 3))
    states = random_states(3, HEADS, 4)
    with pytest.raises(UsageError, match="2 rows, but the batch has 3"):
        empty_cache(mask=torch.ones(2, 4, dtype=torch.long)).update(states, states, 0)
    cache = filled(PLAN, 10, batch=2)
    with pytest.raises(UsageError, match="holds 2 sequences and was given 3") as caught:
        cache.update(states, states, 0)
    assert "reset" in caught.value.hint


@pytest.mark.parametrize("ragged", [False, True])
def test_select_and_repeat_rows(ragged):
    lengths = (300, 131, 40) if ragged else (300, 300, 300)
    states, mask = padded([random_states(1, HEADS, n, seed=n)[0] for n in lengths], 300, "left")
    operations = [
        (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([False, True, True])), [1, 2]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0]),
    ]
    for operation, rows in operations:
        cache = empty_cache(mask=mask if ragged else None)
        cache.update(states, states.flip(1), 0)
        before = read(cache)
        operation(cache)
        assert_exact_bytes(cache, [lengths[row] for row in rows], 300)
        assert all(torch.equal(now, then[rows]) for now, then in zip(read(cache), before, strict=True))
        more = random_states(len(rows), HEADS, 200, seed=3)
        cache.update(more, more, 0)  # and each row goes on by itself
        assert_exact_bytes(cache, [lengths[row] + 200 for row in rows], 500)
        original = empty_cache(mask=mask if ragged else None)
        original.update(states, states.flip(1), 0)
        where = len(rows) - 1
        original.update(*[more[where].expand(3, -1, -1, -1)] * 2, 0)
        for now, then in zip(read(cache), read(original), strict=True):
            assert torch.equal(now[where], then[rows[where]])


@pytest.mark.parametrize(
    ("select", "message"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([0, 2])), "no row 2 in a batch of 2"),
        (lambda cache: cache.batch_select_indices(torch.tensor([-3])), "no row -3 in a batch of 2"),
        (lambda cache: cache.batch_select_indices(torch.tensor([True])), "a mask of 1 rows for a batch of 2"),
    ],
)
def test_rows_that_are_not_there_change_nothing(select, message):
    cache = filled(PLAN, 140, batch=2)
    before = read(cache)
    with pytest.raises(UsageError, match=message):
        select(cache)
    assert cache.lengths == [140, 140]
    assert all(torch.equal(now, then) for now, then in zip(read(cache), before, strict=True))


@pytest.mark.parametrize(
    ("name", "kept"),
    [*((name, kept) for name in CROPPED for kept in (385, 255, 4)),
     *(("windows", kept) for kept in (419, 384, 383, 257, 256, 128, 1))],
)  # fmt: skip
def test_crop_keeps_what_was_read_and_the_bytes_of_the_shorter_cache(name, kept):
    """Into the ring or into a page: what comes back into the ring is raw where the ring still has it, else as
    decoded."""
    plan = llama_plan(*CROPPED[name], num_layers=1)
    cache = filled(plan, 420, batch=2)
    before, original = read(cache), random_states(2, plan.layers[0].attention.num_kv_heads, 420)
    cache.crop(kept - 420)
    assert_exact_bytes(cache, [kept, kept])
    assert cache.get_seq_length() == kept
    sides = zip(SIDES, read(cache), before, (original, original.flip(1)), strict=True)
    for side, now, then, raw in sides:
        assert torch.equal(now, after_crop(plan, side, then, raw, kept))
    more = random_states(2, plan.layers[0].attention.num_kv_heads, 300, seed=4)
    cache.update(more, more, 0)
    assert_exact_bytes(cache, [kept + 300] * 2)


@pytest.mark.parametrize("name", CROPPED)
@pytest.mark.parametrize("crops", [(500, 300), (590, 500, 470, 460), (599, 598, 480, 8), (520, 130, 129)])
def test_crops_in_a_row_are_one_crop(name, crops):
    """The ring keeps what it has, exactly, and no place of a removed token counts as another's."""
    plan = llama_plan(*CROPPED[name], num_layers=1)
    cache, plain = filled(plan, 600, batch=2), filled(plan, 600, batch=2)
    for kept in crops:
        cache.crop(kept - cache.get_seq_length())
    plain.crop(crops[-1] - 600)
    assert all(torch.equal(now, expected) for now, expected in zip(read(cache), read(plain), strict=True))


@pytest.mark.parametrize("lookahead", [0, 5])
def test_rows_that_are_reordered_between_crops(lookahead):
    """Padded rows have lost different tokens; each takes along what it has."""
    plan, config, lengths = llama_plan(*SINKS_3, num_layers=1), tiny_llama(2, 1).config, (400, 340)
    rows, caches = [random_states(1, 2, n, seed=n)[0] for n in lengths], []
    for order in ((0, 1), (1, 0)):
        states, mask = padded([rows[row] for row in order], 400, "left")
        cache = PlanCache(plan, config, mask, lookahead=lookahead)
        cache.update(states, states, 0)
        cache.crop(-20)
        if order == (0, 1):
            cache.reorder_cache(torch.tensor([1, 0]))
        cache.crop(-80)
        caches.append(cache)
    assert caches[0].lengths == caches[1].lengths == [240, 300]
    for now, expected in zip(*map(read, caches), strict=True):
        assert torch.equal(now[0, :, 60:], expected[0, :, 60:])
        assert torch.equal(now[1], expected[1])


CHANGES = {
    "crop": lambda cache: cache.crop(-100),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])),
    "reset": lambda cache: cache.reset(),
}


STRIPES = Format(3, "token", 64, 5, 9, quantizer="rotated", stripe_tokens=16)
WIDE_STRIPES = replace(STRIPES, num_bits=2, num_sink_tokens=20, recent_window=33)
COPIED = {
    "kivi": (llama_plan(*KIVI_2, num_layers=1), "left"),
    "sinks": (llama_plan(*SINKS_3, num_layers=1), "right"),
    "stripes": (llama_plan(STRIPES, WIDE_STRIPES, num_layers=1), "left"),
    "stripes beside pages": (llama_plan(SINKS_3[0], STRIPES, num_layers=1), "right"),
    "basis": (with_transforms(llama_plan(WIDE_STRIPES, STRIPES, num_layers=1), "basis", 0.2), "left"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("plan", "side"), COPIED.values(), ids=COPIED)
def test_a_decoded_copy_follows(plan, side, change):
    """Tokens that are decoded once, and again once rows or tokens have gone: every update gives what others
    give, out of a basis within the rounding of its products."""
    config, allowed = tiny_llama(2, 1).config, 1e-6 if plan.layers[0].basis("k") else 0.0
    states, mask = padded([random_states(1, 2, n, seed=n)[0] for n in (300, 170, 1)], 300, side)
    caches = [of_kind(plan, config, mask) for of_kind in (PlanCache, DecodedCache)]

    def feed_both(states: torch.Tensor, size: int) -> None:
        for part in states.split(size, dim=2):
            plain, copied = (cache.update(part, part.flip(1), 0) for cache in caches)
            for one, other in zip(plain, copied, strict=True):
                assert (one - other).abs().max() <= allowed * one.abs().max()
        caches[1].verify_decoded()

    caches[1].verify_decoded()  # nothing yet
    feed_both(states, 97)
    feed_both(random_states(3, 2, 150, seed=3), 7)
    for cache in caches:
        CHANGES[change](cache)
    caches[1].verify_decoded()
    feed_both(states[: len(caches[0].lengths) or 3], 50)
    assert caches[0].nbytes == caches[1].nbytes == plan.nbytes(caches[1].lengths, caches[1].get_seq_length())
    caches[1].layers[0].sides["v"].pool.records[0] ^= 1
    with pytest.raises(ArtifactError, match="layer 0: the decoded v differ from the packed cache by"):
        caches[1].verify_decoded()


def test_a_decoded_copy_decodes_a_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ragged rows, too: the pages that hold stripes, when the first of these that wait comes to be read."""
    decode, pages = PagedTensor.decode, []

    def counted(part: PagedTensor, spans: list[Span], dtype: torch.dtype) -> torch.Tensor:
        pages.extend((row, page) for row, first, stop in spans for page in range(first, stop))
        return decode(part, spans, dtype)

    monkeypatch.setattr(PagedTensor, "decode", counted)
    plan, config = llama_plan(STRIPES, STRIPES, num_layers=1), tiny_llama(2, 1).config
    states, mask = padded([random_states(1, 2, n, seed=n)[0] for n in (40, 7)], 40, "left")
    cache = DecodedCache(plan, config, mask)
    cache.update(states, states, 0)
    for _ in range(260):
        cache.update(states[:, :, :1], states[:, :, :1], 0)
    # When the last token came, 299 and 266 were there: 18 and 16 stripes had left the window of 9, of either side.
    # The first two of row 0 were read at once.
    assert [pages.count((row, page)) for row in (0, 1) for page in (0, 1, 2)] == [14, 16, 4, 16, 16, 0]


def unpadded(states: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """[1, N, T, D] of every row."""
    return [row[None, :, real.bool()] for row, real in zip(states, mask, strict=True)]


def filled_alone(prompt: torch.Tensor, more: torch.Tensor, kept: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that a row reads back by itself, fed and cropped as the batch was."""
    single = empty_cache()
    for part in (prompt, more):
        single.update(part, part, 0)
    single.crop(kept - 460)
    return read(single)


@pytest.mark.parametrize("kept", [450, 299])
def test_crop_of_a_ragged_batch(kept):
    lengths = (300, 140, 7)
    states, mask = padded([random_states(1, HEADS, n, seed=n)[0] for n in lengths], 300, "left", math.nan)
    cache, more = empty_cache(mask=mask), random_states(3, HEADS, 160)
    for part in (states, more):
        cache.update(part, part, 0)
    before = read(cache)
    cache.crop(kept - 460)
    assert_exact_bytes(cache, [length + kept - 300 for length in lengths], kept)
    alone = [filled_alone(rows, more[row : row + 1], kept) for row, rows in enumerate(unpadded(states, mask))]
    for now, *singles in zip(read(cache), *alone, strict=True):
        for row, single in enumerate(singles):
            assert torch.equal(now[row, :, kept - single.shape[2] :], single[0])
    assert all(torch.equal(now[:, :, :100], then[:, :, :100]) for now, then in zip(read(cache), before, strict=True))


def test_reset_forgets_everything_and_takes_another_batch():
    cache, fresh = filled(PLAN, 300, batch=3), filled(PLAN, 200, batch=2, seed=5)
    cache.reset()
    assert cache.nbytes == 0 and cache.lengths == [] and cache.get_seq_length() == 0
    states = random_states(2, HEADS, 200, seed=5)
    for part in states.split(97, dim=2):
        cache.update(part, part.flip(1), 0)
    assert_exact_bytes(cache, [200, 200])
    assert all(torch.equal(a, b) for a, b in zip(read(cache), read(fresh), strict=True))
