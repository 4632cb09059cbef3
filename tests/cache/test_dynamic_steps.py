"""Steps of a dynamic cache by the operators of static caches, here by their torch reference: what the static
cache gives, bit for bit, in the plan's bytes. The kernels are test_dynamic_steps_gpu.py."""

import copy
import pickle
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cache_cases import assert_exact_bytes, feed, ragged_ids, random_ids, random_states, tiny_llama
from static_cases import FORMATS, TRANSFORMED, assert_same_pages, plan_for
from torch import Tensor

from kvcal import PlanCache, attached
from kvcal.cache import paged_layer
from kvcal.errors import NonFiniteActivations, SlowPath
from kvcal.store.step import LayerStep


@pytest.fixture(autouse=True)
def _steps_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_layer, "STEPPED", {"cpu"})


@pytest.fixture
def stepped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each sequence in every step so far."""
    counts, append = list[int](), LayerStep.append

    def counted(step: LayerStep, q: Tensor, *given: Any) -> Tensor:
        counts.append(1 if q.dim() == 3 else q.shape[1])
        return append(step, q, *given)

    monkeypatch.setattr(LayerStep, "append", counted)
    return counts


@pytest.mark.parametrize("name", [*FORMATS, *TRANSFORMED])
def test_steps_give_what_a_static_cache_gives(name: str, stepped: list[int]) -> None:
    """Prompts of 200, 130 and 3 tokens; then 140 steps, which fill pages in every row at other times."""
    plan, model, prompt = plan_for(name), tiny_llama(2, 1), 200
    ids, mask = ragged_ids((200, 130, 3), 140)
    dynamic = PlanCache(plan, model.config, mask[:, :prompt])
    static = PlanCache(plan, model.config, mask[:, :prompt], max_tokens=400)
    cuts = range(prompt, ids.shape[1])
    with attached(model):
        found = feed(model, dynamic, ids, cuts, mask)
        assert stepped == [1] * 140
        expected = feed(model, static, ids, cuts, mask)
    assert torch.equal(found, expected)
    assert assert_same_pages(static, dynamic) > 0
    assert_exact_bytes(dynamic, [340, 270, 143], ids.shape[1])
    assert dynamic.workspace_nbytes > 0


def test_steps_outside_of_attached_are_told_at_once(stepped: list[int]) -> None:
    """Not of a prompt."""
    model, ids = tiny_llama(2, 1), random_ids(1, 202)
    cache = PlanCache(plan_for("uniform"), model.config)
    with torch.no_grad():
        model(ids[:, :200], past_key_values=cache)
        with pytest.warns(SlowPath, match="within `with kvcal.attached"):
            model(ids[:, 200:201], past_key_values=cache)
        with attached(model), warnings.catch_warnings(action="error"):
            model(ids[:, 201:], past_key_values=cache)
    assert stepped == [1]


def test_prompts_and_steps_in_turn(stepped: list[int]) -> None:
    """Steps after a longer chunk, a crop, other rows and a reset go by the lengths and slots of then."""
    plan, model = plan_for("kitty", num_layers=2), tiny_llama(2, 2)
    ids, caches = random_ids(2, 700), (PlanCache(plan, model.config), PlanCache(plan, model.config, max_tokens=700))
    found = []
    with attached(model):
        for cache in caches:
            logits = [feed(model, cache, ids[:, :300], (120, 121, 122, 280, *range(281, 300)))]
            cache.crop(-150)
            logits += [feed(model, cache, ids[:, 300:460], range(1, 160))]
            cache.reorder_cache(torch.tensor([1, 1]))
            logits += [feed(model, cache, ids[:, 460:470], range(1, 10))]
            cache.reset()
            logits += [feed(model, cache, ids[:, :140], range(100, 140))]
            found.append(torch.cat(logits, 1))
    assert torch.equal(*found)
    assert_same_pages(caches[1], caches[0])
    assert len(stepped) == 4 * (2 + 20 + 160 + 10 + 40)


def test_a_cache_fed_in_inference_mode_is_stepped_outside(stepped: list[int]) -> None:
    plan, model, ids = plan_for("kivi"), tiny_llama(2, 1), random_ids(2, 270)
    cache, found = PlanCache(plan, model.config), []
    with attached(model):
        for start, stop, mode in ((0, 130, True), (130, 133, False), (133, 258, True), (258, 270, False)):
            with torch.inference_mode(mode):
                found.append(feed(model, cache, ids[:, start:stop], range(1, 200) if start else ()))
            if stop == 133:
                cache.crop(-3)
                found[-1] = feed(model, cache, ids[:, start:stop], range(1, 3))
        cache.reset()
        expected = feed(model, cache, ids, range(130, 270))
    assert torch.equal(torch.cat([x.clone() for x in found], 1), expected) and len(stepped) == 3 + 140 + 140


def test_rows_come_and_go(stepped: list[int]) -> None:
    plan, model = plan_for("kivi"), tiny_llama(2, 1)
    ids = random_ids(3, 300)
    cache, alone = PlanCache(plan, model.config), PlanCache(plan, model.config)
    with attached(model):
        feed(model, cache, ids[:, :250], range(240, 250))
        cache.batch_select_indices(torch.tensor([2]))
        found = feed(model, cache, ids[2:, 250:], range(1, 50))
        feed(model, alone, ids[2:, :250], range(240, 250))
        expected = feed(model, alone, ids[2:, 250:], range(1, 50))
    assert torch.allclose(found, expected, atol=1e-5) and len(stepped) == 120
    assert_exact_bytes(cache, [300])


def test_drafts_are_verified_in_one_step(stepped: list[int]) -> None:
    plan, model = plan_for("rotated, feedback"), tiny_llama(2, 1)
    ids = random_ids(1, 200)
    caches = [PlanCache(plan, model.config, max_tokens=size, lookahead=3) for size in (None, 256)]
    with attached(model):
        found = [feed(model, cache, ids, range(100, 200, 4)) for cache in caches]
    assert torch.equal(*found) and stepped == [4] * 50


@pytest.mark.parametrize("case", ["outside", "gradients", "training", "other mask", "positional", "custom mask"])
def test_all_else_is_the_models_own_attention(case: str, stepped: list[int]) -> None:
    plan, model = plan_for("kivi"), tiny_llama(2, 1)
    ids, mask = ragged_ids((40, 30), 1)
    cache = PlanCache(plan, model.config, mask[:, :40])
    with torch.no_grad():
        model(ids[:, :40], attention_mask=mask[:, :40], past_key_values=cache)
    given: dict[str, Any] = {"input_ids": ids[:, 40:], "attention_mask": mask, "past_key_values": cache}
    if case == "other mask":  # which hides a token of the first row, too
        given["attention_mask"] = mask.clone().index_fill_(1, torch.tensor([5]), 0)
    if case == "custom mask":
        given["attention_mask"] = torch.zeros(2, 1, 1, 41).masked_fill(mask[:, None, None] == 0, -1e9)
    expected_cache = copy.deepcopy(cache)
    model.train(case == "training")
    with torch.set_grad_enabled(case == "gradients"):
        expected = model(**given | {"past_key_values": expected_cache}).logits
        with nullcontext() if case == "outside" else attached(model):
            if case == "positional":
                decoder = model.get_decoder()
                hidden = decoder(given["input_ids"], given["attention_mask"], past_key_values=cache)[0]
                found = model.lm_head(hidden)
            else:
                found = model(**given).logits
    model.eval()
    assert torch.equal(found, expected) and not stepped


def test_a_page_that_cannot_be_stored_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PlanCache(plan_for("kivi"), tiny_llama(2, 1).config)
    (layer,) = cache.paged_layers
    cache.update(*random_states(2, 2, 120).chunk(2), 0)
    cache.state.is_stepping = True

    def step(value: float) -> None:
        new = torch.full((1, 2, 1, 8), value)
        cache.update(new, new, 0)
        assert layer.awaits_step(1)
        layer.attend(torch.ones(1, 8, 1, 8), new, new, None, 1.0, 0.0)

    for _ in range(7):
        step(torch.nan)
    cache.check()
    step(1.0)
    with pytest.raises(NonFiniteActivations):
        cache.check()
    cache.check()


def test_a_cache_that_has_stepped_can_be_copied_and_pickled() -> None:
    plan, model, ids = plan_for("queries"), tiny_llama(2, 1), random_ids(2, 150)
    cache = PlanCache(plan, model.config)
    with attached(model):
        feed(model, cache, ids[:, :140], range(120, 140))
        copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
        expected = feed(model, cache, ids[:, 140:], range(1, 10))
        assert all(torch.equal(feed(model, one, ids[:, 140:], range(1, 10)), expected) for one in copies)
