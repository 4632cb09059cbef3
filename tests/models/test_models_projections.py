"""KV projections over every tiny model: the right rows of the right weight, against independent gradients."""

import pytest
import torch
from reparam_cases import outlier_model
from tiny_models import SUPPORTED, TINY_MODELS, batch, built, captured_by, measured
from transformers import BartConfig, BartForCausalLM, BertConfig, BertLMHeadModel

from kvcal.errors import UnsupportedModel
from kvcal.models.projections import kv_projections, output_dim, output_weights
from kvcal.models.supported_layers import attention_layers, geometry_of


def flows_of(model, projections, inputs) -> dict:
    """{module: (its inputs, the gradients of its outputs)} of a backward of the model's own loss."""
    flows, hooks = {}, []

    def keep(module, args, output):
        output.register_hook(lambda gradient: flows.update({module: (args[0].detach(), gradient)}))

    for module in {projection.module: None for projection in projections}:
        hooks.append(module.register_forward_hook(keep))
    model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
    for hook in hooks:
        hook.remove()
    return flows


@pytest.mark.parametrize("name", SUPPORTED)
def test_projection_gradient_norms(name):
    """Of each sequence: ‖Σ g x'‖ head by head; of one sequence alone, the norm of autograd's own gradient."""
    model, geometry, inputs = built(name), measured(name), batch()
    projections = kv_projections(model, geometry)
    layers = {layer.index: layer for layer in attention_layers(geometry)}
    assert [(p.layer, p.side) for p in projections] == [(i, side) for i in layers for side in "kv"]
    flows = flows_of(model, projections, inputs)
    model.zero_grad(set_to_none=True)
    for projection in projections:
        heads, layer = projection.channels_ND, layers[projection.layer]
        head_dim = layer.k_head_dim if projection.side == "k" else layer.v_head_dim
        assert heads.shape == (layer.num_kv_heads, head_dim)
        x, gradient = (
            tensor.unflatten(0, (2, -1)) if tensor.dim() == 2 else tensor for tensor in flows[projection.module]
        )
        found = projection.weight_grad_norms(x, gradient)
        assert found.dtype == torch.float64 and found.shape == (2,)
        for row in range(2):
            squares = [(gradient[row][:, channels].double().T @ x[row].double()).square().sum() for channels in heads]
            assert float(found[row]) == pytest.approx(float(sum(squares)) ** 0.5, rel=1e-4)
    one = {key: value[:1] for key, value in inputs.items()}
    flows = flows_of(model, projections, one)
    for projection in projections:
        module, heads = projection.module, projection.channels_ND.flatten()
        x, gradient = (tensor.reshape(1, -1, tensor.shape[-1]) for tensor in flows[module])
        expected = module.weight.grad.movedim(output_dim(module), 0)[heads].norm()
        assert float(projection.weight_grad_norms(x, gradient)) == pytest.approx(float(expected), rel=1e-4)
    model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("name", SUPPORTED)
def test_projection_channels_make_the_keys_and_values(name):
    """Zero one head's channels in the weight (and bias): exactly that head's K or V becomes zero."""
    model, geometry, inputs = TINY_MODELS[name](), measured(name), batch()
    for projection in kv_projections(model, geometry)[-2:]:  # the last layer: nothing after it changes
        module, channels = projection.module, projection.channels_ND[-1]
        before, _ = captured_by(model, geometry, inputs)
        with torch.no_grad():
            module.weight.movedim(output_dim(module), 0)[channels] = 0
            if module.bias is not None:
                module.bias[channels] = 0
        after, _ = captured_by(model, geometry, inputs)
        for tensor in ("k_post_BNTD", "v_BNTD"):
            old, new = getattr(before[-1], tensor), getattr(after[-1], tensor)
            if tensor[0] != projection.side:
                torch.testing.assert_close(new, old)
                continue
            assert new[:, -1].abs().max() == 0
            if name != "olmo2":  # its norm runs over all heads at once
                torch.testing.assert_close(new[:, :-1], old[:, :-1])
        assert before[-1].q_post_BHTD.allclose(after[-1].q_post_BHTD, atol=1e-6)


def test_projection_refusals_say_why():
    with pytest.raises(UnsupportedModel, match="FalconForCausalLM bypasses"):
        kv_projections(built("falcon"), measured("falcon"))
    model = TINY_MODELS["llama"]()
    attention = model.model.layers[1].self_attn
    attention.register_module("k_proj", torch.nn.Sequential(attention.k_proj))
    with pytest.raises(UnsupportedModel, match="layer 1: LlamaAttention has the children"):
        kv_projections(model, measured("llama"))


def test_cross_attention_that_is_not_called_is_no_layer() -> None:
    """Found by going through the families: a decoder taken out of its encoder-decoder carries unused modules
    with the same layer indices, and their weights are in no loss."""
    torch.manual_seed(0)
    shape = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 32, "vocab_size": 64}
    config = BartConfig(
        **shape, encoder_layers=2, max_position_embeddings=64, is_decoder=True, is_encoder_decoder=False
    )
    model = BartForCausalLM(config).eval()
    decoder = model.get_decoder()
    found = {(one.layer, one.side): one.module for one in kv_projections(model, geometry_of(model))}
    for index, layer in enumerate(decoder.layers):
        assert found[index, "k"] is layer.self_attn.k_proj and found[index, "v"] is layer.self_attn.v_proj
    assert all(hasattr(layer, "encoder_attn") for layer in decoder.layers)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gpt_neox", "phi3", "glm4"])
def test_output_weights_are_what_reads_the_heads(name: str) -> None:
    model = built(name)
    geometry = geometry_of(model)
    weights = output_weights(model, geometry)
    for layer in geometry.layers:
        found = weights[layer.index]
        assert found.shape[1:] == (layer.num_query_heads, layer.v_head_dim)
        modules = [m for m in model.modules() if getattr(m, "layer_idx", None) == layer.index]
        module = next(m for m in modules if any(hasattr(m, child) for child in ("o_proj", "dense", "c_proj")))
        projection = next(getattr(module, n) for n in ("o_proj", "dense", "c_proj") if hasattr(module, n))
        heads = torch.randn(3, layer.num_query_heads, layer.v_head_dim)
        bias = projection.bias if projection.bias is not None else 0.0
        torch.testing.assert_close(torch.einsum("thd,chd->tc", heads, found) + bias, projection(heads.flatten(1)))


def test_an_output_projection_of_other_inputs_is_refused() -> None:
    model = outlier_model()
    geometry = geometry_of(model)
    projection = model.model.layers[1].self_attn.o_proj
    projection.weight = torch.nn.Parameter(projection.weight[:, :-1])
    with pytest.raises(UnsupportedModel, match="layer 1: .* known output projections of 64 inputs: o_proj"):
        output_weights(model, geometry)


def test_the_output_projection_of_bert_is_next_to_its_attention() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = BertLMHeadModel(BertConfig(**sizes, vocab_size=96, is_decoder=True)).eval()
    weights = output_weights(model, geometry_of(model))
    for found, layer in zip(weights.values(), model.bert.encoder.layer, strict=True):
        assert torch.equal(found, layer.attention.output.dense.weight.unflatten(1, (4, 16)))
