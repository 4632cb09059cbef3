"""The shape of the kernels that write pages: how many blocks, of how many threads, with how much shared
memory.

A block packs a page of one head and side, or of rotated pages a part of one (``csrc/pack_part.cuh``): error
feedback rounds the channels of a token one after the other, so tokens are all that can be done at the same
time, and parts let a single page occupy many SMs.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcal.kernels.decode import row_defines
from kvcal.kernels.variants import Defines, Variant
from kvcal.pages.layout_protocol import PAGE_TOKENS, padded_channels
from kvcal.plan.page_format import SIDES, Side
from kvcal.systems.basis.rotated import CANDIDATES, RotatedLayout

THREADS = 256  # of a block that packs whole pages
PART_TOKENS = 32
PAGE_SCRATCH_BYTES = 48 * 1024  # of a block that packs whole pages, at most
BLOCK, KEPT_BLOCKS = 16, 4  # of channels, as in csrc/feedback.cuh
BLOCKS_OF_SM = 3  # of ``append`` with parts


@dataclass(frozen=True)
class PackShape:
    """Blocks of a page, the threads of each, and its dynamic shared memory. ``has_whole_pages``: of a side
    that is packed by one block a page."""

    parts: int
    threads: int
    shared_bytes: int
    has_whole_pages: bool

    def append_blocks(self, pages: int, at_once: int) -> int:
        """Of ``append``, whose step may complete so many pages: parts are dealt to the blocks that a GPU runs
        at a time, a whole page has its own."""
        dealt = min(pages * self.parts, at_once) if self.parts > 1 else 0
        return max(dealt, pages) if self.has_whole_pages else dealt

    @property
    def defines(self) -> Defines:
        if self.parts == 1:
            return {}
        return {"PART_TOKENS": PAGE_TOKENS // self.parts, "PART_BYTES": self.shared_bytes}


def pack_shape(variant: Variant, sides: tuple[Side, ...] = SIDES) -> PackShape:
    """Of ``append``, which packs both sides, or of ``pack`` with one."""
    rotated = [side for side in sides if isinstance(variant.layout(side), RotatedLayout)]
    if not rotated:
        return PackShape(1, THREADS, 0, True)
    shared = max(_part_bytes(variant, side) for side in rotated)
    has_whole_pages = len(rotated) < len(sides)
    if has_whole_pages:
        shared = max(shared, PAGE_SCRATCH_BYTES)
    return PackShape(PAGE_TOKENS // PART_TOKENS, _part_threads(), shared, has_whole_pages)


def append_defines(variant: Variant, has_rows: bool) -> Defines:
    return variant.defines | row_defines(has_rows) | pack_shape(variant).defines


def pack_defines(variant: Variant, side: Side) -> Defines:
    """Of ``pack`` and ``unpack``: the macros of one side alone, shared by all formats of the other."""
    own = {"DTYPE": variant.defines["DTYPE"], "SIDE": SIDES.index(side)}
    own |= {name: value for name, value in variant.defines.items() if name.startswith(f"{side.upper()}_")}
    return own | pack_shape(variant, (side,)).defines


def _part_threads() -> int:
    return -(-CANDIDATES * PART_TOKENS // 32) * 32


def _part_bytes(variant: Variant, side: Side) -> int:
    """``PartScratch`` of the source, which asserts that this is enough."""
    layout, dim = variant.layout(side), variant.head_dim
    has_feedback = variant.k_feedback if side == "k" else variant.v_feedback
    threads, blocks, groups = _part_threads(), padded_channels(dim) // BLOCK, -(-dim // layout.group_size)
    words = -(-layout.num_bits // 2)
    chains = threads if has_feedback else PART_TOKENS
    tile = PART_TOKENS * (dim + 8) * 2
    of_tokens = PART_TOKENS * (4 + 9 * groups) + 4 * threads
    found = tile + of_tokens + 4 * blocks * words * chains + 64
    if has_feedback:
        kept = 4 * chains * min(blocks, KEPT_BLOCKS) * BLOCK
        found += 4 * 8 * blocks * (blocks + 1) * BLOCK + max(kept, dim * (dim + 3))
    return found
