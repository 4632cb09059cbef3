"""The tokens that the cache gives back, at every token count: sinks raw, pages quantized once from the original values,
the ring raw, new tokens raw. Pages never change once written."""

import itertools
from dataclasses import replace

import oracles
import pytest
import torch
from cache_cases import (
    HEAD_DIM,
    KINDS,
    KIVI_2,
    SINKS_3,
    attended,
    feed,
    llama_plan,
    random_ids,
    random_qkv,
    random_states,
    tiny_llama,
)
from static_cases import pages_of, plan_for
from tier_formats import BASE_4, KITTY, THREE_TIERS, V
from tier_oracle import BoostedHead

from kvcal import PlanCache
from kvcal.errors import NonFiniteActivations
from kvcal.geometry import CACHE_DTYPES
from kvcal.pages.codec import ENCODE_PAGES
from kvcal.pages.layout_protocol import without_sinks
from kvcal.plan.plan import RAW, SIDES, Format, Plan

HEADS, TOKENS = 2, 290
PLANS = {name: llama_plan(*pair, num_kv_heads=HEADS, num_layers=1) for name, pair in KINDS.items()}
BOOSTED = {
    name: llama_plan(fmt, V, HEADS, dtype, 1)
    for name, fmt, dtype in (
        ("three tiers", THREE_TIERS, "bfloat16"),
        ("4 bits, boosted", BASE_4, "float32"),
        ("Kitty", KITTY[0], "bfloat16"),
    )
}
PLANS_BF16 = {name: replace(plan, cache_dtype="bfloat16") for name, plan in PLANS.items()}


def empty_cache(plan: Plan, mask: torch.Tensor | None = None) -> PlanCache:
    return PlanCache(plan, tiny_llama(plan.layers[0].attention.num_kv_heads, len(plan.layers)).config, mask)


def oracle_of(plan: Plan, side: str, states: torch.Tensor) -> list[list[oracles.StoredHead]]:
    """[batch][head] of states [B, N, T, D]."""
    original = states.to(CACHE_DTYPES[plan.cache_dtype])
    fmt = plan.layers[0].format(side)
    kind = oracles.StoredHead if fmt.boost is None else BoostedHead
    return [[kind(head, fmt) for head in row] for row in original]


def stored(oracle: list[list[oracles.StoredHead]], num_tokens: int) -> torch.Tensor:
    """[B, N, num_tokens, D]"""
    return torch.stack([torch.stack([head.after(num_tokens) for head in row]) for row in oracle])


def records(cache: PlanCache) -> dict[tuple[str, int, int, int], bytes]:
    """Bytes of every page of layer 0 by (side, row, head, page)."""
    found = {}
    for side in SIDES:
        for row, length in enumerate(cache.lengths):
            pages = pages_of(cache.layers[0].sides[side], row, length)
            for page, head in itertools.product(range(pages.shape[0]), range(pages.shape[1])):
                found[side, row, head, page] = pages[page, head].numpy().tobytes()
    return found


@pytest.mark.parametrize(
    "plan", [*PLANS.values(), PLANS_BF16["sinks"], *BOOSTED.values()], ids=[*PLANS, "bf16", *BOOSTED]
)
def test_every_token_count_reads_what_the_oracle_says(plan):
    keys, values = random_states(2, HEADS, TOKENS, seed=1), random_states(2, HEADS, TOKENS, seed=2)
    expected = {"k": oracle_of(plan, "k", keys), "v": oracle_of(plan, "v", values)}
    cache, written = empty_cache(plan), {}
    for count in range(TOKENS):
        new = slice(count, count + 1)
        k, v = cache.update(keys[:, :, new], values[:, :, new], 0)
        assert torch.equal(k, torch.cat([stored(expected["k"], count), keys[:, :, new]], 2)), count
        assert torch.equal(v, torch.cat([stored(expected["v"], count), values[:, :, new]], 2)), count
        now = records(cache)
        assert now.items() >= written.items(), f"a written page changed at token {count}"
        written = now
    assert len(written) == 2 * 2 * 2 * HEADS
    for (side, row, head, page), record in written.items():
        assert record == expected[side][row][head].record(page, side)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("sizes", [(3, 127, 1, 159), (128, 128, 34)])
def test_a_chunk_reads_the_past_as_stored_and_itself_raw(sizes, name):
    keys, values = random_states(2, HEADS, TOKENS, seed=1), random_states(2, HEADS, TOKENS, seed=2)
    expected = oracle_of(PLANS[name], "k", keys), oracle_of(PLANS[name], "v", values)
    cache, start = empty_cache(PLANS[name]), 0
    for size in [*sizes, 0]:
        new = slice(start, start + size)
        found = cache.update(keys[:, :, new], values[:, :, new], 0)
        for states, oracle, result in zip((keys, values), expected, found, strict=True):
            assert torch.equal(result, torch.cat([stored(oracle, start), states[:, :, new]], 2))
        start += size


def test_a_long_prompt_is_encoded_in_parts_with_the_same_bytes():
    tokens = (ENCODE_PAGES + 2) * 128 + 7
    plan = llama_plan(*SINKS_3, num_layers=1)
    states = random_states(1, 2, tokens)
    whole, parts = empty_cache(plan), empty_cache(plan)
    whole.update(states, states, 0)
    for part in states.split(1000, dim=2):
        parts.update(part, part, 0)
    assert records(whole) == records(parts)
    assert len(records(whole)) == 4 * (ENCODE_PAGES + 2)
    assert whole.nbytes == parts.nbytes == plan.nbytes([tokens])


def test_a_long_prompt_enters_a_basis_in_parts_with_the_same_bytes():
    """Pages, sinks and ring are those of all tokens entered at once, for prompts of several rows, too."""
    tokens, plan = (ENCODE_PAGES + 2) * 128 + 7, plan_for("basis")
    states = random_states(2, 2, tokens)
    for sizes in ((tokens,), (1000, 128, 3, tokens)):
        cache = empty_cache(plan)
        for part in states.split([*sizes[:-1], tokens - sum(sizes[:-1])], dim=2):
            cache.update(part, -part, 0)
        for part, x in zip(cache.layers[0].parts, (states, -states), strict=True):
            entered = part.codec.basis.enter(x.bfloat16().transpose(1, 2)).transpose(1, 2)
            sinks, ring = part.format.num_sink_tokens, part.ring.shape[2]
            assert torch.equal(part.sinks, entered[:, :, :sinks])
            assert torch.equal(part.ring[:, :, torch.arange(tokens - ring, tokens) % ring], entered[:, :, -ring:])
            pages = without_sinks(entered[:, :, : -(tokens % 128)], sinks, 0).unflatten(2, (-1, 128)).transpose(1, 2)
            ordinals = torch.arange(ENCODE_PAGES + 2).repeat(2)
            expected = part.codec.encode(pages.flatten(0, 1), ordinals, part.format.num_bits)
            slots = part.pool.slots([(row, 0, ENCODE_PAGES + 2) for row in range(2)])
            assert torch.equal(part.pool.records[slots], expected)


@pytest.mark.parametrize("formats", [KIVI_2, *KINDS.values()], ids=["kivi", *KINDS])
def test_chunks_cut_at_pages_equal_single_steps(formats):
    plan, given = llama_plan(*formats, num_layers=1), random_qkv(2, 2, 300)
    chunked, stepped, exact = empty_cache(plan), empty_cache(plan), empty_cache(llama_plan(RAW, RAW, num_layers=1))
    by_step = attended(stepped, *given, range(1, 300))
    torch.testing.assert_close(attended(chunked, *given, None), by_step, atol=1e-4, rtol=1e-4)
    assert (by_step - attended(exact, *given)).abs().max() > 1e-2  # quantization is really there
    assert records(chunked) == records(stepped)
    assert chunked.nbytes == stepped.nbytes == plan.nbytes([300, 300])


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_tokens_to_next_page_counts_down_to_every_page(plan):
    cache = empty_cache(plan)
    counts = range(600)
    written = [
        [oracles.pages_read(count, fmt.recent_window) for count in counts]
        for side in SIDES
        if (fmt := plan.layers[0].format(side)) != RAW  # 16-bit pages lose nothing, whenever they are written
    ]
    step = random_states(1, HEADS, 1)
    for count in range(400):
        next_pages = (next(later for later in counts if pages[later] > pages[count]) for pages in written)
        assert cache.tokens_to_next_page() == min(next_pages) - count, count
        cache.update(step, step, 0)


@pytest.mark.parametrize("num_kv_heads", [1, 8])
def test_16_bit_plan_equals_the_model_without_it(num_kv_heads):
    """GQA 8 and 1."""
    model, ids = tiny_llama(num_kv_heads), random_ids(2, 300)
    plan = llama_plan(RAW, RAW, num_kv_heads)
    with torch.no_grad():
        exact = model(ids, use_cache=False).logits
    for cuts in ((), (1, 127, 128, 129)):
        logits = feed(model, PlanCache(plan, model.config), ids, cuts)
        assert (logits - exact).abs().max() <= 2e-5 * exact.abs().max()


@pytest.mark.parametrize(("side", "bad"), [("k", float("nan")), ("v", float("inf"))])
def test_non_finite_activations_are_refused_when_their_page_is_packed(side, bad):
    plan = llama_plan(Format(2, "channel", 32), Format(2, "token", 32), num_layers=1)
    cache, good = empty_cache(plan), random_states(1, 2, 126)
    poisoned = random_states(1, 2, 1)
    poisoned[0, 1, 0, 3] = bad
    one = random_states(1, 2, 1)
    cache.update(*((poisoned, one) if side == "k" else (one, poisoned)), 0)
    cache.update(good, good, 0)
    with pytest.raises(NonFiniteActivations, match="NaN, infinity"):
        cache.update(one, one, 0)


def test_new_tokens_are_rounded_to_the_caches_dtype():
    states = torch.randn(1, HEADS, 200, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    cache = empty_cache(PLANS_BF16["sinks"])
    k, v = cache.update(states[:, :, :1], states[:, :, :1], 0)
    assert k.dtype == v.dtype == torch.float32
    assert torch.equal(k, states[:, :, :1].bfloat16().float()) and not torch.equal(k, states[:, :, :1])
    half, _ = empty_cache(PLANS["sinks"]).update(states.half(), states.half(), 0)
    assert half.dtype == torch.float16 and torch.equal(half, states.half())
