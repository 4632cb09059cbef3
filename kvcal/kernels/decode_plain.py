"""What ``csrc/decode_plain.cu`` is compiled for: query heads a pass, blocks an SM, shared memory.

It serves what the folded kernel does not (``kvcal.kernels.choice.plain_reasons``), and whatever asks for it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from kvcal.kernels.macros import DTYPES, Defines
from kvcal.kernels.variants import Variant
from kvcal.pages.layout import padded_channels

THREADS = 256
TILE_TOKENS = 32
MAX_ROWS = 512
# Query heads of a pass, and blocks of an SM, at most: sums of P V take four registers a head, and an SM has 65,536.
MAX_HEADS = 16
BLOCKS_BY_HEADS = ((4, 3), (MAX_HEADS, 2))
RESERVED_BYTES = 1024  # of an SM's shared memory, for every block


@dataclass(frozen=True)
class PlainShape:
    """``heads`` query heads a pass, ``blocks`` an SM, ``shared_bytes`` a block."""

    heads: int
    blocks: int
    shared_bytes: int

    def part_floats(self, head_dim: int) -> int:
        """``HEADS * PART`` of the source: a block's part of the heads of a pass."""
        return self.heads * (head_dim + 4)


@functools.cache
def plain_shape(head_dim: int, group_heads: int, room: int) -> PlainShape:
    """The fewest passes over the cache whose heads fit in ``room`` bytes of shared memory, the most that a block gets
    (99 KiB or more): one head of 512 channels takes 72 KiB."""
    fewer = (-(-group_heads // passes) for passes in range(1, group_heads + 1))
    heads = next(heads for heads in fewer if heads <= MAX_HEADS and _shared_bytes(head_dim, heads) <= room)
    shared = _shared_bytes(head_dim, heads)
    most = next(blocks for heads_at_most, blocks in BLOCKS_BY_HEADS if heads <= heads_at_most)
    return PlainShape(heads, min(most, (room + RESERVED_BYTES) // (shared + RESERVED_BYTES)), shared)


def plain_defines(variant: Variant, q_dtype: str, softcap: bool, room: int) -> Defines:
    """All macros of the kernel where a block gets at most ``room`` bytes of shared memory."""
    shape = plain_shape(variant.head_dim, variant.group_heads, room)
    return variant.defines | {
        "Q_DTYPE": DTYPES[q_dtype],
        "HAS_SOFTCAP": int(softcap),
        "HEADS": shape.heads,
        "BLOCKS": shape.blocks,
        "SHARED_BYTES": shape.shared_bytes,
    }


def _shared_bytes(head_dim: int, heads: int) -> int:
    """``Shared`` of the source, which asserts that this is enough: tile, queries, scores, weights, sums and rows."""
    padded, weights = padded_channels(head_dim), -(-heads // 4) * 4
    tile = max(TILE_TOKENS * (padded + 4), 4 * THREADS)
    scores = THREADS // 32 * heads * TILE_TOKENS + TILE_TOKENS * weights
    return 4 * (tile + heads * padded + scores + 2 * heads + weights + 2 * MAX_ROWS) + 16
