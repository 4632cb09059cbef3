"""Plans that an engine does not take are refused at start, with every reason and its layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cache_cases import llama_plan, plan_of
from engine_cases import TAKEN, UNSHARED, boosted, plan_for
from form_cases import form_plan

from kvcal.engines.capacity import VllmPool
from kvcal.engines.shard import HeadShard, rank_heads, require_equal_plans
from kvcal.engines.support import DRAFTS, DTYPE, FORMATS, NO_PLAN, loses_sinks, require_served, require_sinks
from kvcal.errors import ArtifactError, UnsupportedModel, UsageError
from kvcal.geometry import AttentionGeometry, ExpandedHeads, Geometry, StateGeometry
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import Format
from kvcal.plan.plan import Plan

K, V = Format(2, "channel", 32), Format(2, "token", 32)
REFUSED = {
    "shrinking": (K, replace(V, num_bits=4, shrink_at=(256,), param_dtype="float32"), "v pages that shrink"),
}


@pytest.mark.parametrize("name", TAKEN | UNSHARED)
def test_every_taken_format_is_served(name: str) -> None:
    require_served(plan_for(name), is_cuda=False)
    require_served(plan_for(name, cache_dtype="bfloat16"), is_cuda=True)


@pytest.mark.parametrize("name", REFUSED)
def test_a_format_that_a_block_cannot_hold_is_refused_with_its_layers(name: str) -> None:
    k, v, reason = REFUSED[name]
    plan = llama_plan(k, v, num_layers=3)
    served = llama_plan(K, V, num_layers=3)
    mixed = replace(plan, layers=(plan.layers[0], served.layers[1], plan.layers[2]))
    with pytest.raises(UnsupportedModel, match=f"layers 0, 2: {reason}") as refused:
        require_served(mixed, is_cuda=False)
    assert refused.value.exit_code == 4
    assert "uniform or boosted pages" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "lattice d=2",
            "layers 0: k pages on a lattice: no kernel reads them as they are stored; layers 0: v pages on",
        ),
        ("before RoPE", "layers 0, 1: k pages before RoPE: no kernel reads them as they are stored"),
        (
            "linear",
            "layers 1, 2: k pages before RoPE: no kernel .*; layers 1, 2: k residuals of a prediction: no kernel",
        ),
    ],
)
def test_what_a_dynamic_cache_alone_takes_is_refused(name: str, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"an engine cannot serve this plan: {reason}") as refused:
        require_served(form_plan(name), is_cuda=False)
    assert refused.value.hint == FORMATS


def with_sinks(keys: int, values: int = 0) -> Plan:
    return llama_plan(replace(K, num_sink_tokens=keys), replace(V, num_sink_tokens=values, recent_window=128))


@pytest.mark.parametrize("plan", [with_sinks(0), with_sinks(127, 4)])
def test_sinks_that_a_first_page_holds_are_shared_with_it(plan: Plan) -> None:
    """With drafts, too."""
    require_sinks(plan)
    assert not loses_sinks(plan) and not loses_sinks(plan, "sglang")
    has_sinks = bool(VllmPool(HeadShard(plan, step_tokens=3)).sinks.block_bytes)
    assert has_sinks == any(fmt.num_sink_tokens for layer in plan.layers for fmt in layer.formats)


@pytest.mark.parametrize("plan", [with_sinks(128), with_sinks(8, 200)])
def test_sinks_that_are_lost_after_a_cached_page_are_refused(plan: Plan) -> None:
    """In vLLM. SGLang knows sinks by all of their tokens."""
    assert loses_sinks(plan) and not loses_sinks(plan, "sglang")
    assert not VllmPool(HeadShard(plan)).sinks.block_bytes
    with pytest.raises(UnsupportedModel, match="the plan keeps 128 sinks or more.* --no-enable-prefix-c") as refused:
        require_sinks(plan)
    assert refused.value.exit_code == 4 and "--set cache.num_sink_tokens=127" in str(refused.value.hint)


@pytest.mark.parametrize("name", TAKEN | UNSHARED)
def test_drafts_are_served_but_for_channels_by_queries(name: str) -> None:
    """On a GPU, too: formats that one launch does not take drafts of are served token by token."""
    for is_cuda, dtype in ((False, "float32"), (True, "bfloat16")):
        plan = plan_for(name, cache_dtype=dtype)
        if plan.needs_queries:
            with pytest.raises(UnsupportedModel, match="with 7 drafts: .* queries of rejected drafts stay counted"):
                require_served(plan, is_cuda, lookahead=7)
        else:
            require_served(plan, is_cuda, lookahead=7)


def test_more_drafts_than_a_ring_has_room_for_are_refused() -> None:
    with pytest.raises(UsageError, match="8 drafts, expected at most 7"):
        require_served(llama_plan(K, V), is_cuda=False, lookahead=8)


def test_layers_without_pages_are_refused() -> None:
    """Sliding windows and states are the engine's own, and blocks are for layers with pages."""
    plan = llama_plan(K, V, num_layers=3)
    window = LayerPlan(AttentionGeometry(1, 8, 2, 8, 8, window=64))
    layers = (plan.layers[0], window, LayerPlan(StateGeometry(2, 64)))
    require_served(replace(plan, layers=layers), is_cuda=False)
    require_served(replace(plan, layers=(plan.layers[0], layers[2])), False, "sglang")
    mixed = replace(plan, layers=layers[:2])
    require_served(mixed, is_cuda=False, lookahead=7)
    require_served(mixed, False, "sglang")
    with pytest.raises(UnsupportedModel, match="layers 1: a sliding window: drafts beside sliding windows"):
        require_served(mixed, False, "sglang", 2)
    with pytest.raises(UnsupportedModel, match="of the type gpt_oss with attention backends of a list of its own"):
        require_served(replace(mixed, model=replace(mixed.model, model_type="gpt_oss")), False, "sglang")
    for engine, model_type in (("vllm", "qwen3_next"), ("sglang", "lfm2")):
        hybrid = replace(plan, layers=(plan.layers[0], layers[2]), model=replace(plan.model, model_type=model_type))
        with pytest.raises(
            UnsupportedModel, match=f"layers 2: a state: drafts beside states.* tried in {engine}"
        ) as no:
            require_served(hybrid, False, engine, 2)
        assert no.value.hint == DRAFTS
    require_served(hybrid, is_cuda=False, lookahead=2)
    with pytest.raises(UnsupportedModel, match="no layer has full attention"):
        require_served(replace(plan, layers=(window,)), is_cuda=False)


def test_what_the_kernels_do_not_take_is_refused_on_a_gpu_alone() -> None:
    plan = plan_for("2 bits by channel", cache_dtype="float32")
    require_served(plan, is_cuda=False)
    with pytest.raises(UnsupportedModel, match="the cache holds float32"):
        require_served(plan, is_cuda=True)


def beside_a_paged_layer(other: AttentionGeometry | StateGeometry, cache_dtype: str = "bfloat16") -> Plan:
    return plan_of(Geometry("llama", cache_dtype, (AttentionGeometry(0, 8, 2, 8, 8), other)), K, V)


SHRINKING, BY_QUERIES = REFUSED["shrinking"][:2], (boosted("query_range"), V)
NO_LAYER = replace(llama_plan(K, V), layers=(LayerPlan(AttentionGeometry(0, 8, 2, 8, 8, 64)),))
STATE, WITH_STATE = StateGeometry(1, 64), AttentionGeometry(1, 8, 2, 8, 8, state_bytes=64)
LATENT = AttentionGeometry(1, 8, 1, 32, 8, None, ExpandedHeads(24, 16))
MENDS = [
    (llama_plan(*SHRINKING, cache_dtype="bfloat16"), "vllm", 0, FORMATS),
    (llama_plan(K, V), "vllm", 0, DTYPE),
    (llama_plan(*SHRINKING), "sglang", 0, f"{DTYPE}; {FORMATS}"),
    (llama_plan(*BY_QUERIES, cache_dtype="bfloat16"), "vllm", 5, DRAFTS),
    (NO_LAYER, "vllm", 0, NO_PLAN.format("vllm")),
    *((beside_a_paged_layer(LATENT, dtype), "vllm", 0, NO_PLAN.format("vllm")) for dtype in ("bfloat16", "float32")),
    (beside_a_paged_layer(WITH_STATE), "sglang", 0, NO_PLAN.format("sglang")),
    *((beside_a_paged_layer(one, "float32"), "vllm", 0, DTYPE) for one in (STATE, WITH_STATE)),
]


@pytest.mark.parametrize(("plan", "engine", "drafts", "hint"), MENDS)
def test_the_hint_is_what_would_be_served(plan: Plan, engine: str, drafts: int, hint: str) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        require_served(plan, True, engine, drafts)
    assert refused.value.hint == hint


@pytest.mark.parametrize(
    ("size", "expected"), [(1, [(0, 4)]), (2, [(0, 2), (2, 4)]), (8, [(n // 2, n // 2 + 1) for n in range(8)])]
)
def test_ranks_take_neighbouring_heads(size: int, expected: list[tuple[int, int]]) -> None:
    geometry = AttentionGeometry(0, 8, 4, 8, 8)
    found = [rank_heads(geometry, rank, size) for rank in range(size)]
    assert [(heads.start, heads.stop) for heads in found] == expected


@pytest.mark.parametrize("size", [3, 16])
def test_heads_that_ranks_cannot_share_are_refused(size: int) -> None:
    with pytest.raises(UnsupportedModel, match=f"which {size} ranks cannot share"):
        HeadShard(plan_for("16 bits"), 0, size).block_bytes(0)


class Ranks:
    """A group of two ranks, as engines have it."""

    world_size, cpu_group = 2, None


@pytest.mark.parametrize("other", ["a", "b"])
def test_ranks_compare_their_plans(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By bytes, as nothing of another rank is unpickled."""

    def gather(found: list[torch.Tensor], digest: torch.Tensor, group: object) -> None:
        found[0].copy_(digest)
        found[1].fill_(int(other * 2, 16))

    monkeypatch.setattr(torch.distributed, "all_gather", gather)
    if other == "a":
        require_equal_plans("a" * 64, Ranks)
        return
    with pytest.raises(ArtifactError, match="the ranks have unequal plans: a{16}, b{16}"):
        require_equal_plans("a" * 64, Ranks)
