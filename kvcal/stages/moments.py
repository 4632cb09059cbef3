"""Statistics that a basis is fitted on (kvcal.pages.basis): weighted queries, and moments of keys and values.

An error e of key s changes the logits of the queries t that read it by q_t . e, and the attention block's output, to
first order, by p_ts (v_s - o_t) (q_t . e), where p are attention weights and o outputs. So query t counts with

    w_t = sum of p_ts^2 |v_s - o_t|^2 over the tokens s that are packed

in the metric of the output projection. A mean of q q' without weights underrates the few sharp queries that retrieve.
Sums are fp64, so that those of two sets of texts merge. Left out: soft caps, which only shrink logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Scores in fp32 that are held at once: 64 MB.
SCORES_AT_ONCE = 2**24


def weighted_queries(
    q_post_HTD: Tensor, k_post_NTD: Tensor, v_NTD: Tensor, cost_HDD: Tensor, scale: float, sinks: int, window: int
) -> Tensor:
    """Sum of w q q' over the queries of a sequence and of each KV head's group, fp64 [N, D, D].

    ``cost_HDD`` is W_o' W_o of each query head. Tokens are packed from ``sinks`` on, once ``window`` tokens have come
    since."""
    num_heads, tokens = q_post_HTD.shape[:2]
    group = num_heads // len(k_post_NTD)
    at = torch.arange(tokens, device=q_post_HTD.device)
    total = torch.zeros(*k_post_NTD.shape[::2], k_post_NTD.shape[2], dtype=torch.float64, device=at.device)
    for head in range(num_heads):
        keys, values, cost = (x.float() for x in (k_post_NTD[head // group], v_NTD[head // group], cost_HDD[head]))
        costs_T = ((values @ cost) * values).sum(1)
        for rows in at.split(max(1, SCORES_AT_ONCE // tokens)):
            queries, seen = q_post_HTD[head, rows].float(), rows[:, None] >= at
            weights = ((queries @ keys.T) * scale).masked_fill(~seen, -torch.inf).softmax(-1)
            output = weights @ values
            turned = output @ cost
            distance = costs_T - 2 * (turned @ values.T) + (turned * output).sum(1, keepdim=True)
            packed = (rows[:, None] - at >= max(window, 1)) & (at >= sinks)
            w_t = (weights.square() * distance.clamp_min_(0.0) * packed).sum(1).double()
            exact = queries.double()
            total[head // group] += (exact * w_t[:, None]).T @ exact
    return total


def moments(x_NTD: Tensor) -> Tensor:
    """Sum of [x, 1] [x, 1]' over tokens, fp64 [N, D + 1, D + 1]."""
    one = torch.nn.functional.pad(x_NTD.double(), (0, 1), value=1.0)
    return one.mT @ one


def mean_and_covariance(sums_NEE: Tensor, is_centered: bool) -> tuple[Tensor, Tensor]:
    """The mean [N, D] and the covariance [N, D, D] of ``moments``, fp64; without centering, 0 and the mean of x x'."""
    count = sums_NEE[:, -1, -1].clamp_min(1.0)
    mean, second = sums_NEE[:, :-1, -1] / count[:, None], sums_NEE[:, :-1, :-1] / count[:, None, None]
    if not is_centered:
        return torch.zeros_like(mean), second
    return mean, second - mean.unsqueeze(2) * mean.unsqueeze(1)
