"""Grids of points that quantize Gaussian vectors with the least mean squared error: those of HIGGS, AQUA-KV's backbone.

A grid of n points in d dimensions stores a vector of N(0, I) as the index of its nearest point. The points are at an
optimum when each is the mean of the vectors nearest to it, which is what Lloyd's algorithm iterates. Measured error per
dimension: 0.1077 (d = 2, n = 16), 0.0298 (2, 64), 0.0078 (2, 256), 0.0969 (4, 256).

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

from pathlib import Path
from typing import Any

from kvcal import artifact
from kvcal.artifact import Artifact, cache_folder, keep
from kvcal.errors import ArtifactError, UsageError
from kvcal.lazy_torch import Tensor, torch
from kvcal.records import TensorSpec, refusing, require_tensors

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
