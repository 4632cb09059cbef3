"""HIGGS as a page format (AQUA-KV sections 2.1 and 4.1): rotate, divide by the group's norm, take the nearest
point.

A page is 128 tokens of the keys or values of ALL KV heads of a layer in a row (width = N D), as one record of
bytes:

    planes, low bits first (see packing) | scales [num_groups][128]

padded to 16 bytes. A token's row is rotated (kvcal.systems.basis.rotated) in groups of the largest power of
two that divides the width. A group's scale is its L2 norm / sqrt(group size): the standard deviation of
values that the rotation has made nearly Gaussian. Each ``lattice_dim`` neighbours, divided by the scale,
become the index of their nearest point in a Gaussian-optimal grid. An index has num_bits * lattice_dim bits
and is stored in planes of 2 bits: rows are tokens, columns indices, padded with zero codes to a multiple of 8
columns.

The scale is stored in ``param_dtype`` and codes are computed against the stored one; a group whose stored
scale is 0 decodes to exactly 0. All decisions are single IEEE operations (the norm in fp64, by halves), so
that another device gets the same bytes. Left out: a group size of its own (1,024 in the paper; here it is
always the Hadamard block).

Grids of n points in d dimensions come with the package (lab/make_grids.py makes them), and a plan carries
those that it uses. Measured error per dimension: 0.1077 (d = 2, n = 16), 0.0298 (2, 64), 0.0078 (2, 256),
0.0969 (4, 256).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvcal import artifact
from kvcal.errors import UsageError
from kvcal.lazy_torch import Tensor, torch
from kvcal.pages.hadamard import block_size, random_signs, rotate, unrotate
from kvcal.pages.layout_protocol import (
    PAGE_TOKENS,
    PARAM_DTYPES,
    Layout,
    aligned_size,
    join_fields,
    require_finite,
    sum_by_halves,
)
from kvcal.pages.packing import pack_planes, plane_sizes, unpack_planes
from kvcal.records import TensorSpec
from kvcal.stored_tensor import ITEM_BYTES

GRIDS = ((2, 16), (2, 64), (2, 256), (4, 256))  # (dim, num_points)
GRIDS_FILE = Path(__file__).with_name("grids.safetensors")
KIND, SCHEMA = "gaussian-grids", 1
LARGEST_POINT = 16.0  # in any dimension, of a grid for N(0, 1)
_SCORES_ON_CPU = 2**17  # 512 KiB stay in its cache
_SCORES_ON_DEVICE = 2**24  # 64 MiB fill a GPU
COLUMN_TILE = 8
ALLOWED_BITS = {dim: tuple((points.bit_length() - 1) // dim for of, points in GRIDS if of == dim) for dim, _ in GRIDS}


@functools.cache
def gaussian_grid(dim: int, num_points: int) -> Tensor:
    """[num_points, dim] fp32 on the CPU, rows in lexicographic order: one of ``GRIDS``."""
    return artifact.read(GRIDS_FILE, KIND, SCHEMA).tensors[f"d{dim}.n{num_points}"]


def nearest_point(vectors: Tensor, grid: Tensor) -> Tensor:
    """vectors [M, d] and grid [n, d], both fp32 on one device, n at most 256 -> [M] uint8: each vector's
    nearest point.

    The nearest point has the largest x . p - |p|^2 / 2, summed over the dimensions from first to last, one
    fp32 operation at a time; of equal ones the lowest index. A few MiB of scores at once, whatever M is.
    """
    vectors_by_dim, points_by_dim = vectors.t().contiguous(), grid.t().unsqueeze(-1)
    half_norms = _dot(points_by_dim, points_by_dim) * 0.5
    step = (_SCORES_ON_CPU if grid.is_cpu else _SCORES_ON_DEVICE) // len(grid)
    codes = [
        # Tensor.max takes the first of equal ones.
        _dot(part.unsqueeze(1), points_by_dim).sub_(half_norms).max(0).indices.to(torch.uint8)
        for part in vectors_by_dim.split(step, dim=1)
    ]
    return torch.cat(codes)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum over the first dimension of a * b, in order."""
    total = a[0] * b[0]
    for i in range(1, len(a)):
        total += a[i] * b[i]
    return total


@dataclass(frozen=True)
class LatticeLayout(Layout):
    """Shape of a page's record. ``width`` is in values: KV heads times head_dim."""

    num_bits: int
    lattice_dim: int
    width: int
    param_dtype: str

    def __post_init__(self) -> None:
        if self.width < 1 or self.width % self.lattice_dim:
            raise UsageError(
                f"a row of {self.width} values cannot be cut in vectors of lattice_dim = {self.lattice_dim}; allowed: "
                f"multiples of {self.lattice_dim} (KV heads times head_dim)",
                hint="use lattice_dim = 2, or a format without a lattice for this layer",
            )

    @property
    def num_points(self) -> int:
        """Points of the grid that this layout's codes index."""
        return 2 ** (self.num_bits * self.lattice_dim)

    @property
    def group_size(self) -> int:
        """Values that share a scale: the Hadamard block."""
        return block_size(self.width)

    @property
    def num_groups(self) -> int:
        return self.width // self.group_size

    @property
    def _num_vectors(self) -> int:
        return self.width // self.lattice_dim

    @property
    def _columns(self) -> int:
        return -(-self._num_vectors // COLUMN_TILE) * COLUMN_TILE

    @property
    def plane_sizes(self) -> tuple[int, ...]:
        return plane_sizes(PAGE_TOKENS, self._columns, self.num_bits * self.lattice_dim)

    @property
    def param_size(self) -> int:
        return self.num_groups * PAGE_TOKENS * ITEM_BYTES[self.param_dtype]

    @property
    def record_bytes(self) -> int:
        return aligned_size(self.code_bytes + self.param_size)

    @property
    def code_bytes(self) -> int:
        return sum(self.plane_sizes)

    def records_per_page(self, num_heads: int) -> int:
        return 1

    def plan_tensors(self, prefix: str) -> dict[str, tuple[str, TensorSpec]]:
        points = TensorSpec("float32", (self.num_points, self.lattice_dim), -LARGEST_POINT, LARGEST_POINT)
        return {
            "signs": (f"{prefix}_signs", TensorSpec("int8", (self.width,), -1, 1)),
            "grid": (f"lattice.d{self.lattice_dim}.b{self.num_bits}", points),
        }

    def make_tensor(self, operand: str, seed: int) -> Tensor:
        if operand == "signs":
            return random_signs(self.width, seed)
        return gaussian_grid(self.lattice_dim, self.num_points)

    def encode_pages(self, x: Tensor, operands: Mapping[str, Tensor]) -> Tensor:
        rows = x.transpose(1, 2).flatten(-2)
        return self.encode(rows, operands["grid"], operands["signs"]).unsqueeze(1)

    def decode_pages(self, records: Tensor, num_heads: int, operands: Mapping[str, Tensor]) -> Tensor:
        rows = self.decode(records.squeeze(1), operands["grid"], operands["signs"])
        return rows.unflatten(-1, (num_heads, -1)).transpose(1, 2)

    def encode(self, x: Tensor, grid: Tensor, signs: Tensor) -> Tensor:
        """x [..., 128, width], any float dtype; grid [num_points, lattice_dim] fp32; signs [width] int8, all
        on one device -> records [..., record_bytes] uint8."""
        assert grid.shape == (self.num_points, self.lattice_dim) and signs.shape == (self.width,)
        rotated = rotate(x, signs).unflatten(-1, (self.num_groups, self.group_size))
        scale = self._scale(rotated)
        step = scale.float().unsqueeze(-1)
        vectors = (rotated / torch.where(step == 0, torch.inf, step)).reshape(-1, self.lattice_dim)
        codes = nearest_point(vectors, grid).view(*x.shape[:-1], self._num_vectors)
        codes = torch.nn.functional.pad(codes, (0, self._columns - self._num_vectors))
        by_group = scale.transpose(-1, -2).clone(memory_format=torch.contiguous_format)
        planes = pack_planes(codes, self.num_bits * self.lattice_dim)
        return join_fields([*planes, by_group.view(torch.uint8).flatten(-2)])

    def decode(self, records: Tensor, grid: Tensor, signs: Tensor) -> Tensor:
        """Inverse of :meth:`encode`: [..., record_bytes] uint8 -> [..., 128, width] fp32."""
        assert grid.shape == (self.num_points, self.lattice_dim) and signs.shape == (self.width,)
        codes, scale = self.fields(records)
        points = grid.index_select(0, codes.flatten().int()).view(*codes.shape[:-1], self.width)
        rotated = points.unflatten(-1, (self.num_groups, self.group_size)) * scale.float().unsqueeze(-1)
        return unrotate(rotated.flatten(-2), signs)

    def _scale(self, rotated: Tensor) -> Tensor:
        """rotated [..., num_groups, group_size] fp32 -> norm / sqrt(group_size) [..., num_groups] in
        ``param_dtype``.

        Squares of fp32 numbers are exact in fp64.
        """
        mean_square = sum_by_halves(rotated.double().square_(), -1) * (1.0 / self.group_size)  # a power of two: exact
        scale = mean_square.sqrt_().float().to(PARAM_DTYPES[self.param_dtype])
        require_finite(
            scale,
            f"keys or values cannot be quantized: a group of {self.group_size} values holds NaN, infinity, or has a "
            f"norm beyond {self.param_dtype}",
            hint="check the model's outputs; a norm too large for float16 fits with param_dtype = 'bfloat16'",
        )
        return scale

    def fields(self, records: Tensor) -> tuple[Tensor, Tensor]:
        """codes [..., 128, width / lattice_dim] uint8, scale [..., 128, num_groups] in ``param_dtype``."""
        offset = sum(self.plane_sizes)
        codes = unpack_planes(records[..., :offset], PAGE_TOKENS, self._columns, self.num_bits * self.lattice_dim)
        scale = records[..., offset : offset + self.param_size].contiguous().view(PARAM_DTYPES[self.param_dtype])
        return codes[..., : self._num_vectors], scale.unflatten(-1, (self.num_groups, PAGE_TOKENS)).transpose(-1, -2)
