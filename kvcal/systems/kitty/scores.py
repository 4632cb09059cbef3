"""Channel scores: which channels of one page of keys are worth more bits.

A page is 128 tokens of one KV head, keys after RoPE; its scores are computed when it is written, and never
again. A new score is one function and one line of ``SCORES`` (docs/adding.md):

- ``magnitude``: mean |K| (Kitty, Eq. 2). Stable where the range follows single outliers.
- ``variance``: mean squared distance from the channel's mean (Kitty's alternative); blind to a constant
  offset, as the quantizer is.
- ``range``: S = (max - min) / (2^B - 1), B = 2: the step of 2 bits (MixKVQ, Eq. 7), its "error-only" score.
- ``query_range``: A = I S (MixKVQ, Eq. 8), I = mean |Q| of the channel after RoPE (Eq. 6), over the heads of
  the group.
- ``query_magnitude``: I mean |K|, Kitty's score weighted in the same way.

Scores decide between channels, so they are the same on every device, bit for bit: all is fp64, one IEEE
operation at a time, and sums add halves of the page to each other in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvcal.errors import UsageError
from kvcal.lazy_torch import Tensor, torch
from kvcal.pages.layout_protocol import PAGE_TOKENS, sum_by_halves

PER_TOKEN = 1 / PAGE_TOKENS  # a power of two: products are exact
RANGE_LEVELS = 2**2 - 1


@dataclass(frozen=True)
class Score:
    """``of``: keys of a page after RoPE, [..., 128, D] fp64 -> [..., D] fp64, higher is more important.
    ``needs_queries``: times the mean |Q| of the channel, of the queries since the page before."""

    of: Callable[[Tensor], Tensor]
    needs_queries: bool = False


def channel_scores(score: str, k_post: Tensor, query_mean: Tensor | None = None) -> Tensor:
    """k_post [..., 128, D], any float dtype -> its scores by the key ``score`` of SCORES, [..., D] fp64.
    ``query_mean``: mean |Q_post| of every channel, [..., D] or what expands to it; UsageError where it is
    needed and None."""
    scores = SCORES[score].of(k_post.double())
    if not SCORES[score].needs_queries:
        return scores
    if query_mean is None:
        raise UsageError(
            f"the score {score!r} needs the queries of a layer, and none were seen before a page was written",
            hint="attach the plan's cache to the model's attention, or take a score of keys alone: magnitude, "
            "variance or range",
        )
    return scores * query_mean.double()


def query_sum(q_post_BHTD: Tensor, real_BT: Tensor, num_kv_heads: int) -> Tensor:
    """fp32 [B, N, D]: the sum of |q| over the tokens that are ``real`` (bool) and the heads that share a KV
    head, which ``query_...`` scores take the mean of."""
    magnitude = q_post_BHTD.float().abs() * real_BT[:, None, :, None]
    return magnitude.sum(2).unflatten(1, (num_kv_heads, -1)).sum(2)


def _magnitude(keys: Tensor) -> Tensor:
    return sum_by_halves(keys.abs(), -2) * PER_TOKEN


def _variance(keys: Tensor) -> Tensor:
    deviation = keys - (sum_by_halves(keys, -2) * PER_TOKEN).unsqueeze(-2)
    return sum_by_halves(deviation.square_(), -2) * PER_TOKEN


def _range(keys: Tensor) -> Tensor:
    """(max - min) / (2^2 - 1)."""
    minimum, maximum = torch.aminmax(keys, dim=-2)
    # By a tensor: CUDA divides by a Python number as a product with its rounded reciprocal.
    return (maximum - minimum) / minimum.new_full((), RANGE_LEVELS)


SCORES: dict[str, Score] = {
    "magnitude": Score(_magnitude),
    "variance": Score(_variance),
    "range": Score(_range),
    "query_magnitude": Score(_magnitude, needs_queries=True),
    "query_range": Score(_range, needs_queries=True),
}
