"""Boosted keys through the cache: bytes, pages, contents and decoding with Kitty's recipes, and with other tiers."""

import itertools
from dataclasses import replace

import pytest
import torch
from cache_cases import (
    HEAD_DIM,
    after_crop,
    assert_exact_bytes,
    feed,
    llama_plan,
    padded,
    plan_of,
    random_ids,
    random_states,
    tiny_llama,
)
from oracles import ITEM_BYTES, StoredHead, pages_read
from oracles import record_bytes as plain_record_bytes
from static_cases import pages_of
from tier_oracle import OraclePage, channel_bits, record_bytes
from torch import Tensor

from kvcal import Plan, PlanCache, attached
from kvcal.errors import UsageError
from kvcal.geometry import CACHE_DTYPES, AttentionGeometry, Geometry
from kvcal.pages.scores import channel_scores
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import RAW, SIDES, Boost, Format, Tier, num_pages
from kvcal.recipe_files import load_recipe

TOKENS = (1, 127, 128, 129, 1000)
HEADS = 2
GQA = {1: 8, 4: 2, 8: 1}  # query heads per KV head -> KV heads of the tiny model


def recipe_formats(name: str) -> tuple[Format, Format]:
    formats = load_recipe(name).formats
    assert formats is not None
    return formats.k, formats.v


def boosted(score: str, *tiers: Tier, **changes) -> Format:
    return replace(Format(2, "channel", 32, 5, boost=Boost(score, tiers)), **changes)


KITTY, KITTY_PRO = recipe_formats("kitty"), recipe_formats("kitty-pro")
THREE_TIERS = boosted("range", Tier(16, 0.25, 2.0), Tier(4, 0.5, 0.9), recent_window=17, num_sink_tokens=0)
BASE_4 = boosted("variance", Tier(8, 0.375), num_bits=4, param_dtype="bfloat16")
QUERY = boosted("query_range", Tier(16, 0.25, 1.5), Tier(4, 0.25, 0.5))
V = Format(2, "token", 32, recent_window=33)
BOOSTED = {
    name: llama_plan(fmt, V, HEADS, num_layers=1)
    for name, fmt in {"three tiers": THREE_TIERS, "4 bits": BASE_4, "kitty": KITTY[0]}.items()
}


def plan_with(name: str, num_kv_heads: int = 2, cache_dtype: str = "float32", num_layers: int = 2) -> Plan:
    formats = {"kitty": KITTY, "kitty-pro": KITTY_PRO, "three tiers": (THREE_TIERS, V), "base 4": (BASE_4, V)}
    return llama_plan(*formats[name], num_kv_heads, cache_dtype, num_layers)


def tiers_of(fmt: Format, head_dim: int = HEAD_DIM) -> tuple[tuple[int, int, float | None], ...]:
    assert fmt.boost is not None
    return tuple((tier.num_bits, max(1, round(tier.share * head_dim)), tier.above) for tier in fmt.boost.tiers)


def bytes_by_hand(plan: Plan, lengths: list[int]) -> int:
    total = 0
    for layer in plan.layers:
        for side, formats in (("k", layer.k), ("v", layer.v)):
            for fmt in formats * (layer.attention.num_kv_heads // len(formats)):
                dtypes = fmt.param_dtype, plan.cache_dtype
                if fmt.boost is None:
                    record = plain_record_bytes(fmt.num_bits, side, fmt.axis, fmt.group_size, HEAD_DIM, *dtypes)
                else:
                    record = record_bytes(fmt.num_bits, tiers_of(fmt), fmt.group_size, HEAD_DIM, *dtypes)
                raw = (fmt.num_sink_tokens + fmt.recent_window + 128) * HEAD_DIM * ITEM_BYTES[plan.cache_dtype]
                total += sum(raw + n // 128 * record for n in lengths)
    return total


@pytest.mark.parametrize(
    ("name", "group", "cache_dtype"),
    [("kitty", 8, "float16"), ("kitty-pro", 4, "bfloat16"), ("three tiers", 4, "bfloat16"), ("base 4", 1, "float32")],
)
def test_predicted_bytes_are_allocated(name, group, cache_dtype):
    heads = GQA[group]
    plan = plan_with(name, heads, cache_dtype)
    model, ids = tiny_llama(heads), random_ids(1, TOKENS[-1])
    cache, start = PlanCache(plan, model.config), 0
    for stop in TOKENS:
        feed(model, cache, ids[:, start:stop])
        assert_exact_bytes(cache, [stop])
        assert cache.nbytes == bytes_by_hand(plan, [stop])
        start = stop


class Contents:
    """What keys [B, N, T, D] must be stored as under a plan of ``BOOSTED``, page by page, by the oracle."""

    def __init__(self, plan: Plan, keys: Tensor) -> None:
        self.plan, self.keys = plan, keys.to(CACHE_DTYPES[plan.cache_dtype])
        self.pages: dict[tuple[int, int, int], OraclePage] = {}

    def page(self, row: int, head: int, number: int) -> OraclePage:
        if (row, head, number) not in self.pages:
            fmt = self.plan.layers[0].format("k")
            tokens = StoredHead(self.keys[row, head], fmt).page_tokens(number)
            score = "magnitude" if fmt.boost is None else fmt.boost.score
            tiers = () if fmt.boost is None else tiers_of(fmt)
            scores = channel_scores(score, tokens, page=number, head=head).tolist()
            self.pages[row, head, number] = OraclePage(
                tokens, scores, fmt.num_bits, tiers, fmt.group_size, fmt.param_dtype, self.plan.cache_dtype
            )
        return self.pages[row, head, number]

    def after(self, num_tokens: int) -> Tensor:
        """[B, N, num_tokens, D] fp32."""
        out, fmt = self.keys[:, :, :num_tokens].float(), self.plan.layers[0].format("k")
        for head in range(HEADS):
            for number in range(pages_read(num_tokens, fmt.recent_window)):
                start = max(fmt.num_sink_tokens, 128 * number)
                for row in range(len(out)):
                    decoded = self.page(row, head, number).decoded[start - 128 * number :]
                    out[row, head, start : 128 * (number + 1)] = decoded
        return out


@pytest.mark.parametrize(
    ("name", "cache_dtype"), [("three tiers", "bfloat16"), ("4 bits", "float32"), ("kitty", "bfloat16")]
)
def test_pages_are_the_encoding_of_the_very_tokens(cache_dtype, name):
    """Sinks and ring are raw, and pages are what the oracle makes of their tokens; token by token where one fills."""
    plan = replace(BOOSTED[name], cache_dtype=cache_dtype)
    keys = random_states(2, HEADS, 300, seed=1)
    contents, cache = Contents(plan, keys), PlanCache(plan, tiny_llama(HEADS, 1).config)
    counts = [0, *range(126, 147), *range(158, 163), *range(254, 263), *range(270, 291, 4), 300]
    for count, following in itertools.pairwise(counts):
        found, _ = cache.update(keys[:, :, count:following], keys[:, :, count:following], 0)
        assert torch.equal(found[:, :, :count], contents.after(count)), count
    written = 0
    part = cache.layers[0].sides["k"]
    for row, pages in enumerate(pages_of(part, row, 300) for row in range(2)):
        for number, head in itertools.product(range(pages.shape[0]), range(pages.shape[1])):
            assert pages[number, head].numpy().tobytes() == contents.page(row, head, number).record
            written += 1
    assert written == 2 * 2 * HEADS


@pytest.mark.parametrize(("name", "group"), [("kitty", 8), ("three tiers", 4)])
def test_generate_keeps_bytes_exact_and_rows_apart(name, group):
    """Pages fill while a ragged batch is generated; every row writes what it would write alone."""
    heads, lengths, width = GQA[group], (250, 120, 9), 250
    plan, model = plan_with(name, heads), tiny_llama(heads)
    ids, mask = padded([random_ids(1, length, seed=length)[0] for length in lengths], width, "left")
    cache = PlanCache(plan, model.config, attention_mask=mask)
    options = {"do_sample": False, "max_new_tokens": 20}
    found = model.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, **options)
    assert_exact_bytes(cache, [length + 19 for length in lengths], width + 19)
    assert [num_pages(length + 19) - num_pages(length) for length in lengths] == [1, 1, 0]
    for row, length in enumerate(lengths):
        alone = ids[row : row + 1, width - length :]
        expected = model.generate(
            input_ids=alone,
            attention_mask=torch.ones_like(alone),
            past_key_values=PlanCache(plan, model.config),
            **options,
        )
        assert torch.equal(found[row, width:], expected[0, length:])


@pytest.mark.parametrize("kept", [299, 255, 159, 32])
@pytest.mark.parametrize("plan", BOOSTED.values(), ids=BOOSTED)
def test_crop_keeps_what_was_read_or_was_there(kept, plan):
    """Into the ring, into pages and into the sinks: what a page no longer serves is raw where the ring has it."""
    cache, states = PlanCache(plan, tiny_llama(HEADS, 1).config), random_states(2, HEADS, 300)
    nothing = states[:, :, :0]
    cache.update(states, states, 0)
    before = cache.update(nothing, nothing, 0)
    cache.crop(kept - 300)
    assert_exact_bytes(cache, [kept, kept])
    for side, now, then in zip(SIDES, cache.update(nothing, nothing, 0), before, strict=True):
        assert torch.equal(now, after_crop(plan, side, then, states, kept))
    cache.update(states, states, 0)
    assert_exact_bytes(cache, [kept + 300] * 2)


@pytest.mark.parametrize("score", ["query_range", "running_query_range"])
def test_query_scores_weigh_channels_by_the_queries_since_the_last_page_or_by_all(score):
    """Pages of the first chunk meet its queries, padding left out; the next page those after it, or all so far."""
    fmt, heads, group = boosted(score, *QUERY.boost.tiers), 2, 4
    plan = llama_plan(fmt, V, heads, num_layers=1)
    keys, queries = random_states(2, heads, 300, seed=1), random_states(2, heads * group, 300, seed=2)
    keys[..., 1] /= 20.0  # queries decide
    queries[1, :, :, 1] /= 400.0
    mask = torch.ones(2, 160, dtype=torch.long)
    mask[1, :7] = 0
    cache = PlanCache(plan, tiny_llama(heads, 1).config, attention_mask=mask)
    layer = cache.layers[0]
    for part in (slice(0, 160), slice(160, 240), slice(240, 300)):
        cache.update(keys[:, :, part], keys[:, :, part], 0)
        layer.observe(queries[:, :, part])
    # Of row 0, the first chunk packs tokens 0 to 127, the third those to 255. Row 1 begins at column 7.
    heard = {(0, 0): (0, 160), (0, 1): (160, 300), (1, 0): (7, 160), (1, 1): (160, 300)}
    if score == "running_query_range":
        heard |= {(0, 1): (0, 300), (1, 1): (7, 300)}
    part = layer.sides["k"]
    layout = fmt.layout("k", heads, HEAD_DIM, "float32", 2)
    chosen = set()
    for (row, number), (start, stop) in heard.items():
        heads_of_row = keys[row, :, 7 if row else 0 :]
        tokens = torch.stack([StoredHead(head, fmt).page_tokens(number) for head in heads_of_row])
        mean = queries[row, :, start:stop].double().unflatten(0, (heads, group)).abs().mean((1, 2))
        expected = layout.encode(tokens, channel_scores(score, tokens, mean))
        found = part.pool.records[part.pool.slots([(row, number, number + 1)])][0]
        assert torch.equal(found, expected)
        bits = channel_bits(layout, found)
        assert set(bits.flatten().tolist()) <= {2, 4, 16}
        chosen.add((row, tuple(bits[0].tolist())))
        without = layout.encode(tokens, channel_scores("range", tokens))
        assert not torch.equal(found, without)
    assert {row for row, bits in chosen if bits[1] == 16} == {0}  # the channel that only row 0's queries look at


def test_query_scores_generate_when_the_model_is_heard():
    plan = llama_plan(boosted("query_range", Tier(4, 0.25)), V)
    model, lengths = tiny_llama(), (150, 120)
    ids, mask = padded([random_ids(1, length, seed=length)[0] for length in lengths], 150, "left")
    cache = PlanCache(plan, model.config, attention_mask=mask)
    options = {"do_sample": False, "max_new_tokens": 12}
    with attached(model):
        model.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, **options)
    assert_exact_bytes(cache, [161, 131], 161)
    deaf = PlanCache(plan, model.config)
    with pytest.raises(UsageError, match="needs the queries of its tokens, which it was not given"):
        model.generate(input_ids=ids[:1], past_key_values=deaf, **options)


def test_boosts_that_cannot_be_stored_are_refused():
    with pytest.raises(ValueError, match="boost needs axis 'channel'"):
        replace(KITTY[0], axis="token")
    with pytest.raises(ValueError, match="v axis 'channel'"):
        LayerPlan(AttentionGeometry(0, 8, 2, 8, 8), (RAW,), (KITTY[0],))
    wide = plan_of(Geometry("llama", "bfloat16", (AttentionGeometry(0, 8, 2, 256, 256),)), *KITTY)
    assert wide.nbytes([1]) > 0
    every = replace(KITTY[0], boost=Boost("magnitude", (Tier(4, 1.0),)))
    with pytest.raises(UsageError, match="256 boosted channels"):
        replace(wide, layers=(replace(wide.layers[0], k=(every,)),)).nbytes([1])
