"""A cache filled under ``torch.inference_mode`` goes on outside of it, and the reverse."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch
from cache_cases import KINDS, attended, llama_plan, random_qkv, tiny_llama
from progressive_cases import fixed
from static_cases import plan_for
from test_cache_families import model_of, two_bit_plan

from kvcal import Plan, PlanCache

PLANS = {
    "windows": llama_plan(*KINDS["windows"], num_layers=1),
    "queries": plan_for("queries"),
    "shrinking": fixed((140, 261), (150, 262)),
}


def mode(inference: bool) -> AbstractContextManager[None]:
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
@pytest.mark.parametrize("name", PLANS)
def test_modes_may_change_between_updates(name: str, max_tokens: int | None) -> None:
    plan = PLANS[name]
    by_turns = (True, False, True, False, True)
    assert torch.equal(lived(plan, by_turns, max_tokens), lived(plan, (False,) * 5, max_tokens))


def test_sliding_windows_too() -> None:
    model, found = model_of("gemma3"), []
    for modes in ((False, False, False), (True, False, True)):
        cache, ids = PlanCache(two_bit_plan("gemma3"), model.config), torch.arange(3, 123).view(1, -1)
        for part, inference in enumerate(modes):
            with mode(inference):
                out = model(ids[:, 40 * part : 40 * part + 40], past_key_values=cache)
        found.append(out.logits)
    assert torch.equal(*found)
