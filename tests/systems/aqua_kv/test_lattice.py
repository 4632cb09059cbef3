"""HIGGS pages: bytes against a scalar oracle, errors at the grids' optimum, and how they are made."""

import math
import runpy
from dataclasses import replace
from pathlib import Path

import oracles
import pytest
import torch
from oracles import PAGE, to_float32

from kvcal.artifact import cache_folder, keep
from kvcal.errors import NonFiniteActivations
from kvcal.pages.hadamard import random_signs
from kvcal.systems.aqua_kv.lattice import GRIDS, LatticeLayout, gaussian_grid, nearest_point

EXPECTED_MSE = {(2, 16): 0.107, (2, 64): 0.030, (2, 256): 0.0077, (4, 256): 0.097}
ALL_FORMATS = [(2, 2), (3, 2), (4, 2), (2, 4)]  # num_bits, lattice_dim


def grid_of(layout: LatticeLayout) -> torch.Tensor:
    return gaussian_grid(layout.lattice_dim, layout.num_points)


def random_page(width: int, seed: int = 0) -> torch.Tensor:
    """[128, width] bf16 values with an outlier channel, a zero token and a constant token."""
    page = torch.randn(PAGE, width, generator=torch.Generator().manual_seed(seed))
    page[:, width // 2] *= 10.0
    page[5], page[9] = 0.0, -1.5
    return page.to(torch.bfloat16)


# ---- the scalar oracle: every step is one fp64 operation, rounded to fp32 where the page format says fp32


def hadamard(values: list[float]) -> list[float]:
    """H x / sqrt(n) of a block, in fp32: sums and differences at distance 1, 2, 4, ..., then a product."""
    values, distance = list(values), 1
    while distance < len(values):
        for i in range(len(values)):
            if not i & distance:
                low, high = values[i], values[i + distance]
                values[i], values[i + distance] = to_float32(low + high), to_float32(low - high)
        distance *= 2
    factor = to_float32(1 / math.sqrt(len(values)))
    return [to_float32(value * factor) for value in values]


def scale_of(block: list[float], param_dtype: str) -> float:
    """sqrt of the mean square; squares are added by halves."""
    squares = [value * value for value in block]
    while len(squares) > 1:
        half = len(squares) // 2
        squares = [squares[i] + squares[half + i] for i in range(half)]
    return oracles.to_param(to_float32(math.sqrt(squares[0] / len(block))), param_dtype)


def dot(a: list[float], b: list[float]) -> float:
    total = 0.0
    for x, y in zip(a, b, strict=True):
        total = to_float32(total + to_float32(x * y))
    return total


def nearest(vector: list[float], points: list[list[float]], half_norms: list[float]) -> int:
    scores = [to_float32(dot(vector, point) - half) for point, half in zip(points, half_norms, strict=True)]
    return scores.index(max(scores))


def lattice_page(page: torch.Tensor, layout: LatticeLayout, signs: list[int]) -> tuple[bytes, torch.Tensor]:
    """The record of one page [128, width], byte by byte, and the values that it decodes to."""
    dim, width = layout.lattice_dim, layout.width
    block = max(2**k for k in range(11) if width % 2**k == 0)
    points, columns = grid_of(layout).tolist(), 8 * math.ceil(width // dim / 8)
    half_norms = [dot(point, point) / 2 for point in points]
    codes, scales, decoded = [], [[0.0] * PAGE for _ in range(width // block)], []
    for token, row in enumerate(page.float().tolist()):
        codes.append([0] * columns)
        decoded.append([])
        for start in range(0, width, block):
            rotated = hadamard([row[start + i] * signs[start + i] for i in range(block)])
            scale = scales[start // block][token] = scale_of(rotated, layout.param_dtype)
            unit = [to_float32(value / scale) if scale else 0.0 for value in rotated]
            chosen = [nearest(unit[i : i + dim], points, half_norms) for i in range(0, block, dim)]
            codes[token][start // dim : (start + block) // dim] = chosen
            back = hadamard([to_float32(value * scale) for code in chosen for value in points[code]])
            decoded[token] += [back[i] * signs[start + i] for i in range(block)]
    shifts = range(0, layout.num_bits * dim, 2)
    record = b"".join(oracles.packed_plane([[c >> s & 3 for c in row] for row in codes], 2) for s in shifts)
    record += b"".join(oracles.param_bytes(scale, layout.param_dtype) for group in scales for scale in group)
    return record + b"\0" * (-len(record) % 16), torch.tensor(decoded)


ORACLE_CASES = [
    LatticeLayout(2, 2, 20, "float16"),  # 5 groups of 4; 10 columns, stored as 16
    LatticeLayout(2, 2, 32, "bfloat16"),
    LatticeLayout(2, 2, 2, "float16"),
    LatticeLayout(3, 2, 24, "float32"),
    LatticeLayout(4, 2, 6, "float16"),
    LatticeLayout(2, 4, 12, "bfloat16"),
]


@pytest.mark.parametrize("layout", ORACLE_CASES, ids=str)
def test_records_and_values_equal_the_oracle(layout):
    page, signs = random_page(layout.width), random_signs(layout.width, seed=1)
    record, values = lattice_page(page, layout, signs.tolist())
    encoded = layout.encode(page, grid_of(layout), signs)
    assert (encoded.dtype, tuple(encoded.shape)) == (torch.uint8, (layout.record_bytes,))
    assert bytes(encoded.tolist()) == record
    assert torch.equal(layout.decode(encoded, grid_of(layout), signs), values)


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-9, -1e-40])
def test_groups_whose_scale_is_zero_decode_to_zero(value):
    """1e-9 is below half of float16's smallest number, and so is its group's scale."""
    layout, signs = LatticeLayout(2, 2, 64, "float16"), random_signs(64, seed=0)
    page = torch.full((PAGE, 64), value)
    page[3] = 1.0
    decoded = layout.decode(layout.encode(page, grid_of(layout), signs), grid_of(layout), signs)
    assert (decoded[:3] == 0).all() and (decoded[4:] == 0).all() and (decoded[3] - 1).square().mean() < 0.2


@pytest.mark.parametrize(("num_bits", "dim"), ALL_FORMATS)
def test_pages_have_the_grids_error(num_bits, dim):
    """Relative squared error: of Gaussian values, of values with an outlier channel, and of equal values."""
    layout, signs = LatticeLayout(num_bits, dim, 128, "float16"), random_signs(128, seed=5)
    pages = torch.randn(8, PAGE, 128, generator=torch.Generator().manual_seed(6))
    outliers = pages * torch.where(torch.arange(128) == 77, 5.0, 1.0)
    expected = EXPECTED_MSE[dim, layout.num_points]
    for x, tolerance in ((pages, 0.03), (outliers, 0.05), (pages[..., :1].expand(-1, -1, 128), 0.5)):
        decoded = layout.decode(layout.encode(x, grid_of(layout), signs), grid_of(layout), signs)
        error = (decoded - x).square().sum() / x.square().sum()
        assert error.item() == pytest.approx(expected, rel=tolerance)


def test_a_norm_beyond_float16_fits_in_bfloat16():
    page, signs, layout = torch.full((PAGE, 64), 1e5), random_signs(64, seed=0), LatticeLayout(4, 2, 64, "float16")
    with pytest.raises(NonFiniteActivations, match="float16") as caught:
        layout.encode(page, grid_of(layout), signs)
    assert "bfloat16" in (caught.value.hint or "")
    layout = replace(layout, param_dtype="bfloat16")
    decoded = layout.decode(layout.encode(page, grid_of(layout), signs), grid_of(layout), signs)
    assert ((decoded - page) / page).square().mean() < 0.02


def test_the_lowest_index_wins_a_tie():
    cross = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, -1.0], [0.0, 1.0], [1.0, 0.0]])
    vectors = torch.tensor([[0.0, 0.0], [0.5, 0.5], [0.5, -0.5], [3.0, 0.0], [-0.1, 0.1], [0.1, 2.0]])
    assert nearest_point(vectors, cross).tolist() == [0, 1, 1, 1, 0, 3]


# ---- the grids


@pytest.mark.parametrize("size", GRIDS)
def test_grids_have_the_expected_error_and_are_stationary(size):
    grid = gaussian_grid(*size)
    assert (grid.dtype, tuple(grid.shape)) == (torch.float32, (size[1], size[0]))
    assert grid.tolist() == sorted(grid.tolist()) and len(set(map(tuple, grid.tolist()))) == size[1]
    vectors = torch.randn(200_000, size[0], generator=torch.Generator().manual_seed(2))
    points = grid[nearest_point(vectors, grid).int()].double()
    assert (vectors - points).square().mean().item() == pytest.approx(EXPECTED_MSE[size], rel=0.03)
    # Points that are the means of their cells: E[x . q] = E[q . q], and E[q] = E[x] = 0.
    assert (vectors * points).sum(1).mean().item() == pytest.approx(points.square().sum(1).mean().item(), rel=2e-3)
    assert points.mean(0).abs().max() < 0.01


def test_the_script_makes_the_stored_grid():
    script = runpy.run_path(str(Path(__file__).parents[3] / "lab" / "make_grids.py"))
    assert torch.equal(script["made_grid"](2, 16), gaussian_grid(2, 16))


def test_what_cannot_be_kept_in_the_cache_folder_is_a_warning(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="hint: set XDG_CACHE_HOME"):
        keep(cache_folder() / "name", b"", "files")


@pytest.mark.parametrize("value", ["", "relative/folder"])
def test_the_cache_folder_is_under_home_without_an_absolute_setting(tmp_path, monkeypatch, value):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cache_folder() == tmp_path / ".cache" / "kvcal"
