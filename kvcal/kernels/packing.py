"""The shape of the kernels that write pages: how many blocks, of how many threads, with how much shared
memory.

A block packs a page of one head and side, or of rotated pages a part of one (``csrc/pack_part.cuh``), such as a
stripe: error feedback rounds the channels of a token one after the other, so tokens are all that can be done at
the same time, and parts let a single page occupy many SMs.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcal.kernels.choice import MAX_STAGED_DIM
from kvcal.kernels.decode import row_defines
from kvcal.kernels.variants import Defines, Variant
from kvcal.pages.layout_protocol import PAGE_TOKENS, padded_channels
from kvcal.plan.page_format import SIDES, Side
from kvcal.systems.basis.rotated import CANDIDATES, RotatedLayout

THREADS = 256  # of a block that packs whole pages
PAGE_SCRATCH_BYTES = 48 * 1024  # of such a block, at most
STORED_HEADS = 16  # of a token that a block stores, while others pack stripes
# Tokens of a part at most, by what shared memory has room for. A block of ``append`` has an SM for itself. Blocks of
# ``pack`` share one, so that one loads while the other computes.
STEP_TOKENS, PROMPT_TOKENS = (128, 64, 32), (64, 32)
LEAST_TOKENS = 32  # of a part of ``append``, where few pages are complete
FEW, FEW_THREADS = 8, 384  # tokens of a stripe that a block packs, and its threads, as in csrc/pack_eight.cuh
BLOCK_BYTES = 1024  # of shared memory that an SM keeps for each block, besides what the block asks for
LARGE_TOKENS, LARGE_TEAM = (
    (32,),
    4,
)  # of heads of more than 128 channels; warps that share a candidate (feedback_large.cuh)
BLOCK, KEPT_BLOCKS, COST_LANES = 16, 4, 8  # of channels, as in csrc/feedback.cuh


@dataclass(frozen=True)
class PackShape:
    """Tokens that a block packs of a rotated page, 0 where no page is; its threads and dynamic shared memory.
    ``has_whole_pages``: of a side that is packed by one block a page. ``stripe_tokens``: packed by a step.
    ``team``: warps that share the chains of one. ``blocks_of_sm``: that an SM has room for, in a step."""

    part_tokens: int
    threads: int
    shared_bytes: int
    has_whole_pages: bool
    stripe_tokens: int
    team: int = 1
    blocks_of_sm: int = 1

    @property
    def blocks_of_page(self) -> int:
        """Of ``pack``."""
        return PAGE_TOKENS // self.part_tokens if self.part_tokens else 1

    def append_blocks(self, pages: int, num_sms: int) -> int:
        """Of ``append``, whose step may complete so many pages, or a stripe of each: parts are dealt to blocks, a
        whole page has its own."""
        comes_in_eights = self.part_tokens == FEW
        parts = -(-self.stripe_tokens // (FEW if comes_in_eights else LEAST_TOKENS))
        storing = -(-pages // STORED_HEADS) if comes_in_eights else 0
        dealt = min(pages * parts + storing, num_sms * self.blocks_of_sm) if self.part_tokens else 0
        return max(dealt, pages) if self.has_whole_pages else dealt

    @property
    def defines(self) -> Defines:
        if not self.part_tokens:
            return {}
        found = {"PART_TOKENS": self.part_tokens, "PART_THREADS": self.threads, "PART_BYTES": self.shared_bytes}
        found |= {"PART_BLOCKS": self.blocks_of_sm} if self.blocks_of_sm > 1 else {}
        return found | ({"PART_TEAM": self.team} if self.team > 1 else {})


def append_shape(variant: Variant, room: int) -> PackShape:
    """Of a GPU whose blocks get ``room`` bytes of shared memory (kvcal.kernels.decode)."""
    stripe = min(variant.format(side).stripe_tokens for side in SIDES)
    if stripe < PAGE_TOKENS and variant.head_dim <= MAX_STAGED_DIM:
        needed = max(_few_bytes(variant, side) for side in SIDES)
        blocks = 2 if 2 * needed + BLOCK_BYTES <= room else 1
        return PackShape(FEW, FEW_THREADS, needed, False, stripe, blocks_of_sm=blocks)
    return _shape(variant, SIDES, STEP_TOKENS, room)


def pack_shape(variant: Variant, side: Side, room: int) -> PackShape:
    return _shape(variant, (side,), PROMPT_TOKENS, room)


def append_defines(variant: Variant, has_rows: bool, room: int) -> Defines:
    return variant.defines | row_defines(has_rows) | append_shape(variant, room).defines


def pack_defines(variant: Variant, side: Side, room: int) -> Defines:
    """Of ``pack`` and ``unpack``: the macros of one side alone, shared by all formats of the other."""
    own = {"DTYPE": variant.defines["DTYPE"], "SIDE": SIDES.index(side)}
    own |= {name: value for name, value in variant.defines.items() if name.startswith(f"{side.upper()}_")}
    return own | pack_shape(variant, side, room).defines


def _shape(variant: Variant, sides: tuple[Side, ...], sizes: tuple[int, ...], room: int) -> PackShape:
    rotated = [side for side in sides if isinstance(variant.layout(side), RotatedLayout)]
    if not rotated:
        return PackShape(0, THREADS, 0, True, PAGE_TOKENS)
    has_whole_pages = len(rotated) < len(sides)
    least = PAGE_SCRATCH_BYTES if has_whole_pages else 0
    is_large = variant.head_dim > MAX_STAGED_DIM
    sizes, team = (LARGE_TOKENS, LARGE_TEAM) if is_large else (sizes, 1)
    needed = {size: max(least, *(_part_bytes(variant, side, size) for side in rotated)) for size in sizes}
    size = next(size for size in sizes if needed[size] <= room)
    stripe = min(variant.format(side).stripe_tokens for side in rotated)
    return PackShape(size, CANDIDATES * size * team, needed[size], has_whole_pages, stripe, team)


def _part_bytes(variant: Variant, side: Side, tokens: int) -> int:
    """``PartScratch`` of the source, which asserts that this is enough."""
    layout, dim = variant.layout(side), variant.head_dim
    has_feedback = variant.k_feedback if side == "k" else variant.v_feedback
    blocks, groups = padded_channels(dim) // BLOCK, -(-dim // layout.group_size)
    words = -(-layout.num_bits // 2)
    chains = CANDIDATES * tokens if has_feedback else tokens
    found = tokens * (2 * (dim + 8) + 9 * groups + 4 + 4 * CANDIDATES) + 4 * blocks * words * chains + 64
    if has_feedback and dim > MAX_STAGED_DIM:
        found += 4 * (2 * BLOCK * BLOCK * blocks + (BLOCK + COST_LANES) * chains)
    elif has_feedback:
        kept = 4 * chains * min(blocks, KEPT_BLOCKS) * BLOCK
        found += 4 * 8 * blocks * (blocks + 1) * BLOCK + max(kept, dim * (dim + 3))
    return found


def _few_bytes(variant: Variant, side: Side) -> int:
    """``FewScratch`` of the source, which asserts that this is enough."""
    layout, dim = variant.layout(side), variant.head_dim
    has_feedback = variant.k_feedback if side == "k" else variant.v_feedback
    columns, groups = padded_channels(dim), -(-dim // layout.group_size)
    words = columns // BLOCK * -(-layout.num_bits // 2)
    found = FEW * (2 * (dim + 8) + 4 * (columns + 4) + 4 * words + 4 * CANDIDATES + 4 + groups) + 4 * dim + 64
    if has_feedback:
        found += 4 * columns * (columns + 1) + 4 * FEW * (CANDIDATES * (columns + 4) + (CANDIDATES - 1) * words)
    return found
