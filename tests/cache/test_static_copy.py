"""A static cache that takes over what a dynamic one holds, from disk or from a prompt: the same bytes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from cache_cases import feed, model_plan, padded, random_ids, tiny_llama
from evaluation_cases import make_plan, tiny
from static_cases import FORMATS, assert_same_pages, drifting_ids, listened, plan_for
from test_static_window import assert_same_windows
from tiny_models import built

from kvcal import PlanCache, attached
from kvcal.errors import UnsupportedModel, UsageError
from kvcal.plan.page_format import SIDES, Format
from kvcal.stages.prefix import complete_prefix, load_prefix, pack_prefix

NAMES = ("uniform", "kivi", "kitty", "queries", "query magnitude", "paged window", "per head", "transformed", "rotated")


def assert_same_tokens(first: PlanCache, second: PlanCache) -> None:
    """Two static caches hold the same bits."""
    assert first.lengths == second.lengths
    for pair, side in itertools.product(zip(first.paged_layers, second.paged_layers, strict=True), SIDES):
        rows = first.padding.rows
        found, expected = (layer.store.read(side, rows, layer.columns, 0, torch.float32) for layer in pair)
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "lengths"), [*((name, (300, 150)) for name in NAMES), ("kivi", (1, 1)), ("queries", (400, 3))]
)
def test_bytes_after_the_copy_and_after_what_follows(name: str, lengths: tuple[int, int]) -> None:
    """A ragged batch, row by row; then steps, of which both caches make the same pages."""
    model, plan, width = tiny_llama(2, 1), plan_for(name), max(lengths)
    ids, mask = padded([drifting_ids(1, n)[0] for n in lengths], width, "left")
    dynamic = PlanCache(plan, model.config, mask)
    straight, copied = (PlanCache(plan, model.config, mask, max_tokens=600) for _ in range(2))
    with listened(2, 1, plan):
        feed(model, dynamic, ids.long(), mask=mask)
    copied.copy_from(dynamic)
    assert assert_same_pages(copied, dynamic) > 0 or width < 32
    steps = (1, 2, *range(80, 140))  # single ones at the beginning, and where pages are packed: none before 80
    rest, later = random_ids(2, 140, seed=4), torch.nn.functional.pad(mask, (0, 140), value=1)
    with listened(2, 1, plan):
        expected = feed(model, dynamic, rest, steps, later)
    with attached(model):
        feed(model, straight, ids.long(), mask=mask)
        assert_same_tokens(copied, straight)
        found = feed(model, copied, rest, steps, later)
        assert torch.equal(found, feed(model, straight, rest, steps, later))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert assert_same_pages(copied, dynamic) > 0
    assert copied.nbytes == plan.nbytes([600] * 2)


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_one_sequence_fills_every_row_with_sliding_windows_too(name: str) -> None:
    model, ids = built(name), random_ids(1, 150)
    plan = model_plan(model, Format(2, "channel", 32, 4), Format(2, "token", 32, 4, 5))
    dynamic, copied = PlanCache(plan, model.config), PlanCache(plan, model.config, max_tokens=200)
    feed(model, dynamic, ids)
    copied.allocate(3, "cpu")
    with attached(model):
        feed(model, copied, random_ids(3, 160, seed=8))  # is forgotten
        copied.copy_from(dynamic)
        assert copied.lengths == [150] * 3
        copied.mark()
        rest, found = random_ids(3, 40, seed=5), []
        for _ in range(2):
            found.append(feed(model, copied, rest, range(1, 40)))
            copied.rewind()
    assert torch.equal(*found)
    for row in range(3):
        again = PlanCache(plan, model.config)
        feed(model, again, ids)
        expected = feed(model, again, rest[row : row + 1], range(1, 40))
        torch.testing.assert_close(found[0][row : row + 1], expected, atol=1e-4, rtol=1e-4)
    one = PlanCache(plan, model.config, max_tokens=200)
    one.copy_from(dynamic)
    assert assert_same_windows(one, dynamic) > 0


def test_a_prefix_from_disk(tmp_path: Path) -> None:
    """What ``load_prefix`` gives, in a static cache of two rows: the tokens that generation gives from the file."""
    loaded, tokens, path = tiny(), random_ids(1, 250)[0], tmp_path / "p.kv"
    model, plan = loaded.model, make_plan(loaded, FORMATS["kitty"])
    pack_prefix(loaded, plan, tokens, path)
    prefix = load_prefix(loaded, plan, path)
    cache = PlanCache(plan, model.config, max_tokens=300)
    cache.allocate(2, "cpu")
    cache.copy_from(prefix.cache)
    assert cache.lengths == [250, 250]
    ids = torch.cat([tokens, prefix.logits_V.argmax().view(1)]).expand(2, -1)
    with attached(model):
        found = model.generate(
            ids, past_key_values=cache, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False
        )
    expected = complete_prefix(loaded, prefix, 31)
    assert found[0, 250:].tolist() == found[1, 250:].tolist() == expected.tolist()


def test_what_is_not_copied() -> None:
    model, plan, ids = tiny_llama(2, 1), plan_for("uniform"), random_ids(2, 200)
    dynamic, static = (PlanCache(plan, model.config, max_tokens=size) for size in (None, 190))
    with pytest.raises(UsageError, match="from a dynamic one that holds tokens"):
        static.copy_from(dynamic)
    feed(model, dynamic, ids[:, :128])
    for wrong in (static, dynamic):
        with pytest.raises(UsageError, match="from a dynamic one that holds tokens"):
            dynamic.copy_from(wrong)
    static.copy_from(dynamic)
    assert static.lengths == [128] * 2 and assert_same_pages(static, dynamic) > 0
    feed(model, dynamic, ids)
    with pytest.raises(UsageError, match="does not fit"):
        static.copy_from(dynamic)
    other = PlanCache(plan_for("kivi"), model.config)
    feed(model, other, ids)
    with pytest.raises(UsageError, match="the other cache's plan is"):
        static.copy_from(other)
    three = PlanCache(plan, model.config)
    feed(model, three, random_ids(3, 9))
    with pytest.raises(UsageError, match="holds 3 sequences, expected 1 or 2"):
        static.copy_from(three)
    gemma, right = built("gemma3"), torch.tensor([[1, 1, 0], [1, 1, 1]])
    padded_right = PlanCache(model_plan(gemma), gemma.config, right)
    feed(gemma, padded_right, ids[:, :3], mask=right)
    with pytest.raises(UnsupportedModel, match="padded behind its tokens"):
        PlanCache(model_plan(gemma), gemma.config, max_tokens=9).copy_from(padded_right)
    linear = built("qwen3_next")
    states = PlanCache(model_plan(linear), linear.config)
    feed(linear, states, ids[:, :3])
    with pytest.raises(UnsupportedModel, match="keeps a state of linear attention"):
        PlanCache(model_plan(linear), linear.config, max_tokens=9).copy_from(states)
