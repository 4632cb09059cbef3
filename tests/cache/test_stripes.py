"""Stripes in a cache: bytes of pages, whatever the chunks; what is read at every token count; and bytes."""

from dataclasses import replace

import pytest
import torch
from cache_cases import attended, llama_plan, random_qkv, tiny_llama
from static_cases import pages_of, with_transforms
from torch import Tensor

from kvcal import Plan, PlanCache, attached
from kvcal.plan.page_format import RAW, SIDES, Format
from kvcal.plan.tensors import layout_tensors

HEADS, TOKENS = 2, 420
STRIPES = Format(3, "token", 64, 5, 9, quantizer="rotated", stripe_tokens=16)
FORMATS = STRIPES, replace(STRIPES, num_bits=2, group_size=32)


def plan_of(stripe_tokens: int, basis: bool) -> Plan:
    formats = (replace(fmt, stripe_tokens=stripe_tokens) for fmt in FORMATS)
    plan = llama_plan(*formats, HEADS, "bfloat16", 1)
    return with_transforms(plan, "basis", 0.2) if basis else plan


def cache_of(plan: Plan, max_tokens: int | None = None) -> PlanCache:
    return PlanCache(plan, tiny_llama(HEADS, 1).config, max_tokens=max_tokens)


def fed(cache: PlanCache, given: tuple[Tensor, ...], stops: list[int]) -> None:
    start = 0
    for stop in stops:
        attended(cache, *(x[:, :, start:stop] for x in given))
        start = stop


@pytest.mark.parametrize(("stripe", "basis"), [(16, False), (16, True), (32, True)])
def test_complete_pages_have_the_bytes_of_pages_that_are_packed_at_once(stripe: int, basis: bool) -> None:
    given = random_qkv(2, HEADS, TOKENS)
    whole = cache_of(plan_of(128, basis))
    fed(whole, given, [TOKENS])
    cuts = torch.randint(1, TOKENS, (12,), generator=torch.Generator().manual_seed(3)).unique().tolist()
    for stops in (
        [TOKENS],
        [*cuts, TOKENS],
        [*range(stripe, TOKENS, stripe), TOKENS],
        [7, 130, *range(131, TOKENS + 1)],
    ):
        cache = cache_of(plan_of(stripe, basis))
        fed(cache, given, stops)
        for ours, theirs in zip(cache.layers[0].parts, whole.layers[0].parts, strict=True):
            for row in range(2):
                pages = pages_of(ours, row, TOKENS)
                assert len(pages) == 4
                assert torch.equal(pages[:3], pages_of(theirs, row, TOKENS))
                unwritten = ~theirs.codec._layout(ours.num_bits).token_bytes(0, TOKENS // stripe * stripe - 384)
                assert not pages[3][:, unwritten].any()


@pytest.mark.parametrize("stripe", [16, 32])
def test_a_read_takes_whole_stripes_from_pages_once_they_left_the_window(stripe: int) -> None:
    plan, given = plan_of(stripe, False), tuple(x.bfloat16().float() for x in random_qkv(1, HEADS, 300))
    cache = cache_of(plan)
    for count in range(300):
        for side, exact in zip(SIDES, given[1:], strict=True):
            if not count:
                continue
            part, rows = cache.layers[0].sides[side], cache.padding.rows
            found = cache.layers[0].store.read(side, rows, count, 0, torch.float32)
            read = max(0, count - 9) // stripe * stripe
            assert torch.equal(found[:, :, read:], exact[:, :, read:count]), count
            assert torch.equal(found[:, :, :5], exact[:, :, : min(5, count)]), count
            decoded = part.decode([(0, 0, -(-count // stripe * stripe // 128))], torch.float32)
            packed = decoded.transpose(0, 1).flatten(1, 2)[None]
            assert torch.equal(found[:, :, 5:read], packed[:, :, 5:read]), count
            assert read <= 5 or (found[:, :, 5:read] != exact[:, :, 5:read]).any()
        attended(cache, *(x[:, :, count : count + 1] for x in given))


def test_bytes_are_those_of_the_plan_at_every_count() -> None:
    plan = plan_of(16, True)
    cache, given = cache_of(plan), random_qkv(2, HEADS, 280)
    sizes = set()
    for count in range(1, 281):
        attended(cache, *(x[:, :, count - 1 : count] for x in given))
        assert cache.nbytes == plan.nbytes([count, count])
        sizes.add(cache.nbytes)
    assert len(sizes) == 4  # pages begin with their first stripes: at 16, 144 and 272 tokens
    static = cache_of(plan, 300)
    attended(static, *(x[:, :, :5] for x in given))
    assert static.nbytes == plan.nbytes([300, 300])


def test_a_ring_has_room_for_the_window_and_a_stripe() -> None:
    fmt = replace(STRIPES, recent_window=112, num_sink_tokens=8)
    assert fmt.ring_tokens() == 128 and replace(fmt, stripe_tokens=128).ring_tokens() == 240
    assert replace(fmt, recent_window=96, stripe_tokens=32).ring_tokens() == 128
    assert [fmt.tokens_read(n) for n in (111, 112, 127, 128, 256, 257)] == [0, 0, 0, 16, 144, 144]
    assert [fmt.num_pages(n) for n in (15, 16, 128, 143, 144)] == [0, 1, 1, 1, 2]
    assert fmt.tokens_to_next_event(128, 128) == 16  # the update after these reads another stripe


def test_layers_of_pages_and_of_stripes_share_a_dynamic_cache_and_a_static_one() -> None:
    """Each with as many pages as it has."""
    plan = llama_plan(*FORMATS, HEADS, "bfloat16", 2)
    other = replace(plan.layers[1], k=Format(2, "channel", 32), v=RAW)
    layers = plan.layers[0], other
    plan = replace(plan, layers=layers, tensors=layout_tensors(layers))
    ids, model, found = torch.randint(3, 60, (1, 150)), tiny_llama(HEADS, 2), []
    with attached(model), torch.no_grad():
        for max_tokens in (None, 300):
            cache = PlanCache(plan, model.config, max_tokens=max_tokens)
            logits = [model(ids[:, :130], past_key_values=cache).logits]
            logits += [model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(130, 150)]
            found.append(torch.cat(logits, 1))
            assert cache.nbytes == plan.nbytes([150] if max_tokens is None else [300])
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
