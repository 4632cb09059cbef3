"""A plan for another model is refused before anything is stored, with exit code 5 and what differs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import torch
import transformers as hf
from cache_cases import HEAD_DIM, feed, llama_plan, model_plan, plan_of, random_ids, tiny_llama
from transformers import PretrainedConfig

from kvcal import Plan, PlanCache, attached
from kvcal.errors import ArtifactError, UsageError
from kvcal.geometry import AttentionGeometry, Geometry, StateGeometry
from kvcal.plan.plan import RAW


def refusal(plan: Plan, config: PretrainedConfig) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        PlanCache(plan, config)
    assert caught.value.exit_code == 5
    return caught.value


def llama_geometry(*layers: AttentionGeometry | StateGeometry) -> Plan:
    return plan_of(Geometry("llama", "float32", layers), RAW, RAW)


def attention(index: int, **changes: int) -> AttentionGeometry:
    shape = {"num_query_heads": 8, "num_kv_heads": 2, "k_head_dim": HEAD_DIM, "v_head_dim": HEAD_DIM}
    return AttentionGeometry(index, **shape | changes)


def test_another_model_type():
    found = refusal(llama_plan(RAW, RAW), hf.Qwen2Config(num_hidden_layers=2))
    assert "model type 'llama', the model is 'qwen2'" in found.message
    assert "tiny" in found.hint


def test_too_few_and_too_many_layers():
    config = tiny_llama().config
    assert (
        "the model caches layer 1, which the plan does not know"
        in refusal(llama_geometry(attention(0)), config).message
    )
    three = llama_geometry(*(attention(index) for index in range(3)))
    assert "the plan has layer 2, the model caches only 2 layers" in refusal(three, config).message


@pytest.mark.parametrize("changes", [{"num_kv_heads": 4}, {"k_head_dim": 16}, {"v_head_dim": 16}])
def test_other_heads_are_refused_at_the_first_update(changes):
    model = tiny_llama()
    cache = PlanCache(llama_geometry(attention(0), attention(1, **changes)), model.config)
    with pytest.raises(
        ArtifactError, match=r"layer 1 caches 2 KV heads of size 8 \(K\) and 8 \(V\), but the plan"
    ) as caught:
        feed(model, cache, random_ids(1, 4))
    assert caught.value.exit_code == 5 and "another model" in caught.value.hint


def test_another_sliding_window():
    config = hf.MistralConfig(num_hidden_layers=1, sliding_window=6)
    window = Geometry("mistral", "float32", (attention(0, window=7),))
    assert "sliding window of 6 tokens, the plan says 7" in refusal(plan_of(window, RAW, RAW), config).message


def test_full_attention_where_the_model_slides_and_the_reverse():
    config = hf.MistralConfig(num_hidden_layers=1, sliding_window=6)
    full = plan_of(Geometry("mistral", "float32", (attention(0),)), RAW, RAW)
    assert "DynamicSlidingWindowLayer, the plan has full attention there" in refusal(full, config).message
    sliding = llama_geometry(attention(0, window=6), attention(1))
    assert "DynamicLayer, the plan has a sliding window there" in refusal(sliding, tiny_llama().config).message


def test_a_state_where_the_model_has_attention_and_the_reverse():
    state = llama_geometry(StateGeometry(0, 64), attention(1))
    assert "DynamicLayer, the plan has a state there" in refusal(state, tiny_llama().config).message
    model = tiny_models.built("qwen3_next")
    plan = model_plan(model)
    for layer, kind in ((attention(0, window=6), "a sliding window"), (attention(0), "full attention")):
        layers = (layer, *plan.geometry.layers[1:])
        wrong = plan_of(Geometry(plan.model.model_type, "float32", layers), RAW, RAW)
        assert f"LinearAttentionLayer, the plan has {kind} there" in refusal(wrong, model.config).message


@pytest.mark.parametrize("changes", [{"num_kv_heads": 2}, {"k_head_dim": 8}, {"v_head_dim": 32}])
def test_other_heads_of_a_sliding_window_are_refused_at_the_first_update(changes):
    model = tiny_models.built("gemma3")
    layers = list(model_plan(model).geometry.layers)
    layers[0] = replace(layers[0], **changes)
    plan = plan_of(Geometry("gemma3_text", "float32", tuple(layers)), RAW, RAW)
    with pytest.raises(ArtifactError, match=r"layer 0 caches 1 KV heads of size 16 \(K\) and 16 \(V\), but the plan"):
        feed(model, PlanCache(plan, model.config), random_ids(1, 4))


@pytest.mark.parametrize("index", [0, 2])
def test_a_state_of_another_size_is_refused_at_the_first_update(index):
    model = tiny_models.built("qwen3_next")
    layers = list(model_plan(model).geometry.layers)
    size = layers[index].bytes_per_sequence
    layers[index] = StateGeometry(index, size + 4)
    plan = plan_of(Geometry("qwen3_next", "float32", tuple(layers)), RAW, RAW)
    expected = f"layer {index} keeps a state of {size} bytes per sequence, but the plan is for {size + 4}"
    with pytest.raises(ArtifactError, match=expected):
        feed(model, PlanCache(plan, model.config), random_ids(3, 4))


def test_other_query_heads():
    config = tiny_llama().config
    found = refusal(llama_geometry(attention(0), attention(1, num_query_heads=4)), config)
    assert "layer 1 has 8 query heads, but the plan is for 4" in found.message


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (("plan.safetensors", tiny_llama().config), "plan is a str, expected a Plan", "load_plan"),
        ((Path("plan.safetensors"), tiny_llama().config), "expected a Plan", "load_plan"),
        ((llama_plan(RAW, RAW), tiny_llama()), "config is a LlamaForCausalLM, expected a Pre", "model.config"),
        ((llama_plan(RAW, RAW), tiny_llama().config.to_dict()), "config is a dict", "model.config"),
        ((llama_plan(RAW, RAW), tiny_llama().config, [[0, 1]]), r"attention_mask has shape \[\[0, 1\]\]", None),
    ],
)
def test_arguments_of_another_type(arguments, message: str, hint: str | None):
    with pytest.raises(UsageError, match=message) as caught:
        PlanCache(*arguments)
    assert caught.value.exit_code == 2 and (hint is None or hint in caught.value.hint)


@pytest.mark.parametrize("max_tokens", [None, 60])
@pytest.mark.parametrize("name", ["gemma3", "llama"])
def test_every_update_is_checked_and_a_refused_one_changes_nothing(name: str, max_tokens: int | None):
    """Fewer heads, another head size, another batch or values of fewer tokens would be broadcast into the rings."""
    model = tiny_models.built(name)
    cache = PlanCache(model_plan(model), model.config, max_tokens=max_tokens)
    with attached(model):
        feed(model, cache, random_ids(2, 9))
        held = cache.nbytes
        for index, layer in enumerate(cache.plan.layers):
            heads, dim = layer.attention.num_kv_heads, layer.attention.k_head_dim
            wrong = [
                ((2, heads + 1, 4, dim), (2, heads + 1, 4, dim), ArtifactError),
                ((2, heads, 4, 1), (2, heads, 4, 1), ArtifactError),
                ((2, heads, 4, dim), (2, heads, 4, 1), ArtifactError),
                ((1, heads, 4, dim), (1, heads, 4, dim), UsageError),
                ((2, heads, 4, dim), (1, heads, 4, dim), UsageError),
                ((2, heads, 4, dim), (2, heads, 1, dim), UsageError),
                ((2, heads, 1, dim), (2, 1, 4, dim), UsageError),
            ]
            for k_shape, v_shape, error in wrong:
                with pytest.raises(error, match=f"layer {index} |sequences"):
                    cache.layers[index].update(torch.zeros(k_shape), torch.zeros(v_shape))
        feed(model, cache, random_ids(2, 9))
    assert cache.lengths == [18, 18] and cache.nbytes >= held


@pytest.mark.parametrize("index", [0, 2])
def test_a_state_that_the_plan_does_not_know_is_refused_at_the_first_update(index):
    """Found by mutated files: its bytes were in no prediction."""
    model = tiny_models.built("qwen3_next")
    layers = tuple(layer for layer in model_plan(model).geometry.layers if layer.index != index)
    plan = plan_of(Geometry("qwen3_next", "float32", layers), RAW, RAW)
    with pytest.raises(ArtifactError, match=f"layer {index} keeps a state, which the plan does not know"):
        feed(model, PlanCache(plan, model.config), random_ids(1, 4))
