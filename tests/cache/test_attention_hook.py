"""Listening to attention: it hears the true queries, keys and values, changes no logits, and leaves no
trace."""

from functools import partial
from typing import Any

import pytest
import torch
from tiny_models import batch, built, measured
from torch import Tensor, nn
from transformers import DynamicCache, LlamaForCausalLM

from kvcal.errors import UnsupportedModel, UsageError
from kvcal.models.attention import _LISTENING, attention_modules, layer_index, listen
from kvcal.models.supported_layers import attention_layers
from kvcal.models.taps import tap

FAMILIES = ("llama", "gemma3", "gpt2", "gpt_oss", "qwen3_next")
Call = tuple[nn.Module, Tensor, Tensor, Tensor]


def decode(model: Any, inputs: dict, steps: int = 3) -> list[Tensor]:
    """Logits of a prompt and of a few tokens after it, through the official cache."""
    cache = DynamicCache(config=model.config)
    mask = inputs["attention_mask"]
    with torch.no_grad():
        logits = [model(**inputs, past_key_values=cache, use_cache=True).logits]
        for _ in range(steps):
            mask = nn.functional.pad(mask, (0, 1), value=1)
            ids = logits[-1][:, -1:].argmax(-1)
            logits.append(model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True).logits)
    return logits


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_with_a_cache_are_the_same_bit_for_bit(name: str, implementation: str) -> None:
    if (name, implementation) == ("gpt_oss", "sdpa"):
        implementation = "eager"  # transformers has no sdpa for its attention sinks
    model, inputs = built(name), batch()
    initial = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    heard: list[Call] = []
    expected = decode(model, inputs)
    with listen(model, lambda *call: heard.append(call)):
        found = decode(model, inputs)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    layers = attention_layers(measured(name))
    assert [layer_index(call[0]) for call in heard] == [layer.index for layer in layers] * 4
    assert model.config._attn_implementation == implementation
    assert not _LISTENING
    model.set_attn_implementation(initial)


def attended_by_hand(q_post_BHTD: Tensor, k_post_BNSD: Tensor, v_BNSD: Tensor) -> Tensor:
    """Causal attention in fp64, [B, T, H * D]."""
    T, S = q_post_BHTD.shape[2], k_post_BNSD.shape[2]
    mask = torch.ones(T, S, dtype=torch.bool).tril(S - T)
    q, k, v = (x.double() for x in (q_post_BHTD, k_post_BNSD, v_BNSD))
    attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return attended.transpose(1, 2).flatten(2)


def test_what_is_heard_gives_the_attention_that_the_model_computes() -> None:
    """In decoding, too: the queries are post-RoPE, [B, H, T, D], and head h reads KV head h // (H / N)."""
    model = built("llama")
    inputs: dict[int | None, Tensor] = {}

    def keep(index: int | None, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs[index] = args[0]

    hooks = [
        module.get_submodule("o_proj").register_forward_pre_hook(partial(keep, layer_index(module)))
        for module in attention_modules(model)
    ]
    heard: list[Call] = []
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), listen(model, lambda *call: heard.append(call)):
        for ids in (torch.tensor([[5, 9, 3, 7, 11]]), torch.tensor([[4]]), torch.tensor([[8, 6]])):
            heard.clear()
            model(input_ids=ids, past_key_values=cache, use_cache=True)
            for module, q_post_BHTD, k_post_BNSD, v_BNSD in heard:
                expected = attended_by_hand(q_post_BHTD, k_post_BNSD, v_BNSD)
                torch.testing.assert_close(inputs[layer_index(module)].double(), expected, atol=1e-5, rtol=1e-5)
    for hook in hooks:
        hook.remove()
    assert len(heard) == 3 and heard[0][1].shape[2] == 2 and heard[0][2].shape[2] == 8


def test_one_listener_at_a_time_whether_a_tap_or_not() -> None:
    model, geometry = built("llama"), measured("llama")
    heard: list[Call] = []
    with listen(model, lambda *call: heard.append(call)):
        with pytest.raises(UsageError, match="LlamaForCausalLM is tapped already"), listen(model, print):
            pytest.fail("heard twice")
        with pytest.raises(UsageError, match="tapped already"), tap(model, print):
            pytest.fail("heard twice")
        assert not heard  # the refused tap did not run the model to measure it
        model(**batch())
    assert len(heard) == 3
    tapped = tap(model, lambda captured: None, geometry)
    with tapped, pytest.raises(UsageError, match="tapped already"), listen(model, print):
        pytest.fail("heard twice")
    assert not _LISTENING and model.config._attn_implementation == "sdpa"


def test_a_model_that_shares_the_configuration_is_not_heard() -> None:
    model = built("llama")
    other = LlamaForCausalLM(model.config).eval()
    assert other.config is model.config
    heard: list[Call] = []
    with torch.no_grad():
        expected = other(**batch()).logits
        with listen(model, lambda *call: heard.append(call)):
            assert torch.equal(other(**batch()).logits, expected)
    assert not heard


def test_other_attention_is_refused_with_the_reason() -> None:
    model = built("llama")
    model.set_attn_implementation("flex_attention")
    reason = "'flex_attention' has masks of another form; supported: sdpa, eager"
    with pytest.raises(UsageError, match=reason), listen(model, print):
        pytest.fail("entered")
    assert model.config._attn_implementation == "flex_attention"
    model.set_attn_implementation("sdpa")
    with pytest.raises(UnsupportedModel, match="BloomForCausalLM bypasses"), listen(built("bloom"), print):
        pytest.fail("entered")
