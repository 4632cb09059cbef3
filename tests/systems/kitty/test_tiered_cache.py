"""Keys that queries boost, through the cache: which queries count, and what is refused."""

from dataclasses import replace

import pytest
import torch
from cache_cases import (
    HEAD_DIM,
    assert_exact_bytes,
    llama_plan,
    padded,
    plan_of,
    random_ids,
    random_states,
    tiny_llama,
)
from oracles import StoredHead
from tier_formats import KITTY, QUERY, V, boosted
from tier_oracle import channel_bits

from kvcal import PlanCache, attached
from kvcal.errors import UsageError
from kvcal.geometry import AttentionGeometry, Geometry
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import RAW, Boost, Tier
from kvcal.systems.kitty.scores import channel_scores

HEADS = 2


def test_query_scores_weigh_channels_by_the_queries_since_the_last_page():
    """Pages of the first chunk meet its queries, padding left out; the next page those after it."""
    score = "query_range"
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
        LayerPlan(AttentionGeometry(0, 8, 2, 8, 8), RAW, KITTY[0])
    wide = plan_of(Geometry("llama", "bfloat16", (AttentionGeometry(0, 8, 2, 256, 256),)), *KITTY)
    assert wide.nbytes([1]) > 0
    every = replace(KITTY[0], boost=Boost("magnitude", (Tier(4, 1.0),)))
    with pytest.raises(UsageError, match="256 boosted channels"):
        replace(wide, layers=(replace(wide.layers[0], k=every),)).nbytes([1])
