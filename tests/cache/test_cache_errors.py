"""What an error leaves: a refused crop changes nothing, and a forward pass that did not end is not built upon. And
modes of torch: a cache filled under ``torch.inference_mode`` goes on outside of it, and the reverse."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from cache_cases import KINDS, assert_exact_bytes, attended, feed, llama_plan, random_ids, random_qkv, tiny_llama
from progressive_cases import fixed
from static_cases import plan_for
from test_cache_families import TWO_BITS, model_of, two_bit_plan
from torch import Tensor

from kvcal import Plan, PlanCache, attached
from kvcal.errors import NonFiniteActivations, UnsupportedModel, UsageError
from kvcal.plan.plan import Format

THREE = 3  # layers: an error in the one in the middle


@pytest.mark.parametrize(("name", "tokens"), [("gemma3", -3), ("gpt_oss", 50)])
def test_a_refused_crop_changes_nothing(name: str, tokens: int) -> None:
    """Sliding windows that are full refuse; layers after them must not have been cropped by then."""
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


MODES = {
    "windows": llama_plan(*KINDS["windows"], num_layers=1),
    "queries": plan_for("queries"),
    "shrinking": fixed((140, 261), (150, 262)),
}


def mode(inference: bool) -> contextlib.AbstractContextManager[None]:
    return torch.inference_mode() if inference else torch.no_grad()


def lived(plan: Plan, modes: tuple[bool, ...], max_tokens: int | None) -> torch.Tensor:
    """Outputs of five parts, each under its mode, with rows that change places and tokens taken back between them."""
    cache, given, outputs = PlanCache(plan, tiny_llama(2, 1).config, max_tokens=max_tokens), random_qkv(2, 2, 400), []
    for part, inference in enumerate(modes):
        with mode(inference):
            new = [x[:, :, 80 * part : 80 * part + 80] for x in given]
            outputs.append(attended(cache, *new, (78, 79)))
            if max_tokens is None:
                cache.crop(-3)
            cache.reorder_cache(torch.tensor([1, 0]))
    return torch.cat(outputs, 2)


@pytest.mark.parametrize("max_tokens", [None, 400])
@pytest.mark.parametrize("name", MODES)
def test_modes_may_change_between_updates(name: str, max_tokens: int | None) -> None:
    plan = MODES[name]
    by_turns = (True, False, True, False, True)
    assert torch.equal(lived(plan, by_turns, max_tokens), lived(plan, (False,) * 5, max_tokens))


def test_modes_may_change_between_updates_of_sliding_windows() -> None:
    model, found = model_of("gemma3"), []
    for modes in ((False, False, False), (True, False, True)):
        cache, ids = PlanCache(two_bit_plan("gemma3"), model.config), torch.arange(3, 123).view(1, -1)
        for part, inference in enumerate(modes):
            with mode(inference):
                out = model(ids[:, 40 * part : 40 * part + 40], past_key_values=cache)
        found.append(out.logits)
    assert torch.equal(*found)
