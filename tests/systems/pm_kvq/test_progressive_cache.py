"""Pages that shrink: bytes at every token count, codes against a chain of shifts written out with numbers,
every way in which a cache can lose, gain or reorder tokens."""

import dataclasses
import itertools
import math
from fractions import Fraction

import oracles
import pytest
import torch
from cache_cases import HEAD_DIM, assert_exact_bytes, attended, llama_plan, random_qkv, random_states, tiny_llama
from progressive_cases import CONTEXT, K_2, V_2, fixed, scheduled

from kvcal import PlanCache
from kvcal.errors import UsageError
from kvcal.pages.layout_protocol import RECORDS_AT_ONCE
from kvcal.pages.uniform import UniformLayout
from kvcal.plan.page_format import num_pages
from kvcal.plan.plan import RAW, SIDES, Format, Plan, Workload
from kvcal.stages.measuring.cache import DecodedCache
from kvcal.systems.pm_kvq.shrink import convert

V_4 = Format(4, "token", 32, 5, 33)


def empty_cache(plan: Plan, mask: torch.Tensor | None = None) -> PlanCache:
    return PlanCache(plan, tiny_llama(2, len(plan.layers)).config, mask)


def update_all(cache: PlanCache, states: torch.Tensor) -> None:
    for layer in range(len(cache.plan.layers)):
        cache.update(states, -states, layer)


def pages(cache: PlanCache, layer: int = 0) -> dict[str, torch.Tensor]:
    """Sequence after sequence."""
    pools = {side: cache.layers[layer].sides[side].pool for side in SIDES}
    spans = [(row, 0, num_pages(length)) for row, length in enumerate(cache.lengths)]
    return {side: pool.records[pool.slots(spans)] for side, pool in pools.items()}


# The oracle: one page through its life, group by group, with Python numbers.


def shifted_group(codes: list[int], scale: float, b: int) -> tuple[list[int], float]:
    """2b bits -> b bits, as the paper defines the equivalent shift; the scale in fp32."""
    halved = [math.floor(Fraction(x, 2**b + 1) + Fraction(1, 2)) for x in codes]
    return halved, oracles.to_float32((2**b + 1) * scale)


def page_after(page: torch.Tensor, axis: str, group_size: int, bits: tuple[int, ...]) -> torch.Tensor:
    """page [128, D] decoded after each of ``bits``: quantized to the first below 16, then shifted."""
    bits = tuple(b for b in bits if b < 16)
    if not bits:
        return page
    values, out = page.tolist(), torch.zeros_like(page)
    for members, _, _ in oracles.group_members(page, axis, group_size):
        codes, scale, zero = oracles.quantize_group([values[t][c] for t, c in members], bits[0])
        for b in bits[1:]:
            codes, scale = shifted_group(codes, scale, b)
        for (t, c), code in zip(members, codes, strict=True):
            out[t, c] = oracles.dequantize_code(code, scale, zero)
    return out


def history(fmt: Format, written: int, now: int) -> tuple[int, ...]:
    """The bits that a page written at a token count has had until ``now``, in turn."""
    return tuple(b for b in (16, 8, 4, 2, 1) if fmt.bits_at(now) <= b <= fmt.bits_at(written))


def test_every_page_reads_as_its_chain_of_shifts():
    """Single steps; pages are written at 16, 8, 4 and 2 bits and meet some, all or none of the shifts."""
    plan = fixed((200, 390, 400), (300, 300, 392, 402))
    states = random_states(1, 2, 410)
    cache, shapes = empty_cache(plan), []
    for count in range(410):
        update_all(cache, states[:, :, count : count + 1])
        shapes.append({side: tuple(tensor.shape) for side, tensor in pages(cache).items()})
        if count + 1 not in (200, 389, 390, 410):
            continue
        found = dict(zip(SIDES, cache.update(states[:, :, :0], states[:, :, :0], 0), strict=True))
        for side, sign in (("k", 1), ("v", -1)):
            fmt = plan.layers[0].format(side)
            for number in range((count + 1) // 128):
                written, head = 128 * (number + 1), number % 2
                start = max(fmt.num_sink_tokens, written - 128)
                page = oracles.StoredHead(sign * states[0, head], fmt).page_tokens(number)
                expected = page_after(page, fmt.axis, 32, history(fmt, written, count + 1))
                assert torch.equal(found[side][0, head, start:written], expected[start - written :]), (count, side)
    assert len({shape for at in shapes for shape in at.values()}) > 8


@pytest.mark.parametrize(("batch", "dtype", "context"), [(1, "float32", CONTEXT), (3, "bfloat16", 640)])
def test_bytes_are_predicted_and_within_the_budget_at_every_token_count(batch, dtype, context):
    plan, budget = scheduled(K_2, V_2 if dtype == "float32" else V_4, batch, dtype=dtype, context=context)
    cache, seen = empty_cache(plan), set()
    step = random_states(batch, 2, 1)
    for count in range(1, context + 1):
        update_all(cache, step)
        assert cache.nbytes == plan.nbytes((count,) * batch) <= budget, count
        seen.add(tuple(cache.layers[layer].sides[side].num_bits for layer in range(2) for side in SIDES))
    assert len(seen) >= 3 and max(max(bits) for bits in seen) == 16
    assert all(paged.num_bits == paged.format.num_bits for layer in cache.layers for paged in layer.parts)


def test_chunks_cut_at_events_equal_single_steps():
    plan = fixed((200, 390, 400), (300, 300, 396))
    states = random_states(2, 2, 420)
    chunked, stepped = empty_cache(plan), empty_cache(plan)
    start, cuts = 0, []
    while start < 420:
        stop = min(420, start + chunked.tokens_to_next_page())
        update_all(chunked, states[:, :, start:stop])
        cuts.append(stop)
        start = stop
    for count in range(420):
        update_all(stepped, states[:, :, count : count + 1])
    assert {200, 300, 390, 396, 400} <= set(cuts) and len(cuts) < 20
    assert all(torch.equal(pages(chunked)[side], pages(stepped)[side]) for side in SIDES)


def test_pages_of_transformed_keys_are_transformed_when_they_leave_16_bits():
    """The 16-bit page holds K as it came, and the chain starts from (K - offset) / λ in fp32."""
    generator = torch.Generator().manual_seed(0)
    rescale, offset = (torch.rand(2, HEAD_DIM, generator=generator) + 0.5 for _ in range(2))
    plain = fixed((200, 201, 202), (200, 201, 202))
    layers = (dataclasses.replace(plain.layers[0], k_rescale=True, k_offset=True),)
    tensors = {"layers.0.k_rescale": rescale, "layers.0.k_offset": offset}
    plan = dataclasses.replace(plain, cache_dtype="bfloat16", layers=layers, tensors=tensors)
    states = random_states(1, 2, 202)
    cache = empty_cache(plan)
    update_all(cache, states[:, :, :199])
    page = oracles.StoredHead(states[0, 1], plan.layers[0].k).page_tokens(0)
    stored = (page - offset[1]) / rescale[1]
    for count in (199, 200, 201, 202):
        if count > 199:
            update_all(cache, states[:, :, count - 1 : count])
        found = cache.update(states[:, :, :0], states[:, :, :0], 0)[0][0, 1, 3:128]
        bits = history(plan.layers[0].k, 128, count)
        expected = page_after(stored, "channel", 32, bits) * rescale[1] + offset[1]
        assert torch.equal(found, (page if count == 199 else expected)[3:])
        assert_exact_bytes(cache, [count])


def test_a_prompt_is_written_with_the_bits_it_is_to_have():
    """No page of a long prompt exists at more bits, and shrinking later is shrinking what was written."""
    plan = fixed((200, 390, 600), (200, 390, 600))
    states = random_states(1, 2, 640)
    whole, direct = empty_cache(plan), empty_cache(fixed((0, 0), (0, 0)))
    update_all(whole, states[:, :, :500])
    update_all(direct, states[:, :, :500])
    assert all(torch.equal(pages(whole)[side], pages(direct)[side]) for side in SIDES)
    assert_exact_bytes(whole, [500])
    update_all(whole, states[:, :, 500:])
    assert_exact_bytes(whole, [640])


def test_cropping_across_an_event_widens_and_growing_again_shrinks_to_the_same_codes():
    plan = fixed((200, 390, 600), (200, 390, 600))
    states = random_states(2, 2, 660)
    cache = empty_cache(plan)
    for start in range(0, 620, 62):
        update_all(cache, states[:, :, start : start + 62])
    before = {side: tensor.clone() for side, tensor in pages(cache).items()}
    read = cache.update(states[:, :, :0], states[:, :, :0], 0)
    cache.crop(-221)  # 399 tokens: 4 bits, and 8 at 389
    assert_exact_bytes(cache, [399, 399])
    again = cache.update(states[:, :, :0], states[:, :, :0], 0)
    for old, new in zip(read, again, strict=True):  # nothing but rounding moves
        kept = old[:, :, :384]
        assert (new[:, :, :384] - kept).abs().max() <= 1e-5 * kept.abs().max()
    cache.crop(-10)
    assert_exact_bytes(cache, [389, 389])
    assert cache.layers[0].sides["k"].num_bits == 8
    for start in range(389, 620, 21):
        update_all(cache, states[:, :, start : start + 21])
    assert_exact_bytes(cache, [620, 620])
    for side in SIDES:  # pages that were never cut
        layout = plan.layers[0].format(side).layout(side, 2, HEAD_DIM, "float32", 2)
        old, new = (layout.fields(tensor.unflatten(0, (2, -1))[:, :3]) for tensor in (before[side], pages(cache)[side]))
        assert torch.equal(old[0], new[0])
        assert torch.allclose(old[1], new[1], rtol=1e-6) and torch.equal(old[2], new[2])


def test_rows_can_be_selected_at_any_width():
    plan = fixed((140, 270), (140, 270))
    states = random_states(3, 2, 300)
    cache = empty_cache(plan)
    for start, stop in itertools.pairwise((0, 130, 139, 141, 260, 275)):
        update_all(cache, states[:, :, start:stop])
        before = [t.clone() for t in cache.update(states[:, :, :0], states[:, :, :0], 0)]
        order = torch.tensor([2, 0, 0])
        cache.reorder_cache(order)
        states = states[order]
        for old, new in zip(before, cache.update(states[:, :, :0], states[:, :, :0], 0), strict=True):
            assert torch.equal(old[order], new)
        assert_exact_bytes(cache, [stop] * 3)
    cache.batch_select_indices(torch.tensor([1]))
    assert_exact_bytes(cache, [275])


def test_attention_is_the_same_by_chunks_by_steps_and_from_decoded_pages():
    plan, budget = scheduled(K_2, V_2, 1, num_layers=1, context=520)
    config, given = tiny_llama(2, 1).config, random_qkv(1, 2, 520)
    caches = [of_kind(plan, config) for of_kind in (PlanCache, PlanCache, DecodedCache)]
    by_chunk = attended(caches[0], *given, None)
    by_step, decoded_once = (attended(cache, *given, range(1, 520)) for cache in caches[1:])
    exact = attended(PlanCache(llama_plan(RAW, RAW, num_layers=1), config), *given)
    assert (by_chunk - by_step).abs().max() < 1e-4 and torch.equal(decoded_once, by_step)
    assert (by_step - exact).abs().max() > 1e-2
    first = min(fmt.shrink_at[0] for layer in plan.layers for fmt in layer.formats)
    assert first > 128 and (by_step - exact)[:, :, : first - 1].abs().max() < 1e-4  # the step to it begins by shrinking
    caches[2].verify_decoded()
    assert all(cache.nbytes == plan.predicted_bytes <= budget for cache in caches)


def test_many_records_are_converted_in_parts():
    tokens = 128 * (RECORDS_AT_ONCE + 3)
    shrink_at = (tokens + 1,) * 3
    plan = dataclasses.replace(fixed(shrink_at, shrink_at), workload=Workload(1, tokens + 1))
    states = random_states(1, 2, tokens)
    cache, one = empty_cache(plan), random_states(1, 2, 1)
    update_all(cache, states)
    assert torch.equal(cache.update(one[:, :, :0], one[:, :, :0], 0)[0], states)
    update_all(cache, one)
    chunk = slice(128 * RECORDS_AT_ONCE, 128 * (RECORDS_AT_ONCE + 1))
    read = cache.update(one[:, :, :0], one[:, :, :0], 0)[0][0, 1, chunk]
    assert torch.equal(read, page_after(states[0, 1, chunk], "channel", 32, (16, 8, 4, 2)))


def test_beyond_the_workload_nothing_is_known_to_fit():
    plan, _ = scheduled(K_2, V_2, 1, context=300)
    cache = empty_cache(plan)
    update_all(cache, random_states(1, 2, 300))
    with pytest.raises(UsageError, match="at most 1 of 300"):
        update_all(cache, random_states(1, 2, 1))
    with pytest.raises(UsageError, match="2 sequences"):
        update_all(empty_cache(plan), random_states(2, 2, 1))


@pytest.mark.gpu
def test_cpu_and_cuda_convert_to_the_same_bytes():
    for axis, dim, start, stop in itertools.product(("channel", "token"), (8, 80), (16, 8, 4), (8, 4, 2, 1)):
        old, new = (UniformLayout("k", bits, axis, 32, dim, "float32", "bfloat16") for bits in (start, stop))
        records = old.encode(random_states(3, 2, 128, dim))
        for there, back in ((old, new), (new, old)) if start > stop else ():
            on_cpu = convert(records, there, back)
            assert torch.equal(convert(records.cuda(), there, back).cpu(), on_cpu)
            records = on_cpu
