"""Going back in a static cache: whatever came behind a mark, what follows a rewind is what would have followed it."""

from __future__ import annotations

import pytest
import torch
from cache_cases import feed, model_plan, padded, random_ids, tiny_llama
from static_cases import assert_same_pages, drifting_ids, listened, plan_for
from tiny_models import built

from kvcal import PlanCache, attached
from kvcal.errors import NonFiniteActivations, UnsupportedModel, UsageError
from kvcal.plan.page_format import Format

NAMES = (
    "uniform",
    "kivi",
    "kitty",
    "queries",
    "random",
    "paged window",
    "16-bit values",
    "per head",
    "transformed",
    "rotated",
)


def windowed_plan():
    return model_plan(built("gemma3"), Format(2, "channel", 32, 4), Format(2, "token", 32, 4, 5))


# Behind sinks that are not full, and before, on and behind the ends of pages.
@pytest.mark.parametrize(
    ("name", "length"),
    [
        *((name, 150) for name in NAMES),
        ("kivi", 128),
        ("kivi", 255),
        ("uniform", 1),
        ("uniform", 128),
        ("queries", 127),
        ("queries", 129),
        ("queries", 3),
    ],
)
def test_requests_behind_a_prompt_are_as_behind_a_fresh_one(name: str, length: int) -> None:
    """Requests of steps and chunks that pack pages; of each, every page is the dynamic cache's."""
    model, plan, prompt = tiny_llama(2, 1), plan_for(name), drifting_ids(2, length)
    cache = PlanCache(plan, model.config, max_tokens=length + 300)
    with attached(model):
        feed(model, cache, prompt)
    cache.mark()
    where = [tensor.data_ptr() for layer in cache.paged_layers for tensor in layer.tensors]
    # Single steps at the beginning, and where pages are packed: with the prompts, none of them between 3 and 90.
    for request, cuts in enumerate([(1, 2, 3, *range(90, 140)), (100, 101, 299), (110, *range(111, 135))]):
        ids, dynamic = random_ids(2, cuts[-1] + 1, seed=request), PlanCache(plan, model.config)
        with attached(model):
            found = feed(model, cache, ids, cuts)
        with listened(2, 1, plan):
            feed(model, dynamic, prompt)
            expected = feed(model, dynamic, ids, cuts)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert assert_same_pages(cache, dynamic) > 0
        cache.rewind()
        assert cache.lengths == [length, length] and cache.static.longest == length
    assert [tensor.data_ptr() for layer in cache.paged_layers for tensor in layer.tensors] == where


def test_a_rewound_cache_is_the_marked_one_bit_for_bit() -> None:
    """Ragged rows and sliding windows; a request behind a request gives what it gives first, by itself."""
    model, plan = built("gemma3"), windowed_plan()
    ids, mask = padded([random_ids(1, n, seed=n)[0] for n in (140, 131, 2)], 140, "left")
    first, second = (random_ids(3, 150, seed=seed) for seed in (1, 2))
    cache = PlanCache(plan, model.config, mask, max_tokens=300)
    later = torch.nn.functional.pad(mask, (0, 150), value=1)
    with attached(model):
        feed(model, cache, ids.long(), (90,), mask)
        cache.mark()
        expected = feed(model, cache, first, range(1, 150), later)
        cache.rewind()
        assert cache.lengths == [140, 131, 2]
        feed(model, cache, second, (130, *range(131, 150)), later)
        cache.rewind()
        assert torch.equal(feed(model, cache, first, range(1, 150), later), expected)


def test_a_mark_within_a_prompt() -> None:
    """Before the padding has ended, a single column is no step yet."""
    model, plan = tiny_llama(2, 1), plan_for("kivi")
    ids, mask = padded([random_ids(1, n, seed=n)[0] for n in (60, 9)], 60, "left")
    cache = PlanCache(plan, model.config, mask, max_tokens=100)
    with attached(model):
        feed(model, cache, ids[:, :30].long(), (), mask[:, :30])
        cache.mark()
        found = []
        for _ in range(2):
            assert cache.static.in_prompt
            found.append(feed(model, cache, ids[:, 30:].long(), (29,), mask))
            assert cache.lengths == [60, 9] and not cache.static.in_prompt
            cache.rewind()
    assert torch.equal(*found)


def test_a_later_mark_takes_the_place_of_the_first_and_a_crop_may_go_behind_it() -> None:
    model, plan, ids = tiny_llama(2, 2), plan_for("kivi", num_layers=2), random_ids(2, 160)
    cache, fresh = (PlanCache(plan, model.config, max_tokens=300) for _ in range(2))
    with attached(model):
        for stop in (100, 140):
            feed(model, cache, ids[:, stop - 100 if stop == 100 else 100 : stop])
            cache.mark()
            held = cache.workspace_nbytes
        feed(model, cache, random_ids(2, 20, seed=3))
        cache.crop(-25)
        feed(model, cache, random_ids(2, 9, seed=4), range(1, 9))
        cache.rewind()
        feed(model, fresh, ids[:, :140], (100,))
        rest = random_ids(2, 150, seed=5)
        assert torch.equal(feed(model, cache, rest, range(1, 150)), feed(model, fresh, rest, range(1, 150)))
    assert cache.workspace_nbytes == held


@pytest.mark.parametrize(("kept", "holds"), [(300, True), (256, True), (255, False), (129, False), (0, False)])
def test_a_crop_into_pages_before_a_mark_ends_it(kept: int, holds: bool) -> None:
    """Tokens to come are packed in their place."""
    model, plan, rest = tiny_llama(2, 1), plan_for("uniform"), random_ids(2, 40, seed=5)
    cache = PlanCache(plan, model.config, max_tokens=500)
    with attached(model):
        feed(model, cache, random_ids(2, 310))
        cache.mark()
        expected = feed(model, cache, rest, range(1, 40))
        cache.crop(kept - 350)
        feed(model, cache, random_ids(2, 140, seed=6), range(100, 140))
        if holds:
            cache.rewind()
            assert torch.equal(feed(model, cache, rest, range(1, 40)), expected)
            return
        with pytest.raises(UsageError, match="no mark to go back to: .* pages before it were cropped"):
            cache.rewind()
        assert cache.lengths == [kept + 140] * 2
        cache.mark()
        cache.rewind()


def test_generate_behind_a_mark() -> None:
    """``generate`` takes what the cache holds as the beginning of its prompt."""
    model, plan, prompt = built("gemma3"), windowed_plan(), random_ids(2, 140)
    cache = PlanCache(plan, model.config, max_tokens=300)
    with attached(model), torch.no_grad():
        feed(model, cache, prompt)
        cache.mark()
        for seed in (1, 2, 1):
            ids = torch.cat([prompt, random_ids(2, 8, seed=seed)], dim=1)
            options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
            options["attention_mask"] = torch.ones_like(ids)
            found = model.generate(ids, past_key_values=cache, **options)
            dynamic = PlanCache(plan, model.config)
            feed(model, dynamic, prompt)
            assert torch.equal(found, model.generate(ids, past_key_values=dynamic, **options))
            cache.rewind()


@pytest.mark.parametrize("name", ["kivi", "queries"])
def test_bytes_of_a_mark_are_those_of_what_is_not_packed(name: str) -> None:
    model, plan = tiny_llama(2, 1), plan_for(name)
    cache = PlanCache(plan, model.config, max_tokens=3000)
    with attached(model):
        feed(model, cache, random_ids(3, 10))
        before, stored = cache.workspace_nbytes, cache.nbytes
        cache.mark()
    parts = cache.paged_layers[0].parts
    held = sum(part.sinks.nbytes + part.ring.nbytes for part in parts)
    sums = sum(part.query_sum.nbytes + part.query_since.nbytes for part in parts)
    assert cache.workspace_nbytes - before == held + sums + 4 * 3 + 8
    assert cache.nbytes == stored == plan.nbytes([3000] * 3)


def test_marks_that_do_not_hold() -> None:
    model, plan = tiny_llama(2, 1), plan_for("kivi")
    cache = PlanCache(plan, model.config, max_tokens=300)
    for unmarkable in (cache, PlanCache(plan, model.config)):
        with pytest.raises(UsageError, match="nothing to mark"):
            unmarkable.mark()
        with pytest.raises(UsageError, match="never marked"):
            unmarkable.rewind()
    with attached(model):
        feed(model, cache, random_ids(2, 140))
        cache.mark()
        cache.reorder_cache(torch.tensor([0, 1]))
        cache.rewind()
        for spoil in (lambda: cache.reorder_cache(torch.tensor([1, 1])), cache.reset):
            spoil()
            with pytest.raises(UsageError, match="no mark to go back to"):
                cache.rewind()
            cache.reset()
            feed(model, cache, random_ids(2, 140))
            cache.mark()
            cache.rewind()
        cache.static.error.fill_(1)
        with pytest.raises(NonFiniteActivations):
            cache.mark()
    linear = built("qwen3_next")
    cache = PlanCache(model_plan(linear), linear.config, max_tokens=40)
    cache.allocate(1, "cpu")
    with pytest.raises(UnsupportedModel, match="layer 0 keeps a state of linear attention"):
        cache.mark()
