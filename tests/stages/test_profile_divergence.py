"""Divergence through the packed cache: decode-faithful feeding, and the KL itself."""

from __future__ import annotations

import math

import pytest
import torch
from test_profile import CACHE, loaded_model

from kvcal.cache.plan_cache import PlanCache
from kvcal.data.sequences import DataSpec, load_sequences
from kvcal.errors import NonFiniteActivations
from kvcal.models.load import load
from kvcal.plan.plan import RAW, Format, Plan
from kvcal.recipe import CacheSpec
from kvcal.stages import divergence
from kvcal.stages.divergence import divergences, feed, kl_divergence, lockstep, one_side_plan, unquantized_plan


def plans_of(loaded) -> tuple[Plan, Plan]:
    """(16 bits, keys of layer 1 at 2 bits)."""
    reference = unquantized_plan(loaded.identity, loaded.geometry)
    return reference, one_side_plan(reference, 1, "k", CACHE.format("k", 2, "channel", 32))


def tokens_of(*shape: int) -> torch.Tensor:
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(2))


def test_feeding_in_chunks_is_feeding_one_token_at_a_time() -> None:
    """Two pages are written on the way; a chunk that reached over a page's end would read exact keys."""
    loaded = loaded_model()
    _, plan = plans_of(loaded)
    tokens_BT = tokens_of(2, 290)
    chunks = list(feed(loaded.model, PlanCache(plan, loaded.model.config), tokens_BT))
    assert [start for start, _ in chunks][0] == 0 and len(chunks) < 12
    assert [start for start, _ in chunks][1:] == torch.tensor([c.shape[1] for _, c in chunks]).cumsum(0).tolist()[:-1]
    cache = PlanCache(plan, loaded.model.config)
    with torch.no_grad():
        single = [
            loaded.model(input_ids=tokens_BT[:, t : t + 1], past_key_values=cache, use_cache=True).logits
            for t in range(290)
        ]
        exact = loaded.model(input_ids=tokens_BT, use_cache=False).logits
    fed = torch.cat([logits for _, logits in chunks], dim=1)
    torch.testing.assert_close(fed, torch.cat(single, dim=1), rtol=1e-3, atol=1e-3)
    assert (fed - exact)[:, :144].abs().max() < 1e-3  # before the first page
    assert (fed - exact)[:, 144:].abs().max() > 0.05


def test_caches_in_lockstep_are_fed_as_if_alone() -> None:
    loaded = loaded_model()
    plans = plans_of(loaded)
    tokens_BT = tokens_of(1, 300)
    together: list[list[torch.Tensor]] = [[], []]
    caches = [PlanCache(plan, loaded.model.config) for plan in plans]
    for number, start, logits in lockstep(loaded.model, caches, tokens_BT):
        assert start == sum(chunk.shape[1] for chunk in together[number])
        together[number].append(logits)
    for plan, chunks in zip(plans, together, strict=True):
        alone = [logits for _, logits in feed(loaded.model, PlanCache(plan, loaded.model.config), tokens_BT)]
        torch.testing.assert_close(torch.cat(chunks, 1), torch.cat(alone, 1), rtol=1e-4, atol=1e-4)


def test_right_padding_leaves_real_tokens_as_they_are() -> None:
    loaded = loaded_model()
    _, plan = plans_of(loaded)
    short = tokens_of(1, 240)
    padded = torch.cat([torch.cat([short, torch.zeros(1, 90, dtype=torch.int64)], 1), tokens_of(1, 330)])
    alone = torch.cat([x for _, x in feed(loaded.model, PlanCache(plan, loaded.model.config), short)], 1)
    batch = torch.cat([x for _, x in feed(loaded.model, PlanCache(plan, loaded.model.config), padded)], 1)
    torch.testing.assert_close(batch[:1, :240], alone, rtol=1e-3, atol=1e-3)


def test_kl_is_that_of_the_definition_in_any_number_of_rows(monkeypatch) -> None:
    p_nV, q_nV = torch.randn(9, 50), torch.randn(9, 50)
    expected = [
        math.fsum(
            math.exp(a) * (a - b)
            for a, b in zip(p.double().log_softmax(0).tolist(), q.double().log_softmax(0).tolist(), strict=True)
        )
        for p, q in zip(p_nV, q_nV, strict=True)
    ]
    torch.testing.assert_close(kl_divergence(p_nV, q_nV), torch.tensor(expected, dtype=torch.float64))
    monkeypatch.setattr(divergence, "MAX_COMPARED", 100)
    torch.testing.assert_close(kl_divergence(p_nV, q_nV), torch.tensor(expected, dtype=torch.float64))
    assert not kl_divergence(p_nV, p_nV).any()
    assert kl_divergence(p_nV[:0], q_nV[:0]).shape == (0,)


def test_kl_counts_the_positions_that_predict_loss_tokens() -> None:
    loaded = loaded_model()
    reference, plan = plans_of(loaded)
    tokens_T = tokens_of(300)
    mask_T = torch.zeros(300, dtype=torch.bool)
    mask_T[[40, 200, 299]] = True
    found_1n = divergences(loaded.model, reference, [plan], tokens_T[None], mask_T[None])
    logits = [
        torch.cat([x for _, x in feed(loaded.model, PlanCache(p, loaded.model.config), tokens_T[None])], 1)[0]
        for p in (reference, plan)
    ]
    expected = torch.stack([kl_divergence(*(x[t - 1 : t] for x in logits))[0] for t in (40, 200, 299)])
    torch.testing.assert_close(found_1n[0], expected, rtol=1e-3, atol=1e-12)
    assert found_1n[0, 0] < 1e-9 < found_1n[0, 1]  # token 40 is predicted before anything is quantized
    mask_T[:] = False
    assert divergences(loaded.model, reference, [plan], tokens_T[None], mask_T[None]).shape == (1, 0)
    assert divergences(loaded.model, reference, [], tokens_T[None], mask_T[None]).shape == (0, 0)


def test_logits_that_are_not_finite_are_refused() -> None:
    loaded = loaded_model()
    reference, plan = plans_of(loaded)
    with torch.no_grad():
        loaded.model.lm_head.weight[5] = math.inf
    with pytest.raises(NonFiniteActivations, match="not finite"):
        divergences(loaded.model, reference, [plan], tokens_of(1, 40), torch.arange(40)[None] > 0)


def test_one_side_of_one_layer_alone_is_quantized() -> None:
    loaded = loaded_model(num_layers=4)
    reference = unquantized_plan(loaded.identity, loaded.geometry)
    fmt = Format(2, "token", 64)
    plan = one_side_plan(reference, 2, "v", fmt)
    formats = {(layer.geometry.index, side): layer.formats(side) for layer in plan.layers for side in ("k", "v")}
    assert formats.pop((2, "v")) == (fmt,)
    assert set(formats.values()) == {(RAW,)} and len(formats) == 7
    assert one_side_plan(reference, 2, "v", RAW) == reference


def test_on_a_trained_model_kl_is_zero_at_16_bits_and_grows_as_bits_fall() -> None:
    """One layer's keys, then values, of the embedded model on a task."""
    torch.set_num_threads(1)
    loaded = load("reasoner-10m", device="cpu")
    data = load_sequences(DataSpec(num_samples=1, seq_len=256, seed=3), loaded.tokenizer)
    tokens_T = data.sequences[0].flip(0)  # nonsense: the next token is not certain, and small errors show
    mask_T = torch.arange(len(tokens_T)) > 140
    assert len(tokens_T) > 240
    cache = CacheSpec(k_recent_window=0, v_recent_window=0)
    reference = unquantized_plan(loaded.identity, loaded.geometry)
    plans = [reference]
    for side, axis in (("k", "channel"), ("v", "token")):
        plans += [one_side_plan(reference, 1, side, cache.format(side, b, axis, 64)) for b in (8, 4, 2, 1)]
    kl_P = divergences(loaded.model, reference, plans, tokens_T[None], mask_T[None]).mean(1)
    assert float(kl_P[0]) == 0.0
    for side_4 in (kl_P[1:5], kl_P[5:]):
        assert float(side_4[0]) > 0 and (side_4[1:] > 2 * side_4[:-1]).all()
