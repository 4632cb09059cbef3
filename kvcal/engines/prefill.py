"""Attention of a chunk of new tokens to its past and to itself, in tiles that are merged by log-sum-exp.

A prompt comes in chunks, and what a chunk attends to may be long and packed. So the past is decoded a tile at
a time into the same scratch, attended to without a mask, and merged: with the outputs o and the log-sum-exps
l of two parts of the keys,

    l = log(exp(l1) + exp(l2))      o = o1 exp(l1 - l) + o2 exp(l2 - l)      (Milakov and Gimelshein 2018)

Tiles are served by FlashAttention on CUDA in 16 bits, torch's or the engine's, by products in fp32 elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

# Past tokens that are decoded at once, with room for them: 134 MB for 8 heads of 128 channels in 16 bits. A tile
# more is a merge more, which at 8,192 new tokens of 32 heads moves as many bytes as decoding 100,000 tokens.
TILE_TOKENS = 32768
# Scores in fp32 that products in torch have at once: 64 MB.
SCORES_AT_ONCE = 2**24
FLASH_DTYPES, FLASH_MAX_DIM = (torch.float16, torch.bfloat16), 256

# On CUDA in 16 bits: q [H, T, D], k and v [N, S, D], whether it is causal (T = S), the scale -> attention [H,
# T, D], and the log-sum-exp of its scores, [H, T] fp32.
Flash = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]


def torch_flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """torch's FlashAttention-2."""
    batched = (x.unsqueeze(0) for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*batched, 0.0, is_causal, scale=scale)
    return out[0], lse[0]


class Logits(NamedTuple):
    """The way from products of queries and keys to logits: ``softcap`` 0 for none; ``s_aux`` [H]: logits of
    sinks without a key."""

    scale: float
    softcap: float = 0.0
    s_aux: Tensor | None = None


class Part(NamedTuple):
    """Attention to a part of the keys: ``out`` [H, T, D] in 16 bits or fp32, and the log-sum-exp of its scores,
    ``lse`` [H, T] fp32."""

    out: Tensor
    lse: Tensor

    def merged(self, other: Part) -> Part:
        """Attention to both parts in fp32, where this one was if it was in fp32."""
        lse = torch.logaddexp(self.lse, other.lse)
        own, others = ((part.lse - lse).exp().unsqueeze(-1) for part in (self, other))
        out = self.out.mul_(own) if self.out.dtype == torch.float32 else self.out * own
        return Part(out.addcmul_(other.out, others), lse)


def attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, past: Iterable[tuple[Tensor, Tensor]], logits: Logits, flash: Flash = torch_flash
) -> Tensor:
    """Attention [T, H, D] in q's dtype of q [T, H, D], causal over k, v [T, N, D] and to all of ``past``:
    tiles of keys and values [N, S, D]."""
    queries = q.transpose(0, 1)
    found = attend_part(queries, k.transpose(0, 1), v.transpose(0, 1), True, logits, flash=flash)
    for keys, values in past:
        found = found.merged(attend_part(queries, keys, values, False, logits, flash=flash))
    out = found.out
    if logits.s_aux is not None:
        out = out * torch.sigmoid(found.lse - logits.s_aux.float().unsqueeze(-1)).unsqueeze(-1)
    return out.transpose(0, 1).to(q.dtype)


def attend_part(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, logits: Logits, flash: Flash = torch_flash) -> Part:
    """Attention of q [H, T, D] to k, v [N, S, D]: to all, or where T = S, each to the tokens up to its own.
    Without the logits of sinks."""
    scale, softcap, _ = logits
    if q.is_cuda and q.dtype in FLASH_DTYPES and not softcap and q.shape[-1] <= FLASH_MAX_DIM:
        return Part(*flash(q, k, v, is_causal, scale))
    (num_heads, tokens, dim), past = q.shape, k.shape[1]
    keys, values = k.float().transpose(-1, -2), v.float()
    by_group = q.unflatten(0, (k.shape[0], -1))  # [N, G, T, D]
    at_once = max(1, SCORES_AT_ONCE // (num_heads * past))
    parts = []
    for first in range(0, tokens, at_once):
        taken = by_group[:, :, first : first + at_once].float()
        scores = (taken.flatten(1, 2) @ keys).unflatten(1, taken.shape[1:3]) * scale  # [N, G, t, S]
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        if is_causal:
            later = torch.ones(taken.shape[2], past, dtype=torch.bool, device=q.device).triu(first + 1)
            scores = scores.masked_fill(later, -torch.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp()
        parts.append(((weights.flatten(1, 2) @ values).view(num_heads, -1, dim), lse.flatten(0, 1)))
    outs, lses = zip(*parts, strict=True)
    return Part(torch.cat(outs, dim=1), torch.cat(lses, dim=1))
