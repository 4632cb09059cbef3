"""HIGGS as a page format (AQUA-KV sections 2.1 and 4.1): rotate, divide by the group's norm, take the nearest point.

A page is 128 tokens of the keys or values of ALL KV heads of a layer in a row (width = N D), as one record of bytes:

    planes, low bits first (see packing) | scales [num_groups][128]

padded to 16 bytes. A token's row is rotated (kvcal.pages.rotated) in groups of the largest power of two that
divides the width. A group's scale is its L2 norm / sqrt(group size): the standard deviation of values that the rotation
has made nearly Gaussian. Each ``lattice_dim`` neighbours, divided by the scale, become the index of their nearest point
in a Gaussian-optimal grid. An index has num_bits * lattice_dim bits and is stored in planes of
2 bits: rows are tokens, columns indices, padded with zero codes to a multiple of 8 columns.

The scale is stored in ``param_dtype`` and codes are computed against the stored one; a group whose stored scale is 0
decodes to exactly 0. All decisions are single IEEE operations (the norm in fp64, by halves), so that another device
gets the same bytes. Left out: a group size of its own (1,024 in the paper; here it is always the Hadamard block).

A grid of n points in d dimensions is at an optimum when each is the mean of the vectors of N(0, I) nearest to it, which
is what Lloyd's algorithm iterates. Measured error per dimension: 0.1077 (d = 2, n = 16), 0.0298 (2, 64), 0.0078
(2, 256), 0.0969 (4, 256).

The vectors are a quasi-random sequence (Roberts' additive recurrence with the generalized golden ratio) through the
inverse normal distribution function. The first points are some of these, spread by sqrt((d + 2) / d): the density of an
optimal grid is the Gaussian's to the power d / (d + 2). Then every batch of new vectors moves the points a shrinking
part of the way to that batch's means (competitive learning, CLVQ, in batches); batches never repeat, and their
differences shake the grid out of poor optima: Lloyd's algorithm on one sample ends 1.5 % worse at (2, 256). A few of
its steps finish.

The same bits on any machine: vectors and points are multiples of 2^-16, so sums of them are exact in fp64 in any order,
and distances are single fp32 operations. A grid takes some seconds on one core, so it is kept in the user's cache
folder. A plan carries the grids that it uses; reading one needs none of this. Left out: other sizes, GPU generation.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcal import artifact
from kvcal.artifact import Artifact, cache_folder, keep
from kvcal.errors import ArtifactError, UsageError
from kvcal.lazy_torch import Tensor, torch
from kvcal.pages.packing import pack_planes, plane_sizes, unpack_planes
from kvcal.pages.record_layout import (
    PAGE_TOKENS,
    PARAM_DTYPES,
    Layout,
    aligned_size,
    join_fields,
    require_finite,
    sum_by_halves,
)
from kvcal.pages.rotated import block_size, random_signs, rotate, unrotate
from kvcal.records import TensorSpec, refusing, require_tensors
from kvcal.stored_tensor import ITEM_BYTES

GRIDS = ((2, 16), (2, 64), (2, 256), (4, 256))  # (dim, num_points)
KIND = "gaussian-grid"
SCHEMA = 1

_RATIO = {2: 1.324717957244746, 4: 1.1673039782614187}  # the root above 1 of x^(dim + 1) = x + 1
_BATCH_VECTORS = 4096
_NUM_BATCHES = 400
_VECTORS_PER_POINT = 512  # of the large sample
_NUM_FINAL_STEPS = 4
_FIXED_POINT = 2.0**16
LARGEST_POINT = 16.0  # in any dimension, of a grid for N(0, 1)
_SCORES_ON_CPU = 2**17  # 512 KiB stay in its cache
_SCORES_ON_DEVICE = 2**24  # 64 MiB fill a GPU
COLUMN_TILE = 8
ALLOWED_BITS = {dim: tuple((points.bit_length() - 1) // dim for of, points in GRIDS if of == dim) for dim, _ in GRIDS}


def gaussian_grid(dim: int, num_points: int) -> Tensor:
    """[num_points, dim] fp32 on the CPU, rows in lexicographic order; from the cache folder, or made and put there.

    A file there that is corrupt or of another version is made again; a folder that cannot be written is a warning.

    Raises:
        UsageError: no grid of this size (``GRIDS`` has those there are).
    """
    if (dim, num_points) not in GRIDS:
        allowed = ", ".join(f"({d}, {n})" for d, n in GRIDS)
        raise UsageError(
            f"no Gaussian grid with (dim, num_points) = ({dim}, {num_points}); allowed: {allowed}",
            hint="2 bits a value are (2, 16) or (4, 256), 3 bits (2, 64), 4 bits (2, 256)",
        )
    inputs = {
        "dim": dim,
        "num_points": num_points,
        "batch_vectors": _BATCH_VECTORS,
        "num_batches": _NUM_BATCHES,
        "vectors_per_point": _VECTORS_PER_POINT,
        "num_final_steps": _NUM_FINAL_STEPS,
    }
    path = cache_folder() / f"gaussian-grid-d{dim}-n{num_points}.safetensors"
    cached = _read(path, inputs)
    if cached is not None:
        return cached
    grid = _generate(dim, num_points)
    keep(path, artifact.to_bytes(Artifact(KIND, SCHEMA, inputs, {}, {"grid": grid})), "grids")
    return grid


def nearest_point(vectors: Tensor, grid: Tensor) -> Tensor:
    """vectors [M, d] and grid [n, d], both fp32 on one device, n at most 256 -> [M] uint8: each vector's nearest point.

    The nearest point has the largest x . p - |p|^2 / 2, summed over the dimensions from first to last, one fp32
    operation at a time; of equal ones the lowest index. A few MiB of scores at once, whatever M is.
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


def _read(path: Path, inputs: dict[str, Any]) -> Tensor | None:
    """The grid of a whole and current file, else None."""
    spec = TensorSpec("float32", (inputs["num_points"], inputs["dim"]), -LARGEST_POINT, LARGEST_POINT)
    try:
        found = artifact.read(path, KIND, SCHEMA)
        with refusing(path):
            require_tensors(found.tensors, {"grid": spec})
    except ArtifactError:
        return None
    grid = found.tensors["grid"]
    rows = [tuple(row) for row in grid.tolist()]
    # In lexicographic order and multiples of 2^-16, as every grid that was made here.
    is_made_here = rows == sorted(set(rows)) and torch.equal(grid, _fixed_point(grid))
    return grid if found.inputs == inputs and is_made_here else None


def _generate(dim: int, num_points: int) -> Tensor:
    grid = _fixed_point(_gaussian_vectors(0, num_points, dim).double() * ((dim + 2) / dim) ** 0.5)
    for batch in range(_NUM_BATCHES):
        vectors = _gaussian_vectors(batch * _BATCH_VECTORS, _BATCH_VECTORS, dim)
        share = 1 - batch / _NUM_BATCHES
        points = grid.double()
        grid = _fixed_point(points + (_cell_means(vectors, grid) - points) * share)
    sample = _gaussian_vectors(0, _VECTORS_PER_POINT * num_points, dim)
    for _ in range(_NUM_FINAL_STEPS):
        grid = _fixed_point(_cell_means(sample, grid))
    for i in reversed(range(dim)):  # stable sorts, the last key first
        grid = grid[torch.argsort(grid[:, i], stable=True)]
    return grid.contiguous()


def _gaussian_vectors(start: int, count: int, dim: int) -> Tensor:
    """Vectors ``start`` .. ``start + count`` of the quasi-random sequence: [count, dim] fp32."""
    steps, step = [], 1.0
    for _ in range(dim):
        step /= _RATIO[dim]
        steps.append(step)
    index = torch.arange(start + 1, start + count + 1, dtype=torch.float64).unsqueeze(-1)
    uniform = (0.5 + index * torch.tensor(steps, dtype=torch.float64)) % 1.0
    return _fixed_point(torch.special.ndtri(uniform))


def _fixed_point(x: Tensor) -> Tensor:
    """Rounded to multiples of 2^-16: exact in fp32 below 256, and the library's last-bit errors are gone."""
    return ((x * _FIXED_POINT).round() / _FIXED_POINT).float()


def _cell_means(vectors: Tensor, grid: Tensor) -> Tensor:
    """[n, d] fp64: the mean of the vectors nearest to each point; a point that is nearest to none stays."""
    codes = nearest_point(vectors, grid).int()
    counts = torch.bincount(codes, minlength=len(grid)).double().unsqueeze(-1)
    sums = [torch.bincount(codes, weights=column.double(), minlength=len(grid)) for column in vectors.unbind(1)]
    return torch.where(counts > 0, torch.stack(sums, 1) / counts.clamp(min=1), grid.double())


_signs = functools.cache(random_signs)
_grid = functools.cache(gaussian_grid)


@dataclass(frozen=True)
class LatticeLayout(Layout):
    """Shape of a page's record. ``width`` is in values: KV heads times head_dim.

    Raises:
        UsageError: no grid for (num_bits, lattice_dim), or a width that ``lattice_dim`` does not divide.
    """

    num_bits: int
    lattice_dim: int
    width: int
    param_dtype: str

    def __post_init__(self) -> None:
        if self.num_bits not in ALLOWED_BITS.get(self.lattice_dim, ()):
            sizes = [(bits, dim) for dim, every in ALLOWED_BITS.items() for bits in every]
            allowed = ", ".join(f"{bits} bits in {dim} dimensions" for bits, dim in sizes)
            raise UsageError(
                f"no lattice with num_bits = {self.num_bits} and lattice_dim = {self.lattice_dim}; allowed: {allowed}",
                hint="lattice_dim = 2 has a grid for 2, 3 and 4 bits",
            )
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
        """Bytes of the scales."""
        return self.num_groups * PAGE_TOKENS * ITEM_BYTES[self.param_dtype]

    @property
    def record_bytes(self) -> int:
        """Bytes of one page of all KV heads, everything included."""
        return aligned_size(sum(self.plane_sizes) + self.param_size)

    def records_per_page(self, num_heads: int) -> int:
        return 1

    def plan_tensors(self, prefix: str) -> dict[str, tuple[str, TensorSpec]]:
        points = TensorSpec("float32", (self.num_points, self.lattice_dim), -LARGEST_POINT, LARGEST_POINT)
        return {
            "signs": (f"{prefix}_signs", TensorSpec("int8", (self.width,), -1, 1)),
            "grid": (f"lattice.d{self.lattice_dim}.b{self.num_bits}", points),
        }

    def make_tensor(self, operand: str, seed: int) -> Tensor:
        return _signs(self.width, seed) if operand == "signs" else _grid(self.lattice_dim, self.num_points)

    def encode_pages(self, x: Tensor, operands: Mapping[str, Tensor]) -> Tensor:
        rows = x.transpose(1, 2).flatten(-2)
        return self.encode(rows, operands["grid"], operands["signs"]).unsqueeze(1)

    def decode_pages(self, records: Tensor, num_heads: int, operands: Mapping[str, Tensor]) -> Tensor:
        rows = self.decode(records.squeeze(1), operands["grid"], operands["signs"])
        return rows.unflatten(-1, (num_heads, -1)).transpose(1, 2)

    def encode(self, x: Tensor, grid: Tensor, signs: Tensor) -> Tensor:
        """x [..., 128, width], any float dtype; grid [num_points, lattice_dim] fp32; signs [width] int8, all on one
        device -> records [..., record_bytes] uint8."""
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
        """rotated [..., num_groups, group_size] fp32 -> norm / sqrt(group_size) [..., num_groups] in ``param_dtype``.

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
