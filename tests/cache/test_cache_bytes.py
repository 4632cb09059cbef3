"""Predicted bytes equal allocated bytes, whatever is fed; and nothing else is held."""

import gc
import itertools

import oracles
import pytest
import tier_oracle
import torch
from cache_cases import (
    HEAD_DIM,
    KINDS,
    KIVI_2,
    SINKS_3,
    assert_exact_bytes,
    feed,
    llama_plan,
    padded,
    random_ids,
    random_states,
    recipe_formats,
    tiny_llama,
)
from peak_bytes import PeakBytes
from tier_formats import BASE_4, KITTY, THREE_TIERS, V

from kvcal import PlanCache
from kvcal.plan.page_format import Boost, Tier
from kvcal.plan.plan import RAW, SIDES, Format, Plan
from kvcal.store import paged_tensor, workspace

TOKENS = (1, 63, 127, 128, 129, 1000)
# The bytes of lattices are those of test_lattice.
RECIPES = {
    name: formats
    for name, formats in recipe_formats().items()
    if all(fmt.lattice_dim is None and fmt.quantizer == "uniform" and not fmt.needs_queries for fmt in formats)
}
PLANS = {name: llama_plan(*formats) for name, formats in RECIPES.items()}
PLANS["windows, bf16"] = llama_plan(*KINDS["windows"], cache_dtype="bfloat16")
PLANS["GQA 8"] = llama_plan(*SINKS_3, num_kv_heads=1, cache_dtype="float16")
PLANS["GQA 1"] = llama_plan(*KINDS["sinks"], num_kv_heads=8)
PLANS["Kitty, GQA 8"] = llama_plan(*KITTY, 1, "float16")
PLANS["three tiers"] = llama_plan(THREE_TIERS, V, cache_dtype="bfloat16")
PLANS["4 bits, GQA 1"] = llama_plan(BASE_4, V, 8)


def expected_bytes(plan: Plan, lengths: list[int]) -> int:
    """The formula of docs/plan-format.md, written out once more."""
    total = 0
    for layer in plan.layers:
        for side in SIDES:
            fmt = layer.format(side)
            for _ in range(layer.attention.num_kv_heads):
                dtypes = fmt.param_dtype, plan.cache_dtype
                if fmt.boost is None:
                    record = oracles.record_bytes(fmt.num_bits, side, fmt.axis, fmt.group_size, HEAD_DIM, *dtypes)
                else:
                    tiers = tier_oracle.tiers_of(fmt, HEAD_DIM)
                    record = tier_oracle.record_bytes(fmt.num_bits, tiers, fmt.group_size, HEAD_DIM, *dtypes)
                token = HEAD_DIM * oracles.ITEM_BYTES[plan.cache_dtype]
                for length in lengths:
                    ring = fmt.recent_window + 128
                    total += (fmt.num_sink_tokens + ring) * token + length // 128 * record
    return total


@pytest.mark.parametrize("name", PLANS)
def test_predicted_bytes_are_allocated(name):
    plan = PLANS[name]
    model = tiny_llama(plan.layers[0].attention.num_kv_heads)
    cache, start = PlanCache(plan, model.config), 0
    assert cache.nbytes == 0
    ids = random_ids(1, TOKENS[-1])
    for stop in TOKENS:
        feed(model, cache, ids[:, start:stop])
        assert_exact_bytes(cache, [stop])
        assert cache.nbytes == expected_bytes(plan, [stop])
        start = stop


@pytest.mark.parametrize(("name", "side"), [("windows, bf16", "left"), ("GQA 8", "right"), ("GQA 1", "left")])
def test_predicted_bytes_are_allocated_for_ragged_batches(name, side):
    """A prompt of 1000 columns in chunks that end at the token counts above, then 200 more tokens for each
    row."""
    plan = PLANS[name]
    heads = plan.layers[0].attention.num_kv_heads
    rows = [random_states(1, heads, length)[0] for length in (1000, 129, 1)]
    states, mask = padded(rows, 1000, side)
    cache, start = PlanCache(plan, tiny_llama(heads).config, attention_mask=mask), 0
    for stop in TOKENS:
        for layer in range(2):
            cache.update(states[:, :, start:stop], states[:, :, start:stop], layer)
        lengths = mask[:, :stop].sum(1).tolist()
        assert_exact_bytes(cache, lengths, stop)
        assert cache.nbytes == expected_bytes(plan, lengths)
        start = stop
    more = random_states(3, heads, 200, seed=1)
    for part in (more[:, :, :1], more[:, :, 1:127], more[:, :, 127:]):
        for layer in range(2):
            cache.update(part, part, layer)
    assert_exact_bytes(cache, [1200, 329, 201], 1200)
    assert cache.nbytes == expected_bytes(plan, [1200, 329, 201])


@pytest.mark.parametrize("name", KINDS)
def test_bytes_are_exact_at_every_token_count(name: str) -> None:
    plan = llama_plan(*KINDS[name], num_kv_heads=4, num_layers=1)
    cache = PlanCache(plan, tiny_llama(4, 1).config)
    step = random_states(2, 4, 1)
    for count in range(1, 260):
        cache.update(step, step, 0)
        assert cache.nbytes == plan.nbytes([count, count]) == expected_bytes(plan, [count, count])


def tensors_reachable(root: object) -> list[torch.Tensor]:
    """Every tensor that can be reached from ``root`` without passing a module, a class or a function."""
    seen, found, stack = {id(root)}, [], [root]
    while stack:
        for referent in gc.get_referents(stack.pop()):
            if id(referent) in seen or isinstance(referent, type | type(gc) | type(lambda: 0)):
                continue
            seen.add(id(referent))
            if isinstance(referent, torch.Tensor):
                found.append(referent)
            else:
                stack.append(referent)
    return found


@pytest.mark.parametrize(("formats", "ragged"), [(KIVI_2, False), (SINKS_3, True), ((RAW, RAW), False)])
def test_nothing_but_the_counted_bytes_is_held(formats, ragged):
    """No tensor reachable from the cache is beyond ``nbytes``: no full-precision copy, no mask, no larger
    base."""
    plan, model = llama_plan(*formats), tiny_llama()
    ids = random_ids(3, 1024)
    mask = torch.ones_like(ids)
    if ragged:
        mask[0, :900], mask[1, :300] = 0, 0
    cache = PlanCache(plan, model.config, attention_mask=mask if ragged else None)
    feed(model, cache, ids, cuts=(700, 701, 1000), mask=mask)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_reachable(cache)}
    assert sum(storages.values()) == cache.nbytes == plan.nbytes(mask.sum(1).tolist(), 1024)


WRITTEN = {
    "16 bits": (RAW, RAW),
    "2 bits": (Format(2, "channel", 32), Format(2, "token", 32)),
    "Kitty": (Format(2, "channel", 128, boost=Boost("magnitude", (Tier(4, 0.125),))), Format(2)),
}


@pytest.mark.parametrize(("name", "ragged"), [("16 bits", False), ("2 bits", True), ("Kitty", False)])
def test_a_step_that_packs_every_layer_takes_what_the_workspace_says(name, ragged, monkeypatch):
    """Keys and values of one layer, the pages of one side, and the scratch of some of them, however many
    layers are packed in the step."""
    monkeypatch.setattr(paged_tensor, "VALUES_AT_ONCE", 2**16)
    monkeypatch.setattr(workspace, "VALUES_AT_ONCE", 2**16)
    plan, model = llama_plan(*WRITTEN[name], num_layers=4), tiny_llama(num_layers=4)
    lengths = [4095, 4095 - 128 * 9 if ragged else 4095]
    mask = torch.tensor([[int(column >= 4095 - length) for column in range(4095)] for length in lengths])
    cache = PlanCache(plan, model.config, attention_mask=mask)
    heads = plan.layers[0].attention.num_kv_heads
    states, step = (random_states(2, heads, count).bfloat16() for count in (4095, 1))
    another = PlanCache(plan, model.config)
    for few, layer in itertools.product((states[:, :, :300], step), range(4)):  # tables that are made once
        another.update(few, few, layer)
    for layer in range(4):
        cache.update(states, states, layer)
    pages = [layer.sides["k"].pool.records.shape[0] for layer in cache.layers]
    before = PeakBytes([tensor for layer in cache.layers for tensor in layer.tensors])
    held = before.now
    assert held == cache.nbytes
    with before as peak:
        for layer in range(4):
            cache.update(step, step, layer)
    assert [layer.sides["k"].pool.records.shape[0] for layer in cache.layers] == [n + 2 for n in pages]
    said = workspace.step_workspace(plan.layers, plan.cache_dtype, 2, 4096)
    assert 0.6 * said.unpacked < peak.peak - held <= said.nbytes
    assert peak.now == cache.nbytes
