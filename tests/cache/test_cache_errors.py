"""State after an error: a refused crop changes nothing, and a forward pass that did not end is not built
upon. And modes of torch: a cache filled under ``torch.inference_mode`` goes on outside of it, and the
reverse."""

import contextlib
import math
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import tiny_models
import torch
import transformers as hf
from cache_cases import (
    HEAD_DIM,
    KINDS,
    assert_exact_bytes,
    attended,
    feed,
    llama_plan,
    model_plan,
    plan_of,
    random_ids,
    random_qkv,
    tiny_llama,
)
from progressive_cases import fixed
from static_cases import plan_for
from test_cache_generate import TWO_BITS, model_of, two_bit_plan
from torch import Tensor
from transformers import PretrainedConfig

from kvcal import Plan, PlanCache, attached
from kvcal.errors import ArtifactError, NonFiniteActivations, UnsupportedModel, UsageError
from kvcal.geometry import AttentionGeometry, Geometry, StateGeometry
from kvcal.plan.plan import RAW, Format

THREE = 3  # layers: an error in the one in the middle


@pytest.mark.parametrize(("name", "tokens"), [("gemma3", -3), ("gpt_oss", 50)])
def test_a_refused_crop_changes_nothing(name: str, tokens: int) -> None:
    """Sliding windows that are full refuse; layers after them must not have been cropped by then."""
    model, ids = model_of(name), random_ids(1, 210)
    caches = [PlanCache(two_bit_plan(name), model.config) for _ in range(2)]
    for cache in caches:
        feed(model, cache, ids[:, :200])
    with pytest.raises(UsageError, match="the window of .* is full"):
        caches[0].crop(tokens)
    assert_exact_bytes(caches[0], [200])
    found, expected = (feed(model, cache, ids[:, 200:]) for cache in caches)
    assert torch.equal(found, expected)


def test_a_state_of_linear_attention_is_not_cropped() -> None:
    model, ids = model_of("qwen3_next"), random_ids(1, 140)
    cache, other = (PlanCache(two_bit_plan("qwen3_next"), model.config) for _ in range(2))
    for each in (cache, other):
        feed(model, each, ids[:, :130])
    with pytest.raises(UnsupportedModel, match="layer 0 keeps a state of linear attention"):
        cache.crop(-1)
    assert torch.equal(feed(model, cache, ids[:, 130:]), feed(model, other, ids[:, 130:]))


@contextlib.contextmanager
def interrupted(model: torch.nn.Module):
    """Within it, the user presses Ctrl-C while the middle layer is at work."""
    handle = model.model.layers[1].mlp.register_forward_hook(Mock(side_effect=KeyboardInterrupt))
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("max_tokens", [None, 400])
def test_a_cache_says_that_a_forward_pass_did_not_end(max_tokens: int | None) -> None:
    model, ids = tiny_llama(2, THREE), random_ids(1, 210)
    plan = llama_plan(*TWO_BITS, 2, num_layers=THREE)
    cache, fresh = (PlanCache(plan, model.config, max_tokens=max_tokens) for _ in range(2))
    with contextlib.nullcontext() if max_tokens is None else attached(model):
        feed(model, cache, ids[:, :60])
        with interrupted(model), pytest.raises(KeyboardInterrupt):
            feed(model, cache, ids[:, 60:200])
        for refused in (lambda: feed(model, cache, ids[:, 200:]), lambda: cache.crop(-1)):
            with pytest.raises(UsageError, match="did not reach the last layer") as caught:
                refused()
            assert "reset()" in caught.value.hint
        cache.reset()
        assert torch.equal(feed(model, cache, ids), feed(model, fresh, ids))


def test_values_that_cannot_be_packed_end_the_cache_too() -> None:
    """Its keys are packed by then, in the first layer."""
    model, ids = tiny_llama(2), random_ids(1, 200)
    cache = PlanCache(llama_plan(Format(2, "channel", 32), Format(2, "token", 32), 2), model.config)
    feed(model, cache, ids[:, :60])

    def spoil(module: torch.nn.Module, given: tuple, out: Tensor) -> Tensor:
        return torch.full_like(out, math.nan)

    handle = model.model.layers[0].self_attn.v_proj.register_forward_hook(spoil)
    with pytest.raises(NonFiniteActivations):
        feed(model, cache, ids[:, 60:])
    handle.remove()
    with pytest.raises(UsageError, match="did not reach the last layer"):
        feed(model, cache, ids[:, 60:])


def test_a_refusal_before_anything_is_stored_is_not_an_end() -> None:
    model = tiny_llama(2)
    cache = PlanCache(llama_plan(*TWO_BITS, 2), model.config, max_tokens=20)
    with attached(model):
        with pytest.raises(UsageError, match="does not fit"):
            feed(model, cache, random_ids(1, 21))
        feed(model, cache, random_ids(1, 20))
    assert cache.lengths == [20]


MODES = {
    "windows": llama_plan(*KINDS["windows"], num_layers=1),
    "queries": plan_for("queries"),
    "shrinking": fixed((140, 261), (150, 262)),
}


def mode(inference: bool) -> contextlib.AbstractContextManager[None]:
    return torch.inference_mode() if inference else torch.no_grad()


def lived(plan: Plan, modes: tuple[bool, ...], max_tokens: int | None) -> torch.Tensor:
    """Outputs of five parts, each under its mode, with rows that change places and tokens taken back between
    them."""
    cache, given, outputs = PlanCache(plan, tiny_llama(2, 1).config, max_tokens=max_tokens), random_qkv(2, 2, 400), []
    for part, inference in enumerate(modes):
        with mode(inference):
            new = [x[:, :, 80 * part : 80 * part + 80] for x in given]
            outputs.append(attended(cache, *new, (78, 79)))
            if max_tokens is None:
                cache.crop(-3)
            cache.reorder_cache(torch.tensor([1, 0]))
    return torch.cat(outputs, 2)


@pytest.mark.parametrize(
    ("name", "max_tokens"), [*((name, None) for name in MODES), ("windows", 400), ("queries", 400)]
)
def test_modes_may_change_between_updates(name: str, max_tokens: int | None) -> None:
    plan = MODES[name]
    by_turns = (True, False, True, False, True)
    assert torch.equal(lived(plan, by_turns, max_tokens), lived(plan, (False,) * 5, max_tokens))


def test_modes_may_change_between_updates_of_sliding_windows() -> None:
    model, found = model_of("gemma3"), []
    for modes in ((False, False, False), (True, False, True)):
        cache, ids = PlanCache(two_bit_plan("gemma3"), model.config), torch.arange(3, 123).view(1, -1)
        for part, inference in enumerate(modes):
            with mode(inference):
                out = model(ids[:, 40 * part : 40 * part + 40], past_key_values=cache)
        found.append(out.logits)
    assert torch.equal(*found)


def refusal(plan: Plan, config: PretrainedConfig) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        PlanCache(plan, config)
    assert caught.value.exit_code == 5
    return caught.value


def llama_geometry(*layers: AttentionGeometry | StateGeometry) -> Plan:
    return plan_of(Geometry("llama", "float32", layers), RAW, RAW)


def attention(index: int, **changes: int | None) -> AttentionGeometry:
    shape = {"num_query_heads": 8, "num_kv_heads": 2, "k_head_dim": HEAD_DIM, "v_head_dim": HEAD_DIM}
    return AttentionGeometry(index, **shape | changes)


def mistral_plan(window: int | None) -> Plan:
    return plan_of(Geometry("mistral", "float32", (attention(0, window=window),)), RAW, RAW)


MISTRAL = hf.MistralConfig(num_hidden_layers=1, sliding_window=6)


@pytest.mark.parametrize(
    ("plan", "config", "says"),
    [
        (llama_geometry(attention(0)), None, "the model caches layer 1, which the plan does not know"),
        (llama_geometry(*map(attention, range(3))), None, "the plan has layer 2, the model caches only 2 layers"),
        (llama_geometry(attention(0), attention(1, num_query_heads=4)), None,
         "layer 1 has 8 query heads, but the plan is for 4"),
        (mistral_plan(7), MISTRAL, "sliding window of 6 tokens, the plan says 7"),
        (mistral_plan(None), MISTRAL, "DynamicSlidingWindowLayer, the plan has full attention there"),
        (llama_geometry(attention(0, window=6), attention(1)), None,
         "DynamicLayer, the plan has a sliding window there"),
        (llama_geometry(StateGeometry(0, 64), attention(1)), None, "DynamicLayer, the plan has a state there"),
    ],
)  # fmt: skip
def test_layers_of_another_model(plan: Plan, config: PretrainedConfig | None, says: str) -> None:
    assert says in refusal(plan, config or tiny_llama().config).message


def test_another_model_type():
    found = refusal(llama_plan(RAW, RAW), hf.Qwen2Config(num_hidden_layers=2))
    assert "model type 'llama', the model is 'qwen2'" in found.message
    assert "tiny" in found.hint


@pytest.mark.parametrize("changes", [{"num_kv_heads": 4}, {"k_head_dim": 16}, {"v_head_dim": 16}])
def test_other_heads_are_refused_at_the_first_update(changes):
    model = tiny_llama()
    cache = PlanCache(llama_geometry(attention(0), attention(1, **changes)), model.config)
    message = r"layer 1 caches 2 KV heads of size 8 \(K\) and 8 \(V\), but the plan"
    with pytest.raises(ArtifactError, match=message) as caught:
        feed(model, cache, random_ids(1, 4))
    assert caught.value.exit_code == 5 and "another model" in caught.value.hint


def test_attention_where_the_model_has_a_state():
    model = tiny_models.built("qwen3_next")
    plan = model_plan(model)
    for layer, kind in ((attention(0, window=6), "a sliding window"), (attention(0), "full attention")):
        layers = (layer, *plan.geometry.layers[1:])
        wrong = plan_of(Geometry(plan.model.model_type, "float32", layers), RAW, RAW)
        assert f"LinearAttentionLayer, the plan has {kind} there" in refusal(wrong, model.config).message


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
    """Fewer heads, another head size, another batch or values of fewer tokens would be broadcast into the
    rings."""
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


@pytest.mark.parametrize("max_tokens", [None, 60])
def test_a_filled_cache_is_reset_before_another_prompt(max_tokens: int | None) -> None:
    """``generate`` takes what a cache holds as fed: a shorter prompt has no tokens then, of however many
    rows."""
    model = tiny_llama(2, 1)
    cache = PlanCache(plan_for("kivi"), model.config, max_tokens=max_tokens)
    wanted = {"past_key_values": cache, "max_new_tokens": 3, "do_sample": False}
    with attached(model):
        model.generate(random_ids(1, 20), **wanted)
        for batch in (1, 2):
            with pytest.raises(
                UsageError, match=re.escape("no new tokens: generate() counts the [22] tokens")
            ) as caught:
                model.generate(random_ids(batch, 10), **wanted)
            assert caught.value.hint == "reset() first, for another prompt"
        with pytest.raises(UsageError, match="1 sequences and was given 2") as caught:
            model(random_ids(2, 5), past_key_values=cache)
        assert "reset()" in caught.value.hint
        cache.reset()
        model.generate(random_ids(1, 10), **wanted)
    assert cache.lengths == [12]


def test_a_cache_says_what_it_holds() -> None:
    """In one line, however many layers; before the first token, too."""
    plan, config = plan_for("kivi"), tiny_llama(2, 1).config
    bits = f"bits_per_value={plan.bits_per_value():.3f}"
    assert repr(PlanCache(plan, config)) == f"PlanCache(nbytes=0, lengths=[], {bits})"
    for max_tokens, room in ((None, ""), (60, ", max_tokens=60")):
        cache = PlanCache(plan, config, max_tokens=max_tokens)
        attended(cache, *random_qkv(2, 2, 30))
        assert repr(cache) == f"PlanCache(nbytes={cache.nbytes}, lengths=[30, 30], {bits}{room})"
