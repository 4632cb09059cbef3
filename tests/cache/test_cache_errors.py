"""What an error leaves: a refused crop changes nothing, and a forward pass that did not end is not built upon."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from cache_cases import assert_exact_bytes, feed, llama_plan, random_ids, tiny_llama
from test_cache_families import TWO_BITS, model_of, two_bit_plan
from torch import Tensor

from kvcal import PlanCache, attached
from kvcal.errors import NonFiniteActivations, UnsupportedModel, UsageError
from kvcal.plan.plan import Format

THREE = 3  # layers: an error in the one in the middle


@pytest.mark.parametrize(("name", "tokens"), [("gemma3", -3), ("gpt_oss", 50)])
def test_a_refused_crop_changes_nothing(name: str, tokens: int) -> None:
    """Sliding windows that are full refuse; layers behind them must not have been cropped by then."""
    model, ids = model_of(name), random_ids(1, 210)
    caches = [PlanCache(two_bit_plan(name), model.config) for _ in range(2)]
    for cache in caches:
        feed(model, cache, ids[:, :200])
    with pytest.raises(UsageError, match="the window of .* is full"):
        caches[0].crop(tokens)
    assert_exact_bytes(caches[0], [200])
    found, expected = (feed(model, cache, ids[:, 200:]) for cache in caches)
    assert torch.equal(found, expected)


def test_a_state_of_linear_attention_is_not_cropped() -> None:
    model, ids = model_of("qwen3_next"), random_ids(1, 140)
    cache, other = (PlanCache(two_bit_plan("qwen3_next"), model.config) for _ in range(2))
    for each in (cache, other):
        feed(model, each, ids[:, :130])
    with pytest.raises(UnsupportedModel, match="layer 0 keeps a state of linear attention"):
        cache.crop(-1)
    assert torch.equal(feed(model, cache, ids[:, 130:]), feed(model, other, ids[:, 130:]))


def test_keeping_the_first_tokens_is_removing_the_others() -> None:
    model, ids = tiny_llama(2), random_ids(1, 180)
    caches = [PlanCache(llama_plan(*TWO_BITS, 2), model.config) for _ in range(2)]
    for cache, tokens in zip(caches, (-40, 130), strict=True):
        feed(model, cache, ids[:, :170])
        cache.crop(tokens)
        cache.crop(500)  # there are no more
        assert cache.lengths == [130]
    first, second = (feed(model, cache, ids[:, 130:]) for cache in caches)
    assert torch.equal(first, second)


@contextlib.contextmanager
def interrupted(model: torch.nn.Module):
    """Within it, the user presses Ctrl-C while the middle layer is at work."""

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].mlp.register_forward_hook(stop)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("max_tokens", [None, 400])
def test_a_cache_says_that_a_forward_pass_did_not_end(max_tokens: int | None) -> None:
    model, ids = tiny_llama(2, THREE), random_ids(1, 210)
    cache, fresh = (
        PlanCache(llama_plan(*TWO_BITS, 2, num_layers=THREE), model.config, max_tokens=max_tokens) for _ in range(2)
    )
    context = contextlib.nullcontext() if max_tokens is None else attached(model)
    with context:
        feed(model, cache, ids[:, :60])
        with interrupted(model), pytest.raises(KeyboardInterrupt):
            feed(model, cache, ids[:, 60:200])
        for refused in (lambda: feed(model, cache, ids[:, 200:]), lambda: cache.crop(-1)):
            with pytest.raises(UsageError, match="did not reach the last layer") as caught:
                refused()
            assert "reset()" in caught.value.hint
        cache.reset()
        assert torch.equal(feed(model, cache, ids), feed(model, fresh, ids))


def test_values_that_cannot_be_packed_end_the_cache_too() -> None:
    """Its keys are packed by then, in the first layer."""
    model, ids = tiny_llama(2), random_ids(1, 200)
    cache = PlanCache(llama_plan(Format(2, "channel", 32), Format(2, "token", 32), 2), model.config)
    feed(model, cache, ids[:, :60])

    def spoil(module: torch.nn.Module, given: tuple, out: Tensor) -> Tensor:
        return torch.full_like(out, math.nan)

    handle = model.model.layers[0].self_attn.v_proj.register_forward_hook(spoil)
    with pytest.raises(NonFiniteActivations):
        feed(model, cache, ids[:, 60:])
    handle.remove()
    with pytest.raises(UsageError, match="did not reach the last layer"):
        feed(model, cache, ids[:, 60:])


def test_a_refusal_before_anything_is_stored_is_not_an_end() -> None:
    model = tiny_llama(2)
    cache = PlanCache(llama_plan(*TWO_BITS, 2), model.config, max_tokens=20)
    with attached(model):
        with pytest.raises(UsageError, match="does not fit"):
            feed(model, cache, random_ids(1, 21))
        feed(model, cache, random_ids(1, 20))
    assert cache.lengths == [20]
