"""Make the Gaussian-optimal grids of the package's lattices: kvcal/systems/aqua_kv/grids.safetensors.

    python lab/make_grids.py

A grid of n points in d dimensions is at an optimum when each is the mean of the vectors of N(0, I) nearest to
it, which is what Lloyd's algorithm iterates. The vectors are a quasi-random sequence (Roberts' additive
recurrence with the generalized golden ratio) through the inverse normal distribution function. The first
points are some of these, spread by sqrt((d + 2) / d): the density of an optimal grid is the Gaussian's to the
power d / (d + 2). Then every batch of new vectors moves the points a shrinking part of the way to that
batch's means (competitive learning, CLVQ, in batches); batches never repeat, and their differences shake the
grid out of poor optima: Lloyd's algorithm on one sample ends 1.5 % worse at (2, 256). A few of its steps
finish.

The same bits on any machine: vectors and points are multiples of 2^-16, so sums of them are exact in fp64 in
any order, and distances are single fp32 operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcal import artifact
from kvcal.systems.aqua_kv.lattice import GRIDS, GRIDS_FILE, KIND, SCHEMA, nearest_point

RATIO = {2: 1.324717957244746, 4: 1.1673039782614187}  # the root above 1 of x^(dim + 1) = x + 1
BATCH_VECTORS, NUM_BATCHES = 4096, 400
VECTORS_PER_POINT = 512  # of the large sample
NUM_FINAL_STEPS = 4


def made_grid(dim: int, num_points: int) -> Tensor:
    """[num_points, dim] fp32 on the CPU, rows in lexicographic order."""
    grid = fixed_point(gaussian_vectors(0, num_points, dim).double() * ((dim + 2) / dim) ** 0.5)
    for batch in range(NUM_BATCHES):
        vectors = gaussian_vectors(batch * BATCH_VECTORS, BATCH_VECTORS, dim)
        share = 1 - batch / NUM_BATCHES
        points = grid.double()
        grid = fixed_point(points + (cell_means(vectors, grid) - points) * share)
    sample = gaussian_vectors(0, VECTORS_PER_POINT * num_points, dim)
    for _ in range(NUM_FINAL_STEPS):
        grid = fixed_point(cell_means(sample, grid))
    for i in reversed(range(dim)):  # stable sorts, the last key first
        grid = grid[torch.argsort(grid[:, i], stable=True)]
    return grid.contiguous()


def gaussian_vectors(start: int, count: int, dim: int) -> Tensor:
    """Vectors ``start`` .. ``start + count`` of the quasi-random sequence: [count, dim] fp32."""
    steps, step = [], 1.0
    for _ in range(dim):
        step /= RATIO[dim]
        steps.append(step)
    index = torch.arange(start + 1, start + count + 1, dtype=torch.float64).unsqueeze(-1)
    uniform = (0.5 + index * torch.tensor(steps, dtype=torch.float64)) % 1.0
    return fixed_point(torch.special.ndtri(uniform))


def fixed_point(x: Tensor) -> Tensor:
    """Rounded to multiples of 2^-16: exact in fp32 below 256, and the library's last-bit errors are gone."""
    return ((x * 2.0**16).round() / 2.0**16).float()


def cell_means(vectors: Tensor, grid: Tensor) -> Tensor:
    """[n, d] fp64: the mean of the vectors nearest to each point; a point that is nearest to none stays."""
    codes = nearest_point(vectors, grid).int()
    counts = torch.bincount(codes, minlength=len(grid)).double().unsqueeze(-1)
    sums = [torch.bincount(codes, weights=column.double(), minlength=len(grid)) for column in vectors.unbind(1)]
    return torch.where(counts > 0, torch.stack(sums, 1) / counts.clamp(min=1), grid.double())


if __name__ == "__main__":
    grids = {f"d{dim}.n{num_points}": made_grid(dim, num_points) for dim, num_points in GRIDS}
    artifact.write(GRIDS_FILE, artifact.Artifact(KIND, SCHEMA, {}, {}, grids))
