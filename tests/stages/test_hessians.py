"""Statistics of a basis against loops over queries and tokens."""

import pytest
import torch
from torch import Tensor

from kvcal.stages import hessians as module
from kvcal.stages.hessians import mean_and_covariance, moments, weighted_queries

TOKENS, DIM = 23, 6


def qkv(group: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(group)
    return tuple(2 * torch.randn(n, TOKENS, DIM, generator=generator) for n in (2 * group, 2, 2))


@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize(("sinks", "window"), [(0, 0), (2, 3)])
def test_weights_are_what_an_error_does_to_the_output(group: int, sinks: int, window: int, monkeypatch) -> None:
    monkeypatch.setattr(module, "SCORES_AT_ONCE", 5 * TOKENS)
    q, k, v = qkv(group)
    projection = torch.randn(2 * group, 9, DIM, generator=torch.Generator().manual_seed(0))
    found = weighted_queries(q, k, v, projection.mT @ projection, 0.4, sinks, window)
    expected = torch.zeros(2, DIM, DIM, dtype=torch.float64)
    for head in range(2 * group):
        n = head // group
        for t in range(TOKENS):
            scores = torch.stack([0.4 * (q[head, t].double() @ k[n, s].double()) for s in range(t + 1)])
            p = scores.softmax(0)
            output = sum(p[s] * v[n, s].double() for s in range(t + 1))
            weight = 0.0
            for s in range(sinks, t + 1 - max(window, 1)):
                error = projection[head].double() @ (v[n, s].double() - output)
                weight += float(p[s] ** 2 * (error @ error))
            expected[n] += weight * torch.outer(q[head, t].double(), q[head, t].double())
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_moments_of_parts_are_those_of_the_whole() -> None:
    x = torch.randn(2, TOKENS, DIM, generator=torch.Generator().manual_seed(0)) + 3
    sums = moments(x[:, :5]) + moments(x[:, 5:])
    mean, covariance = mean_and_covariance(sums, True)
    torch.testing.assert_close(mean, x.double().mean(1))
    for head in range(2):
        torch.testing.assert_close(covariance[head], x[head].double().T.cov(correction=0))
    mean, second = mean_and_covariance(sums, False)
    assert not mean.any()
    torch.testing.assert_close(second, covariance + torch.einsum("ni,nj->nij", *[x.double().mean(1)] * 2))
