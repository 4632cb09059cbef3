"""Stripes of many layers that are packed at once.

Error feedback takes a token's channels one after the other, in a few operations each. On a CPU a stripe is small
next to what it takes to call them: stripes of all layers and sequences that are stored alike go through one call of
the codec. Each head has a factor of its own, so that the bytes are those of single calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvcal.pages.codec import PageCodec
from kvcal.store.pool import Pool

# Tokens of single heads that are encoded, or decoded, at once: bounds the scratch.
TOKENS_AT_ONCE = 16384


class Unpacked(NamedTuple):
    """Tokens [b, n, T, D] of a part, whole stripes as pages hold them, the first of which is number ``begin`` of its
    page; ``slots`` and ``ordinals`` int64 [b, P], of their pages in ``pool``."""

    codec: PageCodec
    num_bits: int
    pool: Pool
    slots: Tensor
    ordinals: Tensor
    begin: int
    tokens: Tensor


def pack_together(unpacked: Sequence[Unpacked]) -> None:
    """Pack them, those of a kind at once. NonFiniteActivations: NaN or infinity."""
    parts: dict[object, list[Unpacked]] = {}
    for one in unpacked:
        parts.setdefault((id(one.pool), one.num_bits, one.begin, one.tokens.shape[2]), []).append(one)
    alike: dict[object, list[Unpacked]] = {}
    for rows in parts.values():
        part = _joined(rows)
        kind = part.codec.kind, part.num_bits, part.begin, part.tokens.shape, part.tokens.device
        alike.setdefault(kind, []).append(part)
    for of_kind in alike.values():
        batch, heads, tokens, _ = of_kind[0].tokens.shape
        at_once = max(1, TOKENS_AT_ONCE // (batch * heads * tokens))
        for first in range(0, len(of_kind), at_once):
            _pack(of_kind[first : first + at_once])


def _joined(rows: Sequence[Unpacked]) -> Unpacked:
    """Of several sequences of one part."""
    if len(rows) == 1:
        return rows[0]
    slots, ordinals, tokens = (torch.cat(x) for x in zip(*((r.slots, r.ordinals, r.tokens) for r in rows), strict=True))
    return rows[0]._replace(slots=slots, ordinals=ordinals, tokens=tokens)


def _pack(parts: Sequence[Unpacked]) -> None:
    one = parts[0]
    codec = one.codec if len(parts) == 1 else PageCodec.beside([part.codec for part in parts])
    tokens = torch.cat([part.tokens for part in parts], 1)
    places = [(part.pool.records, part.slots) for part in parts]
    codec.put(places, one.begin, tokens, one.num_bits, one.ordinals)
