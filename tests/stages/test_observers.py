"""Sensitivity and gradient norms against references that share no code with them: NumPy scalars, retained
gradients, finite differences."""

import gc
import math
from itertools import product

import numpy as np
import pytest
import torch
from profile_cases import (
    ALL,
    FEW,
    Watched,
    batch_of,
    gqa_model,
    measure,
    quantization_error,
    reference_errors,
    row_of,
    sample_of,
)
from tiny_models import built, measured
from torch import Tensor
from transformers import PreTrainedModel

from kvcal.data.sequences import TokenDataset
from kvcal.errors import NonFiniteActivations
from kvcal.models.attention import _LISTENING
from kvcal.models.supported_layers import geometry_of
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.pages.uniform import UniformLayout
from kvcal.recipe import CacheSpec
from kvcal.stages.checkpoint import Batch, Mean
from kvcal.stages.profile.observers import OBSERVERS, GradientPass, next_token_losses
from kvcal.stages.profile.sensitivity import Candidate, Errors, quantization_errors, range_refusal


def observer(model: PreTrainedModel, wanted=ALL, sinks: int = 4) -> GradientPass:
    return GradientPass(model, geometry_of(model, "float32"), wanted, CacheSpec(num_sink_tokens=sinks))


def errors_of(x_NTD: Tensor, g_NTD: Tensor, wanted, sinks: int, cache_dtype: str, param_dtype="float16") -> Errors:
    """Of one sequence, without the dimension of the batch."""
    length_1, cache = torch.tensor([x_NTD.shape[1]]), CacheSpec(num_sink_tokens=sinks, param_dtype=param_dtype)
    found = quantization_errors(x_NTD[None], g_NTD[None], length_1, wanted, cache, cache_dtype)
    return Errors(*(part[0] for part in found))


def next_token_loss(logits_TV: Tensor, tokens_T: Tensor, mask_T: Tensor) -> Tensor:
    """Of one sequence."""
    return next_token_losses(logits_TV[None], tokens_T[None], mask_T[None])[0][0]


@pytest.mark.gpu
def test_losses_on_a_gpu_have_the_same_bits_each_time() -> None:
    torch.manual_seed(0)
    logits_BTV, tokens_BT = torch.randn(4, 2048, 64).cuda() * 3, torch.randint(64, (4, 2048)).cuda()
    mask_BT = torch.rand(4, 2048).cuda() > 0.1
    first, *others = (next_token_losses(logits_BTV, tokens_BT, mask_BT) for _ in range(20))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def loss_by_hand(logits_TV: Tensor, tokens_T: Tensor, mask_T: Tensor) -> Tensor:
    """-log p of token t from the logits of position t - 1, one token at a time."""
    terms = []
    for t in range(1, len(tokens_T)):
        if mask_T[t]:
            row = logits_TV[t - 1]
            terms.append(torch.log(torch.exp(row - row.max()).sum()) + row.max() - row[tokens_T[t]])
    return torch.stack(terms).mean()


def test_weighted_errors_are_those_of_scalar_arithmetic() -> None:
    """Sinks, a whole page, a partial page with a partial group; channels no multiple of a group."""
    torch.manual_seed(0)
    x_NTD, g_NTD = torch.randn(1, 4 + 128 + 41, 40) * 3, torch.randn(1, 4 + 128 + 41, 40)
    for wanted in (Candidate(1, "channel", 32), Candidate(3, "channel", 128), Candidate(2, "token", 32)):
        found = errors_of(x_NTD, g_NTD, [wanted], 4, "bfloat16")
        rounded = x_NTD.bfloat16().float()
        error = quantization_error(rounded[0].numpy(), wanted, 4)
        expected = np.abs(error * g_NTD[0].double().numpy()).sum()
        assert found.weighted_BNC.dtype == torch.float64 and found.weighted_BNC.shape == (1, 1)
        assert float(found.weighted_BNC) == pytest.approx(expected, rel=1e-6)
        assert float(found.squared_BC) == pytest.approx((error**2).sum(), rel=1e-6)
        assert float(found.energy_B) == pytest.approx(float(rounded[0, 4:].double().square().sum()), rel=1e-6)


@pytest.mark.parametrize("head_dim", [16, 80])
@pytest.mark.parametrize("side", ["k", "v"])
def test_errors_are_bit_for_bit_those_of_a_packed_page(side: str, head_dim: int) -> None:
    """With a weight on one channel, the sum is over 128 numbers, exact in fp64: one wrong bit would show."""
    torch.manual_seed(1)
    x_NTD = torch.randn(3, PAGE_TOKENS, head_dim) * torch.tensor([0.01, 1.0, 100.0]).view(3, 1, 1)
    x_NTD[1, :, 2] = 0.7  # constant along tokens
    x_NTD[2, 5] = -3.0  # constant along channels
    errors = {}
    for wanted in ALL[side]:
        layout = UniformLayout(side, *wanted[:3], head_dim, "float16", "bfloat16")
        rounded = x_NTD.bfloat16()
        errors[wanted] = (layout.decode(layout.encode(rounded)) - rounded.float()).abs().double()
    for channel in (2, head_dim - 1):
        g_NTD = torch.zeros_like(x_NTD)
        g_NTD[..., channel] = -1.0
        found_NC = errors_of(x_NTD, g_NTD, ALL[side], 0, "bfloat16").weighted_BNC
        for column, wanted in enumerate(ALL[side]):
            expected_N = errors[wanted][..., channel].sum(-1)
            torch.testing.assert_close(found_NC[:, column], expected_N, rtol=1e-13, atol=0)
    assert float(found_NC.min()) > 0


def test_tokens_in_the_sinks_cost_nothing() -> None:
    x_NTD = torch.randn(2, 6, 16)
    few = errors_of(x_NTD, torch.ones_like(x_NTD), FEW["k"], 6, "float32")
    assert few.weighted_BNC.shape == (2, 2) and not any(part.any() for part in few)
    one = errors_of(x_NTD, torch.ones_like(x_NTD), FEW["k"], 5, "float32")
    assert (one.weighted_BNC[:, 1] > 0).all()


def test_a_range_beyond_the_parameters_is_refused() -> None:
    x_NTD = torch.tensor([-6e4, 6e4]).view(1, 2, 1)
    [candidate] = wanted = [Candidate(1, "channel", 32)]
    narrow = errors_of(x_NTD, x_NTD, wanted, 0, "float32")
    assert not torch.isfinite(narrow.squared_BC).any() and torch.isfinite(narrow.energy_B)
    assert "a group of 32 values" in range_refusal(candidate, "float16").message
    wide = errors_of(x_NTD, x_NTD, wanted, 0, "float32", "bfloat16")
    assert torch.isfinite(wide.weighted_BNC).all()


def test_one_backward_gives_the_sensitivities_and_norms_of_a_reference() -> None:
    """Reference: the model in fp64 with all weights trained and every key and value retaining its gradient.
    Pairing a layer's error with the gradient of the layer at the other end, as the paper's public code does,
    must fail."""
    tokens_T, mask_T = sample_of(4 + 128 + 41)
    found = measure(observer(gqa_model("qwen3"), FEW), 0, tokens_T, mask_T)
    model = gqa_model("qwen3", torch.float64)
    cache = Watched(model.config)
    logits_TV = model(input_ids=tokens_T.unsqueeze(0), past_key_values=cache, use_cache=True).logits[0]
    loss = loss_by_hand(logits_TV, tokens_T, mask_T)
    loss.backward()
    assert float(found.loss_B) == pytest.approx(loss.item(), rel=1e-5)
    for number, layer in enumerate(model.model.layers):
        for side, projection in (("k", layer.self_attn.k_proj), ("v", layer.self_attn.v_proj)):
            norm = math.sqrt(float((projection.weight.grad**2).sum()))
            assert found.weight_grad_norms[number, side] == pytest.approx(norm, rel=1e-4)
            own, opposite = (reference_errors(cache, number, n, FEW[side], side) for n in (number, 3 - number))
            torch.testing.assert_close(found.errors[number, side].weighted_BNC, own, rtol=1e-4, atol=0)
            assert not torch.isclose(found.errors[number, side].weighted_BNC, opposite, rtol=0.3).any()


def test_sensitivities_agree_with_finite_differences_of_the_loss() -> None:
    """No gradient at all: every cached key and value of every layer is nudged up and down, and the loss is
    measured. A reversed or shifted order of the layers fails, and so does a gradient of another loss."""
    tokens_T, mask_T = sample_of(9, num_prompt=2)
    wanted = {"k": (Candidate(2, "token", 32),), "v": (Candidate(2, "token", 32),)}
    found = measure(observer(gqa_model("llama"), wanted, sinks=0), 0, tokens_T, mask_T)
    model = gqa_model("llama", torch.float64)
    slopes, states = {}, {}
    for number, side in product(range(4), "kv"):
        slopes[number, side], states[number, side] = finite_differences(model, tokens_T, mask_T, number, side)
    right, reversed_order = [], []
    for number, side in product(range(4), "kv"):
        x_NTD = states[number, side]
        e_NTD = np.stack([quantization_error(x.numpy(), wanted[side][0], 0) for x in x_NTD])
        for pairs, other in ((right, number), (reversed_order, 3 - number)):
            expected_N = (slopes[other, side] * torch.from_numpy(e_NTD)).abs().sum((1, 2))
            pairs.append((found.errors[number, side].weighted_BNC[:, 0], expected_N))
    for found_N, expected_N in right:
        torch.testing.assert_close(found_N, expected_N, rtol=2e-3, atol=0)
    assert not any(torch.allclose(found_N, expected_N, rtol=0.1) for found_N, expected_N in reversed_order)


def finite_differences(
    model: PreTrainedModel, tokens_T: Tensor, mask_T: Tensor, number: int, side: str
) -> tuple[Tensor, Tensor]:
    """(the loss's slopes [N, T, D], the states) for one layer's side: a row of the batch for each nudge."""
    N, T, D = 2, len(tokens_T), 16
    nudge = 2e-2  # norms and rotations are fp32 in any model: a smaller one would drown in their rounding
    unit = nudge * torch.eye(N * T * D, dtype=torch.float64).view(-1, N, T, D)
    cache = Watched(model.config, {(number, side): torch.cat([unit, -unit, torch.zeros_like(unit[:1])])})
    with torch.no_grad():
        batch_BT = tokens_T.expand(2 * len(unit) + 1, T)
        logits_BTV = model(input_ids=batch_BT, past_key_values=cache, use_cache=True).logits
    losses = torch.nn.functional.cross_entropy(logits_BTV[:, :-1].transpose(1, 2), batch_BT[:, 1:], reduction="none")
    loss_B = losses[:, mask_T[1:]].mean(1)
    slopes = (loss_B[: len(unit)] - loss_B[len(unit) : -1]) / (2 * nudge)
    return slopes.view(N, T, D), cache.kept[number, side][-1]


def test_labels_are_shifted_once_and_the_prompt_is_left_out() -> None:
    tokens_T, mask_T = sample_of(12, num_prompt=4)
    sure = torch.full((12, 64), -30.0)
    sure[torch.arange(11), tokens_T[1:]] = 30.0  # position t predicts token t + 1, and a double shift none
    assert float(next_token_loss(sure, tokens_T, mask_T)) < 1e-6
    logits_TV = torch.randn(12, 64, generator=torch.Generator().manual_seed(1))
    loss = next_token_loss(logits_TV, tokens_T, mask_T)
    assert float(loss) == pytest.approx(float(loss_by_hand(logits_TV, tokens_T, mask_T)), rel=1e-5)
    other_TV = logits_TV.clone()
    other_TV[:3], other_TV[-1] = 7.0 * torch.rand(3, 64), -5.0  # these predict the prompt, and nothing
    assert torch.equal(next_token_loss(other_TV, tokens_T, mask_T), loss)
    other_TV[3] = torch.rand(64)  # the last token of the prompt predicts the first loss token
    assert not torch.isclose(next_token_loss(other_TV, tokens_T, mask_T), loss)


def test_the_gradient_is_of_a_mean_over_loss_tokens() -> None:
    """Tokens outside the loss change no earlier token's sensitivity; a mean over all tokens would."""
    model = gqa_model("llama")
    tokens_T, mask_T = sample_of(132 + 128)
    half = measure(observer(model), 0, tokens_T[:132], mask_T[:132])
    mask_T[132:] = False
    whole = measure(observer(model), 0, tokens_T, mask_T)
    assert float(whole.loss_B) == pytest.approx(float(half.loss_B), rel=1e-5)
    # 4 sinks and one page: the tokens after them have no gradient.
    torch.testing.assert_close(
        whole.errors[1, "k"].weighted_BNC, half.errors[1, "k"].weighted_BNC, rtol=1e-4, atol=1e-12
    )


@pytest.mark.parametrize("name", ["phi3", "qwen3_moe", "gemma3", "qwen3_next", "gpt_oss", "gpt2"])
def test_a_ragged_batch_gives_each_sequence_what_it_gives_alone(name: str) -> None:
    """Padded on the right: after two pages, within the first, and after the sinks alone.

    Forwards of other shapes round otherwise: 1e-6 of a value, 1e-5 with room for any CPU. Errors are
    continuous in the values, since a value in the middle between two codes is as far from both, and with
    parameters in fp32 only: the next fp16 scale is another one by 1e-3. A sum of squared errors then moves by
    2e-5 times the ratio of values to errors, which is below 50 at up to 4 bits (root mean square of both)."""
    model, geometry = built(name), measured(name)
    wanted = {"k": (*FEW["k"], Candidate(4, "channel", 64)), "v": (*FEW["v"], Candidate(2, "token", 128, "rotated"))}
    gradients = GradientPass(model, geometry, wanted, CacheSpec(param_dtype="float32"))
    samples = [sample_of(length, seed=length) for length in (270, 140, 5)]
    samples[2][1][:] = torch.arange(5) > 2
    data = TokenDataset(*(tuple(parts) for parts in zip(*samples, strict=True)), "f", "random")
    together = gradients.measure_together([Batch.of(data, (2, 0, 1))])[0]
    full = {layer.index for layer in geometry.layers if getattr(layer, "window", 1) is None}
    assert together.errors.keys() == together.weight_grad_norms.keys() == set(product(full, "kv")) != set()
    assert together.loss_B.shape == (3,)
    for row, number in enumerate((2, 0, 1)):
        alone, one = measure(gradients, number, *samples[number]), row_of(together, row)
        assert float(one.loss_B) == pytest.approx(float(alone.loss_B), rel=1e-5)
        for place, norm in alone.weight_grad_norms.items():
            assert float(one.weight_grad_norms[place]) == pytest.approx(float(norm), rel=1e-3)
            for part, expected in zip(one.errors[place], alone.errors[place], strict=True):
                torch.testing.assert_close(part, expected, rtol=1e-3, atol=1e-12)


def count_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def test_the_model_is_left_as_it_was_and_nothing_is_kept() -> None:
    model = gqa_model("llama")
    model.model.embed_tokens.weight.requires_grad_(False)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    tokens_T, mask_T = sample_of(60)
    observing = observer(model, FEW)
    first = observing.measure_together([batch_of(0, tokens_T, mask_T)])[0]
    alive = count_tensors()
    for sample in range(3):
        again = observing.measure_together([batch_of(sample, tokens_T, mask_T)])[0]
        assert all(torch.equal(again.errors[key].weighted_BNC, first.errors[key].weighted_BNC) for key in first.errors)
    kept = 2 + 1 + 4 * len(again.errors)  # of the last batch, and what it measured
    assert count_tensors() <= alive + kept
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not _LISTENING and model.config._attn_implementation == "sdpa"


def test_nan_is_refused_with_layer_and_sample_and_the_model_restored() -> None:
    model = gqa_model("llama")
    tokens_T, mask_T = sample_of(30)
    observing = observer(model, FEW)
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight[0, 0] = math.nan
    with pytest.raises(NonFiniteActivations, match="the values of layer 2 are not finite in sample 7"):
        measure(observing, 7, tokens_T, mask_T)
    assert not _LISTENING and all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight[0, 0] = 0.0
        model.lm_head.weight[5] = math.inf
    with pytest.raises(NonFiniteActivations, match="the loss of sample 8 is nan"):
        measure(observing, 8, tokens_T, mask_T)


def test_gradients_that_are_not_finite_are_refused() -> None:
    model = gqa_model("llama")
    tokens_T, mask_T = sample_of(30)

    def poison(module, args, output):
        output.requires_grad_().register_hook(lambda gradient: gradient * math.inf)

    observing = observer(model, FEW)
    handle = model.model.layers[1].self_attn.o_proj.register_forward_hook(poison)
    with pytest.raises(NonFiniteActivations, match="gradient of the (keys|values) of layer 1 .* sample 4"):
        measure(observing, 4, tokens_T, mask_T)
    handle.remove()
    handle = model.model.layers[0].self_attn.k_proj.register_forward_hook(poison)
    with pytest.raises(NonFiniteActivations, match="the k projection of layer 0 has a gradient .* in sample 4"):
        measure(observing, 4, tokens_T, mask_T)
    handle.remove()
    assert measure(observing, 4, tokens_T, mask_T).loss_B > 0


def test_observers_stream_and_merge_to_the_statistic_of_the_batch() -> None:
    """The declared shape; streaming equals batch; parts merge in any order; results change nothing."""
    gradients, place = observer(gqa_model("llama"), FEW), (3, "k")
    batches = [batch_of(n, *sample_of(length, seed=n)) for n, length in enumerate((140, 30, 60))]
    samples = gradients.measure_together(batches)
    for observing in OBSERVERS.values():
        observed = [observing.observe(sample, place) for sample in samples]
        shape = (1, *observing.shape(2, len(FEW["k"])))
        assert all(x.dtype == torch.float64 and x.shape == shape and bool((x > 0).all()) for x in observed)
        first, second, third = (Mean.of(x) for x in observed)
        before = first.total.clone()
        stream = Mean.empty(shape[1:]).update(observed[0]).update(observed[1]).update(observed[2])
        for mean in (Mean.of(torch.cat(observed)), stream, first.merge(second.merge(third))):
            torch.testing.assert_close(mean.result(), torch.cat(observed).mean(0), rtol=1e-13, atol=0)
            assert mean.count == 3 and torch.equal(first.total, before) and first.count == 1
