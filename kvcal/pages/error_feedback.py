"""Error feedback: codes that are chosen one channel after the other, each making up for the errors before it.

A page's grid (scales and zeros), its bytes and its decoder stay; only codes change. What counts is not the
squared error e of a token but e H e', the error of what attention makes of it:

    keys     H = mean q q' over queries after RoPE, summed over the KV head's query heads: the squared error of scores
    values   H = sum of W_o' W_o over the KV head's query heads: the squared error of the attention block's output

With H = U diag(d) U', U upper triangular with ones on its diagonal, e H e' is the sum over channels k of d_k
r_k^2, where r = e U. So channel k is rounded not to its value x_k but to its target, and each r_k is an
ordinary rounding
error:

    target_k = x_k + sum over j < k of e_j U_jk,    x'_k = the grid's point nearest to target_k,    e_j = x_j - x'_j

This is GPTQ (Frantar et al., arXiv 2210.17323) in the form of LDLQ (Chee et al., QuIP, arXiv 2307.13304),
whose factor it has, for tokens instead of rows of weights. Channels keep their natural order. Left out: an
order by H's diagonal, and another H for every position of a page.

A plan stores U row by row from its diagonal on, in fp16: D (D + 1) / 2 numbers a head. On the diagonal, whose
ones are known, is d over its mean: what a channel's rounding error costs. Errors are pushed as they arise,
one product and one sum in fp32 for every later channel, never fused: any device has the same codes, bit for
bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product

from kvcal.lazy_torch import Tensor, torch
from kvcal.records import TensorSpec

LARGEST_FACTOR = 32768.0
# Of all heads on a CPU, whose targets stay in a core's cache; other devices take all at once.
TOKENS_AT_ONCE = {"cpu": 4096}


def factor_spec(num_heads: int, head_dim: int) -> TensorSpec:
    """The stored factor of a layer's keys or values: [N, D (D + 1) / 2]."""
    shape = (num_heads, head_dim * (head_dim + 1) // 2)
    return TensorSpec("float16", shape, -LARGEST_FACTOR, LARGEST_FACTOR)


def feedback_factor(hessian_NDD: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """(factor, share) of hessian_NDD fp64, to whose diagonal ``damping`` times its mean is added: the stored
    factor fp16 [N, D (D + 1) / 2], and sum(d) / trace(H) fp64 [N], the share of the error that is left where
    codes never saturate. A head whose Hessian is 0 has U = 1, d = 1 and share 1."""
    head_dim = hessian_NDD.shape[-1]
    trace = hessian_NDD.diagonal(dim1=1, dim2=2).sum(1)
    scaled = hessian_NDD / torch.where(trace > 0, trace / head_dim, 1.0)[:, None, None]
    eye = torch.eye(head_dim, dtype=torch.float64, device=hessian_NDD.device)
    damped = torch.where((trace > 0)[:, None, None], scaled + damping * eye, eye)
    # Upper from lower: the last channel first.
    upper = torch.linalg.cholesky(damped.flip(1, 2)).flip(1, 2)
    diagonal = upper.diagonal(dim1=1, dim2=2)
    weights = diagonal.square() / diagonal.square().mean(1, keepdim=True)
    rows = upper / diagonal.unsqueeze(1) + torch.diag_embed(weights - 1)
    row, column = torch.triu_indices(head_dim, head_dim)
    factor = rows[:, row, column].clamp(-LARGEST_FACTOR, LARGEST_FACTOR)
    share = diagonal.square().sum(1) / damped.diagonal(dim1=1, dim2=2).sum(1)
    return factor.to(torch.float16), share


def factor_row(factor: Tensor, channel: int, head_dim: int) -> Tensor:
    """Row ``channel`` of U right of the diagonal: [N, D (D + 1) / 2] -> [N, D - 1 - channel]."""
    start = _diagonal_place(channel, head_dim)
    return factor[:, start + 1 : start + head_dim - channel]


def factor_weights(factor: Tensor, head_dim: int) -> Tensor:
    """The costs d of all channels, fp32 [N, D]."""
    return factor[:, [_diagonal_place(channel, head_dim) for channel in range(head_dim)]].float()


def _diagonal_place(channel: int, head_dim: int) -> int:
    return channel * (2 * head_dim - channel + 1) // 2


def feedback_operand(tensors: Mapping[str, Tensor], prefix: str) -> Tensor:
    """The operand of packing, of a plan's tensors: the factor, then its gains, fp16 [N, D] more, if it has
    any."""
    factor, gain = tensors[f"{prefix}_feedback"], tensors.get(f"{prefix}_gain")
    return factor if gain is None else torch.cat([factor, gain], 1)


def factor_gains(factor: Tensor, head_dim: int) -> Tensor:
    """The gains of all channels, fp32 [N, D, or 0 without any], of what ``feedback_operand`` gives."""
    return factor[:, _diagonal_place(head_dim, head_dim) :].float()


def round_with_feedback(
    x: Tensor, scale: Tensor, zero: Tensor, levels: Tensor, factor: Tensor, raw_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Codes, and the targets that they are nearest to.

    Args:
        x: [..., n, T, D], any float dtype, finite; converted to fp32. scale, zero, levels: broadcast to x: of
        its grid, and the largest code. Where levels are 0, values are kept as
            ``raw_dtype`` has their targets, and codes are 0.
        factor: [n, D (D + 1) / 2], as ``feedback_factor`` makes it.
    Returns:
        codes uint8 and targets fp32, shaped like x.
    """
    parts = [_channels_first(part, x.shape) for part in (x, scale, zero, levels)]
    codes, targets = torch.empty_like(parts[0], dtype=torch.uint8), torch.empty_like(parts[0])
    for heads, tokens in blocks(codes.shape[1], codes.shape[2], x.device):
        rows = factor_rows(factor[heads], len(codes))
        values, size, lowest, most = (part[:, heads, tokens] for part in parts)
        found = feed_back(values, size, lowest, most, rows, raw_dtype)
        codes[:, heads, tokens], targets[:, heads, tokens] = found
    return _channels_last(codes, x.shape), _channels_last(targets, x.shape)


def blocks(
    num_heads: int, num_tokens: int, device: torch.device, num_candidates: int = 1
) -> Iterator[tuple[slice, slice]]:
    """The heads and tokens that are taken at once, with so many candidates of each token."""
    most = TOKENS_AT_ONCE.get(device.type, num_candidates * num_heads * num_tokens) // num_candidates
    heads, tokens = max(1, most // max(1, num_tokens)), max(1, min(most, num_tokens))
    for head, token in product(range(0, num_heads, heads), range(0, num_tokens, tokens)):
        yield slice(head, head + heads), slice(token, token + tokens)


def feed_back(
    values: Tensor,
    scale: Tensor,
    zero: Tensor,
    levels: Tensor,
    rows: Sequence[Tensor],
    raw_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """As :func:`round_with_feedback`, with channels first: values fp32 [D, n, M]; scale, zero and levels the same, or
    [1, n, M] of channels that are alike; ``rows`` of the factor. Codes are fp32."""
    targets = values.clone(memory_format=torch.contiguous_format)
    codes, pushed, error = torch.empty_like(targets), torch.empty_like(targets), torch.empty_like(targets[0])
    step = torch.where(scale == 0, torch.inf, scale)
    grid = (part.expand(len(values), -1, -1).unbind() for part in (scale, step, zero, levels))
    sub, mul, minimum = torch.sub, torch.mul, torch.minimum
    # Views of all channels at once: on a CPU, to make one takes as long as to add 1,000 numbers.
    channels = zip(values.unbind(), targets.unbind(), codes.unbind(), *grid, strict=True)
    for channel, (own, due, found, size, divisor, lowest, most) in enumerate(channels):
        minimum(sub(due, lowest, out=found).div_(divisor).round_().clamp_(min=0.0), most, out=found)
        decoded = mul(found, size, out=error).add_(lowest)
        if raw_dtype is not None:
            decoded = torch.where(most == 0, due.to(raw_dtype).float(), decoded)
        sub(own, decoded, out=error)
        targets[channel + 1 :].add_(mul(rows[channel], error, out=pushed[channel + 1 :]))
    return codes, targets


def factor_rows(factor: Tensor, head_dim: int) -> list[Tensor]:
    """Every row of U right of the diagonal, fp32 [D - 1 - channel, n, 1]."""
    places = [_diagonal_place(channel, head_dim) for channel in range(head_dim + 1)]
    every = factor.t().float().unsqueeze(-1).contiguous()
    return [every[start + 1 : stop] for start, stop in pairwise(places)]


def _channels_first(x: Tensor, shape: torch.Size) -> Tensor:
    """A tensor that broadcasts to shape [..., n, T, D] -> fp32 [D, n, all others], where a channel is a run of memory;
    [1, n, all others] where channels are alike."""
    n, T, _ = shape[-3:]
    channels = x.shape[-1] if x.ndim else 1
    full = x.float().expand(*shape[:-1], channels).reshape(math.prod(shape[:-3]), n, T, channels)
    return full.permute(3, 1, 0, 2).flatten(2).contiguous()


def _channels_last(x: Tensor, shape: torch.Size) -> Tensor:
    """Inverse of :func:`_channels_first`."""
    n, T, D = shape[-3:]
    return x.view(D, n, math.prod(shape[:-3]), T).permute(2, 1, 3, 0).reshape(shape)
