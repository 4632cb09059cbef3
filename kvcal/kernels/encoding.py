"""What ``csrc/encode_due.cu`` is compiled for: a stored form on a lattice, as a ``Reconstruction`` describes it.

A tile holds fewer tokens than one that is reconstructed: a thread looks at all points of the grid for each code, so
that it has one byte of codes, 4 vectors, and a page goes to as many blocks as that makes.
"""

from __future__ import annotations

from kvcal.kernels.reconstruction import SHARED_BYTES, THREADS, Reconstruction, tile_floats
from kvcal.kernels.variants import Defines
from kvcal.quantizers.lattice import LatticeLayout
from kvcal.quantizers.pages import PAGE_TOKENS

VECTORS = 4  # of a thread


def encoding_tile_tokens(form: Reconstruction) -> int:
    """Tokens of a tile, a power of two: whose codes are 256 bytes a plane, where that is not less than one token."""
    layout = _lattice(form)
    most = max(1, min(VECTORS * THREADS * layout.lattice_dim // layout.width, PAGE_TOKENS))
    return 1 << most.bit_length() - 1


def encoding_shared_bytes(form: Reconstruction) -> int:
    """The grid, half of its squared norms, the tile, and a step for every group of it."""
    layout, tokens = _lattice(form), encoding_tile_tokens(form)
    grid = layout.num_points * (layout.lattice_dim + 1)
    return 4 * (grid + tile_floats(tokens, layout.width) + tokens * layout.num_groups)


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
    if not form.is_lattice:
        return "records of one head each are encoded by the layout that packs them"
    if num_head_ranges > 1:
        return f"a row lies in {num_head_ranges} head ranges; allowed: 1"
    if encoding_shared_bytes(form) > SHARED_BYTES:
        return (
            f"a row of {form.row_values} values takes {encoding_shared_bytes(form)} bytes of shared memory; allowed: "
            f"{SHARED_BYTES}"
        )
    return None


def _lattice(form: Reconstruction) -> LatticeLayout:
    layout = form.layout
    assert isinstance(layout, LatticeLayout)
    return layout
