"""Channel scores against exact arithmetic, and that they decide alike everywhere."""

from fractions import Fraction

import pytest
import torch

from kvcal.errors import UsageError
from kvcal.systems.kitty.scores import SCORES, channel_scores


def random_keys(*lead: int, dim: int = 8, seed: int = 0) -> torch.Tensor:
    """[..., 128, dim] bf16 of many magnitudes, with an offset, an outlier and a constant channel."""
    keys = torch.randn(*lead, 128, dim, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-3, 3, dim)
    keys[..., 1] += 50.0
    keys[..., 2] = -0.75
    return keys.bfloat16()


def exact_scores(score: str, channel: list[float], query: float) -> float:
    """One channel's score in rational numbers, rounded once."""
    values = [Fraction(value) for value in channel]
    mean_abs = sum(map(abs, values)) / len(values)
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    step = (max(values) - min(values)) / 3
    weight = Fraction(query)
    return float(
        {
            "magnitude": mean_abs,
            "variance": variance,
            "range": step,
            "query_magnitude": weight * mean_abs,
            "query_range": weight * step,
        }[score]
    )


@pytest.mark.parametrize("score", SCORES)
def test_scores_are_exact_to_rounding(score):
    keys = random_keys()
    query_mean = torch.rand(8, generator=torch.Generator().manual_seed(1)) * 4
    found = channel_scores(score, keys, query_mean)
    assert (found.dtype, found.shape) == (torch.float64, (8,))
    expected = [
        exact_scores(score, keys[:, channel].float().tolist(), query_mean[channel].item()) for channel in range(8)
    ]
    assert found.tolist() == pytest.approx(expected, rel=1e-13, abs=1e-300)


@pytest.mark.parametrize("score", SCORES)
def test_a_batch_is_scored_one_by_one(score):
    keys = random_keys(2, 3)
    query_mean = torch.rand(2, 1, 8, generator=torch.Generator().manual_seed(2))
    found = channel_scores(score, keys, query_mean)
    assert found.shape == (2, 3, 8)
    for row in range(2):
        for column in range(3):
            alone = channel_scores(score, keys[row, column], query_mean[row, 0])
            assert torch.equal(found[row, column], alone)


@pytest.mark.parametrize("score", ["magnitude", "variance", "query_magnitude"])
def test_sums_are_added_in_one_order(score):
    """Bit for bit the sum of halves, which any device gives; a running sum differs in the last bit."""
    keys = random_keys(16, dim=16).double() ** 3
    query_mean = torch.ones(16)
    mean = _mean_of_halves(keys)
    expected = _mean_of_halves((keys - mean.unsqueeze(1)) ** 2) if score == "variance" else _mean_of_halves(keys.abs())
    assert torch.equal(channel_scores(score, keys, query_mean), expected)


def _mean_of_halves(x: torch.Tensor) -> torch.Tensor:
    rows = [[list(column) for column in zip(*page, strict=True)] for page in x.tolist()]

    def total(values: list[float]) -> float:
        half = len(values) // 2
        return values[0] if not half else total([a + b for a, b in zip(values[:half], values[half:], strict=True)])

    return torch.tensor([[total(channel) / 128 for channel in page] for page in rows], dtype=torch.float64)


@pytest.mark.parametrize("score", ["query_magnitude", "query_range"])
def test_query_scores_need_queries(score):
    with pytest.raises(UsageError, match=f"the score '{score}' needs the queries"):
        channel_scores(score, random_keys())


@pytest.mark.gpu
@pytest.mark.parametrize("score", SCORES)
def test_a_gpu_scores_bit_for_bit_alike(score):
    keys, query_mean = random_keys(4, 2, dim=128).float() * 1.7, torch.rand(4, 2, 128)
    found = channel_scores(score, keys.cuda(), query_mean.cuda())
    assert torch.equal(found.cpu(), channel_scores(score, keys, query_mean))
