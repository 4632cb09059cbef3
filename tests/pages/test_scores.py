"""Channel scores against exact arithmetic, and that they decide alike everywhere."""

from fractions import Fraction

import pytest
import torch

from kvcal.errors import UsageError
from kvcal.pages.scores import SCORES, channel_scores


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
            "running_query_range": weight * step,
        }[score]
    )


@pytest.mark.parametrize("score", [score for score in SCORES if score != "random"])
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
    page, head = torch.tensor([[4], [9]]), torch.arange(3)
    found = channel_scores(score, keys, query_mean, page, head)
    assert found.shape == (2, 3, 8)
    for row in range(2):
        for column in range(3):
            alone = channel_scores(score, keys[row, column], query_mean[row, 0], int(page[row, 0]), column)
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


def test_random_scores_depend_on_page_head_and_channel_alone():
    keys = random_keys()
    found = channel_scores("random", keys, page=3, head=1)
    assert torch.equal(found, channel_scores("random", random_keys(seed=7) * 2, page=3, head=1))
    others = [channel_scores("random", keys, page=page, head=head) for page, head in ((3, 2), (4, 1), (1, 3), (0, 0))]
    assert all((found != other).all() for other in others)
    assert found.unique().numel() == 8


def test_random_scores_are_uniform():
    pages = torch.arange(64).unsqueeze(1)
    found = channel_scores("random", torch.zeros(64, 8, 128, 128), page=pages, head=torch.arange(8))
    assert found.min() >= 0 and found.max() < 1
    assert found.mean().item() == pytest.approx(0.5, abs=0.01)
    assert found.var().item() == pytest.approx(1 / 12, abs=0.003)
    best = found.argmax(-1).flatten()
    assert best.bincount(minlength=128).max() < 20  # 512 draws over 128 channels: no channel is favoured
    assert found.flatten().unique().numel() > 0.999 * found.numel()


def test_random_scores_by_hand():
    """One value worked out with Python integers: a file written elsewhere ranks the same."""

    def mixed(state: int) -> int:
        for _ in range(2):
            state = ((state ^ (state >> 16)) * 0x45D9F3B) % 2**32
        return state ^ (state >> 16)

    found = channel_scores("random", random_keys(), page=11, head=5)
    assert found.tolist() == [mixed(mixed(mixed(11) + 5) + channel) / 2**32 for channel in range(8)]


@pytest.mark.parametrize("score", ["query_magnitude", "query_range", "running_query_range"])
def test_query_scores_need_queries(score):
    with pytest.raises(UsageError, match=f"the score '{score}' needs the queries"):
        channel_scores(score, random_keys())


@pytest.mark.gpu
@pytest.mark.parametrize("score", SCORES)
def test_a_gpu_scores_bit_for_bit_alike(score):
    keys, query_mean = random_keys(4, 2, dim=128).float() * 1.7, torch.rand(4, 2, 128)
    page = torch.arange(4).unsqueeze(1)
    found = channel_scores(score, keys.cuda(), query_mean.cuda(), page.cuda(), 3)
    assert torch.equal(found.cpu(), channel_scores(score, keys, query_mean, page, 3))
