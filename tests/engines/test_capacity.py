"""Capacity by vLLM's rule: known shapes, vLLM's own planner where it is at hand, and the commands."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli_cases import ran_well, run_kvcal, save_llama
from hybrid_shapes import SHAPES
from transformers import PreTrainedTokenizerBase

from kvcal.engines.capacity import Capacity, SglangPool, VllmPool, capacity, engine_bytes, vllm_pool
from kvcal.engines.shard import HeadShard, stages_of
from kvcal.engines.states import state_bytes
from kvcal.engines.support import NO_TREE, require_peers, require_staged
from kvcal.errors import InfeasibleBudget, UnsupportedModel, UsageError
from kvcal.geometry import AttentionGeometry, Geometry, LayerGeometry, ModelIdentity, StateGeometry
from kvcal.models.config import read_sizes
from kvcal.pages.ways import Engine
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES, Boost, Format, Tier
from kvcal.plan.plan import Plan, Workload, load_plan, save_plan
from kvcal.recipe import AllocateSpec, CacheSpec, ProfileSpec
from kvcal.recipe_files import load_recipe, with_knobs
from kvcal.stages.allocate.record import BudgetSplit
from kvcal.stages.allocate.stage import allocate
from kvcal.stages.checkpoint import Mean
from kvcal.stages.profile.record import Profile, ProfileSetup


def vllm_capacity(plan: Plan, memory: int, num_ranks: int, context: int, lookahead: int = 0) -> Capacity:
    return capacity("vllm", plan, memory, num_ranks, context, lookahead)


def sglang_capacity(plan: Plan, memory: int, num_ranks: int, context: int, max_requests: int) -> Capacity:
    return capacity("sglang", plan, memory, num_ranks, context, max_requests=max_requests)


IDENTITY = ModelIdentity("meta-llama/Llama-3.1-8B", "llama", "a" * 64, "b" * 64, "c" * 64)


def eight_billion(bits: list[int], num_sinks: int = 0) -> Plan:
    """A plan of Llama-3-8B's shape: keys and values of layer i at ``bits[i % len(bits)]`` bits."""
    layers = []
    for index in range(32):
        k, v = (Format(bits[index % len(bits)], axis, num_sink_tokens=num_sinks) for axis in ("channel", "token"))
        layers.append(LayerPlan(AttentionGeometry(index, 32, 8, 128, 128), k, v))
    return Plan(IDENTITY, "bfloat16", tuple(layers), Workload(1, 256), {})


# Bytes of a block and groups of rings as vLLM 0.32 plans them, and its tokens at 32K against 16 bits.
@pytest.mark.parametrize(
    ("bits", "block_bytes", "ring_blocks", "factor"), [([2], 2_359_296, 8, 6.90), ([2, 2, 3, 4], 3_145_728, 6, 5.21)]
)
def test_llama_8b(bits: list[int], block_bytes: int, ring_blocks: int, factor: float) -> None:
    found = vllm_capacity(eight_billion(bits), 40 * 10**9, 1, 32768)
    assert (found.block_bytes, found.ring_blocks) == (block_bytes, ring_blocks)
    assert found.blocks_per_request == 256 + ring_blocks and found.num_blocks == 40 * 10**9 // block_bytes
    assert found.concurrency == found.num_blocks / found.blocks_per_request
    assert found.num_tokens / found.raw_tokens == pytest.approx(factor, abs=0.01)


def test_ranks_share_the_heads() -> None:
    whole, shared = (vllm_capacity(eight_billion([2, 4]), 10**10, ranks, 32768) for ranks in (1, 4))
    assert shared.block_bytes * 4 == whole.block_bytes and shared.raw_tokens // 4 == whole.raw_tokens
    copied = vllm_capacity(eight_billion([2, 4]), 10**10, 32, 32768)  # every head on four ranks
    assert copied.block_bytes * 8 == whole.block_bytes
    with pytest.raises(UnsupportedModel, match="3 ranks cannot share equally"):
        vllm_capacity(eight_billion([2, 4]), 10**10, 3, 32768)


# As vLLM 0.32 divides layers, computed by it.
@pytest.mark.parametrize(
    ("num_layers", "counts"),
    [
        (4, [2, 2]),
        (5, [3, 2]),
        (34, [8, 9, 9, 8]),
        (7, [2, 3, 2]),
        (35, [9, 9, 9, 8]),
        (32, [4] * 8),
        (2, [0, 1, 1, 0]),
    ],
)
def test_stages_of_a_pipeline_take_neighbouring_layers(num_layers: int, counts: list[int]) -> None:
    stages = stages_of(num_layers, len(counts))
    assert [len(own) for own in stages] == counts
    assert [index for own in stages for index in own] == list(range(num_layers))


def test_layers_beside_pages_are_refused_in_stages_of_a_pipeline() -> None:
    for plan in (gemma(2), SHAPES["qwen3-next"].plan(2)):
        with pytest.raises(UnsupportedModel, match="have a sliding window or a state, which was not tried in 2 stages"):
            require_staged(plan, stages_of(len(plan.layers), 2))
    require_staged(eight_billion([2]), stages_of(32, 5))
    with pytest.raises(UnsupportedModel, match="stage 32 of a pipeline of 33 has no layer of the plan's 32"):
        require_staged(eight_billion([2]), stages_of(32, 33))


def test_stages_of_a_pipeline_have_as_many_blocks() -> None:
    """Of 32 layers, stages of 11, 11 and 10, of unequal bits; sinks in one. A layer has the same share in all
    stages, and a request as many blocks of rings; the larger stages decide how many blocks there are."""
    plan = eight_billion([2, 4, 2])
    first, *others = plan.layers
    sinks = replace(first, k=Format(4, "channel", num_sink_tokens=100))
    plan, stages = replace(plan, layers=(sinks, *others)), stages_of(32, 3)
    pools = [VllmPool(one) for one in HeadShard(plan, stages=stages).of_stages]
    assert [len(pool.rings.at) for pool in pools] == [len(own) for own in stages] == [11, 11, 10]
    for name in ("share_bytes", "room", "ring_blocks", "block_tokens"):
        assert len({getattr(pool, name) for pool in pools}) == 1, name
    assert len({(pool.rings[1:], pool.sinks[1:]) for pool in pools}) == 1
    assert sorted(index for pool in pools for index in pool.pages.at) == list(range(32))
    for pool in pools:
        ends = {block: max(first + pool.shard.ring_bytes(index) for index, (at, first) in pool.rings.at.items()
                           if at == block) for block, _ in pool.rings.at.values()}  # fmt: skip
        assert max(ends.values()) <= pool.rings.block_bytes <= pool.room <= pool.block_bytes
        assert pool.pages.block_bytes <= pool.share_bytes * len(pool.pages.at) <= pool.block_bytes
    found, whole = (capacity("vllm", plan, 10**10, 1, 32768, stages=one) for one in (stages, ()))
    assert found.block_bytes == max(pool.block_bytes for pool in pools)
    assert found.num_blocks == 10**10 // found.block_bytes > 2.5 * whole.num_blocks
    assert found.blocks_per_request == 256 + pools[0].ring_blocks
    assert capacity("vllm", plan, 10**10, 2, 32768, stages=stages).block_bytes < 0.51 * found.block_bytes


def test_a_memory_without_room_for_one_request_is_refused() -> None:
    plan = eight_billion([2])
    needed = 264 * 2_359_296
    assert vllm_capacity(plan, needed, 1, 32768).concurrency == 1
    with pytest.raises(InfeasibleBudget, match="a request of 32768 tokens takes 264") as refused:
        vllm_capacity(plan, needed - 1, 1, 32768)
    assert refused.value.smallest_bytes == needed


def test_rings_lie_side_by_side_in_vllms_blocks() -> None:
    """Layers of other heads, and with tokens at 16 bits besides their pages: sinks and a window."""
    besides = Format(2, "channel", num_sink_tokens=4, recent_window=128)
    layers = [
        LayerPlan(AttentionGeometry(n, 8, heads, 64, 64), k, Format(2))
        for n, (heads, k) in enumerate(((2, Format(2, "channel")), (4, besides), (2, Format(2, "channel"))))
    ]
    shard = HeadShard(Plan(IDENTITY, "bfloat16", tuple(layers), Workload(1, 256), {}))
    rings = [shard.ring_bytes(index) for index in range(3)]
    assert rings == [2 * 2 * 128 * 64 * 2, 4 * (4 + 256 + 128) * 64 * 2, 2 * 2 * 128 * 64 * 2]
    found, pool = vllm_capacity(shard.plan, 10**9, 1, 1024), VllmPool(shard)
    assert pool.rings == ({0: (0, 0), 1: (1, 0), 2: (2, 0)}, 3, rings[1])
    assert pool.pages.at[2] == (0, sum(map(shard.block_bytes, (0, 1))))
    assert found.block_bytes == rings[1] > found.page_bytes and found.ring_blocks == 4  # and one of sinks
    fitting = sglang_capacity(shard.plan, 10**9, 1, 1024, 7)
    places = 4 * 4 * 4 * 64 * 2  # of the sinks of four beginnings
    assert fitting.num_blocks == (10**9 - 8 * (sum(rings) + places)) // fitting.block_bytes


def gemma(num_bits: int) -> Plan:
    """Gemma-3-4B's shape: of 34 layers, every sixth has full attention, the others a window of 1,024
    tokens."""
    layers = []
    for index in range(34):
        is_full = index % 6 == 5
        geometry = AttentionGeometry(index, 8, 4, 256, 256, None if is_full else 1024)
        formats = (Format(num_bits, "channel"), Format(num_bits)) if is_full else ()
        layers.append(LayerPlan(geometry, *formats))
    return Plan(IDENTITY, "bfloat16", tuple(layers), Workload(1, 256), {})


@pytest.mark.parametrize(
    ("num_bits", "ranks", "drafts", "block", "window", "factor"),
    [
        (2, 1, 0, 524_288, (16, 4, 65), 2.92),  # of the ring of a layer, which is larger than the pages of five
        (4, 1, 0, 696_320, (16, 3, 65), 2.52),
        (4, 2, 7, 348_160, (16, 3, 66), 2.50),
        (4, 8, 0, 174_080, (16, 3, 65), 2.52),
    ],
)
def test_sliding_windows_lie_in_blocks_of_fewer_tokens(
    num_bits: int, ranks: int, drafts: int, block: int, window: tuple[int, int, int], factor: float
) -> None:
    """``factor``: of the bytes that a request of 32,768 tokens takes in vLLM at 16 bits, in blocks of 16
    tokens: seven groups of five layers, of which one has full attention."""
    plan = gemma(num_bits)
    shard, found = HeadShard(plan, 0, ranks, 1 + drafts), vllm_capacity(plan, 20 * 10**9, ranks, 32768, drafts)
    heads, pool = max(1, 4 // ranks), VllmPool(shard)
    assert shard.windows == {1024: (29, 2 * heads * 256 * 2)} and list(shard.blocks) == [5, 11, 17, 23, 29]
    assert (found.block_bytes, pool.window(1024)) == (block, window)
    assert found.window_blocks == window[1] * window[2] and found.ring_blocks == pool.rings.num_blocks == 5
    assert found.blocks_per_request == 256 + 5 + found.window_blocks
    at_16_bits = (2048 + 6 * 65) * 5 * 16 * 2 * heads * 256 * 2
    assert at_16_bits / (found.blocks_per_request * block) == pytest.approx(factor, abs=0.01)
    assert vllm_capacity(plan, 20 * 10**9, ranks, 100, drafts).window_blocks == window[1] * 7
    assert pool.window(1024, (64, 128)).tokens == 64


@pytest.mark.parametrize(("num_bits", "ranks", "factor"), [(2, 1, 8.7), (3, 1, 8.1), (4, 4, 7.5)])
def test_sliding_windows_have_a_pool_of_their_own_in_sglang(num_bits: int, ranks: int, factor: float) -> None:
    """``factor``: of the bytes that 16 requests of 32,768 tokens take in SGLang without a plan, which keeps all
    tokens of these layers."""
    plan = replace(gemma(num_bits), workload=Workload(16, 32768))
    taken, heads = engine_bytes("sglang", plan, ranks) // ranks, 4 // ranks
    found = sglang_capacity(plan, taken, ranks, 32768, 16)
    assert (found.concurrency, found.blocks_per_request) == (16, 256)
    pool = SglangPool.of(HeadShard(plan, 0, ranks), 16)
    assert pool.window_bytes == 29 * 2 * heads * 256 * 2
    in_pages, in_windows = 16 * 32768 * pool.token_bytes, found.window_tokens * pool.window_bytes
    assert taken == pytest.approx(in_pages + in_windows + pool.fixed, rel=2e-3)
    assert 16 * (1023 + 128 + 256 + 1152) + 2 * 8192 <= found.window_tokens < 16 * 2700 + 2 * 8192
    assert 16 * 32768 * 34 * 2 * heads * 256 * 2 / taken == pytest.approx(factor, abs=0.1)
    assert sglang_capacity(plan, taken - 2, ranks, 32768, 16).concurrency < 16
    longest = sglang_capacity(plan, taken, ranks, 128 * found.num_blocks, 16)
    assert longest.concurrency >= 1 and longest.window_tokens < found.window_tokens


def test_a_pool_of_windows_that_sglang_would_not_start_with_is_refused() -> None:
    """It wants room for more than a window and a page."""
    plan, ratio = gemma(2), 0.1
    pool = SglangPool.of(HeadShard(plan), 1)
    with pytest.raises(InfeasibleBudget, match="a request of 128 tokens takes 90") as refused:
        capacity("sglang", plan, pool.memory(89, ratio), 1, 128, max_requests=1, window_ratio=ratio)
    smallest = refused.value.smallest_bytes
    assert smallest is not None
    assert capacity("sglang", plan, smallest, 1, 128, max_requests=1, window_ratio=ratio).window_tokens == 1152


def test_serve_args_of_a_model_with_sliding_windows(tmp_path: Path) -> None:
    """SGLang's pool for them has the share that requests of the plan's workload need, or those that fit."""
    plan = replace(gemma(3), workload=Workload(16, 32768))
    save_plan(plan, tmp_path / "plan.safetensors")
    line = "serve-args", tmp_path / "plan.safetensors", "--engine", "sglang", "--max-requests", "16"
    words = run_kvcal(*line, "--json").json["arguments"]
    ratio = SglangPool.of(HeadShard(plan), 16).ratio(16, 32768)
    assert words[words.index("--swa-full-tokens-ratio") + 1] == str(ratio)
    memory = (
        engine_bytes("sglang", replace(plan, workload=Workload(4, 32768)), 1) + SglangPool.of(HeadShard(plan), 12).fixed
    )
    sized = run_kvcal(*line, "--kv-memory", f"{memory}B", "--context", "32768", "--json")
    found = sized.json["capacity"]
    assert found["window_ratio"] > ratio and 4 <= found["concurrency"] < 5
    assert "tokens of sliding windows lie in a pool of their own" in sized.err
    two = replace(plan.layers[0], geometry=replace(plan.layers[0].attention, window=512))
    save_plan(replace(plan, layers=(two, *plan.layers[1:])), tmp_path / "two.safetensors")
    refused = run_kvcal("serve-args", tmp_path / "two.safetensors", "--engine", "sglang")
    assert refused.code == 4 and "sliding windows of 512 and 1024 tokens" in refused.err


def test_layers_of_one_window_take_equal_bytes() -> None:
    first, *others = gemma(2).layers
    wider = LayerPlan(replace(first.attention, num_kv_heads=8))
    with pytest.raises(UnsupportedModel, match="and another one with a sliding window of 1024 tokens 8192"):
        vllm_capacity(replace(gemma(2), layers=(wider, *others)), 10**9, 1, 1024)


# Bytes of one request at 16 bits in vLLM's own pool, which raises its blocks to 544 tokens, computed by its planner.
AT_16_BITS = {8192: 254e6, 32768: 856e6, 131072: 3262e6}


@pytest.mark.parametrize(("context", "least"), [(8192, 3.0), (32768, 5.0), (131072, 6.0)])
def test_pages_beside_states_lie_in_long_blocks(context: int, least: float) -> None:
    """Qwen3-Next: 12 layers with pages, and 36 with states of 1.1 MB, without prefix caching."""
    shape = SHAPES["qwen3-next"]
    nbytes = shape.state_bytes(1)
    assert nbytes == 2 * (3 * (2 * 2048 + 4096) + 32 * 128 * 128)
    pool = vllm_pool(HeadShard(shape.plan(2, recent_window=64)), nbytes, has_prefixes=False)
    assert (pool.pages_per_block, pool.state_groups, pool.state_blocks) == (8, 12, 12)
    assert pool.block_bytes == pool.room >= 3 * pool.state_bytes and pool.block_bytes % (16 * 8) == 0
    assert AT_16_BITS[context] / (pool.blocks(context) * pool.block_bytes) > least
    single = vllm_pool(HeadShard(shape.plan(2, recent_window=64)), nbytes, False, 1)
    assert single.blocks(context) * single.block_bytes > 3 * pool.blocks(context) * pool.block_bytes


def test_states_take_a_block_more_for_prefixes_and_for_each_draft() -> None:
    shape = SHAPES["granite-4-h-small"]
    plan, nbytes = shape.plan(2), shape.state_bytes(1)
    pools = [VllmPool(HeadShard(plan, 0, 1, 1 + drafts), has_prefixes, nbytes, 8, 3)
             for drafts, has_prefixes in ((0, False), (0, True), (3, True))]  # fmt: skip
    assert [pool.state_blocks // pool.state_groups for pool in pools] == [1, 2, 5]
    found = capacity("vllm", plan, 10**10, 1, 32768, state_bytes=nbytes)
    pool = vllm_pool(HeadShard(plan), nbytes)
    assert (found.block_tokens, found.state_blocks) == (pool.block_tokens, pool.state_blocks)
    assert found.blocks_per_request == pool.blocks(32768) and found.page_bytes <= found.block_bytes
    with pytest.raises(UsageError, match="36 layers of the plan's model keep a state, whose bytes"):
        capacity("vllm", plan, 10**10, 1, 32768)


@pytest.mark.parametrize("draft_bytes", [0, 4096])
def test_pages_of_long_blocks_have_numbers(draft_bytes: int) -> None:
    """At equal distances, before keys of drafts."""
    shape = SHAPES["qwen3-next"]
    pool = vllm_pool(HeadShard(shape.plan(2), 0, 1, 4), shape.state_bytes(1, 3), draft_bytes=draft_bytes)
    unit, of_block, of_page = pool.page_numbers(pool.block_bytes)
    count, distance = pool.pages_per_block, 12 * pool.share_bytes
    assert count > 1 and unit % 16 == 0 and (unit == distance) == (draft_bytes == 0)
    for block in (0, 1, 1000):
        first = block * pool.block_bytes
        places = [unit * (block * of_block + page * of_page) for page in range(count)]
        assert places == [first + page * distance for page in range(count)]
        assert places[-1] + pool.pages.block_bytes <= first + pool.block_bytes - pool.draft_bytes


def test_states_of_a_family_that_is_not_known_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="of the type 'rwkv' is not known"):
        state_bytes({"model_type": "rwkv"}, 1, 1, "bfloat16")
    with pytest.raises(UsageError, match="lacks the key 'conv_L_cache'"):
        state_bytes({"model_type": "lfm2", "hidden_size": 64}, 1, 1, "bfloat16")
    with pytest.raises(UnsupportedModel, match="3 ranks cannot share a state"):
        SHAPES["qwen3-next"].state_bytes(3)


def test_serve_args_of_a_model_with_states(tmp_path: Path) -> None:
    """Blocks are as long as its config.json tells, and the recurrent state's dtype is stated."""
    shape, model = SHAPES["qwen3-next"], tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(shape.config))
    save_plan(shape.plan(2), tmp_path / "plan.safetensors")
    line = ("serve-args", tmp_path / "plan.safetensors", "--model", model, "--kv-memory", "20GB", "--context", 32768)
    plain, wide = (run_kvcal(*line, *more, "--json").json for more in ((), ("--state-dtype", "float32")))
    for value, dtype in ((plain, None), (wide, "float32")):
        pool = vllm_pool(HeadShard(shape.plan(2)), shape.state_bytes(1, dtype=dtype))
        words = value["arguments"]
        assert words[words.index("--block-size") + 1] == str(pool.block_tokens)
        assert value["capacity"]["block_bytes"] == pool.block_bytes
        assert value["capacity"]["state_blocks"] == pool.state_blocks
    assert wide["arguments"][-2:] == ["--mamba-ssm-cache-dtype", "float32"]
    assert f"blocks of {plain['capacity']['block_tokens']} tokens" in run_kvcal(*line).err
    assert NO_TREE in run_kvcal(*line, "--engine", "sglang", "--json").json["arguments"]


def allocated(
    engine: Engine,
    tp: int,
    nbytes: int,
    num_sink_tokens: int = 0,
    drafts: int = 0,
    besides: tuple[LayerGeometry, ...] = (),
    state_bytes: int = 0,
) -> tuple[Plan, BudgetSplit]:
    """A plan of 12 layers, and those ``besides``, for 3 sequences of 1000 tokens in so many bytes."""
    paged = tuple(AttentionGeometry(index, 8, 4, 64, 64) for index in range(12))
    geometry = Geometry("llama", "bfloat16", paged + besides)
    spec = ProfileSpec(num_bits=(2, 3, 4), k_axes=("channel",), group_sizes=(64,), kl_samples=0)
    cache = CacheSpec(num_sink_tokens=num_sink_tokens, k_recent_window=0, v_recent_window=0)
    setup = ProfileSetup(IDENTITY, geometry, 10**6, 500, spec, cache, "f", "none", 1, 10, 9)
    heads_N1, bits_C = torch.arange(1.0, 5.0).double().unsqueeze(1), torch.tensor([2.0, 3.0, 4.0]).double()
    means = {f"sensitivity.{side}.{n}": Mean((n + 1) * heads_N1 * 4.0**-bits_C, 1) for n in range(12) for side in SIDES}
    wanted = {"objective": "sensitivity", "kv_budget": f"{nbytes}B", "tp": tp, "engine": engine}
    wanted |= {"drafts": drafts, "state_bytes": state_bytes}
    found = allocate(Profile(setup, means), AllocateSpec(batch=3, context=1000, **wanted), {})
    return Plan(IDENTITY, "bfloat16", found.layers, Workload(3, 1000), {}), found.split


BUDGETS = (16_000_000, 18_123_457, 22_000_000, 29_999_999)


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("nbytes", BUDGETS)
def test_a_plan_for_an_engine_takes_the_bytes_that_its_sequences_take_there(tp: int, nbytes: int) -> None:
    """8 ranks of 4 KV heads hold each twice."""
    nbytes *= 1 + tp // 8
    plan, split = allocated("vllm", tp, nbytes)
    taken = split.cache + split.engine
    assert taken <= nbytes == split.budget and taken % tp == 0
    found = vllm_capacity(plan, taken // tp, tp, 1000)
    assert found.num_blocks == 1 + 3 * found.blocks_per_request  # one is nobody's
    assert found.num_blocks * found.block_bytes == taken // tp
    plan, split = allocated("sglang", tp, nbytes, 4)
    taken = split.cache + split.engine
    assert taken <= nbytes
    assert sglang_capacity(plan, taken // tp, tp, 1000, 3).num_blocks == 3 * 8


@pytest.mark.parametrize(
    ("layer", "nbytes"), [(AttentionGeometry(12, 8, 4, 64, 64, 256), 0), (StateGeometry(12, 500_000), 600_000)]
)
def test_layers_besides_pages_are_counted_once(layer: LayerGeometry, nbytes: int) -> None:
    """Sliding windows and states, as the engine holds them."""
    plan, split = allocated("vllm", 1, BUDGETS[-1], besides=(layer,), state_bytes=nbytes)
    taken = split.cache + split.engine
    assert split.fixed > 0 and taken <= BUDGETS[-1]
    found = capacity("vllm", plan, taken, 1, 1000, state_bytes=nbytes)
    assert found.num_blocks == 1 + 3 * found.blocks_per_request and found.num_blocks * found.block_bytes == taken
    assert found.window_blocks + found.state_blocks > 0


@pytest.mark.parametrize("tp", [1, 2])
def test_sliding_windows_of_a_plan_for_sglang_are_counted(tp: int) -> None:
    window = AttentionGeometry(12, 8, 4, 64, 64, 256)
    plan, split = allocated("sglang", tp, BUDGETS[-1], besides=(window,))
    taken = split.cache + split.engine
    assert split.fixed > 0 and taken <= BUDGETS[-1] and taken % tp == 0
    found = sglang_capacity(plan, taken // tp, tp, 1000, 3)
    assert found.num_blocks == 3 * 8 and found.window_tokens == 128 * int(24 * found.window_ratio) > 0


def test_a_plan_for_an_engine_has_room_for_drafts() -> None:
    """But where padding has it: rings lie in whole blocks."""
    more = 0
    for nbytes in BUDGETS:
        plan, split = allocated("vllm", 1, nbytes, drafts=7)
        found = vllm_capacity(plan, split.cache + split.engine, 1, 1000, 7)
        assert found.num_blocks == 1 + 3 * found.blocks_per_request and found.memory <= nbytes
        more += split.engine - allocated("vllm", 1, nbytes)[1].engine
    assert more > 0
    plan, split = allocated("sglang", 1, BUDGETS[0], drafts=7)
    taken, pool = split.cache + split.engine, SglangPool.of(HeadShard(plan, 0, 1, 8), 3)
    found = capacity("sglang", plan, taken, 1, 1000, 7, max_requests=3)
    assert found.num_blocks == 3 * 8 and pool.fixed > SglangPool.of(HeadShard(plan), 3).fixed
    one = SglangPool.of(HeadShard(plan, 0, 1, 8), 3, draft_bytes=4 * 2 * 2 * 64 * 2)
    assert one.memory(10, 0.0) == pool.memory(10, 0.0) + 1280 * 4 * 2 * 2 * 64 * 2


def test_a_budget_for_an_engine_buys_more_bits_the_larger_it_is() -> None:
    taken = [allocated("vllm", 1, nbytes)[1].paged for nbytes in BUDGETS]
    assert taken == sorted(set(taken))
    with pytest.raises(InfeasibleBudget) as refused:
        allocated("vllm", 1, 5_000_000)
    smallest = refused.value.smallest_bytes
    assert allocated("vllm", 1, smallest)[1].budget == smallest
    with pytest.raises(InfeasibleBudget):
        allocated("vllm", 1, smallest - 1)


def test_a_plan_for_an_engine_pays_for_tokens_beside_its_pages() -> None:
    """Each of the 3 sequences has 16-bit copies of its first 100 tokens, in 2 blocks more of rings."""
    plain, with_sinks = (allocated("vllm", 1, BUDGETS[-1], sinks)[0] for sinks in (0, 100))
    blocks = [vllm_capacity(plan, BUDGETS[-1], 1, 1000) for plan in (plain, with_sinks)]
    assert blocks[1].ring_blocks > blocks[0].ring_blocks and blocks[1].concurrency >= 3
    assert with_sinks.nbytes((896,)) < plain.nbytes((896,)) + 12 * 4 * 2 * 100 * 64 * 2
    assert HeadShard(with_sinks).ring_bytes(0) == 2 * 4 * 228 * 64 * 2


def test_a_plan_for_an_engine_is_not_searched() -> None:
    with pytest.raises(UsageError, match=r"allocate.engine = 'vllm' and \[search\]"):
        with_knobs(load_recipe("best"), {"allocate.engine": "vllm", "allocate.bits": 3.0})


@pytest.mark.parametrize("num_sinks", [0, 4])
def test_sglang_takes_rings_off_the_memory_first(num_sinks: int) -> None:
    """And four shared sinks for each ring, of 8 heads of 128 channels."""
    plan = eight_billion([2], num_sinks)
    shard = HeadShard(plan)
    rings = 65 * 32 * (shard.ring_bytes(0) + 4 * 2 * num_sinks * 8 * 128 * 2)
    found = sglang_capacity(plan, 256 * 2_359_296 + rings, 1, 32768, 64)
    assert (found.block_bytes, found.num_blocks, found.ring_blocks) == (2_359_296, 256, 0) and found.concurrency == 1
    with pytest.raises(InfeasibleBudget) as refused:
        sglang_capacity(plan, 1000, 1, 32768, 64)
    assert refused.value.smallest_bytes == 256 * 2_359_296 + rings
    assert f"besides {rings} bytes of rings" in refused.value.message
    assert refused.value.hint is not None and refused.value.hint.endswith("or fewer requests")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    return save_llama(tmp_path_factory.mktemp("served") / "model", tokenizer, num_layers=3, head_dim=64)


@pytest.fixture(scope="module")
def plan_path(model: Path) -> Path:
    geometry = read_sizes(str(model)).geometry
    layers = tuple(LayerPlan(layer, Format(2, "channel"), Format(4)) for layer in geometry.layers)
    path = model.parent / "a plan.safetensors"
    save_plan(Plan(IDENTITY, geometry.cache_dtype, layers, Workload(1, 256), {}), path)
    return path


def test_serve_args_tell_what_fits_into_a_memory(model: Path, plan_path: Path) -> None:
    sized = ("serve-args", plan_path, "--context", 1000, "--tp", 2, "--kv-memory", "100MB")
    value = ran_well(*sized, "--json").json["capacity"]
    assert value["memory"] == 10**8 and value["num_blocks"] == 10**8 // value["block_bytes"]
    assert value["blocks_per_request"] == 8 + value["ring_blocks"] and value["tp"] == 2
    assert value["tokens"] == int(value["concurrency"] * 1000)
    done = run_kvcal(*sized)
    assert f"{value['num_blocks']} blocks" in done.err and f"{value['concurrency']:.2f} requests" in done.err
    assert shlex.split(done.out)[:2] == ["vllm", "serve"] and len(done.out.splitlines()) == 1


def test_serve_args_tell_rings_that_are_larger_than_the_pages_of_a_block(model: Path, tmp_path: Path) -> None:
    geometry = read_sizes(str(model)).geometry
    sinks = Format(2, "channel", num_sink_tokens=2000)
    layers = tuple(LayerPlan(layer, sinks, Format(4)) for layer in geometry.layers)
    path = tmp_path / "sinks.safetensors"
    save_plan(Plan(IDENTITY, geometry.cache_dtype, layers, Workload(1, 256), {}), path)
    sized = ("serve-args", path, "--kv-memory", "100MB", "--context", 1000, "--json")
    done = run_kvcal(*sized)
    value = done.json["capacity"]
    assert value["block_bytes"] > 1.5 * value["page_bytes"] and "take more than the pages of a block" in done.err
    sglang = run_kvcal(*sized, "--engine", "sglang", "--max-requests", 1)
    assert "larger than" not in sglang.err and sglang.json["capacity"]["page_bytes"] == value["page_bytes"]


def test_serve_args_are_one_command_line(model: Path, plan_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(plan_path.parent)
    done = ran_well("serve-args", plan_path.name)
    words = shlex.split(done.out)
    assert not done.err and words[:3] == ["vllm", "serve", "meta-llama/Llama-3.1-8B"]
    given = dict(zip(words[3::2], words[4::2], strict=True))
    assert json.loads(given.pop("--additional-config")) == {"kvcal_plan": str(plan_path)}
    assert given == {"--attention-backend": "KVCAL", "--block-size": "128"}
    more = ("--model", model, "--tp", 2, "--context", 4096, "--kv-memory", "1GB", "--json")
    value = run_kvcal("serve-args", plan_path.name, *more).json
    assert value["arguments"][2] == str(model) and value["arguments"][-6:] == [
        "--tensor-parallel-size", "2", "--max-model-len", "4096", "--kv-cache-memory-bytes", "1000000000",
    ]  # fmt: skip


def test_serve_args_of_stages_of_a_pipeline(plan_path: Path) -> None:
    """Two layers and one, of two ranks each."""
    line = ("serve-args", plan_path, "--pp", 2, "--tp", 2, "--context", 1000, "--kv-memory", "100MB", "--json")
    value = ran_well(*line).json
    words, counted = value["arguments"], value["capacity"]
    assert words[words.index("--pipeline-parallel-size") + 1] == "2" == words[words.index("--tensor-parallel-size") + 1]
    pool = VllmPool(HeadShard(load_plan(plan_path), 0, 2, stages=(range(2), range(2, 3))))
    assert (counted["pp"], counted["block_bytes"]) == (2, pool.block_bytes)
    assert counted["num_blocks"] == 10**8 // pool.block_bytes


def test_serve_args_name_blocks_by_the_plan_where_they_outlive_an_engine(plan_path: Path, tmp_path: Path) -> None:
    plan = load_plan(plan_path)
    found = shlex.split(ran_well("serve-args", plan_path, "--host-memory", "8GB", "--store", tmp_path).out)
    assert found[:3] == ["env", f"PYTHONHASHSEED={int(plan.sha256[:8], 16)}", "vllm"]
    tier = {"type": "fs", "root_dir": str(tmp_path)}
    assert json.loads(found[found.index("--kv-transfer-config") + 1]) == {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 8 * 10**9, "spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier],
        },
    }  # fmt: skip
    found = shlex.split(ran_well("serve-args", plan_path, "--host-memory", "8GB").out)
    assert found[0] == "vllm" and json.loads(found[-1]) == {
        "kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 8 * 10**9},
    }  # fmt: skip


def test_serve_args_join_an_engine_for_prompts_to_one_for_answers(plan_path: Path) -> None:
    peer = {"kv_connector": "PlanNixlConnector", "kv_connector_module_path": "kvcal.engines.vllm.nixl"}
    for role, own in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        found = shlex.split(ran_well("serve-args", plan_path, "--role", role).out)
        assert json.loads(found[found.index("--kv-transfer-config") + 1]) == peer | {"kv_role": own}
    found = shlex.split(ran_well("serve-args", plan_path, "--role", "decode", "--host-memory", "8GB").out)
    given = json.loads(found[-1])
    assert (given["kv_connector"], given["kv_role"]) == ("MultiConnector", "kv_consumer")
    first, second = given["kv_connector_extra_config"]["connectors"]
    assert first == peer | {"kv_role": "kv_consumer"} and second["kv_connector"] == "SimpleCPUOffloadConnector"


def test_peers_take_no_blocks_of_windows_and_states(tmp_path: Path) -> None:
    first = LayerPlan(AttentionGeometry(0, 4, 2, 64, 64), Format(2, "channel"), Format(4))
    by_queries = Format(2, "channel", boost=Boost("query_magnitude", (Tier(4, 0.25),)))
    for layer, says in (
        (LayerPlan(AttentionGeometry(1, 4, 2, 64, 64, window=512)), "layers with a sliding window"),
        (LayerPlan(StateGeometry(1, 1 << 16)), "layers with a state"),
        (LayerPlan(AttentionGeometry(1, 4, 2, 64, 64), by_queries, Format(4)), "channels that queries choose"),
    ):
        plan = Plan(IDENTITY, "bfloat16", (first, layer), Workload(1, 256), {})
        with pytest.raises(UnsupportedModel, match=says):
            require_peers(plan)


def test_serve_args_turn_prefix_caching_off_for_sinks_that_would_be_lost(plan_path: Path, tmp_path: Path) -> None:
    few, many = tmp_path / "few.safetensors", tmp_path / "many.safetensors"
    for path, num_sinks in ((few, 4), (many, 200)):
        keys = Format(2, "channel", 128, num_sinks, 64)
        layer = LayerPlan(AttentionGeometry(0, 4, 2, 64, 64), keys, Format(4))
        save_plan(Plan(IDENTITY, "bfloat16", (layer,), Workload(1, 256), {}), path)
    cases = ((few, ("vllm", "--drafts", 2), False), (few, ("vllm",), False), (few, ("sglang",), False),
             (many, ("vllm",), True), (many, ("sglang",), False),
             (plan_path, ("vllm", "--drafts", 2), False))  # fmt: skip
    for plan, words, is_off in cases:
        found = shlex.split(run_kvcal("serve-args", plan, "--engine", *words).out)
        assert ("--no-enable-prefix-caching" in found) == is_off and "--disable-radix-cache" not in found


def test_drafts_take_a_place_in_every_ring(model: Path, plan_path: Path) -> None:
    line = ("serve-args", plan_path, "--kv-memory", "1GB", "--context", 1000)
    plain, more = (run_kvcal(*line, "--drafts", n, "--json").json["capacity"] for n in (0, 7))
    plan = load_plan(plan_path)
    pools = [VllmPool(HeadShard(plan, step_tokens=n)) for n in (1, 8)]
    for value, pool in zip((plain, more), pools, strict=True):
        assert (value["block_bytes"], value["ring_blocks"]) == (pool.block_bytes, pool.ring_blocks)
    assert more["num_blocks"] * more["block_bytes"] <= 10**9 and pools[1].rings.block_bytes > pools[0].rings.block_bytes
    for draft, expected in (("ngram", {"method": "ngram"}), ("mtp", {"method": "mtp"}), (model, {"model": str(model)})):
        value = ran_well(*line, "--drafts", 5, "--draft", draft, "--json").json
        words = value["arguments"]
        given = json.loads(words[words.index("--speculative-config") + 1])
        assert given == expected | {"num_speculative_tokens": 5}
        layers = {"ngram": 0, "mtp": 1, model: 3}[draft]
        drafted = layers * 128 * plan.layers[0].attention.values_per_token * 2
        pool, page = VllmPool(HeadShard(plan, step_tokens=6), draft_bytes=drafted // 128), 3 * pools[0].share_bytes
        assert value["capacity"]["block_bytes"] == pool.block_bytes == max(pool.room, page + drafted)


def test_serve_args_of_a_model_that_drafts_in_sglang(model: Path, plan_path: Path) -> None:
    line = ("serve-args", plan_path, "--engine", "sglang", "--kv-memory", "1GB", "--context", 1000)
    plan, value = load_plan(plan_path), ran_well(*line, "--drafts", 5, "--draft", model, "--json").json
    words = value["arguments"]
    assert words[words.index("--speculative-draft-model-path") + 1] == str(model)
    assert words[words.index("--speculative-num-draft-tokens") + 1] == "6"
    drafted = 3 * plan.layers[0].attention.values_per_token * 2
    pool = SglangPool.of(HeadShard(plan, step_tokens=6), 64, draft_bytes=drafted)
    assert value["capacity"]["block_bytes"] == pool.block_bytes(0.0) == 128 * (pool.token_bytes + drafted)
    assert value["capacity"]["num_blocks"] == pool.blocks(10**9, 0.0)


def test_serve_args_of_sglang(plan_path: Path) -> None:
    shared = ("serve-args", plan_path, "--engine", "sglang", "--max-requests", 8)
    words = shlex.split(run_kvcal(*shared).out)
    assert words[:7] == [
        "env", f"KVCAL_PLAN={plan_path}", "python", "-m", "sglang.launch_server", "--model-path", IDENTITY.id,
    ]  # fmt: skip
    assert words[7:] == [
        "--attention-backend", "kvcal", "--page-size", "128", "--max-running-requests", "8",
        "--disable-prefill-cuda-graph",
    ]  # fmt: skip
    value = run_kvcal(*shared, "--tp", 2, "--context", 512, "--kv-memory", "10MB", "--json").json
    words, num_blocks = value["arguments"], value["capacity"]["num_blocks"]
    assert words[14:] == [
        "--tp-size", "2", "--context-length", "512", "--max-total-tokens", str(128 * num_blocks),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("serve-args {plan} --store blocks", 2, "--store without --host-memory"),
        ("serve-args {plan} --engine sglang --host-memory 8GB", 2, "leave the device in vllm alone"),
        ("serve-args {plan} --engine sglang --role decode", 2, "from others in vllm alone"),
        ("serve-args {plan} --role decode --drafts 2", 2, "--drafts 2, which were not tried together"),
        ("serve-args {plan} --role decode --tp 2", 2, "--tp 2 --pp 1, which were not tried together"),
        ("serve-args {plan} --context 8 --kv-memory 1KB", 3, "a request of 8 tokens takes"),
        ("serve-args {plan} --engine llama", 2, "'llama' is not one of"),
        ("serve-args {plan} --tp 3", 4, "3 ranks cannot share equally"),
        (
            "serve-args {plan} --engine sglang --drafts 2",
            2,
            "--draft ngram with --engine sglang, where a small model alone",
        ),
        ("serve-args {plan} --pp 4", 4, "stage 3 of a pipeline of 4 has no layer of the plan's 3"),
        ("serve-args {plan} --pp 2 --drafts 2", 2, "in stages of a pipeline in vllm alone, without these"),
        ("serve-args {plan} --engine sglang --pp 2", 2, "in stages of a pipeline in vllm alone"),
    ],
)
def test_refusals(words: str, code: int, says: str, model: Path, plan_path: Path) -> None:
    names = {"model": model, "plan": plan_path}
    done = run_kvcal(*(word.format(**names) for word in words.split()))
    assert done.code == code and says in done.err, done.err
