"""A stored form: what the kernels that encode and reconstruct its pages are compiled for, and their operands.

A stored form (kvcal.store.dequantize) is one side of N neighbouring heads of one layer in one format, whose pages the
attention kernels cannot read: on a lattice, residuals of a prediction, keys before RoPE. ``csrc/reconstruct.cu`` and
``csrc/encode_page.cu`` serve all of them but what has no room in a block's shared memory (``unserved``, ``unencoded``).

A tile of ``encode_page`` is a page of one head, but on a lattice, where a row is all heads and a thread looks at all
points of the grid for each code: it has one byte of codes, 4 vectors, so that a page goes to as many blocks as that
makes. Absent operands are empty tensors.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from pydantic.dataclasses import dataclass as strict_dataclass

from kvcal.geometry import CacheDtype
from kvcal.kernels.variants import DTYPES, Defines, side_defines
from kvcal.lazy_torch import Tensor
from kvcal.pages.lattice import LatticeLayout
from kvcal.pages.record_layout import PAGE_TOKENS, PARAM_DTYPES, RAW_BITS, Layout
from kvcal.pages.rotated import RotatedLayout
from kvcal.pages.tiered import TieredLayout
from kvcal.pages.transforms import Transform
from kvcal.pages.uniform import PageLayout
from kvcal.plan.page_format import SIDES, Format, Side
from kvcal.strict import STRICT

THREADS = 256
TILE_VALUES = 32 * THREADS  # of a lattice: a thread has 32 in registers
TILE_TOKENS = 32  # of one head, otherwise
# The least that a block can have on the GPUs that are served (8.6, 8.9, 12.0).
SHARED_BYTES = 99 * 1024
VECTORS = 4  # of a lattice, of a thread of ``encode_page``
# Values that torch reconstructs, predicts or encodes at once: every temporary in fp32 is 32 MB then.
VALUES_AT_ONCE = 2**23


@strict_dataclass(frozen=True, config=STRICT)
class Reconstruction:
    """One specialisation, as kvcal.kernels.reconstruct has it. ``num_heads``: N. ``rescale``, ``offset``: pages hold
    (K - offset) / rescale. ``is_pre``: pages hold keys before RoPE. ``num_pairs``: of the rotary table, where keys are
    turned, to their positions for ``tokens`` or back for ``kept``; else 0."""

    side: Side
    format: Format
    num_heads: int
    head_dim: int
    cache_dtype: CacheDtype
    is_pre: bool = False
    rescale: bool = False
    offset: bool = False
    num_pairs: int = 0

    def __post_init__(self) -> None:
        assert not (self.is_pre and (self.rescale or self.offset)), "λ and offset are of keys after RoPE"

    @functools.cached_property
    def layout(self) -> Layout:
        return self.format.layout(self.side, self.num_heads, self.head_dim, self.cache_dtype, self.format.num_bits)

    @property
    def is_lattice(self) -> bool:
        return self.format.lattice_dim is not None

    @property
    def row_values(self) -> int:
        """Values of a row of a tile."""
        return self.num_heads * self.head_dim if self.is_lattice else self.head_dim

    @property
    def tile_tokens(self) -> int:
        if not self.is_lattice:
            return TILE_TOKENS
        most = max(1, min(TILE_VALUES // self.row_values, PAGE_TOKENS))
        return 1 << most.bit_length() - 1

    @property
    def shared_bytes(self) -> int:
        """The grid, then the tile."""
        layout = self.layout
        grid = layout.num_points * layout.lattice_dim if isinstance(layout, LatticeLayout) else 0
        return 4 * (grid + tile_floats(self.tile_tokens, self.row_values))

    @property
    def defines(self) -> Defines:
        """The macros: names as in ``csrc``."""
        found = {
            "SIDE": SIDES.index(self.side),
            "DTYPE": DTYPES[self.cache_dtype],
            "TURN": 0 if not self.num_pairs else 1 if self.is_pre else 2,
            "ROTARY_PAIRS": self.num_pairs,
            "TILE_TOKENS": self.tile_tokens,
            "SHARED_BYTES": self.shared_bytes,
        }
        layout = self.layout
        if not isinstance(layout, LatticeLayout):
            pages = side_defines(self.side, self.format, self.head_dim, self.cache_dtype, self.format.num_bits)
            return found | pages | {"K_RESCALE": int(self.rescale), "K_OFFSET": int(self.offset)}
        return found | {
            "DIM": self.head_dim,
            "HEADS": self.num_heads,
            "POINT_DIM": layout.lattice_dim,
            "CODE_BITS": layout.lattice_dim * layout.num_bits,
            "PARAM": DTYPES[layout.param_dtype],
            "SCALE": sum(layout.plane_sizes),
            "RESCALE": int(self.rescale),
            "OFFSET": int(self.offset),
        }


def tile_floats(tokens: int, width: int) -> int:
    """Of a tile in shared memory: ``csrc/tile.cuh``."""
    last = width - 1
    return tokens * (-(-(last + last // 32 * 4 + 1) // 4) * 4)


@functools.cache
def unserved(form: Reconstruction) -> str | None:
    """Why torch reconstructs these pages on CUDA, too; None where the kernel does."""
    if isinstance(form.layout, RotatedLayout):
        return "pages are rotated, which the kernel does not undo"
    if form.cache_dtype == "float32":
        return "tokens are float32, and the kernel writes 16 bits"
    if form.shared_bytes > SHARED_BYTES:
        return (
            f"a row of {form.row_values} values takes {form.shared_bytes} bytes of shared memory; allowed: "
            f"{SHARED_BYTES}"
        )
    return None


class PageCoding(NamedTuple):
    """Operands that turn values into records, and records into values."""

    grid: Tensor  # [points, d] fp32, of a lattice
    signs: Tensor  # int8, of a lattice [N D], of rotated pages [D]
    rescale: Tensor  # [N, D] fp32: pages of keys hold (K - offset) / rescale, where the form says so
    offset: Tensor  # [N, D] fp32
    rotary: Tensor  # [pairs, 4] fp64: the table of kvcal.pages.transforms
    turns: Tensor  # [positions, pairs, 2] fp32, of kvcal.kernels.reconstruct.position_turns: for kernels alone

    def arguments(self, norm: float) -> tuple[int | float, ...]:
        """As the kernels take them; ``norm`` of the transform of a lattice's rows."""
        grid, signs, *others = (operand.data_ptr() for operand in self)
        return (grid, signs, norm, *others)

    def transform(self, form: Reconstruction, heads: slice = slice(None)) -> Transform:
        """Of these heads' pages [..., n, 128, D]."""
        return Transform(
            self.rescale[heads].unsqueeze(-2) if form.rescale else None,
            self.offset[heads].unsqueeze(-2) if form.offset else None,
        )


def encoding_tile_tokens(form: Reconstruction) -> int:
    """Tokens of a tile: on a lattice a power of two, whose codes are 256 bytes a plane unless that is below one."""
    layout = form.layout
    if not isinstance(layout, LatticeLayout):
        return PAGE_TOKENS
    most = max(1, min(VECTORS * THREADS * layout.lattice_dim // layout.width, PAGE_TOKENS))
    return 1 << most.bit_length() - 1


def encoding_shared_bytes(form: Reconstruction) -> int:
    """The tile, then, on a lattice, the grid, half of its squared norms and a step for every group; otherwise what
    csrc/side.cuh has for a page: a step and a zero for every group, and 64 bytes at most."""
    layout, tokens = form.layout, encoding_tile_tokens(form)
    tile = 4 * tile_floats(tokens, form.row_values)
    if isinstance(layout, LatticeLayout):
        return tile + 4 * (layout.num_points * (layout.lattice_dim + 1) + tokens * layout.num_groups)
    assert isinstance(layout, PageLayout)
    return tile + 2 * 4 * layout.param_size // PARAM_DTYPES[form.format.param_dtype].itemsize + 64


def encoding_defines(form: Reconstruction) -> Defines:
    """The macros: names as in ``csrc``."""
    pairs = form.num_pairs if form.is_pre else 0
    return form.defines | {
        "TURN": 2 if pairs else 0,
        "ROTARY_PAIRS": pairs,
        "TILE_TOKENS": encoding_tile_tokens(form),
        "SHARED_BYTES": encoding_shared_bytes(form),
        "RECORD": form.layout.record_bytes,
    }


def unencoded(form: Reconstruction, num_head_ranges: int = 1) -> str | None:
    """Why torch encodes these pages on CUDA, too; None where the kernel does. ``num_head_ranges``: in so many parts do
    the tokens of a row lie."""
    assert not isinstance(form.layout, TieredLayout), "scores of channels are the page codec's"
    if form.format.num_bits == RAW_BITS:
        return "pages of 16 bits have no codes"
    if isinstance(form.layout, RotatedLayout):
        return "pages are rotated, which the kernel does not do"
    if form.is_lattice and num_head_ranges > 1:
        return f"a row of a lattice lies in {num_head_ranges} head ranges; allowed: 1"
    if encoding_shared_bytes(form) > SHARED_BYTES:
        return (
            f"{encoding_tile_tokens(form)} tokens of {form.row_values} values take {encoding_shared_bytes(form)} bytes "
            f"of shared memory; allowed: {SHARED_BYTES}"
        )
    return None
