"""What ``csrc/encode_due.cu`` is compiled for: a stored form, as a ``Reconstruction`` describes it.

A tile is a page of one head, but on a lattice, where a row is all heads and a thread looks at all points of the grid
for each code: it has one byte of codes, 4 vectors, so that a page goes to as many blocks as that makes.
"""

from __future__ import annotations

from kvcal.kernels.reconstruction import SHARED_BYTES, THREADS, Reconstruction, tile_floats
from kvcal.kernels.variants import Defines
from kvcal.pages.lattice import LatticeLayout
from kvcal.pages.layout import PAGE_TOKENS, PARAM_DTYPES, RAW_BITS
from kvcal.pages.tiered import TieredLayout
from kvcal.pages.uniform import PageLayout

VECTORS = 4  # of a thread


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
    assert isinstance(layout, PageLayout | TieredLayout)
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
    if form.is_lattice and num_head_ranges > 1:
        return f"a row of a lattice lies in {num_head_ranges} head ranges; allowed: 1"
    if encoding_shared_bytes(form) > SHARED_BYTES:
        return (
            f"{encoding_tile_tokens(form)} tokens of {form.row_values} values take {encoding_shared_bytes(form)} bytes "
            f"of shared memory; allowed: {SHARED_BYTES}"
        )
    return None
