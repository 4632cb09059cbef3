"""Attention whose backward repeats its bits: torch's settings within it, and the bits themselves on a GPU."""

from unittest.mock import Mock

import pytest
import torch
from tiny_models import TINY_MODELS
from torch import nn

from kvcal.models.attention import repeatable_attention


def settings() -> tuple[bool, int, bool]:
    return (
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.get_deterministic_debug_mode(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


def watched(model: nn.Module) -> dict[str, list[tuple[bool, int, bool]]]:
    """torch's settings when gradients of attention's arguments, and of all else, are there."""
    seen: dict[str, list[tuple[bool, int, bool]]] = {"forward": [], "after": [], "attention": []}

    def attend(*args: torch.Tensor, **kwargs: object) -> torch.Tensor:
        seen["forward"].append(settings())
        output = original(*args, **kwargs)
        output.grad_fn.register_hook(lambda *_: seen["attention"].append(settings()))
        return output

    original = torch.nn.functional.scaled_dot_product_attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
        output = model(input_ids=torch.arange(3, 19).view(2, 8), use_cache=False).logits
    for layer in model.model.layers:
        weight = layer.self_attn.q_proj.weight
        weight.register_post_accumulate_grad_hook(lambda _: seen["after"].append(settings()))
    output.square().mean().backward()
    return seen


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3"])
def test_only_the_backward_of_attention_is_deterministic(family: str) -> None:
    model, before = TINY_MODELS[family]().train(), settings()
    with repeatable_attention(model):
        seen = watched(model)
    count = model.config.num_hidden_layers
    assert seen["forward"] == seen["after"] == [(False, *before[1:])] * count
    assert seen["attention"] == [(False, 2, False)] * count  # 2: an operation without an order raises
    assert settings() == before and watched(model)["attention"] == [before] * count


def test_settings_are_restored_after_an_error() -> None:
    model, before = TINY_MODELS["llama"](), settings()
    fail, logits = Mock(side_effect=RuntimeError("no gradient")), None
    with pytest.raises(RuntimeError, match="no gradient"), repeatable_attention(model):
        model.model.layers[0].self_attn.q_proj.weight.register_hook(fail)
        logits = model(input_ids=torch.arange(3, 19).view(2, 8), use_cache=False).logits
        logits.square().mean().backward()
    assert logits is not None and settings() == before


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_gpu_repeats_the_bits_of_a_backward(head_dim: int) -> None:
    """Enough queries that atomics would add up in many orders; on every GPU there is."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=1024, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=1024 // head_dim,
        num_key_value_heads=4, head_dim=head_dim, vocab_size=256,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    tokens_BT = torch.randint(3, 256, (4, 2048), generator=torch.Generator().manual_seed(1))
    gradients = []
    for number in range(torch.cuda.device_count()):
        model.to(f"cuda:{number}")
        for _ in range(6):
            model.zero_grad()
            with repeatable_attention(model):
                model(input_ids=tokens_BT.to(model.device), use_cache=False).logits.float().square().mean().backward()
            weights = (model.model.layers[0].self_attn.q_proj.weight, model.model.layers[1].self_attn.k_proj.weight)
            gradients.append([weight.grad.cpu() for weight in weights])
    for found in gradients[1:]:
        assert all(map(torch.equal, found, gradients[0]))
