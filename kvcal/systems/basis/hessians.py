"""Sums of what attention makes of errors in keys and values: products of queries and of output projections
(error feedback), queries and keys weighted by that, and moments of keys and values
(kvcal.systems.basis.basis).

An error e of key s changes the logits of the queries t that read it by q_t . e, and the attention block's
output, to first order, by p_ts (v_s - o_t) (q_t . e), where p are attention weights and o outputs. So query t
counts with

    w_t = sum of p_ts^2 |v_s - o_t|^2 over the tokens s that are packed

in the metric of the output projection. A mean of q q' without weights underrates the few sharp queries that
retrieve. The same terms summed over t say how much key s counts, since attention reads tokens that are unlike
the rest; its root weighs the key, so that a few keys are not most of a sum.

RoPE turns keys and queries alike wherever a text lies. So sums over a short text tell those of the same text
at any place of a long context (``over_context``): a basis that has seen the first positions alone fails after
them. Sums are fp64, so that those of two sets of texts merge. Left out: soft caps, which only lower logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcal.models.rope import RotaryMap
from kvcal.pages.hadamard import rotate as rotate_channels
from kvcal.pages.rescale_and_rope import rotate as rotate_positions

DISTANCES = 8  # positions of keys that a query is turned back by, where pages hold keys before RoPE
# Scores in fp32 that are held at once: 64 MB.
SCORES_AT_ONCE = 2**24
MAX_PLACES = 128  # of a text in the context


def key_costs(
    q_post_HTD: Tensor, k_post_NTD: Tensor, v_NTD: Tensor, cost_HDD: Tensor, scale: float, sinks: int, window: int
) -> tuple[Tensor, Tensor]:
    """Costs of errors of keys: the sum of w q q' over the queries of a sequence and of each KV head's group,
    fp64 [N, D, D]; and the weight of each key, with a mean of 1 over the sequence, fp64 [N, T].

    ``cost_HDD`` is W_o' W_o of each query head. Tokens are packed from ``sinks`` on, once ``window`` tokens
    have come since."""
    num_heads, tokens = q_post_HTD.shape[:2]
    group = num_heads // len(k_post_NTD)
    at = torch.arange(tokens, device=q_post_HTD.device)
    total = torch.zeros(*k_post_NTD.shape[::2], k_post_NTD.shape[2], dtype=torch.float64, device=at.device)
    keys_NT = torch.zeros(k_post_NTD.shape[:2], dtype=torch.float64, device=at.device)
    for head in range(num_heads):
        keys, values, cost = (x.float() for x in (k_post_NTD[head // group], v_NTD[head // group], cost_HDD[head]))
        costs_T = ((values @ cost) * values).sum(1)
        for first in range(0, tokens, max(1, SCORES_AT_ONCE // tokens)):
            rows = at[first : first + max(1, SCORES_AT_ONCE // tokens)]
            queries = q_post_HTD[head, rows].float()
            # In place: on a CPU memory for another matrix takes as long as a pass over it.
            weights = (queries @ keys.T).mul_(scale).masked_fill_(at > rows[:, None], -torch.inf).softmax(-1)
            output = weights @ values
            turned = output @ cost
            distance = (turned @ values.T).mul_(-2).add_(costs_T).add_((turned * output).sum(1, keepdim=True))
            costs_TT = weights.square_().mul_(distance.clamp_min_(0.0)).tril_(first - max(window, 1))  # packed ones
            costs_TT[:, :sinks] = 0.0
            exact = queries.double()
            total[head // group] += (exact * costs_TT.sum(1).double()[:, None]).T @ exact
            keys_NT[head // group] += costs_TT.sum(0)
    root_NT = keys_NT.sqrt()
    return total, root_NT / root_NT.mean(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)


def moments(x_NTD: Tensor, weight_NT: Tensor | None = None) -> Tensor:
    """Sum of w [x, 1] [x, 1]' over tokens, fp64 [N, D + 1, D + 1]; w is 1 without weights."""
    one = torch.nn.functional.pad(x_NTD.double(), (0, 1), value=1.0)
    return (one if weight_NT is None else one * weight_NT.unsqueeze(2)).mT @ one


def mean_and_covariance(sums_NEE: Tensor, is_centered: bool) -> tuple[Tensor, Tensor]:
    """The mean [N, D] and the covariance [N, D, D] of ``moments``, fp64; without centering, 0 and the mean of
    x x'."""
    count = sums_NEE[:, -1, -1].clamp_min(1.0)
    mean, second = sums_NEE[:, :-1, -1] / count[:, None], sums_NEE[:, :-1, :-1] / count[:, None, None]
    if not is_centered:
        return torch.zeros_like(mean), second
    return mean, second - mean.unsqueeze(2) * mean.unsqueeze(1)


def over_context(sums_NEE: Tensor, rotary: RotaryMap, tokens: int, context: int) -> Tensor:
    """The mean of R M R' over the places of a text of ``tokens`` in a ``context``, one after the other, where
    R is RoPE's turn by the text's first position: of sums M fp64 [N, E, E] of products of keys, or of
    queries, after RoPE, whose first channels are a head's.

    A pair of channels is one complex z, which RoPE multiplies by exp(i t f). So the means of z z* and of z z'
    over positions t are those of the text times numbers of the frequencies f alone."""
    places = min(MAX_PLACES, max(1, -(-context // tokens)))
    a, b = rotary.pairs.unbind(1)
    eye = torch.eye(sums_NEE.shape[-1], dtype=torch.complex128)
    is_alone = ~torch.isin(torch.arange(len(eye)), rotary.pairs.flatten())
    paired = torch.cat([eye[a] + 1j * eye[b], eye[is_alone]])  # z of x
    frequency = torch.nn.functional.pad(rotary.frequency.double(), (0, int(is_alone.sum())))
    first = torch.linspace(0, context - tokens, places, dtype=torch.float64)  # 0 alone, if the text is longer
    phase = torch.exp(1j * first[:, None] * frequency)
    left = paired @ sums_NEE.to(torch.complex128)
    same = left @ paired.mH * (phase.mT @ phase.conj())
    opposite = left @ paired.mT * (phase.mT @ phase)
    return (paired.mH @ (same @ paired + opposite @ paired.conj())).real / (2 * places)


def query_products(q_post_HTD: Tensor, num_kv_heads: int, position_T: Tensor, rotary: Tensor | None = None) -> Tensor:
    """Sum of q q' over tokens, at ``position_T`` int64, and the query heads of each KV head, fp64 [N, D, D].
    With a ``rotary`` table (kvcal.pages.rescale_and_rope) queries are those that keys before RoPE meet, a
    mean over ``DISTANCES`` keys."""
    if rotary is None:
        return _products(q_post_HTD, num_kv_heads)
    total = q_post_HTD.new_zeros((), dtype=torch.float64)
    for number in range(DISTANCES):
        key_T = position_T * (2 * number + 1) // (2 * DISTANCES)
        # The transpose of RoPE, amplitude included, is RoPE at the negative position.
        turned = rotate_positions(q_post_HTD, rotary.to(q_post_HTD.device), -key_T)
        total = total + _products(turned, num_kv_heads)
    return total / DISTANCES


def output_products(weight_CHD: Tensor, num_kv_heads: int) -> Tensor:
    """Sum of W_o' W_o over the query heads of each KV head, fp64 [N, D, D]; weight_CHD as of
    ``output_weights``."""
    return _products(weight_CHD.transpose(0, 1), num_kv_heads).cpu()


def rotated(hessian_NDD: Tensor, signs_D: Tensor) -> Tensor:
    """Of values x R', where R is the rotation of kvcal.systems.basis.rotated with these signs: R H R',
    fp64."""
    basis = rotate_channels(torch.eye(len(signs_D)), signs_D).double()  # rows: the rotated unit vectors, so it is R'
    return basis.t() @ hessian_NDD @ basis


def _products(x_HTD: Tensor, num_kv_heads: int) -> Tensor:
    x_NRD = x_HTD.double().unflatten(0, (num_kv_heads, -1)).flatten(1, 2)
    return x_NRD.transpose(1, 2) @ x_NRD
