"""A static cache after ``attached`` decodes as the dynamic cache does, whatever the formats and lengths."""

import math
from contextlib import ExitStack
from unittest.mock import Mock

import pytest
import torch
import transformers as hf
from cache_cases import HEAD_DIM, feed, model_plan, padded, ragged_ids, random_ids, random_qkv, tiny_llama
from static_cases import (
    FORMATS,
    QUERY,
    TRANSFORMED,
    assert_generate_compiles_one_graph,
    assert_same_pages,
    drifting_ids,
    listened,
    plan_for,
)
from tiny_models import SUPPORTED, batch, built
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import DynamicCache, StaticCache

from kvcal import PlanCache, attached
from kvcal.cache.attached import _ATTACHED, decoding
from kvcal.errors import UnsupportedModel, UsageError
from kvcal.plan.page_format import Format, num_pages

# Every prompt goes on to where a page is packed or comes to be read: at 128, or at 384 and, after a window of
# 9, 393.
STEPS = {1: 140, 120: 18, 127: 2, 128: 2, 129: 2, 378: 16}
RAGGED = (240, 118, 3)


def decode(model, cache: PlanCache, ids: Tensor, prompt: int, mask: Tensor | None = None) -> Tensor:
    """Logits of a prompt and of every step after it."""
    cuts = [prompt, *range(prompt + 1, ids.shape[1])]
    return feed(model, cache, ids, cuts, mask)


def both(plan, ids: Tensor, prompt: int, mask: Tensor | None = None, heads: int = 2, layers: int = 1):
    """The dynamic and the static cache, fed alike, and their logits."""
    model, found = tiny_llama(heads, layers), []
    prompt_mask = None if mask is None else mask[:, :prompt]
    for max_tokens in (None, ids.shape[1]):
        cache = PlanCache(plan, model.config, prompt_mask, max_tokens=max_tokens)
        with listened(heads, layers, plan) if max_tokens is None else attached(model):
            found.append((cache, decode(model, cache, ids, prompt, mask)))
    return found


@pytest.mark.parametrize(
    ("name", "prompt"),
    [*((name, prompt) for name in (*FORMATS, *TRANSFORMED) for prompt in (120, 378)),
     *(("queries", prompt) for prompt in (1, 127, 128, 129))],
)  # fmt: skip
def test_steps_give_the_logits_and_pages_of_the_dynamic_cache(name: str, prompt: int) -> None:
    plan = plan_for(name)
    ids = drifting_ids(2, prompt + STEPS[prompt])
    (dynamic, expected), (static, found) = both(plan, ids, prompt)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    layer, total = plan.layers[0], ids.shape[1]
    pages = sum(num_pages(total) for side in ("k", "v") for _ in range(layer.attention.num_kv_heads))
    assert assert_same_pages(static, dynamic) == 2 * pages


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
def test_groups_of_query_heads(num_kv_heads: int) -> None:
    """8, 4 and 1 query heads for each KV head."""
    for name in ("queries", "rotated, feedback"):
        ids = random_ids(2, 138)
        (dynamic, expected), (static, found) = both(plan_for(name, num_kv_heads), ids, 120, heads=num_kv_heads)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert assert_same_pages(static, dynamic) > 0


@pytest.mark.parametrize(("name", "side"), [("kivi", "left"), ("queries", "right"), ("paged window", "left")])
def test_ragged_batches(name: str, side: str) -> None:
    """Padding is stored nowhere, and no step attends to it. A page fills in two rows at different steps."""
    ids, mask = ragged_ids(RAGGED, 46)
    if side == "right":
        ids[:, :240], mask[:, :240] = padded([random_ids(1, n, seed=n)[0] for n in RAGGED], 240, side)
    (dynamic, expected), (static, found) = both(plan_for(name), ids, 240, mask)
    real = mask.bool()
    torch.testing.assert_close(found[real], expected[real], atol=1e-4, rtol=1e-4)
    assert static.lengths == [length + 46 for length in RAGGED]
    assert assert_same_pages(static, dynamic) > 0


@pytest.mark.parametrize("name", ["kivi", "queries"])
def test_two_layers_agree_but_for_rounding(name: str) -> None:
    """Where a second layer's keys differ in the last bit, a code may change: then a logit by a quantization
    step."""
    ids = random_ids(2, 150)
    (_, expected), (static, found) = both(plan_for(name, num_layers=2), ids, 120, layers=2)
    difference = (found - expected).abs()
    assert difference.median() < 1e-5 and difference.max() < 1e-2 * expected.abs().max()
    assert static.lengths == [150, 150]


@pytest.mark.parametrize(("name", "chunk"), [("kitty", None), ("kivi", 81)])  # 81 leaves one column to the last chunk
def test_generate_gives_the_same_tokens(name: str, chunk: int | None) -> None:
    model, plan = tiny_llama(2, 2), plan_for(name, num_layers=2)
    ids, mask = padded([random_ids(1, length, seed=length)[0] for length in (244, 180, 3)], 244, "left")
    options = {"max_new_tokens": 20, "do_sample": False, "prefill_chunk_size": chunk, "attention_mask": mask}
    expected = model.generate(ids.long(), past_key_values=PlanCache(plan, model.config, mask), **options)
    static = PlanCache(plan, model.config, mask, max_tokens=300)
    with attached(model):
        found = model.generate(ids.long(), past_key_values=static, **options)
    assert torch.equal(found, expected)
    assert static.lengths == [244 + 19, 180 + 19, 3 + 19]


@pytest.mark.parametrize("name", SUPPORTED)
def test_families(name: str) -> None:
    """Every model the adapter takes either decodes from a static cache as from the dynamic one, or is
    refused."""
    model, inputs = built(name), batch()
    plan = model_plan(model, Format(4, "channel", 32), Format(4, "token", 32))
    reasons = {"llama4": "it attends in chunks", "falcon_h1": "a state besides keys and values"}
    reasons["gemma3n"] = "it reads another layer's keys and values"
    reason = "latents" if plan.geometry.has_latents else reasons.get(name)
    if reason is not None:
        with pytest.raises(UnsupportedModel, match=rf"static cache cannot hold layer \d: {reason}"):
            PlanCache(plan, model.config, inputs["attention_mask"], max_tokens=40)
        return
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    found = []
    for max_tokens in (None, 40):
        cache = PlanCache(plan, model.config, inputs["attention_mask"], max_tokens=max_tokens)
        with attached(model):  # leaves the dynamic cache alone
            result = model.generate(**inputs, past_key_values=cache, **options)
        found.append(torch.stack(result.logits))
    torch.testing.assert_close(found[1], found[0], atol=1e-3, rtol=1e-3)


def test_a_shared_attention_module_cannot_be_attached() -> None:
    """Zamba2's layers call one block: which layer's cache a call belongs to is not known there."""
    with (
        pytest.raises(UnsupportedModel, match="several layers of Zamba2ForCausalLM call the same attention"),
        attached(built("zamba2")),
    ):
        pytest.fail("it was attached")


def test_a_compiled_step_is_one_graph_that_serves_every_step() -> None:
    model, plan = tiny_llama(2, 2), plan_for("kitty", num_layers=2)
    ids = random_ids(2, 140)
    backend = CompileCounter()

    def step(token: Tensor, position: Tensor, cache: PlanCache) -> Tensor:
        return model(token, position_ids=position, past_key_values=cache).logits

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    caches = [PlanCache(plan, model.config, max_tokens=140) for _ in range(2)]
    with attached(model), torch.no_grad():
        expected = decode(model, caches[0], ids, 120)[:, 120:]
        feed(model, caches[1], ids[:, :120])
        found = [compiled(ids[:, i : i + 1], torch.full((2, 1), i), caches[1]) for i in range(120, 140)]
    assert torch.equal(torch.cat(found, dim=1), expected)
    assert backend.frame_count == 1 and caches[1].lengths == [140, 140]


def test_generate_compiles_the_step_by_itself() -> None:
    model, plan = tiny_llama(2, 2), plan_for("kivi", num_layers=2)
    assert_generate_compiles_one_graph(model, plan, random_ids(2, 120), 12)


def test_scaling_softcap_and_sinks_of_attention() -> None:
    """``attend`` in fp64: softcap before the softmax, a logit without a value in it."""
    plan = plan_for("16 bits", cache_dtype="float32")
    cache = PlanCache(plan, tiny_llama(2, 1).config, max_tokens=8)
    q, k, v = random_qkv(1, 2, 5)
    s_aux = torch.randn(8)
    cache.allocate(1, "cpu")
    for t in range(5):
        one = slice(t, t + 1)
        out = cache.layers[0].attend(q[:, :, one], k[:, :, one], v[:, :, one], s_aux, 0.3, 2.5)
    assert out.shape == (1, 1, 8, HEAD_DIM)
    for head in range(8):
        scores = [
            2.5 * math.tanh(0.3 * float(q[0, head, 4].double() @ k[0, head // 4, s].double()) / 2.5) for s in range(5)
        ]
        total = sum(map(math.exp, scores)) + math.exp(float(s_aux[head]))
        expected = sum(math.exp(score) / total * v[0, head // 4, s].double() for s, score in enumerate(scores))
        torch.testing.assert_close(out[0, 0, head].double(), expected, atol=1e-5, rtol=1e-5)


def test_other_caches_are_left_alone_and_the_model_is_restored() -> None:
    model, ids = tiny_llama(2, 2), random_ids(2, 30)
    with torch.no_grad():
        expected = [feed(model, cache, ids, range(20, 30)) for cache in (DynamicCache(config=model.config),)]
        with attached(model):
            assert model.config._attn_implementation == "kvcal_attached_sdpa"
            for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=32)):
                torch.testing.assert_close(feed(model, cache, ids, range(20, 30)), expected[0])
            with pytest.raises(UsageError, match="tapped already") as caught, attached(model):
                pytest.fail("entered twice")
            assert "leave the other context first; attached, entered once, serves all threads" in caught.value.hint
        with pytest.raises(ArithmeticError), attached(model):
            raise ArithmeticError
    assert model.config._attn_implementation == "sdpa" and not _ATTACHED
    assert not model.get_decoder()._forward_pre_hooks


def test_a_static_cache_needs_the_context() -> None:
    model = tiny_llama(2, 1)
    cache = PlanCache(plan_for("kivi"), model.config, max_tokens=32)
    for _ in range(2):
        with pytest.raises(UsageError, match="must be used inside") as error:
            feed(model, cache, random_ids(1, 5))
        assert "kvcal.attached(model)" in str(error.value.hint)
        with attached(model):
            feed(model, cache, random_ids(1, 5))
        assert cache.lengths == [5]
        cache.reset()


def test_a_mask_that_the_cache_does_not_know_is_refused() -> None:
    model, plan = tiny_llama(2, 1), plan_for("kivi")
    ids, mask = padded([random_ids(1, length)[0] for length in (9, 6)], 9, "left")
    with attached(model):
        with pytest.raises(UsageError, match="not the one that its cache was built with"):
            feed(model, PlanCache(plan, model.config, max_tokens=20), ids.long(), mask=mask)
        cache = PlanCache(plan, model.config, mask, max_tokens=20)
        with pytest.raises(UsageError, match="not the one that its cache was built with"):
            feed(model, cache, ids.long())
        cache = PlanCache(plan, model.config, mask, max_tokens=20)
        feed(model, cache, ids.long(), mask=mask)
        own = torch.zeros(2, 1, 1, 10)
        with pytest.raises(UnsupportedModel, match="is given a mask of its own"), torch.no_grad():
            model(ids[:, :1].long(), attention_mask=own, position_ids=torch.tensor([[9], [6]]), past_key_values=cache)


def test_models_that_cannot_be_served() -> None:
    with pytest.raises(UnsupportedModel, match="BloomForCausalLM bypasses"), attached(built("bloom")):
        pytest.fail("entered")
    model = tiny_llama(2, 1)
    with ExitStack() as restore:
        restore.callback(model.set_attn_implementation, "sdpa")
        model.set_attn_implementation("flex_attention")
        with pytest.raises(UsageError, match="supported: sdpa, eager"), attached(model):
            pytest.fail("entered")
        model.set_attn_implementation("eager")
        cache = PlanCache(plan_for("queries"), model.config, max_tokens=200)
        with attached(model):
            decode(model, cache, random_ids(1, 150), 140)
        assert cache.lengths == [150] and QUERY.needs_queries


def test_beams_reorder_rows_in_place() -> None:
    model, plan = tiny_llama(2, 2), plan_for("16 bits", num_layers=2, cache_dtype="float32")
    ids = random_ids(2, 244)
    options = {"max_new_tokens": 40, "num_beams": 3, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, past_key_values=DynamicCache(config=model.config), **options)
    static = PlanCache(plan, model.config, max_tokens=284)
    with attached(model):
        assert torch.equal(model.generate(ids, past_key_values=static, **options), expected)
    assert static.nbytes == plan.nbytes([284] * 6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_mask_that_the_attention_adds_numbers_to_is_named(attention: str) -> None:
    """Doge's, of a prompt without any mask; a dynamic cache takes it."""
    config = hf.DogeConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, attn_implementation=attention,
    )  # fmt: skip
    model, ids = hf.DogeForCausalLM(config).eval(), random_ids(1, 9)
    cache = PlanCache(model_plan(model), config, max_tokens=32)
    with attached(model), pytest.raises(UnsupportedModel, match="DogeAttention adds numbers to its mask") as caught:
        feed(model, cache, ids)
    assert "without max_tokens" in str(caught.value.hint)
    feed(model, PlanCache(cache.plan, config), ids)


@pytest.mark.parametrize(("device", "is_attached"), [("cpu", False), ("cuda", True)])
def test_what_generates_on_a_gpu_is_attached(device: str, is_attached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(2, 1)
    monkeypatch.setattr(type(model), "device", torch.device(device))
    with decoding(model, plan_for("uniform")):
        assert bool(_ATTACHED) == is_attached
    assert not _ATTACHED


def test_a_model_whose_attention_stays_generates_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(2, 1)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    monkeypatch.setattr("kvcal.cache.attached.attention_modules", Mock(side_effect=UnsupportedModel("bypasses it")))
    with decoding(model, plan_for("uniform")):
        assert not _ATTACHED
    with pytest.raises(UnsupportedModel), decoding(model, plan_for("queries")):
        pass
