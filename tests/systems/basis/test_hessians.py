"""Statistics of a basis against loops over queries and tokens."""

import math

import pytest
import torch
import transformers as hf
from form_cases import rotary_table
from reparam_cases import outlier_model
from torch import Tensor

from kvcal.models.rope import rotary_maps
from kvcal.models.supported_layers import geometry_of
from kvcal.pages.rescale_and_rope import rotate
from kvcal.systems.basis import hessians as module
from kvcal.systems.basis.hessians import (
    DISTANCES,
    key_costs,
    mean_and_covariance,
    moments,
    over_context,
    query_products,
)

TOKENS, DIM = 13, 6


def qkv(group: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(group)
    return tuple(2 * torch.randn(n, TOKENS, DIM, generator=generator) for n in (2 * group, 2, 2))


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("sinks", "window"), [(0, 0), (2, 3)])
def test_weights_are_what_an_error_does_to_the_output(group: int, sinks: int, window: int, monkeypatch) -> None:
    monkeypatch.setattr(module, "SCORES_AT_ONCE", 5 * TOKENS)
    q, k, v = qkv(group)
    projection = torch.randn(2 * group, 9, DIM, generator=torch.Generator().manual_seed(0))
    found, weight = key_costs(q, k, v, projection.mT @ projection, 0.4, sinks, window)
    expected, cost = torch.zeros(2, DIM, DIM, dtype=torch.float64), torch.zeros(2, TOKENS, dtype=torch.float64)
    for head in range(2 * group):
        n = head // group
        for t in range(TOKENS):
            scores = torch.stack([0.4 * (q[head, t].double() @ k[n, s].double()) for s in range(t + 1)])
            p = scores.softmax(0)
            output = sum(p[s] * v[n, s].double() for s in range(t + 1))
            for s in range(sinks, t + 1 - max(window, 1)):
                error = projection[head].double() @ (v[n, s].double() - output)
                cost[n, s] += p[s] ** 2 * (error @ error)
                expected[n] += p[s] ** 2 * (error @ error) * torch.outer(q[head, t].double(), q[head, t].double())
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(weight, cost.sqrt() / cost.sqrt().mean(1, keepdim=True), atol=1e-3, rtol=1e-3)
    none = key_costs(q, k, v, projection.mT @ projection, 0.4, sinks, TOKENS)  # nothing is packed
    assert not any(part.any() for part in none)


def test_moments_of_parts_are_those_of_the_whole() -> None:
    x = torch.randn(2, TOKENS, DIM, generator=torch.Generator().manual_seed(0)) + 3
    sums = moments(x[:, :5]) + moments(x[:, 5:])
    mean, covariance = mean_and_covariance(sums, True)
    torch.testing.assert_close(mean, x.double().mean(1))
    for head in range(2):
        torch.testing.assert_close(covariance[head], x[head].double().T.cov(correction=0))
    mean, second = mean_and_covariance(sums, False)
    assert not mean.any()
    assert not any(part.any() for part in mean_and_covariance(torch.zeros(1, 3, 3).double(), True))
    torch.testing.assert_close(second, covariance + torch.einsum("ni,nj->nij", *[x.double().mean(1)] * 2))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
def test_products_of_queries_are_those_of_a_loop(num_kv_heads: int) -> None:
    q = torch.randn(8, 5, 6, generator=torch.Generator().manual_seed(0))
    found = query_products(q, num_kv_heads, torch.arange(5))
    expected = torch.zeros(num_kv_heads, 6, 6, dtype=torch.float64)
    for head in range(8):
        for token in range(5):
            row = q[head, token].double()
            expected[head * num_kv_heads // 8] += torch.outer(row, row)
    torch.testing.assert_close(found, expected)


def test_queries_that_keys_before_rope_meet_give_the_same_scores() -> None:
    """q_s' R(t) e for an error e of a key before RoPE at t: a quadratic form of the mean over t."""
    table = rotary_table(16, 6)
    table[:, 3] = 1.25  # an amplitude, as of YaRN
    q = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(0))
    hessian = query_products(q, 1, 3 * torch.arange(40), table)[0]
    error = torch.randn(16, generator=torch.Generator().manual_seed(1))
    scores = []
    for s in range(40):
        for number in range(DISTANCES):
            t = 3 * s * (2 * number + 1) // (2 * DISTANCES)
            assert 0 <= t <= 3 * s
            turned = rotate(error, table, torch.tensor(t))
            scores.append(float((q[:, s] @ turned.reshape(-1)).double().square().sum()))
    expected = sum(scores) / DISTANCES
    assert float(error.double() @ hessian @ error.double()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dim", [16, 64])
def test_sums_over_the_context_are_those_of_texts_at_its_places(dim: int, monkeypatch) -> None:
    """All channels of 16 turn; of 64 the first 16, as in Pythia."""
    generator, context = torch.Generator().manual_seed(5), 200
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    shape = {"hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 2, "rope_parameters": rope}
    partial = hf.GPTNeoXConfig(num_hidden_layers=1, vocab_size=128, **shape)
    model = outlier_model(1) if dim == 16 else hf.GPTNeoXForCausalLM(partial)
    rotary = rotary_maps(model, geometry_of(model))[0]
    assert rotary.pairs.numel() == 16
    k_pre_NTD = torch.randn(2, 20, dim, generator=generator) + 1
    firsts = torch.linspace(0, context - 20, -(-context // 20), dtype=torch.float64)
    table = rotary.tensor()
    table[:, 3] = 1.0
    expected = torch.zeros(2, dim + 1, dim + 1, dtype=torch.float64)
    for first in firsts:
        for head in range(2):
            for token in range(20):
                position = first + token
                k = k_pre_NTD[head, token].double()
                for a, b, frequency, _ in table.tolist():
                    a, b, cos, sin = int(a), int(b), math.cos(position * frequency), math.sin(position * frequency)
                    k[a], k[b] = k[a] * cos - k[b] * sin, k[b] * cos + k[a] * sin
                one = torch.cat([k, k.new_ones(1)])
                expected[head] += torch.outer(one, one) / len(firsts)
    sums = moments(rotate(k_pre_NTD, table, torch.arange(20)))
    torch.testing.assert_close(over_context(sums, rotary, 20, context), expected, atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(over_context(sums, rotary, 20, 10), sums)  # a text beyond the context, at 0
    monkeypatch.setattr(module, "MAX_PLACES", 1)
    torch.testing.assert_close(over_context(sums, rotary, 20, context), sums)
