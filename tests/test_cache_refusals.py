"""A plan for another model is refused before anything is stored, with exit code 5 and what differs."""

from __future__ import annotations

import pytest
import tiny_models
import transformers as hf
from cache_cases import HEAD_DIM, feed, llama_plan, model_plan, plan_of, random_ids, tiny_llama
from transformers import PretrainedConfig

from kvcal import Plan, PlanCache
from kvcal.errors import ArtifactError
from kvcal.geometry import AttentionGeometry, Geometry, StateGeometry
from kvcal.plan import RAW


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
    model = tiny_models.qwen3_next()
    plan = model_plan(model)
    for layer, kind in ((attention(0, window=6), "a sliding window"), (attention(0), "full attention")):
        layers = (layer, *plan.geometry.layers[1:])
        wrong = plan_of(Geometry(plan.model.model_type, "float32", layers), RAW, RAW)
        assert f"LinearAttentionLayer, the plan has {kind} there" in refusal(wrong, model.config).message
