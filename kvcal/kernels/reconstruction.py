"""What ``csrc/reconstruct.cu`` is compiled for: one stored form, and how much of it a block has in shared memory.

It serves all of them but rows of a lattice that are wider than that (``unserved``).
"""

from __future__ import annotations

import functools
import json

from pydantic.dataclasses import dataclass as strict_dataclass

from kvcal.errors import UsageError
from kvcal.geometry import CacheDtype
from kvcal.kernels.variants import DTYPES, Defines, side_defines
from kvcal.pages.lattice import LatticeLayout
from kvcal.pages.layout import PAGE_TOKENS, Layout
from kvcal.plan.format import SIDES, Format, Side
from kvcal.strict import STRICT, dump, parse

THREADS = 256
TILE_VALUES = 32 * THREADS  # of a lattice: a thread has 32 in registers
TILE_TOKENS = 32  # of one head, otherwise
# The least that a block can have on the GPUs that are served (8.6, 8.9, 12.0).
SHARED_BYTES = 99 * 1024


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

    @functools.cached_property
    def key(self) -> str:
        """Canonical JSON, as a variant's."""
        return json.dumps(dump(self), sort_keys=True, separators=(",", ":"))

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
            "SINKS": self.format.num_sink_tokens,
            "WINDOW": self.format.recent_window,
            "BUFFER": self.format.buffer_tokens,
            "RESCALE": int(self.rescale),
            "OFFSET": int(self.offset),
        }


def tile_floats(tokens: int, width: int) -> int:
    """Of a tile in shared memory: ``csrc/tile.cuh``."""
    last = width - 1
    return tokens * (-(-(last + last // 32 * 4 + 1) // 4) * 4)


@functools.cache
def parse_reconstruction(key: str) -> Reconstruction:
    return parse(Reconstruction, json.loads(key), "what is reconstructed", UsageError)


def unserved(form: Reconstruction) -> str | None:
    """Why torch reconstructs these pages on CUDA, too; None where the kernel does."""
    if form.shared_bytes > SHARED_BYTES:
        return (
            f"a row of {form.row_values} values takes {form.shared_bytes} bytes of shared memory; allowed: "
            f"{SHARED_BYTES}"
        )
    return None
